"""Matching of detections with labels, average precision, the confusion matrix and the result of a validation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from utils.boxes import box_iou

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""The ten IoU thresholds, 0.50 to 0.95, over which mAP50-95 is the mean."""

CONFIDENCE_GRID = np.linspace(0.0, 1.0, 1000)
"""The confidences at which the P, R and F1 curves are sampled."""

_RECALL_GRID = np.linspace(0.0, 1.0, 101)
_SMOOTHING = 0.1  # share of the confidence axis over which the mean F1 is smoothed before its peak is taken


def _class_and_box_tensors(detections, labels) -> tuple[torch.Tensor, torch.Tensor]:
    """Detections `[n, 6]` and labels `[m, 5]` as float tensors on the CPU; `None` means none."""
    found = torch.zeros(0, 6) if detections is None else torch.as_tensor(detections).detach().cpu().float()
    true = torch.zeros(0, 5) if labels is None else torch.as_tensor(labels).detach().cpu().float()
    return found.reshape(-1, 6), true.reshape(-1, 5)


def match_predictions(detections, labels, thresholds: np.ndarray = IOU_THRESHOLDS) -> np.ndarray:
    """Which detections of one image are right, by COCO's greedy rule.

    By falling confidence, each detection takes the free label of its class with the highest IoU of at least
    the threshold; each threshold is matched for itself.

    Args:
        detections: `[n, 6]` x1, y1, x2, y2, confidence, class (tensor or array, any order).
        labels: `[m, 5]` class, x1, y1, x2, y2 in the same pixels.
        thresholds: rising IoU thresholds `[t]`.

    Returns:
        bool `[n, t]`, rows in the order of `detections`.
    """
    found, true = _class_and_box_tensors(detections, labels)
    right = np.zeros((len(found), len(thresholds)), dtype=bool)
    if not len(found) or not len(true):
        return right
    iou = box_iou(found[:, :4], true[:, 1:]).numpy()
    iou = np.where(found[:, 5, None].numpy() == true[None, :, 0].numpy(), iou, -1.0)
    limits = np.asarray(thresholds, dtype=iou.dtype)  # one precision on both sides, so that IoU 0.5 reaches 0.5
    free = np.ones((len(limits), len(true)), dtype=bool)
    order = np.argsort(-found[:, 4].numpy(), kind="stable")
    rows = np.arange(len(limits))
    # Only the few detections that reach the lowest threshold anywhere can take part.
    for index in order[iou.max(axis=1)[order] >= limits.min()]:
        open_iou = np.where(free & (iou[index] >= limits[:, None]), iou[index], -1.0)
        # COCO's own code lets the later of two equally good labels win: search from the end.
        best = len(true) - 1 - open_iou[:, ::-1].argmax(axis=1)
        hit = open_iou[rows, best] >= 0
        right[index] = hit
        free[rows[hit], best[hit]] = False
    return right


