"""Where attention goes in a model file: layer numbers or named places, the renumbering, arguments as people write them.

Works on the lines `[from, number, block, args]` of a model file alone; nothing is built here.

Named places, found from the lines' structure:

- `stages`: behind each stage of the backbone. A stage begins with a layer of stride 2 and has at least one more
  layer; pooling pyramids at its end (SPP, SPPF) do not belong to it.
- `backbone`: behind the last layer of the backbone.
- `neck`: behind each fused map, which is the first C3-like block behind a Concat of the head, or the layer that
  follows the Concat where there is none.
- `head`: behind each map that Detect reads.
- `inside: C3` (on the command line `@C3`): every C3 becomes its attention form.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utils.config import ConfigError, nearest

PLACES = ("stages", "backbone", "neck", "head")

ALIASES: dict[str, str] = {
    alias: name
    for name, aliases in {
        "SE": "SEAttention SELayer SEBlock SE_Block SEModule",
        "ECA": "ECAAttention ECALayer eca_layer EfficientChannelAttention",
        "CBAM": "CBAMBlock CBAM_Block",
        "BAM": "BAMBlock",
        "scSE": "SCSEModule scSEBlock ChannelSpatialSELayer",
        "CA": "CoordAtt CoordAttention CoordinateAttention CABlock",
        "SimAM": "simam_module SimAMBlock",
        "GAM": "GAMAttention GAM_Attention",
        "NAM": "NAMAttention NAM_Attention",
        "EMA": "EMAAttention EMA_attention",
        "SK": "SKAttention SKConv SKNet",
        "ShuffleAttention": "SA sa_layer Shuffle_Attention",
        "TripletAttention": "TripletAttn TripletAttentionBlock",
        "SGE": "SpatialGroupEnhance SGEAttention",
        "GlobalContext": "GlobalContextBlock ContextBlock GCNet GCBlock GC ContextBlock2d",
        "EffectiveSE": "EffectiveSELayer EffectiveSEModule eSE",
        "PolarizedSequential": "PSA_s SequentialPolarizedSelfAttention",
        "DoubleAttention": "DoubleAttentionBlock DoubleAttentionLayer A2Attention A2Block",
        "CrissCross": "CrissCrossAttention CCA CCAttention",
        "ParNetAttention": "ParNet ParNet_Attention",
        "LSKA": "LSKAttention LSKABlock",
        "MHSA": "MultiHeadSelfAttention BoTMHSA",
    }.items()
    for alias in aliases.split()
}
"""Names under which attention blocks are found elsewhere → names of the table `models.yolo.BLOCKS`."""

_PYRAMIDS = ("SPP", "SPPF", "C3SPP", "nn.Identity")
_HALVING = ("Focus", "Contract")
"""Blocks that halve a map whatever their arguments are."""


def line_error(where: str, index: int, text: str) -> ConfigError:
    """An error that names file and layer."""
    return ConfigError(f"{where}: layer {index}: {text}")


def check_line(line: Any, where: str, index: int) -> tuple[Any, int, str, list]:
    """The four parts of a layer's line; raises `ConfigError` for anything else."""
    if not isinstance(line, list) or len(line) != 4:
        raise line_error(where, index, f"expected [from, number, block, [arguments]], found {line}")
    source, number, block, args = line
    numbers = source if isinstance(source, list) else [source]
    if not numbers or not all(isinstance(s, int) and not isinstance(s, bool) for s in numbers):
        raise line_error(where, index, f"'from' must be a layer number or a list of them, found {source}")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise line_error(where, index, f"number must be 1 or more, found {number}")
    if not isinstance(args, list):
        raise line_error(where, index, f"arguments must be a list, found {args}")
    return source, number, str(block), args


def absolute_sources(source: Any, where: str, index: int) -> tuple[int, ...]:
    """Layer numbers that a line's `from` means; -1 is the image."""
    absolute = []
    for s in source if isinstance(source, list) else [source]:
        layer = index + s if s < 0 else s
        if layer >= index or layer < -1 or (layer == -1 and index > 0):
            raise line_error(where, index, f"'from' {s} is no earlier layer (0 to {index - 1})")
        absolute.append(layer)
    return tuple(absolute)


