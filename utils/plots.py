"""Pictures: boxes on photographs (OpenCV), curves and statistics (matplotlib, imported by the functions that draw)."""

from __future__ import annotations

import colorsys
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from utils import UserError
from utils.boxes import xywh2xyxy

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from utils.metrics import Metrics

MAX_LEGEND = 20
"""With more classes than this, curves are drawn in grey without a legend."""

READABLE_SIDE = 400
"""Pictures of a grid are enlarged to this many pixels where there is room."""

Colour = tuple[int, int, int]


class PlotError(UserError):
    """A picture that cannot be made or written."""


def class_colour(number: int) -> Colour:
    """A strong BGR colour for a class number; neighbouring numbers lie far apart on the colour circle."""
    hue = (0.02 + number * 0.618034) % 1  # steps of the golden ratio never bunch up
    ring = number // 12 % 3  # hues come close to each other in the end: vary the tone too
    red, green, blue = colorsys.hsv_to_rgb(hue, (0.85, 0.6, 0.95)[ring], (0.9, 0.95, 0.65)[ring])
    return round(blue * 255), round(green * 255), round(red * 255)


def write_image(path: Path, image: np.ndarray) -> Path:
    """Writes a BGR image, also below non-ASCII folders; as .jpg when OpenCV cannot write the ending.

    Returns the path written. Raises `PlotError` when the place cannot be written.
    """
    if not cv2.haveImageWriter(f"x{path.suffix}"):
        path = path.with_suffix(".jpg")
    coded, data = cv2.imencode(path.suffix, image)
    if not coded:
        raise PlotError(f"{path}: OpenCV cannot encode the picture")
    try:
        path.write_bytes(data.tobytes())
    except OSError as error:
        raise PlotError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def _text_colour(background: Colour) -> Colour:
    """Black or white, whichever reads better on a BGR colour."""
    blue, green, red = background
    return (0, 0, 0) if 0.114 * blue + 0.587 * green + 0.299 * red > 140 else (255, 255, 255)


class _AsciiText:
    """Text in OpenCV's own font, which knows ASCII only."""

    def __init__(self, height: int) -> None:
        self.scale = height / 30  # at scale 1 a capital is 21 px tall, with its descender about 30
        self.thickness = max(round(height / 14), 1)

    def size(self, text: str) -> tuple[int, int]:
        (width, height), baseline = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, self.scale, self.thickness)
        return width, height + baseline

    def draw(self, image: np.ndarray, text: str, left: int, bottom: int, colour: Colour) -> None:
        baseline = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, self.scale, self.thickness)[1]
        at = (left, bottom - baseline)
        cv2.putText(image, text, at, cv2.FONT_HERSHEY_SIMPLEX, self.scale, colour, self.thickness, cv2.LINE_AA)


class _UnicodeText:
    """Text in the DejaVu font that comes with matplotlib: most alphabets, nothing to download."""

    def __init__(self, height: int) -> None:
        from matplotlib import get_data_path
        from PIL import ImageFont

        font = Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
        self.font = ImageFont.truetype(str(font), height)

    def size(self, text: str) -> tuple[int, int]:
        return math.ceil(self.font.getlength(text)), sum(self.font.getmetrics())

    def draw(self, image: np.ndarray, text: str, left: int, bottom: int, colour: Colour) -> None:
        from PIL import Image, ImageDraw

        canvas = Image.fromarray(image)
        ImageDraw.Draw(canvas).text((left, bottom - self.size(text)[1]), text, fill=colour, font=self.font)
        image[:] = np.asarray(canvas)


def _text_writer(text: str, height: int) -> _AsciiText | _UnicodeText:
    return _AsciiText(height) if text.isascii() else _UnicodeText(height)


def draw_boxes(
    image: np.ndarray,
    boxes: Sequence[Sequence[float]] | np.ndarray,
    labels: Sequence[str],
    colours: Sequence[Colour],
    *,
    line_thickness: int = 3,
) -> np.ndarray:
    """A copy of a BGR image with boxes `[n, 4]` (xyxy, pixels) and their labels; an empty label draws the box alone.

    Later boxes cover earlier ones, and labels cover boxes. A label stands above its box, or inside when there is
    no room above, and always within the picture.
    """
    canvas = np.ascontiguousarray(image).copy()
    corners = [tuple(round(float(value)) for value in box[:4]) for box in boxes]
    for (x1, y1, x2, y2), colour in zip(corners, colours):
        cv2.rectangle(canvas, (x1, y1), (x2, y2), colour, line_thickness)
    for corner, text, colour in zip(corners, labels, colours):
        if text:
            _draw_label(canvas, corner, text, colour, line_thickness)
    return canvas


