"""Checkpoints: atomic writing, reading without running code, official YOLOv5 weights, transfer between models.

A `.pt` file is a zip archive with a pickle that names functions to call. Here the pickle is read by an unpickler
that resolves a fixed list of names only: tensors are rebuilt by code of this module, and the classes of official
checkpoints (`models.yolo.DetectionModel`, `torch.nn.modules…`) become inert stand-ins that hold their attributes.
Any other name is refused before anything is called.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from utils import UserError

FORMAT = "yolov5-attention/1"
"""Marks a checkpoint of this project."""


class CheckpointError(UserError):
    """A checkpoint that cannot be read, is not what it should be, or was refused."""


class Inert:
    """Stand-in for an object of a pickled class: holds its attributes, does nothing."""

    kind = ""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args = args
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}


class _Callable:
    """A function that a pickle may call but not alter."""

    __slots__ = ("_function",)

    def __init__(self, function):
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("a function is not to be altered")

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a function is not to be altered")


_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}

_INERT_MODULES = ("models.", "utils.", "torch.nn.modules.", "numpy.")
_INERT_NAMES = {
    ("argparse", "Namespace"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "PureWindowsPath"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("_codecs", "encode"),
    ("torch", "device"),
}


def _rebuild_tensor(
    storage: torch.Tensor, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any
) -> torch.Tensor:
    if not isinstance(storage, torch.Tensor):
        raise pickle.UnpicklingError("a tensor without storage")
    count = 1
    for side in size:
        count *= side
    if count > storage.numel():
        raise pickle.UnpicklingError(f"a tensor of {count} elements in a storage of {storage.numel()}")
    return torch.as_strided(storage, tuple(size), tuple(stride), offset)


def _rebuild_parameter(data: torch.Tensor, *_: Any) -> torch.Tensor:
    return data


class _Unpickler(pickle.Unpickler):
    """Resolves the names that checkpoints need, and no others."""

    def __init__(self, file: BinaryIO, archive: zipfile.ZipFile, prefix: str):
        super().__init__(file)
        self._archive, self._prefix = archive, prefix
        self._storages: dict[str, torch.Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        fixed = {
            ("collections", "OrderedDict"): OrderedDict,
            ("builtins", "set"): set,
            ("__builtin__", "set"): set,
            ("torch", "Size"): tuple,
            ("torch._utils", "_rebuild_tensor_v2"): _Callable(_rebuild_tensor),
            ("torch._utils", "_rebuild_parameter"): _Callable(_rebuild_parameter),
        }
        if (module, name) in fixed:
            return fixed[module, name]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) in _INERT_NAMES or module.startswith(_INERT_MODULES):
            return type("Inert", (Inert,), {"kind": f"{module}.{name}"})
        raise CheckpointError(f"asks for {module}.{name}, which no checkpoint needs; nothing of it was run")

    def persistent_load(self, pid: Any) -> torch.Tensor:
        tag, dtype, key, _, count = pid
        if tag != "storage" or not isinstance(dtype, torch.dtype) or not re.fullmatch(r"\d+", str(key)):
            raise pickle.UnpicklingError(f"unknown reference {pid!r}"[:200])
        if key not in self._storages:
            entry = self._archive.getinfo(f"{self._prefix}data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != count * dtype.itemsize:
                raise pickle.UnpicklingError(f"storage {key} does not have the size it claims")
            data = bytearray(self._archive.read(entry))
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return self._storages[key]


def read_archive(path: str | Path) -> Any:
    """The object in a `.pt` file, without running code from it. Raises `CheckpointError` with the reason."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) != 1 or archive.getinfo(pickles[0]).compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"{path}: a zip file, but no PyTorch checkpoint")
            with archive.open(pickles[0]) as file:
                return _Unpickler(file, archive, pickles[0].removesuffix("data.pkl")).load()
    except CheckpointError as error:
        raise CheckpointError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except zipfile.BadZipFile:
        raise CheckpointError(f"{path}: damaged or no PyTorch checkpoint (no whole zip archive)") from None
    except Exception as error:  # whatever bytes are in the file, the answer is this one
        raise CheckpointError(f"{path}: damaged or no PyTorch checkpoint ({error})") from error


