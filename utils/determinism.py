"""Deterministic training: the three modes, the settings of a run, the guard around the backward pass.

PyTorch keeps one process-wide flag: with `torch.use_deterministic_algorithms(True)` an operation that has no
deterministic implementation raises, or warns when `warn_only` is set. Some operations have one in the forward pass
only, so a model builds, runs, and dies at its first backward pass. The modes decide what happens then:

| mode         | forward | backward | an operation without deterministic implementation            |
|--------------|---------|----------|--------------------------------------------------------------|
| `strict`     | on      | on       | ends the run with one message: its name and the ways out     |
| `warn`       | warn    | warn     | is reported once, counted, and listed at the end of the run  |
| `scoped-off` | on      | off      | is free to run in the backward pass, and only there          |

`configure` sets a run up and puts everything back; `backward_guard` changes the flag for a backward pass alone.
"""

from __future__ import annotations

import contextlib
import enum
import os
import platform
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from utils import UserError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")
"""Workspace layouts under which cuBLAS repeats its results; the first is faster and takes 24 MiB more."""

_ALERT_TEXT = "does not have a deterministic implementation"
_ALERT = re.compile(rf"(?P<operation>\S(?:.*?\S)?) {_ALERT_TEXT}")


class DeterministicMode(enum.Enum):
    """What an operation without a deterministic implementation does to the run."""

    STRICT = "strict"
    WARN = "warn"
    SCOPED_OFF = "scoped-off"


class NonDeterministicError(UserError):
    """An operation without a deterministic implementation was met where it is not allowed."""


def operation_of(message: str) -> str | None:
    """The operation's name in PyTorch's error or warning about determinism, None for any other text."""
    match = _ALERT.search(message)
    return match["operation"] if match else None


class OperationRecord:
    """Operations without a deterministic implementation that ran, with counts; each is reported once."""

    def __init__(self, report: Callable[[str], None]):
        self.counts: dict[str, int] = {}
        self.layers: dict[str, list[str]] = {}
        """Operation → modules it comes from, where a dry run has found them."""
        self._report = report

    def _named(self, operation: str) -> str:
        layers = self.layers.get(operation)
        return f"{operation} in {', '.join(layers)}" if layers else operation

    def add(self, operation: str) -> None:
        self.counts[operation] = self.counts.get(operation, 0) + 1
        if self.counts[operation] == 1:
            self._report(
                f"not deterministic: {self._named(operation)} has no deterministic implementation, so this run "
                "may not repeat bit for bit (reported once; counted from here on)"
            )

    def summary(self) -> str:
        """One line for the end of the run; empty when there is nothing to tell."""
        if not self.counts:
            return ""
        listed = ", ".join(f"{self._named(name)} ({count} times)" for name, count in sorted(self.counts.items()))
        return f"operations without a deterministic implementation in this run: {listed}"


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn PyTorch's error about an operation into one message with the ways out."""
    try:
        yield
    except RuntimeError as error:
        operation = operation_of(str(error))
        if operation is None:
            raise
        raise NonDeterministicError(
            f"{operation} has no deterministic implementation. Ways out: use a block of this project in its place "
            "(their gradients are deterministic); --deterministic-mode warn to run it and have it reported; "
            "--deterministic-mode scoped-off to allow it in backward passes"
        ) from error


def _flags() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_flags(flags: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])


_BACKWARD_FLAGS = {
    DeterministicMode.STRICT: (True, False),
    DeterministicMode.WARN: (True, True),
    DeterministicMode.SCOPED_OFF: (False, False),
}


@contextlib.contextmanager
def backward_guard(mode: DeterministicMode) -> Iterator[None]:
    """Run a backward pass under the flags of `mode`, and put flag and `warn_only` back exactly as they were.

    Safe against exceptions and nesting. Where the flags are already right nothing is set. An operation that is
    not allowed raises `NonDeterministicError`.
    """
    before = _flags()
    wanted = _BACKWARD_FLAGS[mode]
    if before != wanted:
        _set_flags(wanted)
    try:
        with _explained():
            yield
    finally:
        if _flags() != before:
            _set_flags(before)