def _halves(block: str, args: list) -> bool:
    position = 1 if block.startswith("nn.MaxPool") else 2
    return block in _HALVING or (len(args) > position and args[position] == 2 and block != "nn.Upsample")


def _stages(backbone: Sequence[list]) -> list[int]:
    starts = [i for i, line in enumerate(backbone) if _halves(line[2], line[3])]
    ends = []
    for start, following in zip(starts, [*starts[1:], len(backbone)]):
        end = following - 1
        while end > start and backbone[end][2] in _PYRAMIDS:
            end -= 1
        if end > start:
            ends.append(end)
    return ends


def _fused(backbone: Sequence[list], head: Sequence[list]) -> list[int]:
    places = []
    first = len(backbone)
    for i, line in enumerate(head):
        if line[2] != "Concat" or i + 1 >= len(head) - 1:
            continue
        run = i + 1
        while run < len(head) - 1 and head[run][2] == "Conv" and head[run][0] == -1 and not _halves(*head[run][2:4]):
            run += 1
        block = run if run < len(head) - 1 and head[run][2].startswith(("C3", "BottleneckCSP")) else i + 1
        places.append(first + block)
    return places


def find_place(place: Any, cfg: Mapping[str, Any], where: str) -> list[int]:
    """Layer numbers behind which a named place or a number means to put a block."""
    backbone, head = cfg["backbone"], cfg["head"]
    count = len(backbone) + len(head)
    if isinstance(place, int) and not isinstance(place, bool):
        if not 0 <= place < count - 1:
            raise ConfigError(f"{where}: attention: after {place}: no such layer (0 to {count - 2})")
        return [place]
    if place == "stages":
        found = _stages(backbone)
    elif place == "backbone":
        found = [len(backbone) - 1]
    elif place == "neck":
        found = _fused(backbone, head)
    elif place == "head":
        found = list(absolute_sources(head[-1][0], where, count - 1))
    else:
        raise ConfigError(
            f"{where}: attention: '{place}' is no place{nearest(str(place), PLACES)} "
            f"(a layer number, {', '.join(PLACES)}, or inside: C3)"
        )
    if not found:
        raise ConfigError(f"{where}: attention: this model has nothing that '{place}' could mean")
    return found


def parse_flag(text: str) -> dict[str, Any]:
    """An entry of `attention:` from the command line's `cbam@neck`, `se@2,4,6` or `eca@C3`."""
    block, at, place = text.partition("@")
    parts = [part.strip() for part in place.split(",") if part.strip()]
    if not at or not block or not parts:
        raise ConfigError(f"--attention {text}: expected BLOCK@PLACE, for example cbam@neck, se@2,4,6 or eca@C3")
    if any(part.upper() == "C3" for part in parts):
        if len(parts) > 1:
            raise ConfigError(f"--attention {text}: C3 cannot be combined with other places; give the flag twice")
        return {"block": block, "inside": "C3"}
    return {"block": block, "after": [int(part) if part.isdigit() else part for part in parts]}


def _checked_entry(entry: Any, where: str) -> dict[str, Any]:
    keys = set(entry) if isinstance(entry, dict) else set()
    if "block" not in keys or keys - {"block", "after", "inside", "args"} or ("after" in keys) == ("inside" in keys):
        raise ConfigError(
            f"{where}: attention: expected {{block: NAME, after: [layers or places]}} or "
            f"{{block: NAME, inside: C3}}, found {entry}"
        )
    if not isinstance(entry.get("args", []), list):
        raise ConfigError(f"{where}: attention: args must be a list, found {entry['args']}")
    return entry


