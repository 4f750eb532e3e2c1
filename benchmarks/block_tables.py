"""What the tables of attention blocks share: their options, and where they are written."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def table_parser(description: str, blocks: Sequence[str], batch: int) -> argparse.ArgumentParser:
    """Options of a table with a row for each of `blocks`; `batch` is the default batch size."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--device", default="")
    parser.add_argument("--blocks", nargs="+", default=list(blocks), choices=list(blocks))
    parser.add_argument("--out", default="", help="also write the table into this file")
    return parser


def write_table(lines: Sequence[str], out: str) -> None:
    """Print the table, and write it into the file `out` where one is named."""
    text = "\n".join(lines)
    print(text)
    if out:
        Path(out).write_text(text + "\n", encoding="utf-8")
