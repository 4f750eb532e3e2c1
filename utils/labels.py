"""Images and label files: finding, reading, checking and caching them."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import logging
import math
import os
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from utils import UserError

IMAGE_SUFFIXES = frozenset(
    (".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"),
)
"""Lower-case endings of the files that count as images."""

ROUNDING = 0.01
"""How far a coordinate may leave 0…1 and still be taken for a rounding error, which is clipped."""

_LOGGER = logging.getLogger(__name__)
_REDUCED_FLAGS = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
_CACHE_MAGIC = b"labels\x00\x01"  # the last byte is the version of the format
_JPEG_END = np.array((0xFF, 0xD9), np.uint8)
_NO_POINTS = np.zeros((0, 2), np.float32)


class LabelError(UserError):
    """Images or labels that are not there or cannot be read."""

    def __str__(self) -> str:
        # a DataLoader passes the exception on from its worker with the whole traceback for a message
        return super().__str__().rsplit("LabelError: ", 1)[-1].strip()


def read_image(path: str | Path, *, reduce: int = 1) -> np.ndarray:
    """The image in a file as uint8 `[H, W, 3]`, blue first, EXIF orientation applied.

    Grey images get three equal channels, transparency is dropped, deeper pixels keep their upper 8 bits.
    Of a JPEG file that is cut short the rest is grey. `reduce` 2, 4 or 8 asks for a picture smaller by that
    factor, sides rounded up, which JPEG decoders give in a fraction of the time.
    Raises `LabelError` when there is no image to be had.
    """
    return _read(path, reduce)[0]


def _read(path: str | Path, reduce: int = 1) -> tuple[np.ndarray, bool]:
    """The image, and whether its file was cut short and the rest of the image is grey."""
    try:
        # imread cannot open every path on Windows; decoding from memory can
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise LabelError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not data.size:
        raise LabelError(f"{path}: cannot be decoded as an image (empty file)")
    cut = _is_cut_jpeg(data)
    if cut:  # decoders differ in what they do without an end mark, so give it one
        data = np.append(data, _JPEG_END)
    try:
        image = cv2.imdecode(data, _REDUCED_FLAGS[reduce])
    except cv2.error as error:
        raise LabelError(f"{path}: cannot be decoded as an image ({' '.join(str(error).split())})") from None
    if image is None:
        raise LabelError(f"{path}: cannot be decoded as an image")
    return image, cut


def _is_cut_jpeg(data: np.ndarray) -> bool:
    """Whether a JPEG's last scan has no end mark behind it. A thumbnail before it has marks of its own."""
    if data[:2].tobytes() != b"\xff\xd8" or data[-2:].tobytes() == b"\xff\xd9":
        return False
    content = data.tobytes()
    return content.rfind(b"\xff\xd9") < content.rfind(b"\xff\xda")


def find_images(paths: Sequence[Path]) -> list[Path]:
    """All images that `paths` mean, absolute, sorted, each once.

    A path is a folder (searched to any depth), an image, a `.txt` list with one image a line, or a glob.
    A relative line of a list is taken from the list's own folder. Raises `LabelError` for a path that
    is not there and for a line that names no image.
    """
    found: set[Path] = set()
    for path in map(Path, paths):
        if path.is_dir():
            found.update(_images_below(path))
        elif path.is_file():
            found.update(_listed_images(path) if path.suffix.lower() == ".txt" else [path])
        elif matches := sorted(glob.glob(str(path), recursive=True)):
            for match in map(Path, matches):
                found.update(_images_below(match) if match.is_dir() else filter(is_image, [match]))
        else:
            raise LabelError(f"{path}: no such file or folder (expected images, a folder of images or a list of them)")
    return sorted({Path(os.path.abspath(path)) for path in found}, key=Path.as_posix)


