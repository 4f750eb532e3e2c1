"""Table of the attention blocks: what each adds to yolov5n and yolov5s behind every stage, and what it costs.

    python benchmarks/blocks.py [--rounds 7] [--imgsz 320] [--batch 4] [--blocks SE CBAM …] [--out FILE]

Times are ratios to the plain model, measured in pairs in one run (plain, block, plain, block, …), medians over the
rounds: absolute times of a shared machine mean little. Determinism is a real backward pass under the strict flag where
there is a CUDA device, otherwise what the dispatcher records on the CPU against the table in `utils/audit.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from block_tables import table_parser, write_table
from tqdm import tqdm

from models.yolo import BLOCKS, DetectionModel, attention_blocks
from utils.audit import by_real_run, by_table
from utils.config import Hyperparameters
from utils.devices import describe, select_device
from utils.loss import DetectionLoss


def step_of(model: DetectionModel, images: torch.Tensor) -> Callable[[], None]:
    """A forward and backward pass with the loss, and an optimizer step."""
    model.train()
    criterion = DetectionLoss(model.detect.anchors, model.nc, Hyperparameters().scaled(3, model.nc, images.shape[3]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    rows = [[i % len(images), i % model.nc, 0.3 + 0.05 * i, 0.6 - 0.03 * i, 0.2, 0.3] for i in range(8)]
    targets = torch.tensor(rows, device=images.device)

    def step() -> None:
        loss, _ = criterion(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def inference_of(model: DetectionModel, images: torch.Tensor) -> Callable[[], None]:
    def infer() -> None:
        with torch.inference_mode():
            model.decode(model(images))

    return infer


def seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def ratio(plain: Callable[[], None], other: Callable[[], None], rounds: int, device: torch.device) -> float:
    """Median over the rounds of time(other) / time(plain), each pair measured back to back."""
    plain(), other()
    return statistics.median(seconds(other, device) / seconds(plain, device) for _ in range(rounds))


def deterministic(name: str, device: torch.device) -> str:
    """`yes`, or the operations that are not deterministic."""
    block = BLOCKS[name][0](16).to(device)

    def work() -> None:
        x = torch.randn(2, 16, 12, 10, device=device, requires_grad=True)
        block(x).sum().backward()

    detect = by_real_run if device.type == "cuda" else by_table
    return ", ".join(sorted(detect(work))) or "yes"


def row_of(name: str, arguments: argparse.Namespace, device: torch.device) -> str:
    cells = [name]
    for size in "ns":
        cfg = f"models/yolov5{size}.yaml"
        plain, other = DetectionModel(cfg), DetectionModel(cfg, attention=[f"{name}@stages"])
        added = sum(p.numel() for p in other.parameters()) - sum(p.numel() for p in plain.parameters())
        cells += [f"{added:,}", f"{other.gflops(640) - plain.gflops(640):.3f}"]
        if size == "n":
            images = torch.rand(arguments.batch, 3, arguments.imgsz, arguments.imgsz, device=device)
            plain, other = plain.to(device), other.to(device)
            times = [ratio(*(step_of(m, images) for m in (plain, other)), arguments.rounds, device)]
            plain, other = plain.eval().fuse(), other.eval().fuse()
            times += [ratio(*(inference_of(m, images) for m in (plain, other)), arguments.rounds, device)]
    cells += [f"{value:.2f}" for value in times] + [deterministic(name, device)]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = table_parser(__doc__.splitlines()[0], attention_blocks(), batch=4)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device = select_device(arguments.device)
    how = "measured on CUDA" if device.type == "cuda" else "by its operations"
    lines = [
        f"{describe(device)}; batch {arguments.batch}, {arguments.imgsz} px, medians of {arguments.rounds} pairs",
        "",
        "| block | parameters, n | GFLOPs, n | parameters, s | GFLOPs, s | training step, n | inference, n "
        f"| deterministic ({how}) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [row_of(name, arguments, device) for name in tqdm(arguments.blocks)]
    write_table(lines, arguments.out)


if __name__ == "__main__":
    main()
