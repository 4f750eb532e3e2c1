"""Reading and checking the three kinds of YAML: hyperparameters, data sets and model files."""

from __future__ import annotations

import copy
import difflib
import math
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from utils import ROOT, UserError


class ConfigError(UserError):
    """A YAML file that cannot be read or does not mean what its place asks for."""


class _Loader(yaml.SafeLoader):
    """Safe YAML in which `1e-3` is a number and a key given twice is an error.

    YAML 1.1 asks for a dot in a number with an exponent, so PyYAML reads `1e-3` as text;
    and it lets the last of two equal keys win without a word.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (dict, list)):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_float_without_dot(self, node: yaml.ScalarNode) -> float:
        return float(self.construct_scalar(node))


_Loader.add_constructor("tag:project,float", _Loader.construct_float_without_dot)
_Loader.add_implicit_resolver("tag:project,float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; anything else raises `ConfigError` naming file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    try:
        value = yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader: builds plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected 'key: value' lines, found {type(value).__name__}")
    return value


def find_file(name: str | Path, *folders: str) -> Path:
    """The file that `name` means: as given, else below the project, else below its `folders`.

    So `--data coco128.yaml` works from any working folder. Raises `ConfigError` with the places tried.
    """
    given = Path(name).expanduser()
    candidates = [given]
    if not given.is_absolute():
        candidates += [ROOT / given, *(ROOT / folder / given for folder in folders)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise ConfigError(f"{name}: no such file (looked for {', '.join(str(c) for c in dict.fromkeys(candidates))})")


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """A hint ', did you mean …?' for a misspelt word, or nothing."""
    close = difflib.get_close_matches(str(word), [str(k) for k in known], n=2, cutoff=0.5)
    return f", did you mean {' or '.join(close)}?" if close else ""


@dataclass(frozen=True)
class Hyperparameters:
    """Training hyperparameters with YOLOv5's names and default values (`data/hyps/hyp.scratch-low.yaml`).

    Gains `box`, `obj`, `cls` are those for three detection layers, 80 classes and 640 px;
    `scaled` adapts them. Augmentation probabilities lie in [0, 1], `degrees` and `shear` are degrees,
    `translate` and `scale` fractions.
    """

    lr0: float = 0.01
    lrf: float = 0.01
    momentum: float = 0.937
    weight_decay: float = 0.0005
    warmup_epochs: float = 3.0
    warmup_momentum: float = 0.8
    warmup_bias_lr: float = 0.1
    box: float = 0.05
    cls: float = 0.5
    cls_pw: float = 1.0
    obj: float = 1.0
    obj_pw: float = 1.0
    iou_t: float = 0.2
    anchor_t: float = 4.0
    fl_gamma: float = 0.0
    hsv_h: float = 0.015
    hsv_s: float = 0.7
    hsv_v: float = 0.4
    degrees: float = 0.0
    translate: float = 0.1
    scale: float = 0.5
    shear: float = 0.0
    perspective: float = 0.0
    flipud: float = 0.0
    fliplr: float = 0.5
    mosaic: float = 1.0
    mixup: float = 0.0
    copy_paste: float = 0.0
    label_smoothing: float = 0.0

    def scaled(self, layers: int, classes: int, imgsz: int) -> Hyperparameters:
        """Gains for `layers` detection layers, `classes` classes and images of `imgsz` px."""
        return replace(
            self,
            box=self.box * 3 / layers,
            cls=self.cls * classes / 80 * 3 / layers,
            obj=self.obj * (imgsz / 640) ** 2 * 3 / layers,
        )

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


_PROBABILITIES = ("flipud", "fliplr", "mosaic", "mixup", "copy_paste", "label_smoothing", "iou_t")


def hyperparameters_from(values: dict[str, Any], where: str) -> tuple[Hyperparameters, list[str]]:
    """Hyperparameters from a mapping, missing ones at their default, and the names that were missing.

    Raises `ConfigError` for an unknown name, a value that is no finite number, or a probability outside [0, 1].
    """
    known = [f.name for f in fields(Hyperparameters)]
    numbers = {}
    for name, value in values.items():
        if name == "anchors":  # YOLOv5 keeps an anchor count for evolution here; the model file decides
            continue
        if name not in known:
            raise ConfigError(f"{where}: unknown hyperparameter '{name}'{nearest(name, known)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"{where}: {name} must be a number, found {value!r}")
        if name in _PROBABILITIES and not 0 <= value <= 1:
            raise ConfigError(f"{where}: {name} must lie between 0 and 1, found {value}")
        if value < 0:
            raise ConfigError(f"{where}: {name} must not be negative, found {value}")
        numbers[name] = float(value)
    missing = [name for name in known if name not in numbers and name != "label_smoothing"]
    return Hyperparameters(**numbers), missing


def load_hyperparameters(path: str | Path) -> tuple[Hyperparameters, list[str]]:
    """Hyperparameters from a YAML file and the names that the file leaves at their default."""
    file = find_file(path, "data/hyps")
    return hyperparameters_from(read_yaml(file), str(path))


@dataclass(frozen=True)
class DataConfig:
    """A data set: where its images are and what its classes are called.

    `train`, `val` and `test` are image folders, list files or globs, absolute; `names` by class number.
    `generate` names the built-in set that the project draws itself when the folder is not there yet.
    """

    file: Path
    root: Path
    train: tuple[Path, ...]
    val: tuple[Path, ...]
    test: tuple[Path, ...]
    names: tuple[str, ...]
    generate: str | None = None

    @property
    def nc(self) -> int:
        return len(self.names)


def class_names(value: Any, nc: Any, where: str) -> tuple[str, ...]:
    """Class names by number from a YAML list or dict; missing names become `class3`. `nc` must agree if given."""
    if value is None and nc is None:
        raise ConfigError(f"{where}: 'names' is missing (a list, or 'number: name' lines)")
    if value is None:
        value = [f"class{i}" for i in range(_class_count(nc, where))]
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{where}: 'names' must be a list or 'number: name' lines")
    numbered = {}
    for key, name in value.items():
        if isinstance(key, bool) or not str(key).isdigit():
            raise ConfigError(f"{where}: class number {key!r} in 'names' is not a whole number from 0")
        if isinstance(name, bool):
            raise ConfigError(f"{where}: name of class {key} was read as {name}; put it in quotes ('yes', 'no', 'on')")
        numbered[int(key)] = str(name)
    gaps = [i for i in range(max(numbered) + 1) if i not in numbered]
    if gaps:
        raise ConfigError(f"{where}: 'names' has no entry for class {gaps[0]} (numbers must run from 0 without gaps)")
    if nc is not None and _class_count(nc, where) != len(numbered):
        raise ConfigError(f"{where}: nc is {nc} but 'names' has {len(numbered)} entries")
    return tuple(numbered[i] for i in range(len(numbered)))


def _class_count(nc: Any, where: str) -> int:
    if isinstance(nc, bool) or not isinstance(nc, int) or nc < 1:
        raise ConfigError(f"{where}: nc must be a whole number from 1, found {nc!r}")
    return nc


def load_data_config(path: str | Path) -> DataConfig:
    """A data set file; its `path` is taken relative to the file's own folder, the splits relative to `path`."""
    file = find_file(path, "data")
    raw = read_yaml(file)
    if not any(key in raw for key in ("train", "val", "test")):
        raise ConfigError(f"{path}: no data set file: none of 'train', 'val', 'test' is there")
    root = (file.parent / Path(str(raw.get("path") or ".")).expanduser()).resolve()

    def split(key: str) -> tuple[Path, ...]:
        value = raw.get(key)
        items = value if isinstance(value, list) else [] if value in (None, "") else [value]
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{path}: '{key}' must be a path or a list of paths, found {value!r}")
        return tuple(root / Path(item).expanduser() for item in items)

    return DataConfig(
        file=file,
        root=root,
        train=split("train"),
        val=split("val"),
        test=split("test"),
        names=class_names(raw.get("names"), raw.get("nc"), str(path)),
        generate=raw.get("generate"),
    )


def load_model_file(path: str | Path) -> dict[str, Any]:
    """A model file as a mapping, its `extends` base merged in: the file's own keys win over the base's.

    `attention` stays as written; `models.yolo.insert_attention` puts the blocks in.
    """
    file = find_file(path, "models", "models/hub", "models/attention")
    return _load_extended(file, [])


def _load_extended(file: Path, above: list[Path]) -> dict[str, Any]:
    if file in above:
        raise ConfigError(f"{file}: 'extends' runs in a circle ({' → '.join(p.name for p in [*above, file])})")
    own = read_yaml(file)
    base_name = own.pop("extends", None)
    if base_name is None:
        return own
    base_file = (file.parent / str(base_name)).resolve()
    if not base_file.is_file():
        raise ConfigError(f"{file}: 'extends: {base_name}' names no file ({base_file})")
    merged = _load_extended(base_file, [*above, file])
    merged.update(copy.deepcopy(own))
    return merged
