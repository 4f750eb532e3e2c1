"""The detection model: the table of blocks, model files turned into layers, Detect, DetectionModel.

`python -m models.yolo --cfg FILE` prints a model's summary.

A model file is a list of layers `[from, number, block, args]`, backbone then head. `parse_layers` turns each into a
`Layer` (what it reads) and a module; the modules live in `DetectionModel.model`, so that parameter names are
YOLOv5's (`model.0.conv.weight`).
"""

from __future__ import annotations

import argparse
import ast
import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models import common
from utils.checkpoint import read_weights
from utils.config import ConfigError, find_file, load_model_file, nearest
from utils.options import run_script

BLOCKS: dict[str, tuple[type[nn.Module], str]] = {
    "Conv": (common.Conv, "scaled"),
    "DWConv": (common.DWConv, "scaled"),
    "DWConvTranspose2d": (common.DWConvTranspose2d, "scaled"),
    "nn.ConvTranspose2d": (nn.ConvTranspose2d, "scaled"),
    "Bottleneck": (common.Bottleneck, "scaled"),
    "CrossConv": (common.CrossConv, "scaled"),
    "Focus": (common.Focus, "scaled"),
    "GhostConv": (common.GhostConv, "scaled"),
    "GhostBottleneck": (common.GhostBottleneck, "scaled"),
    "MixConv2d": (common.MixConv2d, "scaled"),
    "SPP": (common.SPP, "scaled"),
    "SPPF": (common.SPPF, "scaled"),
    "C3SPP": (common.C3SPP, "scaled"),
    "BottleneckCSP": (common.BottleneckCSP, "repeated"),
    "C3": (common.C3, "repeated"),
    "C3x": (common.C3x, "repeated"),
    "C3TR": (common.C3TR, "repeated"),
    "C3Ghost": (common.C3Ghost, "repeated"),
    "nn.BatchNorm2d": (nn.BatchNorm2d, "same"),
    "SE": (common.SE, "same"),
    "ECA": (common.ECA, "same"),
    "CBAM": (common.CBAM, "same"),
    "nn.Upsample": (nn.Upsample, "plain"),
    "nn.MaxPool2d": (nn.MaxPool2d, "plain"),
    "nn.ZeroPad2d": (nn.ZeroPad2d, "plain"),
    "nn.Identity": (nn.Identity, "plain"),
    "Contract": (common.Contract, "contract"),
    "Expand": (common.Expand, "expand"),
    "Concat": (common.Concat, "concat"),
}
"""YAML name → class and rule.

`scaled`: (c1, c2 · width, …); `repeated`: (c1, c2 · width, number · depth, …); `same`: (c1, …), channels kept;
`plain`: arguments as written, channels kept; `contract`, `expand`, `concat`: arguments as written.
`Detect` comes last in every file and is treated apart.
"""

ACTIVATIONS: dict[str, type[nn.Module]] = {
    f"nn.{cls.__name__}": cls
    for cls in (
        nn.SiLU,
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.Hardswish,
        nn.Mish,
        nn.GELU,
        nn.ELU,
        nn.Identity,
        nn.Sigmoid,
    )
}