def is_image(path: Path) -> bool:
    """Whether the name ends like an image's."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def _images_below(folder: Path) -> Iterable[Path]:
    for parent, _, names in os.walk(folder, followlinks=True):
        yield from (Path(parent, name) for name in names if is_image(Path(name)))


def _listed_images(list_file: Path) -> Iterable[Path]:
    for number, line in enumerate(_lines(_read_text(list_file)), 1):
        name = line.strip()
        if not name:
            continue
        if not is_image(Path(name)):
            raise LabelError(f"{list_file}:{number}: '{name}' is no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
        yield list_file.parent / Path(name).expanduser()


def label_path(image: Path) -> Path:
    """The label file of an image: its last folder `images` becomes `labels`, its ending `.txt`."""
    parts = list(image.parts)
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] == "images":
            parts[i] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _read_text(path: Path) -> str:
    """Text of a file. Bytes that are no UTF-8 become marks that no number contains, so their row is refused."""
    data = path.read_bytes()
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # what `>` writes in PowerShell
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


@dataclass(frozen=True)
class ParsedLabels:
    """What a label file says.

    `boxes` is float32 `[n, 5]`: class, then centre x, y, width, height as fractions of the image.
    `segments[i]` is the polygon of row i, float32 `[k, 2]`, empty where the row was a box.
    `problems` are (line number, reason) of refused rows; `clipped` and `duplicates` count the rows
    that were moved to the image's edge and left out as exact repetitions.
    """

    boxes: np.ndarray
    segments: list[np.ndarray]
    problems: list[tuple[int, str]]
    clipped: int = 0
    duplicates: int = 0


class _RefusedRow(Exception):
    """A row that means no object; the text is the reason."""


def parse_labels(text: str, nc: int) -> ParsedLabels:
    """Objects in the text of a label file with classes 0 to `nc - 1`.

    A row is `class x y w h` or `class x1 y1 x2 y2 x3 y3 …`, separated by blanks, tabs or commas.
    """
    rows: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    problems: list[tuple[int, str]] = []
    seen: set[bytes] = set()
    clipped = duplicates = 0
    for number, line in enumerate(_lines(text.removeprefix("\ufeff")), 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        try:
            row, segment, moved = _parse_row(words, nc)
        except _RefusedRow as refused:
            problems.append((number, str(refused)))
            continue
        identity = row.tobytes() + segment.tobytes()
        if identity in seen:
            duplicates += 1
            continue
        seen.add(identity)
        clipped += moved
        rows.append(row)
        segments.append(segment)
    boxes = np.stack(rows) if rows else np.zeros((0, 5), np.float32)
    return ParsedLabels(boxes, segments, problems, clipped, duplicates)


def _parse_row(words: list[str], nc: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Box `[5]`, polygon `[k, 2]` and whether it was clipped; raises `_RefusedRow`."""
    count = len(words) - 1
    if count != 4 and (count < 6 or count % 2):
        hint = "; a confidence does not belong here" if count == 5 else ""
        raise _RefusedRow(f"expected a class and 4 box values or 6, 8, … polygon values, found {count} values{hint}")
    values = np.array([_number(word) for word in words])
    label, coordinates = float(values[0]), values[1:]
    if not label.is_integer():
        raise _RefusedRow(f"class {words[0]} is not a whole number")
    if not 0 <= label < nc:
        raise _RefusedRow(f"class {int(label)} is out of range (the data set has classes 0 to {nc - 1})")
    far = np.abs(coordinates - 0.5) > 0.5 + ROUNDING + 1e-9
    if far.any():
        word = words[1 + int(far.argmax())]
        raise _RefusedRow(f"{word} lies outside 0 to 1 (coordinates are fractions of the image's width and height)")
    inside = np.clip(coordinates, 0.0, 1.0)
    moved = bool((inside != coordinates).any())
    if count == 4:
        segment, box = _NO_POINTS, inside
    else:
        segment = inside.reshape(-1, 2)
        low, high = segment.min(0), segment.max(0)
        box = np.concatenate(((low + high) / 2, high - low))
    row = np.concatenate((values[:1], box)).astype(np.float32)
    if not (row[3:] > 0).all():
        raise _RefusedRow(f"the {'box' if count == 4 else 'polygon'} has no size")
    return row, segment.astype(np.float32), moved


def _number(word: str) -> float:
    try:
        value = math.nan if "_" in word else float(word)  # float() takes '1_0' for 10
    except ValueError:
        hint = " (the two characters \\n stand where a line should end)" if "\\n" in word else ""
        raise _RefusedRow(f"'{word[:40]}' is not a number{hint}") from None
    if not math.isfinite(value):
        raise _RefusedRow(f"'{word[:40]}' is not a finite number")
    return value


