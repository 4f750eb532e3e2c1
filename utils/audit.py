"""Which operations of a model have no deterministic implementation, and the modules that they come from.

`find_alerts(model, images, detect)` runs a copy of a model forward and backward under a detector:

- `by_real_run` sets the deterministic flag to warn and reads PyTorch's warnings, on the device that the model is on;
- `by_table` records on the CPU what the dispatcher runs and looks it up in the table of operations that alert on
  CUDA, so no GPU is needed. The word of a real run on CUDA beats it.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils.determinism import operation_of, rng_state, set_rng_state
from utils.swap import can_swap

CHECKED_WITH = "2.14.1"
"""The PyTorch version whose list of operations (torch.use_deterministic_algorithms) the table was made from."""

DECOMPOSED = "fine while the flag is on: PyTorch {since} and later decomposes it on CUDA at forward time, which is slow"
OWN_KERNEL = "fine in strict: PyTorch takes a deterministic kernel then, but not in warn or with the flag off"


@dataclass(frozen=True)
class Rule:
    """What is known of an operation: its name to users, and when it does not alert after all.

    `overload` limits the rule to one form of the operation, `when` to some arguments. `strict` says why it runs in
    `strict` on CUDA after all: PyTorch picks another kernel while the flag is on.
    """

    name: str
    overload: str = ""
    when: Callable[[tuple], bool] | None = None
    strict: str = ""

    def applies(self, overload: str, args: tuple) -> bool:
        """Whether a call of the operation alerts."""
        return self.overload in ("", overload) and (self.when is None or self.when(args))


ALERTING: dict[str, Rule] = {
    "_adaptive_avg_pool2d_backward": Rule("AdaptiveAvgPool2d"),
    "_adaptive_avg_pool3d_backward": Rule("AdaptiveAvgPool3d"),
    "adaptive_max_pool2d_backward": Rule("AdaptiveMaxPool2d"),
    "avg_pool3d_backward": Rule("AvgPool3d"),
    "fractional_max_pool2d_backward": Rule("FractionalMaxPool2d"),
    "fractional_max_pool3d_backward": Rule("FractionalMaxPool3d"),
    "max_unpool2d": Rule("MaxUnpool2d"),
    "max_unpool3d": Rule("MaxUnpool3d"),
    "upsample_linear1d_backward": Rule("linear interpolation"),
    "upsample_bilinear2d_backward": Rule("bilinear interpolation", strict=DECOMPOSED.format(since="2.1")),
    "_upsample_bilinear2d_aa_backward": Rule("antialiased bilinear interpolation"),
    "upsample_bicubic2d_backward": Rule("bicubic interpolation"),
    "_upsample_bicubic2d_aa_backward": Rule("antialiased bicubic interpolation"),
    "upsample_trilinear3d_backward": Rule("trilinear interpolation", strict=DECOMPOSED.format(since="2.9")),
    "reflection_pad1d_backward": Rule("ReflectionPad1d"),
    "reflection_pad2d_backward": Rule("ReflectionPad2d"),
    "reflection_pad3d_backward": Rule("ReflectionPad3d"),
    "nll_loss2d_forward": Rule("NLLLoss on maps"),
    "_ctc_loss_backward": Rule("CTCLoss"),
    "put": Rule("Tensor.put"),
    "put_": Rule("Tensor.put_"),
    "histc": Rule("torch.histc", when=lambda args: args[0].is_floating_point()),
    "bincount": Rule("torch.bincount", when=lambda args: len(args) > 1 and args[1] is not None),  # weights
    "median": Rule("torch.median", overload="dim"),  # with indices
    "scatter_reduce": Rule("scatter_reduce with prod", when=lambda args: args[4] == "prod"),
    "scatter_reduce_": Rule("scatter_reduce with prod", when=lambda args: args[4] == "prod"),
    "_embedding_bag_dense_backward": Rule("EmbeddingBag with max", when=lambda args: args[7] == 1),
    "grid_sampler_2d_backward": Rule("grid_sample"),
    "grid_sampler_3d_backward": Rule("grid_sample"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Rule("scaled_dot_product_attention", strict=OWN_KERNEL),
    "_scaled_dot_product_efficient_attention_backward": Rule("scaled_dot_product_attention", strict=OWN_KERNEL),
}
"""Operation as the dispatcher calls it on the CPU → what happens to it on CUDA with the deterministic flag.