class Detect(nn.Module):
    """The last layer: one 1x1 convolution a map, to `anchors · (5 + nc)` channels.

    `anchors` is `[maps, anchors, 2]`, in units of each map's stride once `DetectionModel` has set it.
    """

    def __init__(self, nc: int, anchors: Sequence[Sequence[float]], channels: Sequence[int]):
        super().__init__()
        self.nc = nc
        self.register_buffer("anchors", torch.tensor(anchors).float().view(len(anchors), -1, 2))
        outputs = self.anchors.shape[1] * (5 + nc)
        self.m = nn.ModuleList(nn.Conv2d(c, outputs, 1) for c in channels)

    def forward(self, maps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Raw maps `[B, anchors, ny, nx, 5 + nc]`, before any sigmoid."""
        raw = []
        for conv, x in zip(self.m, maps):
            y = conv(x)
            b, _, ny, nx = y.shape
            raw.append(y.view(b, self.anchors.shape[1], 5 + self.nc, ny, nx).permute(0, 1, 3, 4, 2).contiguous())
        return raw

    def start_biases(self, stride: torch.Tensor) -> None:
        """Objectness as if 8 objects were in a 640 px image, classes as if each had a share of 0.6 / nc."""
        for conv, s in zip(self.m, stride.tolist()):
            with torch.no_grad():
                bias = conv.bias.view(self.anchors.shape[1], -1)
                bias[:, 4] += math.log(8 / (640 / s) ** 2)
                bias[:, 5 : 5 + self.nc] += math.log(0.6 / (self.nc - 0.99999))


@dataclass(frozen=True)
class Layer:
    """What a layer is and reads: `sources` are absolute layer numbers, -1 is the image."""

    index: int
    sources: tuple[int, ...]
    many: bool
    repeats: int
    block: str
    args: tuple


def _error(where: str, index: int, text: str) -> ConfigError:
    return ConfigError(f"{where}: layer {index}: {text}")


def _plain_argument(value: Any, cfg: dict[str, Any]) -> Any:
    """Words in a layer's arguments that stand for values: `None`, and the file's own `nc` and `anchors`."""
    if value == "None":
        return None
    return cfg[value] if value in ("nc", "anchors") and isinstance(value, str) else value


def _width(channels: Any, multiple: float) -> int:
    """Channels times the width multiple, rounded up to a multiple of 8."""
    return math.ceil(channels * multiple / 8) * 8


def _check_line(line: Any, where: str, index: int) -> tuple[Any, int, str, list]:
    if not isinstance(line, list) or len(line) != 4:
        raise _error(where, index, f"expected [from, number, block, [arguments]], found {line}")
    source, number, block, args = line
    numbers = source if isinstance(source, list) else [source]
    if not numbers or not all(isinstance(s, int) and not isinstance(s, bool) for s in numbers):
        raise _error(where, index, f"'from' must be a layer number or a list of them, found {source}")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise _error(where, index, f"number must be 1 or more, found {number}")
    if not isinstance(args, list):
        raise _error(where, index, f"arguments must be a list, found {args}")
    return source, number, str(block), args


def _sources(source: Any, where: str, index: int) -> tuple[int, ...]:
    absolute = []
    for s in source if isinstance(source, list) else [source]:
        layer = index + s if s < 0 else s
        if layer >= index or layer < -1 or (layer == -1 and index > 0):
            raise _error(where, index, f"'from' {s} is no earlier layer (0 to {index - 1})")
        absolute.append(layer)
    return tuple(absolute)


def _arguments(rule: str, args: list, channels: list[int], number: int, width: float) -> tuple[list, int]:
    """Constructor arguments by the block's rule, and the channels that come out."""
    c1 = channels[0]
    if rule in ("scaled", "repeated"):
        if not args or not isinstance(args[0], int):
            raise ValueError(f"the first argument must be the number of channels, found {args[:1]}")
        c2 = _width(args[0], width)
        return [c1, c2, *([number] if rule == "repeated" else []), *args[1:]], c2
    if rule == "same":
        return [c1, *args], c1
    if rule == "concat":
        return args, sum(channels)
    gain = args[0] ** 2 if rule in ("contract", "expand") else 1
    return args, {"contract": c1 * gain, "expand": c1 // gain}.get(rule, c1)


def _detect(cfg: dict[str, Any], args: list, channels: list[int]) -> Detect:
    if len(args) != 2:
        raise ValueError(f"Detect takes [nc, anchors], found {args}")
    nc, anchors = args
    if isinstance(anchors, int):  # a count: placeholders that AutoAnchor replaces
        anchors = [list(range(anchors * 2))] * len(channels)
    if len(anchors) != len(channels):
        raise ValueError(f"Detect reads {len(channels)} maps, but 'anchors' has {len(anchors)} rows")
    return Detect(nc, anchors, channels)


def parse_layers(cfg: dict[str, Any], ch: int, where: str) -> tuple[list[Layer], nn.Sequential]:
    """Layers and modules of a full model file; raises `ConfigError` with file and layer number."""
    depth, width = cfg.get("depth_multiple", 1.0), cfg.get("width_multiple", 1.0)
    layers: list[Layer] = []
    modules: list[nn.Module] = []
    out: list[int] = []
    lines = [*cfg["backbone"], *cfg["head"]]
    for index, line in enumerate(lines):
        source, number, block, args = _check_line(line, where, index)
        sources = _sources(source, where, index)
        channels = [ch if s == -1 else out[s] for s in sources]
        number = max(round(number * depth), 1) if number > 1 else number
        args = [_plain_argument(a, cfg) for a in args]
        if (block == "Detect") != (index == len(lines) - 1):
            raise _error(where, index, "Detect must be the last layer, and only that")
        if block != "Detect" and block not in BLOCKS:
            raise _error(where, index, f"unknown block '{block}'{nearest(block, [*BLOCKS, 'Detect'])}")
        try:
            if block == "Detect":
                module, args, c2 = _detect(cfg, args, channels), [args[0], args[1], channels], 0
            else:
                cls, rule = BLOCKS[block]
                args, c2 = _arguments(rule, args, channels, number, width)
                copies = 1 if rule == "repeated" else number
                module = cls(*args) if copies == 1 else nn.Sequential(*(cls(*args) for _ in range(copies)))
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise _error(where, index, f"{block} does not take {args}: {error}") from error
        layers.append(Layer(index, sources, isinstance(source, list), number, block, tuple(args)))
        modules.append(module)
        out.append(c2)
    return layers, nn.Sequential(*modules)


def insert_attention(cfg: dict[str, Any], where: str) -> dict[str, Any]:
    """The full model file for one with an `attention` list: blocks put in, later `from` numbers shifted.

    An entry is `{block: CBAM, after: [2, 4], args: []}`, `after` counting the layers of the file without attention.
    Whoever read such a layer reads its attention block instead.
    """
    cfg = copy.deepcopy(cfg)
    entries = cfg.pop("attention", None)
    if not entries:
        return cfg
    lines = [*cfg["backbone"], *cfg["head"]]
    added: dict[int, list[list]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        if (
            not isinstance(entry, dict)
            or set(entry) - {"block", "after", "args"}
            or not {"block", "after"} <= set(entry)
        ):
            raise ConfigError(f"{where}: attention: expected {{block: NAME, after: [layers]}}, found {entry}")
        block, after = entry["block"], entry["after"]
        if BLOCKS.get(block, (None, ""))[1] != "same":
            known = [name for name, (_, rule) in BLOCKS.items() if rule == "same"]
            raise ConfigError(f"{where}: attention: unknown block '{block}'{nearest(block, known)}")
        for layer in after if isinstance(after, list) else [after]:
            if not isinstance(layer, int) or not 0 <= layer < len(lines) - 1:
                raise ConfigError(f"{where}: attention: after {layer}: no such layer (0 to {len(lines) - 2})")
            added.setdefault(layer, []).append([-1, 1, block, list(entry.get("args", []))])

    moved: list[int] = []  # base layer → where its (attended) output is in the new numbering
    sections: dict[str, list] = {"backbone": [], "head": []}
    for index, line in enumerate(lines):
        source, number, block, args = _check_line(line, where, index)
        sources = _sources(source, where, index)
        written = source if isinstance(source, list) else [source]
        renumbered = [-1 if w == -1 else moved[s] for w, s in zip(written, sources)]
        section = "backbone" if index < len(cfg["backbone"]) else "head"
        new = [[renumbered if isinstance(source, list) else renumbered[0], number, block, args], *added.get(index, [])]
        sections[section] += new
        moved.append((moved[-1] if moved else -1) + len(new))
    return {**cfg, **sections}


def resolve_model_file(cfg: str | Path | dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A full model file, attention put in, and the name for messages, from a path or a mapping."""
    raw, where = (cfg, "model") if isinstance(cfg, dict) else (load_model_file(cfg), str(cfg))
    for key in ("backbone", "head", "anchors", "nc"):
        if key not in raw:
            raise ConfigError(f"{where}: no model file: '{key}' is missing")
    for key in ("depth_multiple", "width_multiple"):
        value = raw.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ConfigError(f"{where}: {key} must be a positive number, found {value!r}")
    if not isinstance(raw["backbone"], list) or not isinstance(raw["head"], list) or not raw["head"]:
        raise ConfigError(f"{where}: 'backbone' and 'head' must be lists of layers")
    return insert_attention(raw, where), where


def parse_activation(text: str, where: str) -> Callable[[], nn.Module]:
    """`nn.LeakyReLU(0.1)` as a function that makes it; known activations and plain numbers only."""
    match = re.fullmatch(r"\s*([\w.]+)\s*\((.*)\)\s*", str(text))
    cls = ACTIVATIONS.get(match.group(1)) if match else None
    if cls is None:
        raise ConfigError(f"{where}: unknown activation '{text}'{nearest(text, list(ACTIVATIONS))}")
    try:
        args = [ast.literal_eval(part) for part in match.group(2).split(",") if part.strip() and "=" not in part]
        made = cls(*args)
    except (ValueError, SyntaxError, TypeError):
        raise ConfigError(f"{where}: activation '{text}' cannot be read; write for example nn.LeakyReLU(0.1)") from None
    return lambda: copy.deepcopy(made)


@dataclass(frozen=True)
class LayerTrace:
    """What one layer does to an image: shape or shapes of its output and multiply-adds."""

    shape: tuple[tuple[int, ...], ...]
    macs: float


class DetectionModel(nn.Module):
    """A YOLOv5 detection model.

    `cfg` is a model file's path or mapping, `nc` and `names` replace its number and names of classes.
    `model_file` is the full mapping that builds this model again. Raises `ConfigError` for a file that means nothing.
    """

    def __init__(
        self, cfg: str | Path | dict[str, Any], nc: int | None = None, names: Sequence[str] | None = None, ch: int = 3
    ):
        super().__init__()
        resolved, where = resolve_model_file(cfg)
        if names is not None and nc is None:
            nc = len(names)
        if nc is not None:
            resolved["nc"] = nc
        self.model_file = resolved
        self.nc: int = resolved["nc"]
        self.names = tuple(names) if names is not None else tuple(f"class{i}" for i in range(self.nc))
        if len(self.names) != self.nc:
            raise ConfigError(f"{where}: {self.nc} classes, but {len(self.names)} names")
        layers, self.model = parse_layers(resolved, ch, where)
        if self.detect.nc != self.nc:
            raise ConfigError(f"{where}: Detect is written for {self.detect.nc} classes instead of 'nc' ({self.nc})")
        self.layers = tuple(layers)
        self._kept = frozenset(s for layer in layers for s in layer.sources if s != layer.index - 1)
        if "activation" in resolved:
            make = parse_activation(resolved["activation"], where)
            for module in self.modules():
                if isinstance(module, common.Conv) and isinstance(module.act, nn.SiLU):
                    module.act = make()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps, module.momentum = 1e-3, 0.03
            elif isinstance(module, (nn.SiLU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish)):
                module.inplace = True
        self.stride = self._find_stride(ch, where)
        self._scale_anchors()
        self.detect.start_biases(self.stride)

    @property
    def detect(self) -> Detect:
        return self.model[-1]

    def _find_stride(self, ch: int, where: str) -> torch.Tensor:
        size = 256
        try:
            shapes = self.trace((size, size), ch)[-1].shape
        except RuntimeError as error:
            raise ConfigError(f"{where}: the layers do not fit together: {' '.join(str(error).split())}") from error
        return torch.tensor([size / shape[2] for shape in shapes])

    def _scale_anchors(self) -> None:
        """Anchors from pixels to units of the stride, in the order of the strides."""
        anchors = self.detect.anchors
        area = anchors.prod(-1).mean(-1)
        if (area[-1] - area[0]) * (self.stride[-1] - self.stride[0]) < 0:
            anchors.copy_(anchors.flip(0))
        anchors.div_(self.stride.view(-1, 1, 1))

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Raw maps `[B, anchors, ny, nx, 5 + nc]` for images `[B, 3, H, W]` in 0…1, sides multiples of the stride."""
        kept: dict[int, torch.Tensor] = {-1: images}
        x: Any = images
        for layer, module in zip(self.layers, self.model):
            inputs = [x if s == layer.index - 1 else kept[s] for s in layer.sources]
            x = module(inputs if layer.many else inputs[0])
            if layer.index in self._kept:
                kept[layer.index] = x
        return x

    def decode(self, raw: Sequence[torch.Tensor]) -> torch.Tensor:
        """`[B, N, 5 + nc]`: centre and size in pixels of the network's input, objectness, class scores."""
        decoded = []
        for y, anchors, stride in zip(raw, self.detect.anchors, self.stride.tolist()):
            b, na, ny, nx, no = y.shape
            row = torch.arange(ny, device=y.device, dtype=y.dtype)
            column = torch.arange(nx, device=y.device, dtype=y.dtype)
            cell = torch.stack((column.expand(ny, nx), row[:, None].expand(ny, nx)), 2) - 0.5
            y = y.sigmoid()
            centre = (y[..., 0:2] * 2 + cell) * stride
            size = (y[..., 2:4] * 2) ** 2 * (anchors * stride).to(y.dtype)[:, None, None]
            decoded.append(torch.cat((centre, size, y[..., 4:]), 4).view(b, na * ny * nx, no))
        return torch.cat(decoded, 1)

    def augmented(self, images: torch.Tensor) -> torch.Tensor:
        """Decoded predictions `[B, N, 5 + nc]` of three passes: full size, 0.83 mirrored, 0.67.

        The coarsest map of the first pass and the finest of the last are left out, as in YOLOv5.
        """
        multiple = int(self.stride.max())
        width = images.shape[3]
        passes = []
        for scale, mirrored in ((1.0, False), (0.83, True), (0.67, False)):
            view = _scaled_view(images.flip(3) if mirrored else images, scale, multiple)
            decoded = self.decode(self(view))
            box = decoded[..., :4] / scale
            if mirrored:
                box = torch.cat((width - box[..., 0:1], box[..., 1:]), 2)
            passes.append(torch.cat((box, decoded[..., 4:]), 2))
        levels = len(self.stride)
        cells = sum(4**level for level in range(levels))
        coarsest = passes[0].shape[1] // cells
        finest = passes[-1].shape[1] // cells * 4 ** (levels - 1)
        passes[0] = passes[0][:, : passes[0].shape[1] - coarsest]
        passes[-1] = passes[-1][:, finest:]
        return torch.cat(passes, 1)

    def fuse(self) -> DetectionModel:
        """Fold every batch norm that follows a convolution into it, in place; for inference only."""
        for module in self.modules():
            if isinstance(module, common.Conv):
                module.fuse()
        return self

    def trace(self, size: tuple[int, int], ch: int = 3) -> list[LayerTrace]:
        """Output shapes and multiply-adds of each layer for one image of `size` (height, width).

        Runs on shapes alone (the meta device): nothing is computed and no state changes.
        """
        macs = [0.0] * len(self.layers)
        shapes: list[tuple] = [()] * len(self.layers)
        handles = []
        for index, module in enumerate(self.model):

            def remember(_, __, output, index=index):
                outputs = output if isinstance(output, list) else [output]
                shapes[index] = tuple(tuple(o.shape) for o in outputs)

            handles.append(module.register_forward_hook(remember))
            for part in module.modules():
                handles.append(part.register_forward_hook(_macs_hook(macs, index)))
        training = self.training
        state = {name: t.detach().to("meta") for name, t in [*self.named_parameters(), *self.named_buffers()]}
        try:
            self.eval()
            with torch.no_grad():
                torch.func.functional_call(self, state, (torch.empty(1, ch, *size, device="meta"),))
        finally:
            self.train(training)
            for handle in handles:
                handle.remove()
        return [LayerTrace(shape, count) for shape, count in zip(shapes, macs)]

    def gflops(self, imgsz: int = 640) -> float:
        """Billions of floating-point operations for one image, two for each multiply-add."""
        return 2e-9 * sum(layer.macs for layer in self.trace((imgsz, imgsz)))

    def summary(self, imgsz: int = 640) -> str:
        """A table of the layers and a line of totals."""
        rows = [f"{'layer':>5}  {'from':>14}  {'n':>2}  {'parameters':>10}  {'block':<16}arguments"]
        for layer, module in zip(self.layers, self.model):
            source = list(layer.sources) if layer.many else layer.sources[0]
            count = sum(p.numel() for p in module.parameters())
            cells = f"{layer.index:>5}  {source!s:>14}  {layer.repeats:>2}  {count:>10,}  {layer.block:<16}"
            rows.append(f"{cells}{list(layer.args)}")
        parameters = sum(p.numel() for p in self.parameters())
        rows.append(
            f"{len(self.layers)} layers, {parameters:,} parameters, {len(self.state_dict())} state-dict entries, "
            f"{self.gflops(imgsz):.1f} GFLOPs at {imgsz} px, strides {[int(s) for s in self.stride]}"
        )
        return "\n".join(rows)


def _scaled_view(images: torch.Tensor, scale: float, multiple: int) -> torch.Tensor:
    """Images `[B, C, H, W]` at `scale`, padded with gray (0.447) to multiples of `multiple` px."""
    if scale == 1.0:
        return images
    h, w = images.shape[2:]
    small = int(h * scale), int(w * scale)
    full = math.ceil(h * scale / multiple) * multiple, math.ceil(w * scale / multiple) * multiple
    resized = F.interpolate(images, size=small, mode="bilinear", align_corners=False)
    return F.pad(resized, (0, full[1] - small[1], 0, full[0] - small[0]), value=0.447)


def _macs_hook(macs: list[float], index: int) -> Callable:
    def count(module: nn.Module, inputs: tuple, output: Any) -> None:
        if isinstance(module, (nn.Conv1d, nn.Conv2d)):
            macs[index] += output.numel() * module.weight[0].numel()
        elif isinstance(module, nn.Linear):
            macs[index] += output.numel() * module.in_features
        elif isinstance(module, nn.BatchNorm2d):
            macs[index] += 4 * output.numel()  # what the counter behind YOLOv5's published figures takes
        elif isinstance(module, nn.MultiheadAttention):
            length, batch, width = inputs[0].shape
            macs[index] += length * batch * width * (4 * width + 2 * length)

    return count


def load_model(path: str | Path, device: torch.device | str = "cpu", *, fuse: bool = True) -> DetectionModel:
    """The model in a checkpoint of this project or an official YOLOv5 `.pt`: fp32, evaluation mode, on `device`."""
    weights = read_weights(find_file(path))
    model = DetectionModel(weights.model_file, names=weights.names)
    model.load_state_dict(weights.state)
    model.eval().requires_grad_(False)
    return (model.fuse() if fuse else model).to(device)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m models.yolo", description="Print a model's summary.")
    parser.add_argument("--cfg", required=True, metavar="FILE", help="model file")
    parser.add_argument("--imgsz", type=int, default=640, help="image size for GFLOPs (default: 640)")
    return parser.parse_args()


def _main(arguments: argparse.Namespace) -> None:
    print(DetectionModel(arguments.cfg).summary(arguments.imgsz))


if __name__ == "__main__":
    run_script(_main, _parse_arguments)