@dataclass(frozen=True)
class Weights:
    """What a model needs from a checkpoint: fp32 tensors, class names and the full model file."""

    state: dict[str, torch.Tensor]
    names: tuple[str, ...]
    model_file: dict[str, Any]


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint of this project, whole; an official or foreign file raises `CheckpointError`."""
    content = read_archive(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a checkpoint of a training run here, so it cannot be resumed")
    return content


def read_weights(path: str | Path) -> Weights:
    """Weights from a checkpoint of this project (EMA where there is one) or an official YOLOv5 `.pt`."""
    content = read_archive(path)
    try:
        if isinstance(content, dict) and content.get("format") == FORMAT:
            state = content["ema"] or content["model"]
            return Weights({k: _fp32(v) for k, v in state.items()}, tuple(content["names"]), content["model_file"])
        model = (content.get("ema") or content["model"]) if isinstance(content, dict) else content
        if not isinstance(model, Inert):
            raise CheckpointError(f"{path}: no YOLOv5 checkpoint (no model in it)")
        attributes = model.attributes
        state = {k: _fp32(v) for k, v in _module_state(model, "") if not k.endswith("anchor_grid")}
        names = attributes["names"]
        numbered = dict(names) if isinstance(names, dict) else dict(enumerate(names))
        return Weights(state, tuple(str(numbered[i]) for i in range(len(numbered))), dict(attributes["yaml"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: no YOLOv5 checkpoint ({error!r} is missing or of the wrong kind)") from error


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _module_state(module: Inert, prefix: str) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of a stand-in's state dict, in PyTorch's order."""
    attributes = module.attributes
    transient = attributes.get("_non_persistent_buffers_set", set())
    own = [*attributes.get("_parameters", {}).items(), *attributes.get("_buffers", {}).items()]
    entries = [(prefix + k, v) for k, v in own if isinstance(v, torch.Tensor) and k not in transient]
    for name, child in attributes.get("_modules", {}).items():
        if isinstance(child, Inert):
            entries += _module_state(child, f"{prefix}{name}.")
    return entries


