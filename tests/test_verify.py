"""--verify-reproducibility: two runs compared bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from utils import ROOT
from utils.verify import Difference, StepObserver, StepsDone, first_difference, same_bits


def test_bits_not_values():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert same_bits(torch.zeros(0, 3), torch.zeros(0, 3))


def test_the_first_difference_is_named_with_its_size():
    a = {"loss": torch.tensor([1.0]), "w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    b = {"loss": torch.tensor([1.0]), "w": torch.tensor([[1.0, 2.5], [3.0, 4.25]])}
    found = first_difference(3, a, b)
    assert found == Difference(3, "w", 2, 4, 0.5)
    assert str(found) == "first difference after step 3 in w: 2 of 4 elements, at most 0.5"
    assert first_difference(3, a, {k: v.clone() for k, v in a.items()}) is None
    assert first_difference(1, a, {"loss": a["loss"]}).name == "w"
    assert first_difference(1, {"loss": a["loss"]}, a).name == "w"


def test_observer_writes_then_compares(tmp_path):
    states = [{"w": torch.tensor([float(i)])} for i in range(4)]
    first = StepObserver(tmp_path, 3, compare=False)
    first(1, states[1])
    first(2, states[2])
    with pytest.raises(StepsDone):
        first(3, states[3])
    second = StepObserver(tmp_path, 3, compare=True)
    second(1, states[1])
    with pytest.raises(StepsDone):
        second(2, states[3])
    assert second.difference == Difference(2, "w", 1, 1, 1.0)


def verify(tiny_data, tmp_path, *flags, source="train.py") -> subprocess.CompletedProcess:
    command = [
        sys.executable, source, "--data", tiny_data, "--imgsz", 64, "--batch-size", 7, "--workers", 0,
        "--device", "cpu", "--epochs", 2, "--verify-reproducibility", 4, *flags,
    ]  # fmt: skip
    return subprocess.run([str(c) for c in command], cwd=tmp_path, capture_output=True, text=True, env={**os.environ})


def test_a_run_here_is_identical(tiny_data, tmp_path):
    done = verify(tiny_data, tmp_path, source=ROOT / "train.py")
    assert done.returncode == 0, done.stderr
    assert "identical: loss and every tensor after each of 4 batches" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_run_that_does_not_repeat_is_found(tiny_data, tmp_path):
    """A block that draws from the clock makes the second run another one."""
    script = tmp_path / "chance.py"
    script.write_text(
        f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
from models import common

class Chance(common.Attention):
    def __init__(self, c1, *, identity=False):
        super().__init__(identity)
        self.weight = torch.nn.Parameter(torch.ones(c1, 1, 1))

    def forward(self, x):
        return x * self.weight * (1 + 1e-3 * (time.time_ns() % 1000))

from models.yolo import BLOCKS
BLOCKS["Chance"] = (Chance, "attention")
from train import main
from utils.options import parse_train, run_script
if __name__ == "__main__":
    run_script(main, parse_train)
""",
        encoding="utf-8",
    )
    done = verify(tiny_data, tmp_path, "--cfg", "models/yolov5n.yaml", "--attention", "Chance@8", source=script)
    assert done.returncode == 1
    assert "not reproducible: first difference after step 1 in loss" in done.stderr and "Traceback" not in done.stderr


def test_too_few_batches(tiny_data, tmp_path):
    done = verify(tiny_data, tmp_path, "--epochs", 1, "--verify-reproducibility", 99, source=ROOT / "train.py")
    assert done.returncode == 1 and "over before 99 batches" in done.stderr
