"""What determinism means and costs on this device, in one short table.

    python benchmarks/gpu_check.py [--steps 50] [--imgsz 320] [--batch 16] [--device 0] [--out FILE]

For the plain model, a naive CBAM with adaptive pooling and every attention block, in the three modes: does a strict run
raise, do two runs of the same steps end with the same bits, how long is a step. Then what strict costs against
scoped-off and against no determinism at all, what filling uninitialised memory costs, and whether the audit by table
agrees with what happened. Under eight minutes on one GPU; on a CPU take few steps and small images.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from block_tables import table_parser, write_table
from torch import nn
from tqdm import tqdm

from models.common import Attention
from models.yolo import BLOCKS, DetectionModel, attention_blocks
from utils.audit import audit, by_table
from utils.checkpoint import weights_sha256
from utils.config import Hyperparameters
from utils.determinism import DeterministicMode, NonDeterministicError, backward_guard, configure
from utils.devices import describe, select_device
from utils.loss import DetectionLoss

MODES = (*DeterministicMode, None)
"""The three modes, and None for no determinism at all."""


class NaiveCBAM(Attention):
    """CBAM as it is pasted into YOLOv5: adaptive pooling modules for the global mean and maximum."""

    def __init__(self, c1, k=7, ratio=16, *, identity=False):
        super().__init__(identity)
        self.mean, self.peak = nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)
        hidden = max(c1 // ratio, 1)
        self.mlp = nn.Sequential(nn.Conv2d(c1, hidden, 1, bias=False), nn.ReLU(), nn.Conv2d(hidden, c1, 1, bias=False))
        self.conv = nn.Conv2d(2, 1, k, padding=k // 2, bias=False)

    def forward(self, x):
        x = x * (self.mlp(self.mean(x)) + self.mlp(self.peak(x))).sigmoid()
        summary = torch.cat((x.mean(1, keepdim=True), x.max(1, keepdim=True).values), 1)
        return x * self.conv(summary).sigmoid()


@contextmanager
def settings(mode: DeterministicMode | None, fill: bool = False) -> Iterator[None]:
    """The settings of a mode; None leaves PyTorch's defaults, seeded."""
    if mode is None:
        torch.manual_seed(0)
        yield
        return
    with configure(mode, 0, report=lambda _: None):
        torch.utils.deterministic.fill_uninitialized_memory = fill
        yield


def run_steps(name: str, mode: DeterministicMode | None, arguments: argparse.Namespace, fill: bool = False):
    """Fingerprint of the weights after some steps, the median milliseconds of a step, and what raised, if anything."""
    device = select_device(arguments.device)
    flags = [f"{name}@stages"] if name != "plain" else []
    with settings(mode, fill):
        model = DetectionModel("models/yolov5n.yaml", attention=flags).to(device).train()
        generator = torch.Generator().manual_seed(1)
        images = torch.rand(arguments.batch, 3, arguments.imgsz, arguments.imgsz, generator=generator).to(device)
        targets = torch.rand(8 * arguments.batch, 6, generator=generator) * 0.5 + 0.2
        targets[:, 0] = torch.arange(len(targets)) % arguments.batch
        targets[:, 1] = torch.arange(len(targets)) % model.nc
        hyp = Hyperparameters().scaled(3, model.nc, arguments.imgsz)
        criterion = DetectionLoss(model.detect.anchors, model.nc, hyp)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        times = []
        for _ in range(arguments.steps):
            start = time.perf_counter()
            try:
                loss, _ = criterion(model(images), targets.to(device))
                with backward_guard(mode or DeterministicMode.SCOPED_OFF):
                    loss.backward()
            except NonDeterministicError as error:
                return "", float("nan"), str(error).split(" has no")[0]
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() - start) * 1000)
        return weights_sha256(model.state_dict()), statistics.median(times), ""


def row_of(name: str, arguments: argparse.Namespace) -> str:
    cells, raised = [name], ""
    for mode in MODES:
        (first, ms, error), (second, _, _) = run_steps(name, mode, arguments), run_steps(name, mode, arguments)
        raised = raised or error
        cells.append(f"raises {error}" if error else f"{'same' if first == second else 'other'} bits, {ms:.1f} ms")
    flags = [f"{name}@stages"] if name != "plain" else []
    expected = audit(DetectionModel("models/yolov5n.yaml", attention=flags), 64, by_table)
    agrees = bool(expected) == bool(raised) or select_device(arguments.device).type == "cpu"
    verdict = ", ".join(sorted({alert.operation for alert in expected})) or "nothing"
    return f"| {' | '.join([*cells, verdict + ('' if agrees else ' (wrong)')])} |"


def main() -> None:
    parser = table_parser(__doc__.splitlines()[0], attention_blocks(), batch=16)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    BLOCKS["NaiveCBAM"] = (NaiveCBAM, "attention")
    lines = [
        f"{describe(select_device(arguments.device))}; batch {arguments.batch}, {arguments.imgsz} px, "
        f"two runs of {arguments.steps} steps each",
        "",
        "| model | strict | warn | scoped-off | all off | audit by table says |",
        "|---|---|---|---|---|---|",
    ]
    lines += [row_of(name, arguments) for name in tqdm(["plain", "NaiveCBAM", *arguments.blocks])]
    fill = [run_steps("CBAM", DeterministicMode.STRICT, arguments, fill=on)[1] for on in (False, True)]
    lines += ["", f"filling of uninitialised memory, CBAM in strict: off {fill[0]:.1f} ms, on {fill[1]:.1f} ms a step"]
    write_table(lines, arguments.out)


if __name__ == "__main__":
    main()
