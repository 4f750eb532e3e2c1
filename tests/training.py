"""Small training runs on a few pictures of the built-in set, and how two of them are compared."""

from __future__ import annotations

import csv

import torch

from train import TrainResult
from utils.checkpoint import read_checkpoint, weights_sha256
from utils.options import TrainOptions


def options(data, project, **changes) -> TrainOptions:
    values = {"imgsz": 64, "batch_size": 8, "epochs": 2, "workers": 0, "noplots": True, "device": "cpu"}
    return TrainOptions(**{**values, "data": str(data), "project": str(project), **changes})


FOUR_EPOCHS = {"epochs": 4, "batch_size": 7}


def rows(result: TrainResult) -> list[dict[str, str]]:
    with open(result.folder / "results.csv", newline="", encoding="utf-8") as file:
        return [{k.strip(): v.strip() for k, v in row.items()} for row in csv.DictReader(file)]


def assert_same_run(a: TrainResult, b: TrainResult) -> None:
    assert rows(a) == rows(b)
    assert a.sha256 == b.sha256
    last = [read_checkpoint(r.folder / "weights" / "last.pt") for r in (a, b)]
    for part in ("model", "ema"):
        assert weights_sha256(last[0][part]) == weights_sha256(last[1][part])
    states = [content["optimizer"]["state"] for content in last]
    assert states[0].keys() == states[1].keys()
    for key in states[0]:
        assert torch.equal(states[0][key]["momentum_buffer"], states[1][key]["momentum_buffer"])
    assert last[0]["gradients"] and last[0]["gradients"].keys() == last[1]["gradients"].keys()