`AdaptiveAvgPool2d(1)` is not here because PyTorch turns it into a mean before the dispatcher sees it.
"""

_STRICT_REMARKS = {rule.name: rule.strict for rule in ALERTING.values() if rule.strict}

Detector = Callable[[Callable[[], object]], Counter[str]]
"""Runs a piece of work and counts its operations that have no deterministic implementation."""


class LayeredModel(Protocol):
    """What the audit needs of a detection model: `layers` describe the modules of `model`, in the same order."""

    layers: Sequence[Any]
    model: nn.Sequential


@dataclass(frozen=True)
class Alert:
    """An operation without a deterministic implementation and the innermost module that runs it.

    `layer` and `block` are the layer's number and name in the model file (None and "" for the model's own code),
    `module` is the module's path and `kind` its class. `swappable` modules have an equivalent in `utils.swap`.
    `remark` says where the operation is deterministic after all.
    """

    layer: int | None
    block: str
    module: str
    kind: str
    operation: str
    swappable: bool = False
    remark: str = ""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self.alerting: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.operations.add(name)
        rule = ALERTING.get(name)
        if rule is not None and rule.applies(func._overloadname, args):
            self.alerting[rule.name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _flags(enabled: bool, warn_only: bool) -> Iterator[None]:
    """The deterministic flag as given, and as it was at the end."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def operations_of(work: Callable[[], object]) -> set[str]:
    """Names of the operations that a function runs, in its forward and backward passes."""
    with _Recorder() as recorder:
        work()
    return recorder.operations


def by_table(work: Callable[[], object]) -> Counter[str]:
    """Operations of work on the CPU that alert on CUDA by the table, as users know them, with counts."""
    # with the flag on, operations that alert on the CPU too would end the work
    with _flags(False, False), _Recorder() as recorder:
        work()
    return recorder.alerting