def average_precision(recall: np.ndarray, precision: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Area below the precision envelope, sampled at 101 recalls.

    Args:
        recall: `[k]`, rising with falling confidence.
        precision: `[k]` at the same confidences.

    Returns:
        The area; the envelope `[k + 2]` (largest precision at this recall or beyond); its recalls `[k + 2]`.
    """
    recalls = np.concatenate(([0.0], recall, [1.0]))
    envelope = np.concatenate(([1.0], precision, [0.0]))
    envelope = np.maximum.accumulate(envelope[::-1])[::-1]
    heights = np.interp(_RECALL_GRID, recalls, envelope)
    area = float((heights[1:] + heights[:-1]).sum() / (2 * (len(_RECALL_GRID) - 1)))
    return area, envelope, recalls


def _smoothed(values: np.ndarray, fraction: float) -> np.ndarray:
    """Running mean over about twice `fraction` / 2 of the length; the ends are continued with their own value."""
    half = round(len(values) * fraction * 2) // 4
    padded = np.pad(values, half, mode="edge")
    width = 2 * half + 1
    return np.convolve(padded, np.full(width, 1 / width), mode="valid")


@dataclass(frozen=True)
class Curves:
    """What the curve plots need, for the c classes that have labels.

    `precision`, `recall` and `f1` are `[c, 1000]` over `confidence` (IoU 0.5);
    `envelope` is the precision `[c, 1000]` over `recall_grid`.
    """

    confidence: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    recall_grid: np.ndarray
    envelope: np.ndarray


@dataclass(frozen=True)
class ClassResults:
    """Figures of the c classes that have labels; `classes` `[c]` holds their numbers in rising order.

    `precision`, `recall`, `f1`, `tp` and `fp` `[c]` are those at `confidence`, where the smoothed mean F1 over
    the classes peaks (IoU 0.5). `ap` is `[c, t]`.
    """

    classes: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    tp: np.ndarray
    fp: np.ndarray
    ap: np.ndarray
    confidence: float
    curves: Curves


def _confidence_curves(hits: np.ndarray, conf: np.ndarray, instances: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precision, recall and envelope curves, and AP, of one class from its sorted detections.

    Returns `[3, 1000]` curves (precision over confidence, recall over confidence, envelope over recall) and `[t]` AP.
    """
    curves = np.zeros((3, len(CONFIDENCE_GRID)))
    if not len(conf):
        return curves, np.zeros(hits.shape[1])
    true_positives = hits.cumsum(axis=0)
    recall = true_positives / instances
    precision = true_positives / np.arange(1, len(conf) + 1)[:, None]
    # np.interp wants rising abscissae: look both confidences up with their sign turned.
    curves[0] = np.interp(-CONFIDENCE_GRID, -conf, precision[:, 0], left=1.0)
    curves[1] = np.interp(-CONFIDENCE_GRID, -conf, recall[:, 0], left=0.0)
    areas = [average_precision(recall[:, t], precision[:, t]) for t in range(hits.shape[1])]
    _, envelope, recalls = areas[0]
    curves[2] = np.interp(CONFIDENCE_GRID, recalls, envelope)
    return curves, np.array([area for area, _, _ in areas])


def ap_per_class(tp: np.ndarray, conf: np.ndarray, pred_cls: np.ndarray, target_cls: np.ndarray) -> ClassResults:
    """Average precision and the P, R and F1 curves of each class that has labels.

    Args:
        tp: bool `[n, t]` from `match_predictions`, all images together.
        conf: `[n]` confidences.
        pred_cls: `[n]` classes of the detections; those of classes without labels are left out.
        target_cls: `[m]` classes of the labels.
    """
    tp, conf, pred_cls = np.asarray(tp, dtype=bool), np.asarray(conf, dtype=np.float64), np.asarray(pred_cls)
    order = np.argsort(-conf, kind="stable")
    tp, conf, pred_cls = tp[order], conf[order], pred_cls[order]
    classes, instances = np.unique(np.asarray(target_cls), return_counts=True)
    curves = np.zeros((3, len(classes), len(CONFIDENCE_GRID)))
    ap = np.zeros((len(classes), tp.shape[1]))
    for row, (number, count) in enumerate(zip(classes, instances)):
        mine = pred_cls == number
        curves[:, row], ap[row] = _confidence_curves(tp[mine], conf[mine], count)
    precision, recall, envelope = curves
    total = precision + recall
    f1 = np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
    peak = int(_smoothed(f1.mean(axis=0), _SMOOTHING).argmax()) if len(classes) else 0
    at_p, at_r = precision[:, peak], recall[:, peak]
    right = np.round(at_r * instances)
    wrong = np.round(np.divide(right, at_p, out=np.zeros_like(right), where=at_p > 0) - right)
    return ClassResults(
        classes=classes.astype(np.int64),
        precision=at_p,
        recall=at_r,
        f1=f1[:, peak],
        tp=right,
        fp=wrong,
        ap=ap,
        confidence=float(CONFIDENCE_GRID[peak]),
        curves=Curves(CONFIDENCE_GRID, precision, recall, f1, CONFIDENCE_GRID, envelope),
    )


class ConfusionMatrix:
    """Counts of detected against true classes, whatever their class: pairs are made by IoU alone.

    `matrix` is int64 `[nc + 1, nc + 1]`: rows the detected class, columns the true class, the last of each the
    background (last row: labels that nothing found; last column: detections where nothing is).
    """

    def __init__(self, nc: int, conf_thres: float = 0.25, iou_thres: float = 0.45) -> None:
        self.matrix = np.zeros((nc + 1, nc + 1), dtype=np.int64)
        self.nc = nc
        self.conf_thres = conf_thres
        self.iou_thres = iou_thres

    def update(self, detections, labels) -> None:
        """Counts one image: detections `[n, 6]` xyxy, confidence, class; labels `[m, 5]` class, xyxy; or `None`."""
        found, true = _class_and_box_tensors(detections, labels)
        found = found[found[:, 4] > self.conf_thres]
        found_cls, true_cls = found[:, 5].numpy().astype(np.int64), true[:, 0].numpy().astype(np.int64)
        found_open, true_open = np.ones(len(found), dtype=bool), np.ones(len(true), dtype=bool)
        if len(found) and len(true):
            iou = box_iou(found[:, :4], true[:, 1:]).numpy()
            pairs = np.argwhere(iou > self.iou_thres)
            for d, t in pairs[np.argsort(-iou[tuple(pairs.T)], kind="stable")]:
                if found_open[d] and true_open[t]:
                    found_open[d] = true_open[t] = False
                    self.matrix[found_cls[d], true_cls[t]] += 1
        np.add.at(self.matrix, (found_cls[found_open], self.nc), 1)
        np.add.at(self.matrix, (self.nc, true_cls[true_open]), 1)


@dataclass(frozen=True)
class Metrics:
    """The result of a validation. Shares lie in [0, 1]; per-class arrays `[c]` follow `classes`.

    `precision`, `recall`, `map50` and `map50_95` are means over the classes that have labels, 0 without any.
    `loss` holds the mean box, objectness and class loss (zeros when none was asked for),
    `speed` milliseconds an image of pre-processing, inference and NMS.
    """

    precision: float
    recall: float
    map50: float
    map50_95: float
    names: tuple[str, ...]
    classes: np.ndarray
    class_precision: np.ndarray
    class_recall: np.ndarray
    class_ap50: np.ndarray
    class_ap: np.ndarray
    class_instances: np.ndarray
    class_images: np.ndarray
    images: int
    confusion: ConfusionMatrix
    curves: Curves
    loss: tuple[float, float, float] = (0.0, 0.0, 0.0)
    speed: tuple[float, float, float] = (0.0, 0.0, 0.0)
    confidence: float = 0.0

    @property
    def fitness(self) -> float:
        """What training keeps the best of: a tenth mAP50, nine tenths mAP50-95."""
        return 0.1 * self.map50 + 0.9 * self.map50_95

    @property
    def instances(self) -> int:
        """Number of labels."""
        return int(self.class_instances.sum())

    def table(self, *, per_class: bool = True, header: bool = True) -> str:
        """The printed table: all classes, then each class with labels when there are several classes."""
        lines = [TABLE_HEADER] if header else []
        lines.append(
            _table_row("all", self.images, self.instances, self.precision, self.recall, self.map50, self.map50_95)
        )
        if per_class and len(self.names) > 1:
            columns = (self.class_instances, self.class_precision, self.class_recall, self.class_ap50, self.class_ap)
            for number, *figures in zip(self.classes, *columns):
                lines.append(_table_row(self.names[number], self.images, *figures))
        return "\n".join(lines)


TABLE_HEADER = "".join(
    f"{title:>{width}}"
    for title, width in zip(("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"), (22, *[11] * 6))
)


def _table_row(name: str, images: int, instances: int, *shares: float) -> str:
    return f"{name:>22}{images:>11}{instances:>11}" + "".join(f"{share:>11.3g}" for share in shares)


@dataclass
class MetricsCollector:
    """Gathers matches image by image; `result` turns them into `Metrics`."""

    names: tuple[str, ...]
    confusion: ConfusionMatrix = field(init=False)
    images: int = field(default=0, init=False)
    _matches: list[np.ndarray] = field(default_factory=list, init=False)
    _scores: list[np.ndarray] = field(default_factory=list, init=False)
    _targets: list[np.ndarray] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.confusion = ConfusionMatrix(len(self.names))

    def update(self, detections: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds one image: detections `[n, 6]` xyxy, confidence, class; labels `[m, 5]` class, xyxy; same pixels."""
        self.images += 1
        self._matches.append(match_predictions(detections, labels))
        self._scores.append(detections[:, 4:6].detach().cpu().numpy())
        self._targets.append(labels[:, 0].detach().cpu().numpy().astype(np.int64))
        self.confusion.update(detections, labels)

    def result(self, *, loss: Sequence[float] = (0, 0, 0), speed: Sequence[float] = (0, 0, 0)) -> Metrics:
        """The figures of all images so far."""
        matches = np.concatenate([np.zeros((0, len(IOU_THRESHOLDS)), dtype=bool), *self._matches])
        scores = np.concatenate([np.zeros((0, 2), dtype=np.float32), *self._scores])
        targets = np.concatenate([np.zeros(0, dtype=np.int64), *self._targets])
        found = ap_per_class(matches, scores[:, 0], scores[:, 1], targets)
        in_images = np.zeros(len(self.names), dtype=np.int64)
        for classes in self._targets:
            in_images[np.unique(classes)] += 1
        ap = found.ap.mean(axis=1)
        means = [float(column.mean()) if len(column) else 0.0 for column in (found.precision, found.recall)]
        maps = [float(column.mean()) if len(column) else 0.0 for column in (found.ap[:, 0], ap)]
        return Metrics(
            *means,
            *maps,
            names=self.names,
            classes=found.classes,
            class_precision=found.precision,
            class_recall=found.recall,
            class_ap50=found.ap[:, 0],
            class_ap=ap,
            class_instances=np.bincount(targets, minlength=len(self.names))[found.classes],
            class_images=in_images[found.classes],
            images=self.images,
            confusion=self.confusion,
            curves=found.curves,
            loss=tuple(float(value) for value in loss),
            speed=tuple(float(value) for value in speed),
            confidence=found.confidence,
        )


class StageTimer:
    """Wall-clock time of the stages of inference, a CUDA device's queued work included."""

    def __init__(self, stages: int, device: torch.device) -> None:
        self.seconds = [0.0] * stages
        self.last = 0.0
        self._cuda = device if device.type == "cuda" else None

    def _now(self) -> float:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        return time.perf_counter()

    @contextmanager
    def measure(self, stage: int) -> Iterator[None]:
        """Adds the time of the block to `seconds[stage]`; `last` keeps it alone."""
        start = self._now()
        yield
        self.last = self._now() - start
        self.seconds[stage] += self.last

    def milliseconds(self, images: int) -> tuple[float, ...]:
        """Milliseconds an image, by stage."""
        return tuple(1000 * second / max(images, 1) for second in self.seconds)