def save_checkpoint(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint so that `path` is at every moment the old file or the new one, whole.

    Raises `CheckpointError` when it cannot be written; the old file is untouched then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise CheckpointError(f"{path}: could not be written ({error}); the file from before is untouched") from error
    finally:
        temporary.unlink(missing_ok=True)


def strip_checkpoint(path: Path) -> None:
    """Leave in a checkpoint what inference needs: the EMA as the model, names, model file and how it was trained."""
    content = read_checkpoint(path)
    kept = ("model_file", "names", "hyperparameters", "options", "determinism", "versions", "progress")
    save_checkpoint(path, {"model": content["ema"] or content["model"], "ema": None, **{k: content[k] for k in kept}})


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """Fingerprint of names, shapes and bytes of a state dict: equal only for bit-identical weights."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


@dataclass(frozen=True)
class Transfer:
    """Outcome of carrying weights over: the tensors to load, how many of the source's were used, which not."""

    state: dict[str, torch.Tensor]
    total: int
    in_part: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def transferred(self) -> int:
        return self.total - len(self.unused)

    def summary(self) -> str:
        part = f", {len(self.in_part)} of them in part (other classes)" if self.in_part else ""
        left = f"; not used: {', '.join(self.unused[:4])}{' …' if len(self.unused) > 4 else ''}" if self.unused else ""
        return f"transferred {self.transferred} of {self.total} tensors{part}{left}"


def _by_layer(state: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"model\.(\d+)\.(.+)", name)
        if match:
            layers.setdefault(int(match.group(1)), {})[match.group(2)] = tensor
    return layers


def _fits(source: torch.Tensor, target: torch.Tensor | None, rows_may_differ: bool) -> bool:
    if target is None or source.ndim != target.ndim:
        return False
    start = 1 if rows_may_differ and source.ndim else 0
    return source.shape[start:] == target.shape[start:]


def align_layers(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """Which layer of the target each layer of the source became: {source layer: target layer}.

    Layers keep their order, and the alignment is the one under which most tensors have equal names, and among
    those the one with most equal shapes (dynamic programming, as in sequence alignment). So blocks may be put in
    or taken out anywhere, whether by an `attention` list or by hand, while a model of another width is aligned
    stage by stage. The last layers, the heads, may differ in rows (classes).
    """
    a, b = _by_layer(source), _by_layer(target)
    rows, columns = sorted(a), sorted(b)
    last = (rows[-1], columns[-1]) if rows and columns else None

    def score(i: int, j: int) -> int:
        fitting = sum(_fits(tensor, b[j].get(name), (i, j) == last) for name, tensor in a[i].items())
        return len(a[i].keys() & b[j].keys()) * (len(source) + 1) + fitting

    best = [[0] * (len(columns) + 1) for _ in range(len(rows) + 1)]
    for r in range(len(rows) - 1, -1, -1):
        for c in range(len(columns) - 1, -1, -1):
            pair = best[r + 1][c + 1] + score(rows[r], columns[c])
            best[r][c] = max(pair, best[r + 1][c], best[r][c + 1])
    aligned, r, c = {}, 0, 0
    while r < len(rows) and c < len(columns):
        gain = score(rows[r], columns[c])
        if gain and best[r][c] == best[r + 1][c + 1] + gain:
            aligned[rows[r]] = columns[c]
            r, c = r + 1, c + 1
        elif best[r][c] == best[r][c + 1]:
            c += 1
        else:
            r += 1
    return aligned


def _merge_rows(
    source: torch.Tensor, target: torch.Tensor, anchors: int, source_names: Sequence[str], target_names: Sequence[str]
) -> torch.Tensor | None:
    """The target's head tensor with the source's box, objectness and same-named class rows; None if they do not fit."""
    old, new = 5 + len(source_names), 5 + len(target_names)
    if source.shape != (anchors * old, *target.shape[1:]) or target.shape[0] != anchors * new:
        return None
    merged = target.detach().clone().view(anchors, new, *target.shape[1:])
    rows = source.view(anchors, old, *source.shape[1:]).to(merged.dtype)
    merged[:, :5] = rows[:, :5]
    position = {name: i for i, name in enumerate(source_names)}
    for i, name in enumerate(target_names):
        if name in position:
            merged[:, 5 + i] = rows[:, 5 + position[name]]
    return merged.view_as(target)


def transfer_weights(
    weights: Weights, target: Mapping[str, torch.Tensor], target_names: Sequence[str], *, keep_anchors: bool
) -> Transfer:
    """Carry a checkpoint's tensors to a model with state dict `target`, whose layer numbers and classes may differ.

    With `keep_anchors` the target's anchors stay; they count as used where they are equal.
    """
    aligned = align_layers(weights.state, target)
    state: dict[str, torch.Tensor] = {}
    in_part, unused = [], []
    for name, tensor in weights.state.items():
        match = re.fullmatch(r"model\.(\d+)\.(.+)", name)
        layer = aligned.get(int(match.group(1))) if match else None
        key = f"model.{layer}.{match.group(2)}" if match and layer is not None else ""
        wanted = target.get(key)
        if wanted is None:
            unused.append(name)
        elif key.endswith(".anchors") and keep_anchors:
            if wanted.shape != tensor.shape or not torch.equal(wanted.cpu(), tensor):
                unused.append(name)
        elif wanted.shape == tensor.shape:
            state[key] = tensor
        else:
            anchors = target.get(f"model.{layer}.anchors")
            count = anchors.shape[1] if anchors is not None else 0
            merged = _merge_rows(tensor, wanted, count, weights.names, target_names) if count else None
            if merged is None:
                unused.append(name)
            else:
                state[key] = merged
                in_part.append(name)
    return Transfer(state, len(weights.state), tuple(in_part), tuple(unused))
