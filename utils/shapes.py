"""The built-in data set: pictures of simple shapes, drawn by the project itself.

All arithmetic is on integers and all chance comes from the raw output of PCG64, whose stream NumPy guarantees.
So pixels and labels are the same on every machine and with every version of NumPy.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from utils import UserError

NAMES = ("circle", "square", "triangle", "cross")
SIDE = 160
"""Height and width of a picture in pixels."""
COUNTS = {"train": 640, "val": 64}
"""Pictures in each split: as many as make forty epochs enough steps to learn the task from nothing."""

_COSINES = (256, 247, 222, 181, 128, 66, 0)  # of 0°, 15°, … 90°, in 1/256
_FINE = 2  # samples per pixel and axis at the edges of a shape


class _Dice:
    """Whole numbers that depend on nothing but the key."""

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(key))

    def below(self, n: int) -> int:
        """One of 0 … n - 1."""
        return int(self._bits.random_raw() % n)

    def between(self, low: int, high: int) -> int:
        """One of low … high."""
        return low + self.below(high - low + 1)

    def field(self, n: int, *shape: int) -> np.ndarray:
        """Numbers 0 … n - 1, int64."""
        raw = self._bits.random_raw(int(np.prod(shape)))
        return (raw % np.uint64(n)).astype(np.int64).reshape(shape)


def draw_shapes(root: Path, *, progress: bool = True) -> None:
    """Draw the built-in set into the new folder `root`: `images/{train,val}/*.png`, `labels/{train,val}/*.txt`.

    The folder appears in one step when all is drawn, so it is never seen half done; if another process was
    first, its folder stays. Raises `UserError` when the place cannot be written.
    """
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    except OSError as error:
        raise UserError(f"{root}: the built-in data set cannot be drawn there ({error.strerror or error})") from None
    try:
        _draw_all(temporary, progress)
        temporary.chmod(0o755)  # mkdtemp's folders are private
        try:
            os.replace(temporary, root)
        except OSError:
            if not (root / "labels").is_dir():
                raise
    except OSError as error:
        raise UserError(f"{root}: the built-in data set cannot be drawn there ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _draw_all(root: Path, progress: bool) -> None:
    for split in COUNTS:
        (root / "images" / split).mkdir(parents=True)
        (root / "labels" / split).mkdir(parents=True)
    jobs = [(split, number) for split, count in COUNTS.items() for number in range(count)]
    for split, number in tqdm(jobs, desc="drawing the built-in set", disable=None if progress else True):
        image, boxes = draw_picture(split, number)
        _, png = cv2.imencode(".png", image)
        (root / "images" / split / f"{number:04}.png").write_bytes(png.tobytes())
        lines = [f"{label} {_fractions(corners)}\n" for label, *corners in boxes]
        (root / "labels" / split / f"{number:04}.txt").write_text("".join(lines), encoding="utf-8")


def _fractions(corners: list[int]) -> str:
    """Centre and size as fractions; six digits hold every multiple of 1/320 exactly."""
    x1, y1, x2, y2 = corners
    return " ".join(f"{value / (2 * SIDE):.6f}" for value in (x1 + x2, y1 + y2, 2 * (x2 - x1), 2 * (y2 - y1)))


def draw_picture(split: str, number: int) -> tuple[np.ndarray, list[tuple[int, int, int, int, int]]]:
    """Picture `number` of a split, uint8 `[SIDE, SIDE, 3]` (blue first), and its boxes: class, x1, y1, x2, y2."""
    dice = _Dice(list(COUNTS).index(split), number)
    base = dice.field(256, 3)
    canvas = _background(dice, base)
    for _ in range(dice.below(4)):
        _add_bar(dice, canvas, base)
    boxes: list[tuple[int, int, int, int, int]] = []
    areas: list[int] = []
    owner = np.full((SIDE, SIDE), -1)  # which shape is on top
    wanted = 0 if dice.below(25) == 0 else dice.between(2, 11)
    for _ in range(4 * wanted):
        if len(boxes) == wanted:
            break
        label, mask = _random_shape(dice)
        if _fits(mask, owner, areas):
            owner[mask >= _FINE * _FINE // 2] = len(boxes)
            areas.append(int((mask >= _FINE * _FINE // 2).sum()))
            boxes.append((label, *_extent(mask)))
            _paint(canvas, mask, _surface(dice, base))
    grain = dice.between(1, 9)
    canvas += dice.field(2 * grain + 1, SIDE, SIDE, 3) - grain
    return np.clip(canvas, 0, 255).astype(np.uint8), boxes


def _background(dice: _Dice, base: np.ndarray) -> np.ndarray:
    """Texture around the colour `base`, int64 `[SIDE, SIDE, 3]`: clouds, and on half of them a pattern."""
    canvas = np.empty((SIDE, SIDE, 3), np.int64)
    strength = dice.between(10, 60)
    cells = (2, 4, 8, 16)[dice.below(4)]
    clouds = _clouds(dice, cells)
    tint = dice.field(3, 3) + 1
    canvas[:] = base + (clouds[:, :, None] - 128) * strength * tint // 256
    kind = dice.below(6)
    if kind < 3:
        y, x = np.mgrid[:SIDE, :SIDE]
        period, depth = dice.between(5, 30), dice.between(6, 30)
        slope_x, slope_y = dice.between(-4, 4), dice.between(1, 4)
        if kind == 0:  # stripes
            pattern = (x * slope_x + y * slope_y) // (2 * period) % 2
        elif kind == 1:  # checks
            pattern = (x // period + y // period) % 2
        else:  # a slope of light
            pattern = (x * slope_x + y * slope_y) // SIDE
        canvas += (pattern * depth)[:, :, None]
    return canvas


def _clouds(dice: _Dice, cells: int) -> np.ndarray:
    """Smooth noise 0 … 255, `[SIDE, SIDE]`: random heights on a lattice, straight lines between them."""
    heights = dice.field(256, cells + 1, cells + 1)
    step = SIDE // cells
    position = np.arange(SIDE)
    cell, within = position // step, position % step
    rows = heights[cell] * (step - within)[:, None] + heights[cell + 1] * within[:, None]
    return (rows[:, cell] * (step - within) + rows[:, cell + 1] * within) // (step * step)


def _add_bar(dice: _Dice, canvas: np.ndarray, base: np.ndarray) -> None:
    """A long thin bar that is no object, to have something to tell apart from objects."""
    cos, sin = _direction(dice.below(24))
    centre_x, centre_y, thickness = dice.below(SIDE), dice.below(SIDE), dice.between(1, 4)
    y, x = np.mgrid[:SIDE, :SIDE]
    distance = np.abs((x - centre_x) * cos + (y - centre_y) * sin)
    canvas[distance <= thickness * 128] = _distinct_colour(dice, base, 60)


def _direction(step: int) -> tuple[int, int]:
    """Cosine and sine of `step` times 15°, in 1/256."""
    quarter, rest = divmod(step % 24, 6)
    cos, sin = _COSINES[rest], _COSINES[6 - rest]
    for _ in range(quarter):
        cos, sin = -sin, cos
    return cos, sin


def _random_shape(dice: _Dice) -> tuple[int, np.ndarray]:
    """Class and coverage 0 … `_FINE`² of each pixel, `[SIDE, SIDE]`."""
    label = dice.below(len(NAMES))
    # three in eight small, three middling, two large
    low, high = ((7, 11), (7, 11), (7, 11), (12, 20), (12, 20), (12, 20), (21, 36), (21, 36))[dice.below(8)]
    radius = dice.between(low, high)
    cos, sin = _direction(dice.below(24))
    centre_x, centre_y = dice.below(SIDE), dice.below(SIDE)
    mask = np.zeros((SIDE, SIDE), np.int64)
    reach = radius * 6 // 5 + 1  # the corners of a square lie a little outside the radius
    left, right = max(centre_x - reach, 0), min(centre_x + reach, SIDE)
    top, bottom = max(centre_y - reach, 0), min(centre_y + reach, SIDE)
    # twice the distance from the centre, in samples, which makes the middle of a sample whole
    dx = 2 * np.arange(left * _FINE, right * _FINE) + 1 - 2 * _FINE * centre_x
    dy = (2 * np.arange(top * _FINE, bottom * _FINE) + 1 - 2 * _FINE * centre_y)[:, None]
    u, v, size = dx * cos + dy * sin, dy * cos - dx * sin, 2 * _FINE * radius * 256
    inside = _INSIDE[label](u, v, size)
    mask[top:bottom, left:right] = inside.reshape(bottom - top, _FINE, right - left, _FINE).sum((1, 3))
    return label, mask


def _in_circle(u: np.ndarray, v: np.ndarray, size: int) -> np.ndarray:
    return u * u + v * v <= size * size


def _in_square(u: np.ndarray, v: np.ndarray, size: int) -> np.ndarray:
    half = size * 4 // 5
    return (np.abs(u) <= half) & (np.abs(v) <= half)


def _in_triangle(u: np.ndarray, v: np.ndarray, size: int) -> np.ndarray:
    """Equilateral: half a radius in front of each of three sides, whose normals are 120° apart."""
    return (2 * v <= size) & (222 * np.abs(u) - 128 * v <= 128 * size)


def _in_cross(u: np.ndarray, v: np.ndarray, size: int) -> np.ndarray:
    across, along = np.minimum(np.abs(u), np.abs(v)), np.maximum(np.abs(u), np.abs(v))
    return (along <= size) & (3 * across <= size)


_INSIDE: tuple[Callable[[np.ndarray, np.ndarray, int], np.ndarray], ...] = (
    _in_circle,
    _in_square,
    _in_triangle,
    _in_cross,
)


def _fits(mask: np.ndarray, owner: np.ndarray, areas: list[int]) -> bool:
    """Whether the shape lies mostly in the picture and leaves more than half of every other one to be seen."""
    covered = mask >= _FINE * _FINE // 2
    x1, y1, x2, y2 = _extent(mask) if covered.any() else (0, 0, 0, 0)
    if min(x2 - x1, y2 - y1) < 8:
        return False
    left = np.bincount(owner[~covered] + 1, minlength=len(areas) + 1)[1:]
    return bool((2 * left > np.array(areas, np.int64)).all())


def _extent(mask: np.ndarray) -> tuple[int, int, int, int]:
    """x1, y1, x2, y2 around the pixels that are covered at least half."""
    covered = mask >= _FINE * _FINE // 2
    columns, rows = np.flatnonzero(covered.any(0)), np.flatnonzero(covered.any(1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _surface(dice: _Dice, base: np.ndarray) -> np.ndarray:
    """Colours of a shape, broadcast to `[SIDE, SIDE, 3]`: mostly plain, some striped or cloudy, some pale."""
    colour = _distinct_colour(dice, base, 70 if dice.below(6) == 0 else 160)
    kind = dice.below(6)
    if kind == 0:
        stripes = (np.arange(SIDE) // dice.between(2, 5) % 2)[:, None, None]
        return colour + (2 * stripes - 1) * dice.between(8, 25)
    if kind == 1:
        return colour + (_clouds(dice, 16)[:, :, None] - 128) * dice.between(10, 50) // 128
    return colour[None, None]


def _distinct_colour(dice: _Dice, base: np.ndarray, least: int) -> np.ndarray:
    """A colour whose channels differ from those of `base` by at least `least` together."""
    while True:
        colour = dice.field(256, 3)
        if np.abs(colour - base).sum() >= least:
            return colour


def _paint(canvas: np.ndarray, mask: np.ndarray, colours: np.ndarray) -> None:
    full = _FINE * _FINE
    share = mask[mask > 0][:, None]
    under, over = canvas[mask > 0], np.broadcast_to(colours, canvas.shape)[mask > 0]
    canvas[mask > 0] = (under * (full - share) + over * share + full // 2) // full
