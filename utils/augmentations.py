"""Changes to an image and its objects.

Every random change comes in two parts: `draw_…` takes all it needs from the sample's generator and returns
a small value, a pure function applies that value. So what a sample looks like depends on nothing but the generator.

Boxes are float32 `[n, 5]`: class, then x1, y1, x2, y2 in pixels, unless said otherwise.
Images are uint8 `[H, W, 3]`, blue first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from utils.boxes import xywh2xyxy
from utils.config import Hyperparameters

FILL = 114
"""Grey of the places where there is no image."""


@dataclass(frozen=True)
class Objects:
    """Objects of one image: boxes `[n, 5]` in pixels and the polygons of those that have one.

    `points` is float32 `[p, 2]`, all polygons one after the other; `lengths` int `[n]` says how many
    belong to each box, 0 where there is only the box.
    """

    boxes: np.ndarray
    points: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def joined(parts: Sequence[Objects]) -> Objects:
        return Objects(
            np.concatenate([part.boxes for part in parts]),
            np.concatenate([part.points for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )

    def polygon(self, i: int) -> np.ndarray:
        """Polygon of object i, `[k, 2]`, in pixels."""
        start = int(self.lengths[:i].sum())
        return self.points[start : start + int(self.lengths[i])]


def to_pixels(
    boxes: np.ndarray,
    points: np.ndarray,
    lengths: np.ndarray,
    size: tuple[float, float],
    offset: tuple[float, float] = (0.0, 0.0),
) -> Objects:
    """Objects in pixels from fractions of an image of `size` (width, height) that lies at `offset` (x, y).

    `boxes` is `[n, 5]`: class, centre x, y, width, height.
    """
    scale, shift = np.array(size, np.float32), np.array(offset, np.float32)
    corners = xywh2xyxy(boxes[:, 1:]) * np.tile(scale, 2) + np.tile(shift, 2)
    return Objects(np.concatenate((boxes[:, :1], corners), 1), points * scale + shift, lengths)


def to_fractions(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Class, centre x, y, width, height `[n, 5]` as fractions of an image of `size` (width, height).

    Boxes are clipped to the image.
    """
    low, high = np.clip(boxes[:, 1:3], 0, size), np.clip(boxes[:, 3:5], 0, size)
    return np.concatenate((boxes[:, :1], (low + high) / 2 / size, (high - low) / size), 1, dtype=np.float32)


def letterbox(
    image: np.ndarray,
    new_shape: tuple[int, int] | int,
    *,
    auto: bool = False,
    scale_fill: bool = False,
    scaleup: bool = True,
    stride: int = 32,
    color: int = FILL,
) -> tuple[np.ndarray, tuple[float, float], tuple[float, float]]:
    """The image fitted into `new_shape` (height, width) with its aspect kept, and a border around it.

    `auto` leaves only as much border as a multiple of `stride` needs, `scale_fill` stretches instead
    of a border, `scaleup=False` never enlarges. Returns the image, the scale (x, y) and the border on
    the left and on top in pixels, which may be halves. The image may be the one passed in.
    """
    height, width = image.shape[:2]
    new_height, new_width = (new_shape, new_shape) if isinstance(new_shape, int) else new_shape
    scale = min(new_height / height, new_width / width)
    if not scaleup:
        scale = min(scale, 1.0)
    # a side of a very thin image would round to nothing
    inner_width, inner_height = max(round(width * scale), 1), max(round(height * scale), 1)
    border_x, border_y = new_width - inner_width, new_height - inner_height
    ratio = (scale, scale)
    if auto:
        border_x, border_y = border_x % stride, border_y % stride
    elif scale_fill:
        border_x = border_y = 0
        inner_width, inner_height = new_width, new_height
        ratio = (new_width / width, new_height / height)
    if (width, height) != (inner_width, inner_height):
        image = cv2.resize(image, (inner_width, inner_height), interpolation=cv2.INTER_LINEAR)
    if border_x or border_y:
        left, top = border_x // 2, border_y // 2  # the odd pixel goes to the right and to the bottom
        edges = (top, border_y - top, left, border_x - left)
        image = cv2.copyMakeBorder(image, *edges, cv2.BORDER_CONSTANT, value=(color, color, color))
    return image, ratio, (border_x / 2, border_y / 2)


