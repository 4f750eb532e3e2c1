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
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import nn

from models import attention_zoo, common
from models.placement import (
    ALIASES,
    absolute_sources,
    attention_arguments,
    check_line,
    insert_attention,
    line_error,
    parse_flag,
)
from models.trace import LayerError, trace
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
    "SE": (common.SE, "attention"),
    "ECA": (common.ECA, "attention"),
    "CBAM": (common.CBAM, "attention"),
    "BAM": (common.BAM, "attention"),
    "scSE": (common.SCSE, "attention"),
    "CA": (common.CA, "attention"),
    "SimAM": (common.SimAM, "attention"),
    "GAM": (attention_zoo.GAM, "attention"),
    "NAM": (attention_zoo.NAM, "attention"),
    "EMA": (attention_zoo.EMA, "attention"),
    "SK": (attention_zoo.SK, "attention"),
    "ShuffleAttention": (attention_zoo.ShuffleAttention, "attention"),
    "TripletAttention": (attention_zoo.TripletAttention, "attention"),
    "SGE": (attention_zoo.SGE, "attention"),
    "GlobalContext": (attention_zoo.GlobalContext, "attention"),
    "EffectiveSE": (attention_zoo.EffectiveSE, "attention"),
    "PolarizedSequential": (attention_zoo.PolarizedSequential, "attention"),
    "DoubleAttention": (attention_zoo.DoubleAttention, "attention"),
    "CrissCross": (attention_zoo.CrissCross, "attention"),
    "ParNetAttention": (attention_zoo.ParNetAttention, "attention"),
    "LSKA": (attention_zoo.LSKA, "attention"),
    "MHSA": (attention_zoo.MHSA, "attention"),
    "C3SE": (attention_zoo.C3SE, "repeated"),
    "C3ECA": (attention_zoo.C3ECA, "repeated"),
    "C3CA": (attention_zoo.C3CA, "repeated"),
    "C3CBAM": (attention_zoo.C3CBAM, "repeated"),
    "ConvCBAM": (attention_zoo.ConvCBAM, "scaled"),
    "nn.Upsample": (nn.Upsample, "plain"),
    "nn.MaxPool2d": (nn.MaxPool2d, "plain"),
    "nn.ZeroPad2d": (nn.ZeroPad2d, "plain"),
    "nn.Identity": (nn.Identity, "plain"),
    "Contract": (common.Contract, "contract"),
    "Expand": (common.Expand, "expand"),
    "Concat": (common.Concat, "concat"),
}
"""YAML name → class and rule.

`scaled`: (c1, c2 · width, …); `repeated`: (c1, c2 · width, number · depth, …); `attention`: (c1, …), channels kept,
numbers of channels in the line left out; `same`: (c1, …), channels kept;
`plain`: arguments as written, channels kept; `contract`, `expand`, `concat`: arguments as written.
`Detect` comes last in every file and is treated apart.
"""

FOREIGN_FILES = (
    ({"lr0", "momentum", "hsv_h"}, "a hyperparameter file, no model file (it belongs to --hyp)"),
    ({"train", "val", "names"}, "a data set file, no model file (it belongs to --data)"),
)
"""Keys that tell what a file is that was given for a model file."""

ATTENTION_STARTS = ("paper", "identity")
"""`attention_init` of a full model file: the papers' initialisation, or every attention block the identity at first."""

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


def _plain_argument(value: Any, cfg: dict[str, Any]) -> Any:
    """Words in a layer's arguments that stand for values: `None`, and the file's own `nc` and `anchors`."""
    if value == "None":
        return None
    return cfg[value] if value in ("nc", "anchors") and isinstance(value, str) else value


def _width(channels: Any, multiple: float) -> int:
    """Channels times the width multiple, rounded up to a multiple of 8."""
    return math.ceil(channels * multiple / 8) * 8


def has_attention(block: str) -> bool:
    """Whether a block of the table is or wraps an attention block: it can start as the identity then."""
    block = table_name(block)
    return block in BLOCKS and "identity" in inspect.signature(BLOCKS[block][0]).parameters


