"""Deterministic equivalents of standard modules, put into a built model by `--deterministic-swap`.

Adaptive pooling, bilinear upsampling, max unpooling and reflection padding have no deterministic gradient (or, for
unpooling, no deterministic forward) on CUDA. The classes here give the same outputs and gradients by operations that
have one. They are subclasses of what they replace, without parameters of their own, so that attributes, the tests of
other code for a module's class, and the names in state dicts stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


def _window_edges(size: int, windows: int) -> list[tuple[int, int]]:
    """Start and end of each of an axis's windows in adaptive pooling; neighbours overlap where sizes do not divide."""
    return [(i * size // windows, -((-(i + 1) * size) // windows)) for i in range(windows)]


def _disjoint_step(edges: Sequence[tuple[int, int]]) -> int:
    """The least step at which no two of every step-th windows overlap."""
    step = 1
    while any(a[1] > b[0] for a, b in zip(edges, edges[step:])):
        step += 1
    return step


def _output_size(wanted: int | Sequence[int | None], x: torch.Tensor) -> tuple[int, int]:
    """Height and width that come out of adaptive pooling: a number means both, None in a pair the input's own."""
    pair = tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted, wanted)
    return tuple(have if size is None else int(size) for size, have in zip(pair, x.shape[-2:]))


class DeterministicAdaptiveMaxPool2d(nn.AdaptiveMaxPool2d):
    """`AdaptiveMaxPool2d` that takes the values at the maxima's places: of ties the first gets the whole gradient.

    Finding the places is deterministic, and so is the gradient of taking values from places that are all different.
    Where windows overlap they may share a place, so windows that do not overlap are taken together, group by group.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        size = _output_size(self.output_size, x)
        _, places = F.adaptive_max_pool2d(x.detach(), size, return_indices=True)
        flat = x.flatten(-2)
        rows, columns = (_disjoint_step(_window_edges(have, out)) for have, out in zip(x.shape[-2:], size))
        if rows == columns == 1:
            values = flat.gather(-1, places.flatten(-2)).view(places.shape)
        else:
            values = x.new_zeros(places.shape)
            for i in range(rows):
                for j in range(columns):
                    group = places[..., i::rows, j::columns]
                    taken = flat.gather(-1, group.flatten(-2)).view(group.shape)
                    values[..., i::rows, j::columns] = taken
        return (values, places) if self.return_indices else values


def _resampled(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`rows @ x @ columns.T` for each map, outside of autocast, in at least single precision."""
    with torch.autocast(x.device.type, enabled=False):
        return (rows @ x.to(rows.dtype) @ columns.T).to(x.dtype)


def _working_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class DeterministicAdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """`AdaptiveAvgPool2d` as a mean over equal windows or, where sizes do not divide, a product with mean matrices.

    In the product a value that is not finite spreads along its row and column.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = _output_size(self.output_size, x)
        if x.shape[-2] % height == 0 and x.shape[-1] % width == 0:
            windows = x.unflatten(-1, (width, x.shape[-1] // width)).unflatten(-3, (height, x.shape[-2] // height))
            return windows.mean((-3, -1))
        return _resampled(x, _mean_matrix(x, -2, height), _mean_matrix(x, -1, width))


def _mean_matrix(x: torch.Tensor, axis: int, windows: int) -> torch.Tensor:
    """`[windows, size]`: each row averages over one window of the axis."""
    edges = torch.tensor(_window_edges(x.shape[axis], windows), device=x.device)
    at = torch.arange(x.shape[axis], device=x.device)
    inside = ((at >= edges[:, :1]) & (at < edges[:, 1:])).to(_working_dtype(x))
    return inside / inside.sum(1, keepdim=True)


class _BilinearUpsample:
    """Bilinear upsampling as a product with interpolation matrices.

    A value that is not finite spreads along its row and column.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 4:
            raise ValueError(f"bilinear upsampling takes [B, C, H, W], found {list(x.shape)}")
        factors = _pair(self.scale_factor)
        sizes = _pair(self.size)
        matrices = []
        for axis, size, factor in zip((-2, -1), sizes, factors):
            have = x.shape[axis]
            out = math.floor(have * factor) if size is None else size
            # a given factor is used as it is, not as the ratio of the rounded sizes
            exact = factor if size is None and not self.recompute_scale_factor else None
            matrices.append(_interpolation_matrix(x, have, out, exact, bool(self.align_corners)))
        return _resampled(x, *matrices)


class DeterministicUpsample(_BilinearUpsample, nn.Upsample):
    """`Upsample(mode="bilinear")` of any size or factor."""


class DeterministicUpsamplingBilinear2d(_BilinearUpsample, nn.UpsamplingBilinear2d):
    """`UpsamplingBilinear2d`."""


def _pair(value: float | Sequence[float] | None) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


def _interpolation_matrix(x: torch.Tensor, have: int, out: int, factor: float | None, corners: bool) -> torch.Tensor:
    """`[out, have]`: the weights of the two neighbours of each output position, as PyTorch places them."""
    dtype = _working_dtype(x)
    position = torch.arange(out, device=x.device, dtype=dtype)
    if corners:
        source = position * ((have - 1) / (out - 1) if out > 1 else 0.0)
    else:
        source = (position + 0.5) * (1 / factor if factor else have / out) - 0.5
    source = source.clamp(0, have - 1)
    at = torch.arange(have, device=x.device, dtype=dtype)
    return (1 - (source[:, None] - at).abs()).clamp(min=0)


class DeterministicMaxUnpool2d(nn.MaxUnpool2d):
    """`MaxUnpool2d` that scatters into zeros."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        kernel, stride, padding = (_pair(v) for v in (self.kernel_size, self.stride, self.padding))
        size = [(n - 1) * s - 2 * p + k for n, s, p, k in zip(x.shape[-2:], stride, padding, kernel)]
        if output_size is not None:
            wanted = list(output_size)[-2:]
            if any(abs(w - n) >= s for w, n, s in zip(wanted, size, stride)):
                raise ValueError(f"output_size {wanted} must differ from {size} by less than the stride {list(stride)}")
            size = wanted
        flat = x.new_zeros((*x.shape[:-2], size[0] * size[1])).scatter(-1, indices.flatten(-2), x.flatten(-2))
        return flat.unflatten(-1, size)


class _ReflectionPad:
    """Reflection padding by slices, flipped and joined; a negative padding cuts off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, (before, after) in enumerate(zip(self.padding[::2], self.padding[1::2])):
            axis = -1 - number
            size = x.shape[axis]
            if max(before, after) >= size:
                raise ValueError(f"reflection padding {(before, after)} must be smaller than the size {size}")
            parts = [x.narrow(axis, 1, before).flip(axis)] if before > 0 else []
            start, end = max(-before, 0), size - max(-after, 0)
            parts.append(x.narrow(axis, start, end - start))
            if after > 0:
                parts.append(x.narrow(axis, size - 1 - after, after).flip(axis))
            x = torch.cat(parts, axis)
        return x


class DeterministicReflectionPad1d(_ReflectionPad, nn.ReflectionPad1d):
    """`ReflectionPad1d`."""


class DeterministicReflectionPad2d(_ReflectionPad, nn.ReflectionPad2d):
    """`ReflectionPad2d`."""


class DeterministicReflectionPad3d(_ReflectionPad, nn.ReflectionPad3d):
    """`ReflectionPad3d`."""


SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.AdaptiveMaxPool2d: DeterministicAdaptiveMaxPool2d,
    nn.AdaptiveAvgPool2d: DeterministicAdaptiveAvgPool2d,
    nn.Upsample: DeterministicUpsample,
    nn.UpsamplingBilinear2d: DeterministicUpsamplingBilinear2d,
    nn.MaxUnpool2d: DeterministicMaxUnpool2d,
    nn.ReflectionPad1d: DeterministicReflectionPad1d,
    nn.ReflectionPad2d: DeterministicReflectionPad2d,
    nn.ReflectionPad3d: DeterministicReflectionPad3d,
}
"""Standard module → its deterministic equivalent. Subclasses are left alone: they may compute something else."""


def can_swap(module: nn.Module) -> bool:
    """Whether `swap_modules` replaces a module."""
    return type(module) in SWAPS and (type(module) is not nn.Upsample or module.mode == "bilinear")


def swap_modules(model: nn.Module) -> list[str]:
    """Replace every standard module that has a deterministic equivalent, in place; returns a line for each.

    Only the class of a module object changes: whoever else holds it, its hooks and its attributes stay.
    """
    lines = []
    for path, module in model.named_modules():
        if can_swap(module):
            old, new = type(module), SWAPS[type(module)]
            module.__class__ = new
            lines.append(f"{path or 'the model'}: {old.__name__} → {new.__name__}")
    return lines