@dataclass(frozen=True)
class Mosaic:
    """Four images around a point: their indices, upper left, upper right, lower left, lower right."""

    indices: tuple[int, int, int, int]
    centre: tuple[int, int]


def draw_mosaic(rng: np.random.Generator, index: int, count: int, imgsz: int) -> Mosaic:
    """Image `index` and three out of `count` in any order; centre anywhere in the middle half of the canvas."""
    partners = rng.integers(count, size=3)
    indices = rng.permutation(np.append(partners, index))
    x, y = rng.integers(imgsz // 2, 2 * imgsz - imgsz // 2, size=2)
    return Mosaic(tuple(int(i) for i in indices), (int(x), int(y)))


def paste_tiles(images: Sequence[np.ndarray], mosaic: Mosaic, imgsz: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Canvas `[2 imgsz, 2 imgsz, 3]` with each image's corner at the centre, and where each image begins (x, y).

    What sticks out is cut off; the beginnings may then be negative.
    """
    side = 2 * imgsz
    canvas = np.full((side, side, 3), FILL, np.uint8)
    x, y = mosaic.centre
    offsets = []
    for place, image in enumerate(images):
        height, width = image.shape[:2]
        left = x - width if place % 2 == 0 else x
        top = y - height if place < 2 else y
        x1, y1, x2, y2 = max(left, 0), max(top, 0), min(left + width, side), min(top + height, side)
        canvas[y1:y2, x1:x2] = image[y1 - top : y2 - top, x1 - left : x2 - left]
        offsets.append((left, top))
    return canvas, offsets


def clip_objects(objects: Objects, size: tuple[int, int]) -> Objects:
    """Boxes and polygons cut at the edges of an image of `size` (width, height)."""
    boxes = objects.boxes.copy()
    boxes[:, 1:] = np.clip(boxes[:, 1:], 0, np.tile(size, 2))
    return Objects(boxes, np.clip(objects.points, 0, size), objects.lengths)


def draw_copy_paste(rng: np.random.Generator, lengths: np.ndarray, probability: float) -> np.ndarray:
    """Indices of the objects to copy, `probability` of those with a polygon (`lengths` > 0), in drawn order."""
    candidates = np.flatnonzero(lengths)
    if not probability or not len(candidates):
        return np.zeros(0, np.int64)
    return rng.choice(candidates, size=round(probability * len(candidates)), replace=False)


def copy_paste(image: np.ndarray, objects: Objects, chosen: np.ndarray) -> tuple[np.ndarray, Objects]:
    """Mirror images of the chosen objects pasted at their mirrored place, unless they hide 30 % of another one."""
    if not len(chosen):
        return image, objects
    width = image.shape[1]
    mask = np.zeros(image.shape[:2], np.uint8)
    boxes, points, lengths = objects.boxes, [objects.points], list(objects.lengths)
    for i in chosen:  # one after the other: each must leave those before it visible
        label, x1, y1, x2, y2 = objects.boxes[i]
        mirrored = np.array([label, width - x2, y1, width - x1, y2], np.float32)
        if (_hidden_share(mirrored[1:], boxes[:, 1:]) >= 0.30).any():
            continue
        polygon = objects.polygon(i)
        boxes = np.concatenate((boxes, mirrored[None]))
        points.append(polygon * np.float32((-1, 1)) + np.float32((width, 0)))
        lengths.append(len(polygon))
        cv2.drawContours(mask, [polygon.astype(np.int32)], -1, 255, cv2.FILLED)
    if len(points) > 1:
        image = image.copy()
        cv2.copyTo(cv2.flip(image, 1), cv2.flip(mask, 1), image)
    return image, Objects(boxes, np.concatenate(points), np.array(lengths, objects.lengths.dtype))


def _hidden_share(cover: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Share of each box `[n, 4]` that lies under the box `cover` `[4]`."""
    sides = np.minimum(cover[2:], boxes[:, 2:]) - np.maximum(cover[:2], boxes[:, :2])
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return np.clip(sides, 0, None).prod(1) / (area + 1e-7)


@dataclass(frozen=True)
class Perspective:
    """A projective map of the plane, `matrix` `[3, 3]`, onto an image of `size` (width, height).

    `scale` is the enlargement in it, against which boxes are judged to be cut off.
    """

    matrix: np.ndarray
    scale: float
    size: tuple[int, int]


def draw_perspective(
    rng: np.random.Generator, hyp: Hyperparameters, shape: tuple[int, int], border: int = 0
) -> Perspective:
    """A random rotation, enlargement, shear, shift and tilt of an image of `shape` (height, width).

    The result is larger by `border` on every side (smaller if negative). The image's middle is the centre.
    """
    height, width = shape
    size = (width + 2 * border, height + 2 * border)
    tilt = rng.uniform(-hyp.perspective, hyp.perspective, 2)
    angle = math.radians(rng.uniform(-hyp.degrees, hyp.degrees))
    scale = rng.uniform(1 - hyp.scale, 1 + hyp.scale)
    shear = np.tan(np.radians(rng.uniform(-hyp.shear, hyp.shear, 2)))
    shift = rng.uniform(0.5 - hyp.translate, 0.5 + hyp.translate, 2) * size
    to_centre = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1]])
    tilted = np.array([[1, 0, 0], [0, 1, 0], [tilt[0], tilt[1], 1]])
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    rotated = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    sheared = np.array([[1, shear[0], 0], [shear[1], 1, 0], [0, 0, 1]])
    shifted = np.array([[1, 0, shift[0]], [0, 1, shift[1]], [0, 0, 1]])
    return Perspective(shifted @ sheared @ rotated @ tilted @ to_centre, scale, size)