def _arguments(cls: type, rule: str, args: list, channels: list[int], number: int, width: float) -> tuple[list, int]:
    """Constructor arguments by the block's rule, and the channels that come out."""
    c1 = channels[0]
    if rule == "attention":
        return [c1, *attention_arguments(cls, args, c1, lambda c: _width(c, width))], c1
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
    identity = cfg.get("attention_init") == "identity"
    layers: list[Layer] = []
    modules: list[nn.Module] = []
    out: list[int] = []
    lines = [*cfg["backbone"], *cfg["head"]]
    for index, line in enumerate(lines):
        source, number, block, args = check_line(line, where, index)
        block = table_name(block)
        sources = absolute_sources(source, where, index)
        channels = [ch if s == -1 else out[s] for s in sources]
        number = max(round(number * depth), 1) if number > 1 else number
        args = [_plain_argument(a, cfg) for a in args]
        if (block == "Detect") != (index == len(lines) - 1):
            raise line_error(where, index, "Detect must be the last layer, and only that")
        if block != "Detect" and block not in BLOCKS:
            raise line_error(where, index, f"unknown block '{block}'{nearest(block, [*BLOCKS, 'Detect'])}")
        try:
            if block == "Detect":
                module, args, c2 = _detect(cfg, args, channels), [args[0], args[1], channels], 0
            else:
                cls, rule = BLOCKS[block]
                args, c2 = _arguments(cls, rule, args, channels, number, width)
                copies = 1 if rule == "repeated" else number
                start = {"identity": True} if identity and has_attention(block) else {}
                made = [cls(*args, **start) for _ in range(copies)]
                module = made[0] if copies == 1 else nn.Sequential(*made)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            raise line_error(where, index, f"{block} does not take {args}: {error}") from error
        layers.append(Layer(index, sources, isinstance(source, list), number, block, tuple(args)))
        modules.append(module)
        out.append(c2)
    return layers, nn.Sequential(*modules)


def table_name(name: str) -> str:
    """The table's name for a block's name or alias; other names come back as they are."""
    return name if name in BLOCKS else ALIASES.get(name, name)


def attention_blocks() -> list[str]:
    """The table's names of the blocks that keep channels and weigh a map."""
    return [name for name, (_, rule) in BLOCKS.items() if rule == "attention"]


def attention_name(name: str, form: str, where: str) -> str:
    """The table's name of an attention block, by its name or an alias in any case; with form `C3` the C3 around it."""
    known = {key.lower(): key for key in attention_blocks()}
    known.update({alias.lower(): key for alias, key in ALIASES.items()})
    block = known.get(str(name).lower())
    if block is None:
        raise ConfigError(f"{where}: attention: unknown block '{name}'{nearest(str(name).lower(), list(known))}")
    if form == "block":
        return block
    wrapped = f"{form}{block}"
    if wrapped not in BLOCKS:
        forms = [key for key in BLOCKS if key.startswith(form) and key[len(form) :] in known.values()]
        raise ConfigError(f"{where}: attention: there is no {wrapped}; inside {form} there are {', '.join(forms)}")
    return wrapped


