"""A model's layers run on shapes alone: sizes, multiply-adds, and which layers do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from utils.determinism import DeterministicMode, backward_guard

if TYPE_CHECKING:
    from models.yolo import DetectionModel, Layer


class LayerError(Exception):
    """What is wrong with a layer's inputs, found while tracing."""

    def __init__(self, index: int, text: str):
        super().__init__(text)
        self.index = index


@dataclass(frozen=True)
class LayerTrace:
    """What one layer does to an image: shape or shapes of its output and multiply-adds."""

    shape: tuple[tuple[int, ...], ...]
    macs: float


def trace(model: DetectionModel, size: tuple[int, int], ch: int = 3) -> list[LayerTrace]:
    """Output shapes and multiply-adds of each layer for one image of `size` (height, width).

    Runs on the meta device: nothing is computed and no state changes. Raises `LayerError` where a layer cannot
    take what it reads.
    """
    counter = FlopCounterMode(display=False)  # convolutions and matrix products
    macs = [0.0] * len(model.layers)
    shapes: list[tuple] = [()] * len(model.layers)
    started: list[Layer] = []
    handles = []
    for layer, module in zip(model.layers, model.model):

        def begin(_, inputs, layer=layer):
            started.append(layer)
            _check_sizes(model, layer, inputs[0])
            macs[layer.index] -= counter.get_total_flops() / 2

        def end(_, __, output, index=layer.index):
            outputs = output if isinstance(output, list) else [output]
            shapes[index] = tuple(tuple(o.shape) for o in outputs)
            macs[index] += counter.get_total_flops() / 2

        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
        norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
        handles += [norm.register_forward_hook(_norm_hook(macs, layer.index)) for norm in norms]
    training = model.training
    state = {name: t.detach().to("meta") for name, t in [*model.named_parameters(), *model.named_buffers()]}
    try:
        model.eval()
        # nothing is computed here, so an operation that is not deterministic may pass: the audit tells of it
        with torch.no_grad(), counter, backward_guard(DeterministicMode.SCOPED_OFF):
            torch.func.functional_call(model, state, (torch.empty(1, ch, *size, device="meta"),))
    except RuntimeError as error:
        layer = started[-1]
        read = ", ".join(f"{_place(model, s)} {list(shapes[s][0]) if s >= 0 else ''}" for s in layer.sources)
        text = f"{layer.block} cannot read {read}: {' '.join(str(error).split())}"
        raise LayerError(layer.index, text) from error
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return [LayerTrace(shape, count) for shape, count in zip(shapes, macs)]


def _place(model: DetectionModel, index: int) -> str:
    return "the image" if index < 0 else f"layer {index} ({model.layers[index].block})"


def _check_sizes(model: DetectionModel, layer: Layer, maps: Any) -> None:
    if layer.block == "Concat" and len({tuple(m.shape[2:]) for m in maps}) > 1:
        read = ", ".join(f"{_place(model, s)} {m.shape[2]}x{m.shape[3]}" for s, m in zip(layer.sources, maps))
        raise LayerError(layer.index, f"Concat reads maps of unequal sizes: {read}")


def _norm_hook(macs: list[float], index: int) -> Callable:
    """Four multiply-adds an element of a batch norm, as in the counts that YOLOv5 publishes."""

    def count(_: nn.Module, __: tuple, output: torch.Tensor) -> None:
        macs[index] += 4 * output.numel()

    return count