def random_perspective(image: np.ndarray, objects: Objects, p: Perspective) -> tuple[np.ndarray, np.ndarray]:
    """The image under the map and the boxes `[m, 5]` of those objects that are still to be seen.

    A box follows its polygon where there is one, else its four corners.
    """
    grey = (FILL, FILL, FILL)
    if p.matrix[2, 0] or p.matrix[2, 1]:
        image = cv2.warpPerspective(image, p.matrix, p.size, borderValue=grey)
    else:
        image = cv2.warpAffine(image, p.matrix[:2], p.size, borderValue=grey)
    boxes = objects.boxes
    if not len(boxes):
        return image, boxes
    corners = _mapped(boxes[:, [1, 2, 3, 2, 3, 4, 1, 4]].reshape(-1, 2), p.matrix).reshape(-1, 4, 2)
    moved = np.concatenate((corners.min(1), corners.max(1)), 1)
    outlined = objects.lengths > 0
    if outlined.any():
        moved[outlined] = _visible_boxes(_mapped(objects.points, p.matrix), objects.lengths[outlined], p.size)
    moved = np.clip(moved, 0, np.tile(p.size, 2))
    # a polygon bounds what is visible tightly, so a smaller rest of it is still worth learning
    kept = box_candidates(boxes[:, 1:] * p.scale, moved, np.where(outlined, 0.01, 0.10))
    return image, np.concatenate((boxes[:, :1], moved), 1, dtype=np.float32)[kept]