def _draw_label(canvas: np.ndarray, box: tuple[int, ...], text: str, colour: Colour, line_thickness: int) -> None:
    height, width = canvas.shape[:2]
    writer = _text_writer(text, max(8 * line_thickness, 12))
    text_width, text_height = writer.size(text)
    pad = max(line_thickness, 2)
    label_width, label_height = text_width + 2 * pad, text_height + pad
    left = max(min(box[0] - line_thickness // 2, width - label_width), 0)
    top = box[1] - label_height if box[1] >= label_height else box[1]
    top = max(min(top, height - label_height), 0)
    cv2.rectangle(canvas, (left, top), (left + label_width, top + label_height), colour, -1)
    writer.draw(canvas, text, left + pad, top + label_height - pad // 2, _text_colour(colour))


def plot_batch(
    images: torch.Tensor,
    boxes: torch.Tensor | Sequence[torch.Tensor],
    names: Sequence[str],
    path: Path,
    *,
    paths: Sequence[str] | None = None,
    max_images: int = 16,
    max_size: int = 1920,
    conf_thres: float = 0.25,
) -> None:
    """Draws a batch as a grid of at most `max_images` pictures, the whole at most about `max_size` px wide and high.

    Args:
        images: `[B, 3, H, W]` RGB, uint8 or float in 0..1.
        boxes: labels `[N, 6]` (image, class, x, y, w, h; normalised), or detections `[n, 6]` of each image (xyxy in
            the network's pixels, confidence, class); of these the ones above `conf_thres` are drawn.
        names: class names.
        path: file to write.
        paths: files of the images; their names are written on the pictures.
    """
    count, _, height, width = images.shape
    count = min(count, max_images)
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns) if columns else 0
    if not count:
        return
    # small pictures are enlarged, or the names would cover them
    scale = min(max(1.0, READABLE_SIDE / min(height, width)), max_size / max(columns * width, rows * height))
    cell_h, cell_w = max(round(height * scale), 1), max(round(width * scale), 1)
    grid = np.full((rows * cell_h, columns * cell_w, 3), 255, np.uint8)
    for index in range(count):
        picture = images[index].cpu().numpy()
        picture = picture if picture.dtype == np.uint8 else (picture * 255).clip(0, 255).astype(np.uint8)
        picture = picture.transpose(1, 2, 0)[..., ::-1]
        how = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
        picture = cv2.resize(picture, (cell_w, cell_h), interpolation=how)
        corners, labels, numbers = _boxes_of(boxes, index, names, (width, height), conf_thres)
        thickness = 1 if min(cell_h, cell_w) < 400 else 2
        colours = [class_colour(number) for number in numbers]
        factors = np.array([cell_w / width, cell_h / height] * 2)
        picture = draw_boxes(picture, corners * factors, labels, colours, line_thickness=thickness)
        if paths is not None:
            caption = Path(paths[index]).name[:40]
            _draw_label(picture, (2, 2), caption, (64, 64, 64), 1)
        cv2.rectangle(picture, (0, 0), (cell_w - 1, cell_h - 1), (255, 255, 255), 1)
        top, left = index // columns * cell_h, index % columns * cell_w
        grid[top : top + cell_h, left : left + cell_w] = picture
    write_image(Path(path), grid)


def _boxes_of(
    boxes: torch.Tensor | Sequence[torch.Tensor],
    index: int,
    names: Sequence[str],
    size: tuple[int, int],
    conf_thres: float,
) -> tuple[np.ndarray, list[str], list[int]]:
    """Corners `[n, 4]` in pixels, labels and class numbers of one image of a batch; the surest come last."""
    if isinstance(boxes, (list, tuple)):
        found = boxes[index].detach().cpu().numpy()
        found = found[found[:, 4] > conf_thres]
        found = found[np.argsort(found[:, 4], kind="stable")]
        numbers = found[:, 5].astype(int).tolist()
        return found[:, :4], [f"{names[n]} {conf:.1f}" for n, conf in zip(numbers, found[:, 4])], numbers
    targets = boxes.detach().cpu().numpy()
    mine = targets[targets[:, 0] == index]
    numbers = mine[:, 1].astype(int).tolist()
    return xywh2xyxy(mine[:, 2:6]) * np.array([*size, *size]), [names[n] for n in numbers], numbers


def _new_figure(width: float, height: float) -> Figure:
    """A figure of its own, outside pyplot: nothing global is touched, and it is freed with its last reference."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path, dpi: int = 150) -> None:
    try:
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        raise PlotError(f"{path}: cannot be written ({error.strerror})") from None


def _shown(name: str, limit: int = 24) -> str:
    """A class name as matplotlib shows it unchanged: `$` starts a formula there, a leading `_` hides a legend entry."""
    name = name if len(name) <= limit else name[: limit - 1] + "…"
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def _class_lines(axes: Axes, x: np.ndarray, curves: np.ndarray, labels: Sequence[str], classes: Sequence[int]) -> None:
    """One line a class: coloured and named for a few classes, grey for many."""
    few = len(curves) <= MAX_LEGEND
    for curve, label, number in zip(curves, labels, classes):
        blue, green, red = (value / 255 for value in class_colour(int(number)))
        style = (
            {"color": (red, green, blue), "label": label, "linewidth": 1.2}
            if few
            else {"color": "0.7", "linewidth": 0.7}
        )
        axes.plot(x, curve, **style)


def _mean_line(axes: Axes, x: np.ndarray, curves: np.ndarray, label: str) -> None:
    """The mean of the classes, broad: below a few coloured lines (a single one must show), above many grey ones."""
    zorder = 1.5 if len(curves) <= MAX_LEGEND else 3
    axes.plot(x, curves.mean(axis=0), color="black", linewidth=3.5, label=label, zorder=zorder)


def _finish_curves(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, 1), ylim=(0, 1.01))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(bbox_to_anchor=(1.02, 1), loc="upper left", borderaxespad=0, fontsize=9)


def plot_pr_curve(metrics: Metrics, path: Path) -> None:
    """Precision over recall of each class with labels, and their mean."""
    curves = metrics.curves
    figure = _new_figure(9, 6)
    axes = figure.add_subplot()
    labels = [f"{_shown(metrics.names[c])} {ap:.3f}" for c, ap in zip(metrics.classes, metrics.class_ap50)]
    _class_lines(axes, curves.recall_grid, curves.envelope, labels, metrics.classes)
    if len(metrics.classes):
        label = f"all classes {metrics.map50:.3f} mAP@0.5"
        _mean_line(axes, curves.recall_grid, curves.envelope, label)
    axes.set_title("Precision over recall, IoU 0.5")
    _finish_curves(axes, "Recall", "Precision")
    _save(figure, Path(path))


def plot_confidence_curves(metrics: Metrics, folder: Path) -> None:
    """`P_curve.png`, `R_curve.png` and `F1_curve.png`: each figure over the confidence threshold."""
    curves = metrics.curves
    titles = (("P", "Precision", curves.precision), ("R", "Recall", curves.recall), ("F1", "F1", curves.f1))
    for short, title, values in titles:
        figure = _new_figure(9, 6)
        axes = figure.add_subplot()
        _class_lines(
            axes, curves.confidence, values, [_shown(metrics.names[c]) for c in metrics.classes], metrics.classes
        )
        if len(metrics.classes):
            mean = values.mean(axis=0)
            best = int(mean.argmax())
            label = f"all classes: {mean[best]:.2f} at {curves.confidence[best]:.3f}"
            _mean_line(axes, curves.confidence, values, label)
        axes.set_title(f"{title} over confidence, IoU 0.5")
        _finish_curves(axes, "Confidence", title)
        _save(figure, Path(folder) / f"{short}_curve.png")


def plot_confusion_matrix(matrix: np.ndarray, names: Sequence[str], path: Path) -> None:
    """The confusion matrix `[nc + 1, nc + 1]`, background last; each column as shares of that true class."""
    shares = matrix / np.maximum(matrix.sum(axis=0, keepdims=True), 1)
    count = len(matrix)
    side = min(max(0.55 * count + 3, 6), 18)
    figure = _new_figure(side * 1.15, side)
    axes = figure.add_subplot()
    shown = axes.imshow(np.where(shares < 0.005, np.nan, shares), cmap="Blues", vmin=0, vmax=1)
    if count <= 31:
        size = min(12, max(6, 130 / count))
        for row, column in np.argwhere(shares >= 0.005):
            colour = "white" if shares[row, column] > 0.5 else "black"
            text = f"{shares[row, column]:.2f}" if count > 12 else f"{shares[row, column]:.2f}\n({matrix[row, column]})"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=size)
    ticks = [_shown(name) for name in names] + ["background"]
    size = min(11, max(4, 0.5 * side * 72 / count))  # half a cell high
    axes.set_xticks(range(count), ticks, rotation=90 if count > 6 else 0, fontsize=size)
    axes.set_yticks(range(count), ticks, fontsize=size)
    axes.set(xlabel="True", ylabel="Predicted", title="Confusion matrix, columns as shares of the true class")
    figure.colorbar(shown, ax=axes, shrink=0.8)
    _save(figure, Path(path))


def plot_labels(boxes: np.ndarray, names: Sequence[str], path: Path) -> None:
    """Statistics of all labels `[n, 5]` (class, x, y, w, h; normalised): counts, box shapes, places and sizes."""
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 5)
    figure = _new_figure(max(11, min(0.16 * len(names) + 6, 22)), 10)
    counts, shapes, places, sizes = figure.subplots(2, 2).flat
    numbers = boxes[:, 0].astype(int)
    heights = np.bincount(numbers, minlength=len(names))
    colours = [tuple(v / 255 for v in class_colour(i)[::-1]) for i in range(len(names))]
    bars = counts.bar(range(len(names)), heights, color=colours)
    counts.set(ylabel="instances", title=f"{len(boxes)} instances of {len(names)} classes")
    small = len(names) > 8
    counts.margins(x=0.01)
    counts.set_xticks(
        range(len(names)),
        [_shown(n) for n in names],
        rotation=90 if small else 0,
        fontsize=min(10, max(4, 22 * figure.get_figwidth() / len(names))),
    )
    if not small:
        counts.bar_label(bars)
    _draw_shapes(shapes, boxes, colours)
    for axes, (a, b), title in ((places, (1, 2), "centres"), (sizes, (3, 4), "sizes")):
        axes.hist2d(boxes[:, a], boxes[:, b], bins=50, range=[[0, 1], [0, 1]], cmap="viridis", cmin=1)
        axes.set_aspect("equal")
        axes.set_title(f"box {title}, shares of the image")
    places.invert_yaxis()  # as in the picture: y runs downwards
    places.set(xlabel="x", ylabel="y")
    sizes.set(xlabel="width", ylabel="height")
    _save(figure, Path(path))


def _draw_shapes(axes: Axes, boxes: np.ndarray, colours: Sequence[Any], limit: int = 1000) -> None:
    """At most `limit` boxes, evenly taken from all, laid over one centre."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    some = boxes[np.linspace(0, len(boxes) - 1, min(limit, len(boxes))).astype(int)] if len(boxes) else boxes
    patches = [Rectangle((-w / 2, -h / 2), w, h) for w, h in some[:, 3:5]]
    edges = [colours[int(number)] for number in some[:, 0]]
    axes.add_collection(PatchCollection(patches, facecolor="none", edgecolor=edges, linewidth=0.5))
    axes.set(
        xlim=(-0.5, 0.5), ylim=(-0.5, 0.5), title="box shapes, shares of the image", xlabel="width", ylabel="height"
    )
    axes.set_aspect("equal")


RESULT_COLUMNS = (
    "train/box_loss",
    "train/obj_loss",
    "train/cls_loss",
    "metrics/precision",
    "metrics/recall",
    "val/box_loss",
    "val/obj_loss",
    "val/cls_loss",
    "metrics/mAP_0.5",
    "metrics/mAP_0.5:0.95",
)
"""Columns of `results.csv` that are drawn, in the order of their places."""


def read_results(path: Path) -> dict[str, np.ndarray]:
    """Columns of a `results.csv` as float arrays; fields without a number are NaN. Raises `PlotError`."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = [[field.strip() for field in row] for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlotError(f"{path}: cannot be read as CSV ({error})") from None
    if len(rows) < 2:
        raise PlotError(f"{path}: there is no epoch in it")

    def number(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            return math.nan

    header, body = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    return {name: np.array([number(row[i]) for row in body]) for i, name in enumerate(header)}


def plot_results(csv_path: Path, path: Path | None = None) -> Path:
    """Draws losses and metrics over the epochs from `results.csv` into `results.png` beside it; returns its path."""
    columns = read_results(csv_path)
    missing = [name for name in ("epoch", *RESULT_COLUMNS) if name not in columns]
    if missing:
        raise PlotError(f"{csv_path}: there is no column '{missing[0]}'")
    figure = _new_figure(15, 6.5)
    for axes, name in zip(figure.subplots(2, 5).flat, RESULT_COLUMNS):
        values = columns[name]
        axes.plot(columns["epoch"], values, color="tab:blue", marker=".", linewidth=1.5, markersize=5)
        if len(values) >= 10 and np.isfinite(values).all():
            axes.plot(columns["epoch"], _running_mean(values), color="tab:orange", linestyle=":", linewidth=2)
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        if len(values) == 1:
            axes.set_xlim(columns["epoch"][0] - 1, columns["epoch"][0] + 1)
        axes.grid(alpha=0.3)
        if np.isfinite(values).any():
            axes.set_ylim(bottom=0)
    path = Path(path) if path is not None else Path(csv_path).with_name("results.png")
    _save(figure, path)
    return path


def _running_mean(values: np.ndarray, half: int = 3) -> np.ndarray:
    """Mean over the neighbours up to `half` steps away; at the ends over those that are there."""
    kernel = np.ones(2 * half + 1)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def plot_attention(image: np.ndarray, gains: Sequence[tuple[str, Any, Any]], path: Path) -> None:
    """How attention weighs a picture: a row for each block, spatial gain over the picture, channel gains as bars.

    `image` is uint8 BGR `[h, w, 3]`, `gains` (title, channel `[C]` or None, spatial `[H, W]` or None).
    Red positions are raised, blue ones lowered, against the block's own middle.
    """
    aspect = image.shape[1] / image.shape[0]
    figure = _new_figure(3.2 * aspect + 6.5, 3.2 * len(gains))
    grid = figure.subplots(len(gains), 2, squeeze=False, width_ratios=[3.2 * aspect + 1, 5])
    grey = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
    for (left, right), (title, channel, spatial) in zip(grid, gains):
        left.imshow(grey, cmap="gray", alpha=0.9)
        left.set_axis_off()
        left.set_title(title, loc="left", fontsize=10)
        if spatial is None:
            left.text(0.5, 0.5, "weighs all positions alike", transform=left.transAxes, **_NOTE)
        else:
            large = cv2.resize(np.asarray(spatial, np.float32), image.shape[1::-1], interpolation=cv2.INTER_LINEAR)
            reach = max(float(np.abs(large - np.median(large)).max()), 1e-6)
            middle = float(np.median(large))
            shown = left.imshow(large, cmap="coolwarm", alpha=0.55, vmin=middle - reach, vmax=middle + reach)
            figure.colorbar(shown, ax=left, fraction=0.04, label="gain by position")
        if channel is None:
            right.set_axis_off()
            right.text(0.5, 0.5, "weighs all channels alike", transform=right.transAxes, **_NOTE)
        else:
            ordered = np.sort(np.asarray(channel))[::-1]
            right.bar(range(len(ordered)), ordered, width=1.0, color="tab:blue")
            right.set(xlabel=f"{len(ordered)} channels, sorted", ylabel="gain", xlim=(-0.5, len(ordered) - 0.5))
            right.grid(axis="y", alpha=0.3)
    _save(figure, Path(path), dpi=110)


_NOTE = {"ha": "center", "va": "center", "fontsize": 10, "bbox": {"facecolor": "white", "alpha": 0.8}}