@dataclass(frozen=True)
class LabelSet:
    """The usable images of a split and their objects; entry i of every list belongs to image i.

    `shapes` is int32 `[n, 2]`: height and width as `read_image` returns them. `boxes[i]` and `segments[i]`
    are as in `ParsedLabels`. `problems` lists what was left out, as `file:line: reason` or `file: reason`.
    `missing` and `empty` count images without a label file and with an empty one (both are background),
    `corrupt` images left out and `cut` those whose file ends early, `refused`, `clipped` and `duplicates` rows.
    """

    images: list[Path]
    shapes: np.ndarray
    boxes: list[np.ndarray]
    segments: list[list[np.ndarray]]
    problems: list[str] = field(default_factory=list)
    missing: int = 0
    empty: int = 0
    corrupt: int = 0
    cut: int = 0
    refused: int = 0
    clipped: int = 0
    duplicates: int = 0

    def __len__(self) -> int:
        return len(self.images)

    def summary(self) -> str:
        """One line: what there is, what was left out."""
        parts = [f"{len(self)} images", f"{sum(map(len, self.boxes))} boxes"]
        counted = (
            (self.missing, "without labels"),
            (self.empty, "with an empty label file"),
            (self.corrupt, "unreadable images left out"),
            (self.cut, "images whose file is cut short"),
            (self.refused, "label rows refused"),
            (self.duplicates, "duplicate rows left out"),
            (self.clipped, "rows clipped to the image"),
        )
        return ", ".join(parts + [f"{count} {what}" for count, what in counted if count])

    def report(self, limit: int = 10) -> str:
        """The summary, and below it the first `limit` of what was left out."""
        rest = len(self.problems) - limit
        more = [f"    … and {rest} more"] if rest > 0 else []
        return "\n".join([self.summary(), *(f"    {problem}" for problem in self.problems[:limit]), *more])


def load_labels(images: Sequence[Path], nc: int, *, cache: Path | None, progress: bool = True) -> LabelSet:
    """Check every image and read its labels, from `cache` when nothing has changed since it was written.

    A cache that is stale, damaged or cannot be written only costs time. Images are decoded once in full,
    so what a `LabelSet` holds can be trained on.
    """
    images = list(images)
    fingerprint = _fingerprint(images, nc)
    if cache is not None and (known := _read_cache(cache, images, fingerprint)) is not None:
        return known
    workers = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        scans = pool.map(lambda image: _scan(image, nc), images)  # decoding runs outside Python's lock
        bar = tqdm(scans, desc="labels", total=len(images), unit="image", disable=None if progress else True)
        labels = _joined(images, bar)
    if cache is not None:
        _write_cache(cache, images, labels, fingerprint)
    return labels


@dataclass(frozen=True)
class _Scan:
    """What one image and its label file hold; `shape` is None when the image is of no use."""

    shape: tuple[int, int] | None
    parsed: ParsedLabels = ParsedLabels(np.zeros((0, 5), np.float32), [], [])
    missing: bool = False
    empty: bool = False
    cut: bool = False
    problems: tuple[str, ...] = ()


def _scan(image: Path, nc: int) -> _Scan:
    try:
        pixels, cut = _read(image)
    except LabelError as error:
        return _Scan(None, problems=(str(error),))
    notes = (f"{image}: the file is cut short, its lower part is grey",) if cut else ()
    scan = _Scan(pixels.shape[:2], cut=cut, problems=notes)
    file = label_path(image)
    try:
        text = _read_text(file)
    except FileNotFoundError:
        return replace(scan, missing=True)
    except OSError as error:
        return replace(scan, problems=(*notes, f"{file}: cannot be read ({error.strerror or error})"))
    parsed = parse_labels(text, nc)
    refused = tuple(f"{file}:{number}: {reason}" for number, reason in parsed.problems)
    return replace(scan, parsed=parsed, empty=not text.strip(), problems=notes + refused)