def resolve_model_file(cfg: str | Path | dict[str, Any], attention: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """A full model file, attention put in, and the name for messages, from a path or a mapping.

    `attention` are further entries as on the command line, `cbam@neck`.
    """
    raw, where = (cfg, "model") if isinstance(cfg, dict) else (load_model_file(cfg), str(cfg))
    missing = [key for key in ("backbone", "head", "anchors", "nc") if key not in raw]
    if missing:
        kind = next((kind for keys, kind in FOREIGN_FILES if keys & set(raw)), "no model file")
        raise ConfigError(f"{where}: {kind}: '{missing[0]}' is missing")
    for key in ("depth_multiple", "width_multiple"):
        value = raw.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ConfigError(f"{where}: {key} must be a positive number, found {value!r}")
    if not isinstance(raw["backbone"], list) or not isinstance(raw["head"], list) or not raw["head"]:
        raise ConfigError(f"{where}: 'backbone' and 'head' must be lists of layers")
    if raw.get("attention_init", "auto") not in ("auto", *ATTENTION_STARTS):
        raise ConfigError(f"{where}: attention_init must be auto, paper or identity, found {raw['attention_init']!r}")
    resolve = partial(attention_name, where=where)
    return insert_attention(raw, where, resolve, [parse_flag(text) for text in attention]), where


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


class DetectionModel(nn.Module):
    """A YOLOv5 detection model.

    `cfg` is a model file's path or mapping, `nc` and `names` replace its number and names of classes.
    `attention` puts further blocks in, as on the command line (`cbam@neck`); `attention_init` is `identity` or `paper`,
    by default the file's, `paper` where it says nothing or `auto`.
    `model_file` is the full mapping that builds this model again, `remarks` lists what looks unintended in it.
    Raises `ConfigError` for a file that means nothing.
    """

    def __init__(
        self,
        cfg: str | Path | dict[str, Any],
        nc: int | None = None,
        names: Sequence[str] | None = None,
        ch: int = 3,
        attention: Sequence[str] = (),
        attention_init: str | None = None,
    ):
        super().__init__()
        resolved, where = resolve_model_file(cfg, attention)
        start = attention_init or resolved.get("attention_init", "paper")
        resolved["attention_init"] = "paper" if start == "auto" else start
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
        self.remarks = bypassed_attention(layers)
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
            shapes = trace(self, (size, size), ch)[-1].shape
        except LayerError as error:
            raise line_error(where, error.index, str(error)) from error
        stride = torch.tensor([size / shape[2] for shape in shapes])
        steps = stride.diff().sign()
        if len(steps) and not (steps == steps[0]).all():
            read = ", ".join(f"layer {s} (stride {int(x)})" for s, x in zip(self.layers[-1].sources, stride))
            raise line_error(where, self.layers[-1].index, f"Detect must read its maps in the order of stride: {read}")
        return stride

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

    def gflops(self, imgsz: int = 640) -> float:
        """Billions of floating-point operations for one image, two for each multiply-add."""
        return 2e-9 * sum(layer.macs for layer in trace(self, (imgsz, imgsz)))

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
        rows += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(rows)


def bypassed_attention(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Remarks on layers that read a map from before its attention, as happens when numbers were not shifted by hand."""
    remarks = []
    for gate in layers:
        if BLOCKS.get(gate.block, (None, ""))[1] != "attention":
            continue
        for reader in layers[gate.index + 1 :]:
            if gate.sources[0] in reader.sources:
                before = f"layer {gate.sources[0]} ({layers[gate.sources[0]].block})"
                remarks.append(
                    f"layer {reader.index} ({reader.block}) reads {before} before its attention "
                    f"(layer {gate.index}, {gate.block})"
                )
    return tuple(remarks)


def _scaled_view(images: torch.Tensor, scale: float, multiple: int) -> torch.Tensor:
    """Images `[B, C, H, W]` at `scale`, padded with gray (0.447) to multiples of `multiple` px."""
    if scale == 1.0:
        return images
    h, w = images.shape[2:]
    small = int(h * scale), int(w * scale)
    full = math.ceil(h * scale / multiple) * multiple, math.ceil(w * scale / multiple) * multiple
    resized = F.interpolate(images, size=small, mode="bilinear", align_corners=False)
    return F.pad(resized, (0, full[1] - small[1], 0, full[0] - small[0]), value=0.447)


def model_file_text(model_file: dict[str, Any]) -> str:
    """A full model file as YAML, a layer a line."""
    text = []
    for key, value in model_file.items():
        if isinstance(value, list):
            rows = (yaml.safe_dump(row, default_flow_style=True, width=10_000).strip() for row in value)
            text.append(f"{key}:\n" + "".join(f"  - {row}\n" for row in rows))
        else:
            text.append(yaml.safe_dump({key: value}, default_flow_style=False, allow_unicode=True))
    return "".join(text)


def find_weights(path: str | Path) -> Path:
    """The checkpoint that a name means, in the working folder or the project's."""
    try:
        return find_file(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; weights are never downloaded, copy the file there") from None


def load_model(path: str | Path, device: torch.device | str = "cpu", *, fuse: bool = True) -> DetectionModel:
    """The model in a checkpoint of this project or an official YOLOv5 `.pt`: fp32, evaluation mode, on `device`."""
    weights = read_weights(find_weights(path))
    model = DetectionModel(weights.model_file, names=weights.names)
    model.load_state_dict(weights.state)
    model.eval().requires_grad_(False)
    return (model.fuse() if fuse else model).to(device)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m models.yolo", description="Print a model's summary.")
    parser.add_argument("--cfg", required=True, metavar="FILE", help="model file")
    parser.add_argument("--attention", nargs="+", default=[], metavar="BLOCK@PLACE", help="blocks to put in: cbam@neck")
    parser.add_argument("--imgsz", type=int, default=640, help="image size for GFLOPs (default: 640)")
    parser.add_argument("--resolved", action="store_true", help="print the full model file instead")
    return parser.parse_args()


def _main(arguments: argparse.Namespace) -> None:
    model = DetectionModel(arguments.cfg, attention=arguments.attention)
    print(model_file_text(model.model_file) if arguments.resolved else model.summary(arguments.imgsz))


if __name__ == "__main__":
    run_script(_main, _parse_arguments)
