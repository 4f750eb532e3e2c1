"""Two runs compared bit by bit: the first writes its state after every step, the second is held against it."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from utils import UserError


class StepsDone(Exception):
    """The steps to be looked at are done; ends a run that would go on."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs: step (from 1), tensor, how many of its elements differ and by how much."""

    step: int
    name: str
    elements: int
    total: int
    largest: float

    def __str__(self) -> str:
        return (
            f"first difference after step {self.step} in {self.name}: {self.elements} of {self.total} elements, "
            f"at most {self.largest:.3g}"
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit; unlike `==`, NaN equals itself and -0.0 is not 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def first_difference(step: int, a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> Difference | None:
    """The first tensor in the order of `a` that differs, None when all are equal bit for bit."""
    for name, x in a.items():
        y = b.get(name)
        if y is None or x.shape != y.shape:
            return Difference(step, name, x.numel(), x.numel(), float("inf"))
        if not same_bits(x, y):
            gap = (x.double() - y.double()).abs()
            return Difference(step, name, int((x != y).sum()), x.numel(), float(gap.max()))
    extra = next((name for name in b if name not in a), None)
    return Difference(step, extra, b[extra].numel(), b[extra].numel(), float("inf")) if extra else None


@dataclass
class StepObserver:
    """Writes the state after each of `steps` steps into `folder`, or compares with what is there already.

    `difference` is the first one found; comparing ends there. Raises `StepsDone` when it has seen enough.
    """

    folder: Path
    steps: int
    compare: bool
    difference: Difference | None = None

    def __call__(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        file = self.folder / f"step{step}.pt"
        here = {name: tensor.detach().cpu() for name, tensor in state.items()}
        if self.compare:
            self.difference = first_difference(step, torch.load(file, weights_only=True), here)
        else:
            torch.save(here, file)
        if self.difference or step >= self.steps:
            raise StepsDone


def _observed_run(train: Callable, options: Any, observer: StepObserver, found: Any) -> None:
    """One of the two runs of `verify`, in a process of its own; puts what it found into the queue `found`."""
    try:
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
            train(options, observer)
    except StepsDone:
        found.put(("difference", observer.difference))
    except UserError as error:
        found.put(("error", str(error)))
    else:
        found.put(("error", f"the run is over before {observer.steps} batches; raise --epochs"))


def verify(train: Callable, options: Any, steps: int) -> None:
    """`--verify-reproducibility`: the same `steps` batches in two fresh processes, compared after each.

    `train(options, observer)` is the training. Raises `UserError`, which is exit status 1, naming the first step and
    tensor that differ.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        options = replace(options, project=place, noplots=True, noval=True, nosave=True)
        for compare in (False, True):
            print(f"{'second' if compare else 'first'} run of {steps} batches")
            found = context.SimpleQueue()
            observer = StepObserver(Path(place), steps, compare)
            process = context.Process(target=_observed_run, args=(train, options, observer, found))
            process.start()
            process.join()
            kind, what = found.get() if not found.empty() else ("error", f"the run died ({process.exitcode})")
            if kind == "error":
                raise UserError(f"--verify-reproducibility: {what}")
            if what:
                raise UserError(f"not reproducible: {what}")
    print(f"identical: loss and every tensor after each of {steps} batches, bit for bit")
