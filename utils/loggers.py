"""The log of a run: `results.csv`, one row an epoch."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

COLUMNS = (
    "epoch",
    "train/box_loss",
    "train/obj_loss",
    "train/cls_loss",
    "metrics/precision",
    "metrics/recall",
    "metrics/mAP_0.5",
    "metrics/mAP_0.5:0.95",
    "val/box_loss",
    "val/obj_loss",
    "val/cls_loss",
    "x/lr0",
    "x/lr1",
    "x/lr2",
)
"""YOLOv5's columns; the rates are those of biases, weights and normalisation weights."""

WIDTH = 22


class ResultsLog:
    """Appends rows to `results.csv`. A resumed run first drops the rows of epochs it will run again."""

    def __init__(self, path: Path, first_epoch: int = 0):
        self.path = path
        kept = []
        if first_epoch and path.is_file():
            with open(path, newline="", encoding="utf-8") as file:
                kept = [row for row in list(csv.reader(file))[1:] if row and int(row[0]) < first_epoch]
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(",".join(f"{name:>{WIDTH}}" for name in COLUMNS) + "\n")
            file.writelines(",".join(row) + "\n" for row in kept)

    def append(self, row: Mapping[str, float]) -> None:
        """Write one epoch; nine digits give back every fp32 value exactly."""
        cells = [f"{row[name]:>{WIDTH}.9g}" for name in COLUMNS]
        with open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(",".join(cells) + "\n")
