"""What attention blocks do to the maps that pass them: by how much each channel and each position is weighed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from models.common import Attention
from models.yolo import DetectionModel

NEGLIGIBLE = 1e-3
"""Gains that vary by less than this are no gate."""


@dataclass(frozen=True)
class AttentionGain:
    """Gain of one attention block on one image, output over input.

    `channel` `[C]` and `spatial` `[H, W]` are factors: for blocks that multiply by gates, the gates themselves up to a
    common factor. A part that does not vary is None.
    """

    name: str
    block: str
    channel: torch.Tensor | None
    spatial: torch.Tensor | None


def split_gain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Channel and spatial factors of `y / x`, both `[C, H, W]`, as medians, which forgive values near zero.

    The channel factor is the median over positions, the spatial one the median over channels of what remains.
    """
    x, y = x.float(), y.float()
    usable = x.abs() > 1e-4 * x.abs().amax().clamp(min=1e-12)
    ratio = torch.where(usable, y / x, torch.full_like(x, torch.nan))
    channel = ratio.flatten(1).nanmedian(1).values.nan_to_num(1.0)
    spatial = (ratio / channel.clamp(min=1e-6)[:, None, None]).nanmedian(0).values.nan_to_num(1.0)
    varies = [part.max() - part.min() > NEGLIGIBLE for part in (channel, spatial)]
    return (channel if varies[0] else None), (spatial if varies[1] else None)


def attention_modules(model: DetectionModel) -> dict[str, nn.Module]:
    """The model's attention blocks by module path, without the parts that they are made of."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


@contextlib.contextmanager
def recorded_gains(model: DetectionModel) -> Iterator[list[AttentionGain]]:
    """Within it, every forward pass adds the gain of each attention block on the batch's first image to the list."""
    gains: list[AttentionGain] = []
    handles = []
    for name, module in attention_modules(model).items():

        def record(module, inputs, output, name=name):
            gains.append(AttentionGain(name, type(module).__name__, *split_gain(inputs[0][0], output[0])))

        handles.append(module.register_forward_hook(record))
    try:
        yield gains
    finally:
        for handle in handles:
            handle.remove()