def insert_attention(
    cfg: Mapping[str, Any], where: str, resolve: Callable[[str, str], str], extra: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The full model file for one with an `attention` list, later `from` numbers shifted.

    `resolve(name, "block")` gives the table's name of an attention block, `resolve(name, "C3")` that of the C3 with it
    inside; both raise `ConfigError`. `extra` entries come behind the file's own. Numbers and places always count the
    layers of the file without attention, and whoever read such a layer reads its attention block instead.
    """
    cfg = copy.deepcopy(dict(cfg))
    entries = cfg.pop("attention", None) or []
    entries = [*(entries if isinstance(entries, list) else [entries]), *extra]
    if not entries:
        return cfg
    lines = [list(check_line(line, where, i)) for i, line in enumerate([*cfg["backbone"], *cfg["head"]])]
    cfg["backbone"], cfg["head"] = lines[: len(cfg["backbone"])], lines[len(cfg["backbone"]) :]
    added: dict[int, list[list]] = {}
    inside = None
    for entry in entries:
        entry = _checked_entry(entry, where)
        if "inside" in entry:
            if str(entry["inside"]) != "C3" or inside:
                raise ConfigError(f"{where}: attention: inside: only C3, and only one block, found {entry}")
            inside = resolve(entry["block"], "C3")
            continue
        block = resolve(entry["block"], "block")
        places = entry["after"] if isinstance(entry["after"], list) else [entry["after"]]
        for layer in dict.fromkeys(layer for place in places for layer in find_place(place, cfg, where)):
            added.setdefault(layer, []).append([-1, 1, block, list(entry.get("args", []))])
    if inside:
        if not any(line[2] == "C3" for line in lines):
            raise ConfigError(f"{where}: attention: inside: C3: this model has no C3")
        for line in lines:
            line[2] = inside if line[2] == "C3" else line[2]
    return {**cfg, **_renumbered(lines, len(cfg["backbone"]), added, where)}


def _renumbered(lines: list[list], split: int, added: Mapping[int, list[list]], where: str) -> dict[str, list]:
    moved: list[int] = []  # base layer → where its (attended) output is in the new numbering
    sections: dict[str, list] = {"backbone": [], "head": []}
    for index, (source, number, block, args) in enumerate(lines):
        sources = absolute_sources(source, where, index)
        written = source if isinstance(source, list) else [source]
        new_sources = [-1 if w == -1 else moved[s] for w, s in zip(written, sources)]
        new = [[new_sources if isinstance(source, list) else new_sources[0], number, block, args]]
        new += added.get(index, [])
        sections["backbone" if index < split else "head"] += new
        moved.append((moved[-1] if moved else -1) + len(new))
    return sections


def _plausible(name: str, value: Any) -> bool:
    """Whether a value can be the attention parameter of that name."""
    if not isinstance(value, int) or isinstance(value, bool):
        return not isinstance(value, str)
    if name == "k":
        return 1 <= value <= 63 and value % 2 == 1
    return 1 <= value <= 64


def attention_arguments(cls: type, args: Sequence[Any], c1: int, width: Callable[[int], int]) -> list[Any]:
    """Constructor arguments behind `c1` from the arguments in a line, as they occur in the wild.

    Up to two leading numbers that are the channels of the layer before, scaled or not, are taken for channels and
    left out: channels always come from the layer before. What follows are the block's own parameters in their order,
    never scaled. Raises `ValueError` for numbers that can be neither.
    """
    parameters = [p for p in inspect.signature(cls).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    rest = list(args)
    for _ in range(2):
        if not rest or not isinstance(rest[0], int) or isinstance(rest[0], bool):
            break
        if rest[0] == c1 or (rest[0] > 0 and rest[0] % 8 == 0 and width(rest[0]) == c1):
            rest.pop(0)
    if len(rest) > len(parameters):
        taken = ", ".join(p.name for p in parameters) or "no arguments"
        raise ValueError(f"the layer before has {c1} channels; beside them it takes {taken}, found {list(args)}")
    for parameter, value in zip(parameters, rest):
        if value is not None and not _plausible(parameter.name, value):
            odd = " (an odd kernel size)" if parameter.name == "k" else ""
            raise ValueError(
                f"{value} is neither the channels of the layer before ({c1}) nor a value of '{parameter.name}'{odd}"
            )
    return rest