def by_real_run(work: Callable[[], object]) -> Counter[str]:
    """Operations that PyTorch itself warns about on the device at hand, by its names, with counts.

    Warnings of autograd's own threads are raised again in the calling thread at the end of a backward pass.
    Others that the work causes are left out: the work is a rehearsal, they come again.
    """
    with _flags(True, True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    names = (operation_of(str(warning.message)) for warning in caught)
    return Counter(name for name in names if name is not None)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with every tensor in its lists, tuples and dictionaries changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph; it needs a gradient if it did."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(item)


@dataclass(frozen=True)
class _Call:
    """One call of a module as it was met: arguments cut from their graph, and whether gradients were recorded."""

    args: tuple
    kwargs: dict[str, Any]
    gradients: bool

    def run(self, module: nn.Module) -> None:
        """Forward and, where something needs a gradient, backward."""
        with torch.set_grad_enabled(self.gradients):
            # clones, because a module may work in place, which a leaf that needs a gradient forbids
            args, kwargs = _mapped(self.args, torch.clone), _mapped(self.kwargs, torch.clone)
            output = module(*args, **kwargs)
            ends = [tensor for tensor in _tensors_of(output) if tensor.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


@contextlib.contextmanager
def _calls_caught(module: nn.Module) -> Iterator[dict[str, list[_Call]]]:
    """Calls of the outermost modules below `module` that are called, by path below it.

    Lists and other containers are never called, so these modules may lie deeper than its children.
    """
    calls: dict[str, list[_Call]] = {}
    running: list[str] = []
    handles = []
    for path, part in module.named_modules():
        if part is module:
            continue

        def begin(_, args, kwargs, path=path):
            if not running:
                call = _Call(_mapped(args, _cut), _mapped(kwargs, _cut), torch.is_grad_enabled())
                calls.setdefault(path, []).append(call)
            running.append(path)

        def end(*_):
            running.pop()

        handles.append(part.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(part.register_forward_hook(end))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _search(module: nn.Module, path: str, calls: list[_Call], detect: Detector) -> tuple[Counter, list[tuple]]:
    """All operations of a module's calls, and (path, module, operation) of the innermost modules.

    What a module runs more often than its parts together is its own.
    """
    total: Counter[str] = Counter()
    inner: dict[str, list[_Call]] = {}
    for call in calls:
        with _calls_caught(module) as caught:
            found = detect(lambda call=call: call.run(module))
        total += found
        if found:
            for name, more in caught.items():
                inner.setdefault(name, []).extend(more)
    own = Counter(total)
    places: list[tuple] = []
    for name, more in inner.items():
        below = f"{path}.{name}" if path else name
        explained, deeper = _search(module.get_submodule(name), below, more, detect)
        own -= explained
        places += [place for place in deeper if place[2] in total]
    return total, [*((path, module, operation) for operation in sorted(own)), *places]


def find_alerts(model: LayeredModel, images: torch.Tensor, detect: Detector) -> list[Alert]:
    """Every operation of a model that alerts when it trains on `images`, with the modules they come from.

    One pass forward and backward where nothing alerts; else every layer again by itself and, where it alerts, its
    parts, down to the innermost module. The loss is not part of it. The passes run on a copy of the model, so
    that parameters, gradients, statistics, hooks and modes stay as they are; generators and flags are put back,
    also after an exception. Autocast and the model's device and dtype are the caller's.
    """
    state = rng_state()
    try:
        rehearsed = copy.deepcopy(model).train()
        call = _Call((images.detach(),), {}, True)
        _, places = _search(rehearsed, "", [call], detect)
    finally:
        set_rng_state(state)
    alerts = []
    for path, module, operation in places:
        words = path.split(".")
        layer = int(words[1]) if words[0] == "model" and len(words) > 1 and words[1].isdigit() else None
        block = "" if layer is None else model.layers[layer].block
        remark = _STRICT_REMARKS.get(operation, "")
        alerts.append(Alert(layer, block, path, type(module).__name__, operation, can_swap(module), remark))
    return alerts


def audit(model: LayeredModel, imgsz: int, detect: Detector, batch_size: int = 2) -> list[Alert]:
    """`find_alerts` on made-up images of `imgsz` px, on the model's device and in its dtype.

    Two images, since batch norm cannot train on a single value. `imgsz` must be a multiple of the model's stride.
    """
    weight = next(model.parameters())
    images = torch.linspace(0, 1, batch_size * 3 * imgsz**2, device=weight.device, dtype=weight.dtype)
    return find_alerts(model, images.view(batch_size, 3, imgsz, imgsz), detect)


def _way_out(alert: Alert) -> str:
    if alert.layer is None:
        return "see below"
    block = "a block of this project"
    if not alert.swappable:
        return block
    is_the_layer = alert.module == f"model.{alert.layer}"
    return "--deterministic-swap" if is_the_layer else f"--deterministic-swap, or {block}"


def format_alerts(alerts: Sequence[Alert]) -> str:
    """A table of the alerts, what to do about each, and the ways out for all; "" where there are none."""
    if not alerts:
        return ""
    head = ("layer", "block", "module", "operation", "what to do")
    rows = [
        (
            "-" if alert.layer is None else str(alert.layer),
            alert.block or "-",
            f"{alert.module or 'the model'} ({alert.kind})",
            alert.operation,
            _way_out(alert),
        )
        for alert in alerts
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (head, *rows)]
    remarks = dict.fromkeys(f"{alert.operation}: {alert.remark}" for alert in alerts if alert.remark)
    ways = ["use a block of this project in a block's place"]
    if any(alert.swappable for alert in alerts):
        ways.append("--deterministic-swap to replace standard modules by deterministic ones with equal outputs")
    ways.append("--deterministic-mode warn to run and have them reported, scoped-off to allow them in backward passes")
    return "\n".join([*lines, *remarks, f"ways out: {'; '.join(ways)}"])


def verdict(alerts: Sequence[Alert]) -> str:
    """What the table says, in one line for a log."""
    where = f"on CUDA, by the table of PyTorch {CHECKED_WITH}"
    if not alerts:
        return f"determinism: every operation of the model has a deterministic implementation {where}"
    places: dict[str, list[str]] = {}
    for alert in alerts:
        places.setdefault(alert.operation, []).append(alert.module or "the model")
    found = "; ".join(f"{operation} in {', '.join(modules)}" for operation, modules in places.items())
    return f"determinism: without deterministic implementation {where}: {found}"