def _joined(images: list[Path], scans: Iterable[_Scan]) -> LabelSet:
    scans = list(scans)
    used = [(image, scan) for image, scan in zip(images, scans, strict=True) if scan.shape is not None]
    return LabelSet(
        images=[image for image, _ in used],
        shapes=np.array([scan.shape for _, scan in used], np.int32).reshape(-1, 2),
        boxes=[scan.parsed.boxes for _, scan in used],
        segments=[scan.parsed.segments for _, scan in used],
        problems=[problem for scan in scans for problem in scan.problems],
        missing=sum(scan.missing for scan in scans),
        empty=sum(scan.empty for scan in scans),
        corrupt=len(scans) - len(used),
        cut=sum(scan.cut for scan in scans),
        refused=sum(len(scan.parsed.problems) for scan in scans),
        clipped=sum(scan.parsed.clipped for scan in scans),
        duplicates=sum(scan.parsed.duplicates for scan in scans),
    )


_COUNTS = ("missing", "empty", "corrupt", "cut", "refused", "clipped", "duplicates")


def _fingerprint(images: list[Path], nc: int) -> bytes:
    """32 bytes that change with the list, the number of classes, and any file's size or time."""
    digest = hashlib.blake2b(f"{nc}\n".encode(), digest_size=32)
    for image in images:
        digest.update(os.fsencode(image))
        for file in (image, label_path(image)):
            try:
                status = file.stat()
                digest.update(f"\0{status.st_size},{status.st_mtime_ns}".encode())
            except OSError:
                digest.update(b"\0absent")
    return digest.digest()


def _write_cache(cache: Path, images: list[Path], labels: LabelSet, fingerprint: bytes) -> None:
    """Magic, fingerprint, checksum, then arrays in NumPy's zip format; put in place in one step."""
    usable = set(labels.images)
    segments = [segment for one in labels.segments for segment in one]
    meta = {"problems": labels.problems, **{name: getattr(labels, name) for name in _COUNTS}}
    payload = io.BytesIO()
    np.savez(
        payload,
        used=np.array([image in usable for image in images], bool),
        shapes=labels.shapes,
        counts=np.array([len(boxes) for boxes in labels.boxes], np.int64),
        boxes=np.concatenate([np.zeros((0, 5), np.float32), *labels.boxes]),
        lengths=np.array([len(segment) for segment in segments], np.int64),
        points=np.concatenate([_NO_POINTS, *segments]),
        meta=np.frombuffer(json.dumps(meta).encode(), np.uint8),
    )
    data = payload.getvalue()
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=cache.parent, prefix=f".{cache.name}.", delete=False) as file:
            temporary = file.name
            file.write(_CACHE_MAGIC + fingerprint + hashlib.blake2b(data, digest_size=32).digest() + data)
        os.chmod(temporary, 0o644)  # temporary files are private, which a shared data folder should not inherit
        os.replace(temporary, cache)
    except OSError as error:
        _LOGGER.warning("%s: labels are not cached (%s)", cache, error.strerror or error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _read_cache(cache: Path, images: list[Path], fingerprint: bytes) -> LabelSet | None:
    """What the cache holds, or None when it is absent, older than the files, or damaged."""
    try:
        content = cache.read_bytes()
    except OSError:
        return None
    head = len(_CACHE_MAGIC)
    magic, stored, checksum = content[:head], content[head : head + 32], content[head + 32 : head + 64]
    if magic != _CACHE_MAGIC or stored != fingerprint:
        return None
    data = content[head + 64 :]
    if hashlib.blake2b(data, digest_size=32).digest() != checksum:
        _LOGGER.warning("%s: damaged, reading the labels again", cache)
        return None
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return _unpacked(dict(arrays), images)
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        _LOGGER.warning("%s: not usable (%s), reading the labels again", cache, error)
        return None


def _unpacked(arrays: dict[str, np.ndarray], images: list[Path]) -> LabelSet:
    meta = json.loads(arrays["meta"].tobytes())
    boxes = np.split(arrays["boxes"], np.cumsum(arrays["counts"]))[:-1]
    polygons = np.split(arrays["points"], np.cumsum(arrays["lengths"]))[:-1]
    ends = np.cumsum(arrays["counts"]).tolist()
    return LabelSet(
        images=[image for image, used in zip(images, arrays["used"], strict=True) if used],
        shapes=arrays["shapes"],
        boxes=boxes,
        segments=[polygons[end - len(box) : end] for end, box in zip(ends, boxes, strict=True)],
        problems=[str(problem) for problem in meta["problems"]],
        **{name: int(meta[name]) for name in _COUNTS},
    )