def _mapped(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Points `[n, 2]` under a projective map."""
    moved = points @ matrix[:, :2].T + matrix[:, 2]
    return moved[:, :2] / moved[:, 2:]


def _visible_boxes(points: np.ndarray, lengths: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Boxes `[n, 4]` around the part of each outline that lies in the image; zeros when none does.

    `points` holds closed polygons one after the other, `lengths` (all > 0) their numbers of points.
    Edges are cut at the frame exactly: an edge a + t (b - a) is inside for t between the latest entry
    and the earliest exit through the four sides.
    """
    starts = np.cumsum(lengths) - lengths
    following = np.arange(1, len(points) + 1)
    following[starts + lengths - 1] = starts
    step = points[following] - points
    with np.errstate(divide="ignore", invalid="ignore"):
        at_low, at_high = -points / step, (np.array(size) - points) / step
    # an edge parallel to a side is inside for every t or for none
    parallel, within = step == 0, (points >= 0) & (points <= size)
    enter = np.where(parallel, np.where(within, 0.0, np.inf), np.minimum(at_low, at_high)).max(1).clip(min=0)
    leave = np.where(parallel, 1.0, np.maximum(at_low, at_high)).min(1).clip(max=1)
    visible = (enter <= leave)[:, None]
    with np.errstate(invalid="ignore"):
        first, last = points + step * enter[:, None], points + step * leave[:, None]
    low = np.minimum.reduceat(np.where(visible, np.minimum(first, last), np.inf), starts)
    high = np.maximum.reduceat(np.where(visible, np.maximum(first, last), -np.inf), starts)
    boxes = np.concatenate((low, high), 1)
    return np.where(np.isfinite(boxes).all(1, keepdims=True), boxes, 0.0)


def box_candidates(before: np.ndarray, after: np.ndarray, min_area: float | np.ndarray) -> np.ndarray:
    """Which boxes `[n, 4]` are worth learning after a change: larger than 2 px, not too thin, enough left.

    `before` must have the change's enlargement in it; `min_area` is the share of its area that must be left.
    """
    width, height = (before[:, 2:] - before[:, :2]).T
    new_width, new_height = (after[:, 2:] - after[:, :2]).T
    aspect = np.maximum(new_width / (new_height + 1e-16), new_height / (new_width + 1e-16))
    share = new_width * new_height / (width * height + 1e-16)
    return (new_width > 2) & (new_height > 2) & (share > min_area) & (aspect < 100)


def draw_mixup(rng: np.random.Generator) -> float:
    """Weight of the first image, nearly always close to one half."""
    return float(rng.beta(32.0, 32.0))


def mixup(
    image: np.ndarray, boxes: np.ndarray, other: np.ndarray, other_boxes: np.ndarray, weight: float
) -> tuple[np.ndarray, np.ndarray]:
    """Two images of one size laid over each other, with the boxes of both."""
    return cv2.addWeighted(image, weight, other, 1 - weight, 0), np.concatenate((boxes, other_boxes))


@dataclass(frozen=True)
class ColourGains:
    """Factors for hue, saturation and value."""

    hue: float
    saturation: float
    value: float


def draw_colour(rng: np.random.Generator, hyp: Hyperparameters) -> ColourGains:
    """Factors between 1 - g and 1 + g for each hyperparameter g."""
    return ColourGains(*(rng.uniform(-1, 1, 3) * (hyp.hsv_h, hyp.hsv_s, hyp.hsv_v) + 1).tolist())


def hsv(image: np.ndarray, gains: ColourGains) -> np.ndarray:
    """The image with its hue, saturation and value multiplied; the hue runs round the circle of 180 steps."""
    if gains == ColourGains(1.0, 1.0, 1.0):
        return image
    levels = np.arange(256.0)
    table = np.empty((1, 256, 3), np.uint8)
    table[0, :, 0] = levels * gains.hue % 180
    table[0, :, 1] = np.clip(levels * gains.saturation, 0, 255)
    table[0, :, 2] = np.clip(levels * gains.value, 0, 255)
    return cv2.cvtColor(cv2.LUT(cv2.cvtColor(image, cv2.COLOR_BGR2HSV), table), cv2.COLOR_HSV2BGR)


@dataclass(frozen=True)
class Flips:
    """Whether to turn the image upside down and left to right."""

    up_down: bool
    left_right: bool


def draw_flips(rng: np.random.Generator, hyp: Hyperparameters) -> Flips:
    up_down, left_right = rng.random(2) < (hyp.flipud, hyp.fliplr)
    return Flips(bool(up_down), bool(left_right))


def flip(image: np.ndarray, boxes: np.ndarray, flips: Flips) -> tuple[np.ndarray, np.ndarray]:
    """The image and its boxes mirrored."""
    height, width = image.shape[:2]
    if flips.up_down:
        image = cv2.flip(image, 0)
        boxes = boxes[:, [0, 1, 4, 3, 2]] * np.float32((1, 1, -1, 1, -1)) + np.float32((0, 0, height, 0, height))
    if flips.left_right:
        image = cv2.flip(image, 1)
        boxes = boxes[:, [0, 3, 2, 1, 4]] * np.float32((1, -1, 1, -1, 1)) + np.float32((0, width, 0, width, 0))
    return image, boxes