@contextlib.contextmanager
def _operations_recorded(record: OperationRecord) -> Iterator[None]:
    """Send PyTorch's warnings about determinism to `record`, whatever filters are set; others go their usual way.

    One hook for the whole run costs nothing in a step; catching warnings around every backward pass would.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_ALERT_TEXT}", category=UserWarning)
        show = warnings.showwarning

        def hook(message, category, filename, lineno, file=None, line=None):
            operation = operation_of(str(message))
            if operation is None:
                show(message, category, filename, lineno, file, line)
            else:
                record.add(operation)

        warnings.showwarning = hook
        yield


@contextlib.contextmanager
def _environment_restored(name: str) -> Iterator[None]:
    before = os.environ.get(name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _settings_restored() -> Iterator[None]:
    flags = _flags()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    fill = torch.utils.deterministic.fill_uninitialized_memory
    generators = rng_state()
    try:
        yield
    finally:
        _set_flags(flags)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        torch.utils.deterministic.fill_uninitialized_memory = fill
        set_rng_state(generators)


def _prepare_cublas(mode: DeterministicMode) -> None:
    """Set the cuBLAS variable where the user has not; refuse a value under which results do not repeat."""
    value = os.environ.get(CUBLAS_VARIABLE)
    if value is not None and value not in CUBLAS_VALUES:
        raise NonDeterministicError(
            f"{CUBLAS_VARIABLE}={value}: cuBLAS repeats its results with {' or '.join(CUBLAS_VALUES)} only; "
            "set one of them or leave the variable out"
        )
    if value is None and torch.cuda.is_initialized() and mode is DeterministicMode.STRICT:
        raise NonDeterministicError(
            f"CUDA is in use already without {CUBLAS_VARIABLE}, which is read at its start; "
            f"set {CUBLAS_VARIABLE}={CUBLAS_VALUES[0]} before starting Python"
        )
    os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_VALUES[0])


@contextlib.contextmanager
def configure(mode: DeterministicMode, seed: int, report: Callable[[str], None] = print) -> Iterator[OperationRecord]:
    """Set up a reproducible run and put everything back at the end, also after an exception.

    Seeds Python, NumPy and PyTorch, sets the deterministic flag of `mode`, cuDNN's flags and, where CUDA is there
    and the user has not set it, `CUBLAS_WORKSPACE_CONFIG`; turns off the filling of uninitialised memory, which
    costs time and hides nothing here. Yields the record of operations; `report` gets each once, as a line.
    """
    record = OperationRecord(report)
    with _environment_restored(CUBLAS_VARIABLE), _settings_restored(), _operations_recorded(record), _explained():
        if torch.cuda.is_available():
            _prepare_cublas(mode)
        _set_flags((True, mode is DeterministicMode.WARN))
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.utils.deterministic.fill_uninitialized_memory = False
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield record


VARIABLES = (
    CUBLAS_VARIABLE,
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "PYTHONHASHSEED",
)
"""Environment variables that can change what a run computes."""


def run_report(mode: DeterministicMode, seed: int, record: OperationRecord, device: torch.device) -> dict[str, Any]:
    """What decides whether a run repeats, as plain values; called while the run's settings are in force.

    `bit_reproducible` says whether the same command gives the same bits on the same device with the same versions
    and number of threads; `reasons` says why not.
    """
    reasons = [f"{name} has no deterministic implementation and ran {n} times" for name, n in record.counts.items()]
    if mode is DeterministicMode.SCOPED_OFF and device.type == "cuda":
        reasons.append("backward passes were not checked (scoped-off)")
    cuda = device.type == "cuda"
    return {
        "mode": mode.value,
        "seed": seed,
        "bit_reproducible": not reasons,
        "reasons": reasons,
        "operations": dict(record.counts),
        "layers": {name: record.layers.get(name, []) for name in record.counts},
        "flags": {
            "deterministic_algorithms": _flags()[0],
            "warn_only": _flags()[1],
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
            "cuda_matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        },
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "cuda": torch.version.cuda if cuda else None,
            "cudnn": torch.backends.cudnn.version() if cuda else None,
            "platform": platform.platform(),
        },
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def rng_state() -> dict[str, Any]:
    """State of every global random generator as plain values and tensors, for a checkpoint."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators where `rng_state` found them; CUDA devices that are not here are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)


if __name__ == "__main__":
    # this part alone needs modules above this one, so they are loaded here and only when it runs as a script
    import argparse
    import importlib

    def _parse_arguments() -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            prog="python -m utils.determinism",
            description="List the operations of a model that have no deterministic implementation on CUDA; no GPU "
            "is needed. Exit status 0 when there are none, else 1.",
        )
        parser.add_argument("--cfg", required=True, metavar="FILE", help="model file")
        parser.add_argument(
            "--attention", nargs="+", default=[], metavar="BLOCK@PLACE", help="blocks to put in: cbam@neck"
        )
        parser.add_argument("--imgsz", type=int, default=64, help="image size in pixels (default: 64)")
        arguments = parser.parse_args()
        if arguments.imgsz < 1:
            parser.error(f"argument --imgsz: must be 1 or more, found {arguments.imgsz}")
        return arguments

    def _main(arguments: argparse.Namespace) -> None:
        audit = importlib.import_module("utils.audit")
        model = importlib.import_module("models.yolo").DetectionModel(arguments.cfg, attention=arguments.attention)
        stride = int(model.stride.max())
        imgsz = -(-arguments.imgsz // stride) * stride
        try:
            alerts = audit.audit(model, imgsz, audit.by_table)
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[:1]
            raise UserError(f"{arguments.cfg}: does not train on images of {imgsz} px: {''.join(reason)}") from error
        print(audit.verdict(alerts))
        if alerts:
            print(audit.format_alerts(alerts))
            raise SystemExit(1)

    importlib.import_module("utils.options").run_script(_main, _parse_arguments)
