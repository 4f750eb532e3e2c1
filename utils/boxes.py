"""Boxes: conversions between their forms, overlap, non-maximum suppression, mapping back to the original image.

`xywh` is centre and size, `xyxy` two opposite corners. Conversions take torch tensors and numpy arrays alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
import torchvision

Array = TypeVar("Array", torch.Tensor, np.ndarray)

CLASS_OFFSET = 7680
"""Pixels by which NMS shifts the boxes of each class so that classes do not meet: above any image size in use."""

MAX_NMS = 30_000
"""Most candidates that NMS looks at in an image, the best by score."""


def _copy(x: Array) -> Array:
    return x.clone() if isinstance(x, torch.Tensor) else np.array(x, copy=True)


def xyxy2xywh(x: Array) -> Array:
    """Corners `[..., 4+]` to centre and size; further columns are kept."""
    y = _copy(x)
    y[..., 0:2] = (x[..., 0:2] + x[..., 2:4]) / 2
    y[..., 2:4] = x[..., 2:4] - x[..., 0:2]
    return y


def xywh2xyxy(x: Array) -> Array:
    """Centre and size `[..., 4+]` to corners; further columns are kept."""
    y = _copy(x)
    half = x[..., 2:4] / 2
    y[..., 0:2] = x[..., 0:2] - half
    y[..., 2:4] = x[..., 0:2] + half
    return y


def box_iou(a: torch.Tensor, b: torch.Tensor, eps: float = 1e-7) -> torch.Tensor:
    """IoU of every box in `a` `[N, 4]` with every box in `b` `[M, 4]`, both xyxy: `[N, M]`."""
    overlap = (torch.min(a[:, None, 2:4], b[None, :, 2:4]) - torch.max(a[:, None, 0:2], b[None, :, 0:2])).clamp(min=0)
    intersection = overlap.prod(2)
    area_a = (a[:, 2:4] - a[:, 0:2]).prod(1)
    area_b = (b[:, 2:4] - b[:, 0:2]).prod(1)
    return intersection / (area_a[:, None] + area_b[None, :] - intersection + eps)


def paired_iou(a: torch.Tensor, b: torch.Tensor, kind: str = "iou", eps: float = 1e-7) -> torch.Tensor:
    """Overlap of pairs of boxes `[..., 4]` in xywh: `[...]`.

    `kind` is `iou`, `giou` (arXiv:1902.09630), `diou` or `ciou` (arXiv:1911.08287). The weight of CIoU's
    aspect term is a constant for the gradient, as in that paper.
    """
    a_size, b_size = a[..., 2:4], b[..., 2:4]
    a_low, a_high = a[..., 0:2] - a_size / 2, a[..., 0:2] + a_size / 2
    b_low, b_high = b[..., 0:2] - b_size / 2, b[..., 0:2] + b_size / 2
    intersection = (torch.min(a_high, b_high) - torch.max(a_low, b_low)).clamp(min=0).prod(-1)
    union = a_size.prod(-1) + b_size.prod(-1) - intersection + eps
    iou = intersection / union
    if kind == "iou":
        return iou
    hull = torch.max(a_high, b_high) - torch.min(a_low, b_low)
    if kind == "giou":
        hull_area = hull.prod(-1) + eps
        return iou - (hull_area - union) / hull_area
    distance = (a[..., 0:2] - b[..., 0:2]).square().sum(-1) / (hull.square().sum(-1) + eps)
    if kind == "diou":
        return iou - distance
    if kind != "ciou":
        raise ValueError(f"unknown kind of IoU: {kind!r}")
    aspect = (4 / math.pi**2) * (
        torch.atan(b_size[..., 0] / b_size[..., 1]) - torch.atan(a_size[..., 0] / a_size[..., 1])
    ).square()
    with torch.no_grad():
        weight = aspect / (aspect - iou + (1 + eps))
    return iou - (distance + aspect * weight)


def _candidates(
    prediction: torch.Tensor, conf_thres: float, classes: Sequence[int] | None, multi_label: bool
) -> torch.Tensor:
    """Boxes of one image above the threshold, `[n, 6]` (xyxy, score, class), highest score first."""
    prediction = prediction[prediction[:, 4] > conf_thres]
    scores = prediction[:, 5:] * prediction[:, 4:5]
    if multi_label:
        row, column = (scores > conf_thres).nonzero(as_tuple=True)
    else:
        best, column = scores.max(1)
        row = (best > conf_thres).nonzero(as_tuple=True)[0]
        column = column[row]
    if classes is not None:
        wanted = torch.isin(column, torch.as_tensor(list(classes), dtype=column.dtype, device=column.device))
        row, column = row[wanted], column[wanted]
    score = scores[row, column]
    order = score.argsort(descending=True, stable=True)[:MAX_NMS]
    row, column, score = row[order], column[order], score[order]
    boxes = xywh2xyxy(prediction[row, :4])
    return torch.cat((boxes, score[:, None], column[:, None].to(boxes.dtype)), 1)


def nms(
    predictions: torch.Tensor,
    *,
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    classes: Sequence[int] | None = None,
    agnostic: bool = False,
    multi_label: bool = False,
    max_det: int = 300,
) -> list[torch.Tensor]:
    """Non-maximum suppression of decoded predictions `[B, N, 5 + nc]` (xywh px, objectness, class scores).

    Returns one `[n, 6]` tensor an image: xyxy, score (objectness · class score), class; highest score first.
    With `multi_label` a box may count for several classes, `agnostic` lets boxes of different classes suppress
    each other, `classes` keeps those classes only. All candidates are treated, however long it takes.
    """
    multi_label = multi_label and predictions.shape[2] > 6
    results = []
    for prediction in predictions:
        found = _candidates(prediction, conf_thres, classes, multi_label)
        boxes = found[:, :4] if agnostic else found[:, :4] + found[:, 5:6] * CLASS_OFFSET
        results.append(found[torchvision.ops.nms(boxes, found[:, 4], iou_thres)[:max_det]])
    return results


def clip_boxes(boxes: Array, shape: tuple[int, int]) -> Array:
    """Boxes `[..., 4+]` xyxy cut to an image of `shape` (height, width); a new array."""
    clipped = _copy(boxes)
    for columns, limit in ((slice(0, 4, 2), shape[1]), (slice(1, 4, 2), shape[0])):
        part = boxes[..., columns]
        clipped[..., columns] = part.clamp(0, limit) if isinstance(part, torch.Tensor) else part.clip(0, limit)
    return clipped


def scale_boxes(
    boxes: Array,
    from_shape: tuple[int, int],
    to_shape: tuple[int, int],
    ratio_pad: tuple[tuple[float, float], tuple[float, float]] | None = None,
) -> Array:
    """Boxes `[n, 4+]` xyxy from pixels of the network's input back to pixels of the original image, clipped to it.

    Shapes are (height, width). `ratio_pad` is ((ratio_h, ratio_w), (pad_w, pad_h)) of the letterbox;
    without it a centred letterbox of the one ratio that fits is assumed.
    """
    if ratio_pad is None:
        gain = min(from_shape[0] / to_shape[0], from_shape[1] / to_shape[1])
        pad = (from_shape[1] - to_shape[1] * gain) / 2, (from_shape[0] - to_shape[0] * gain) / 2
    else:
        gain, pad = ratio_pad[0][0], ratio_pad[1]
    scaled = _copy(boxes)
    scaled[..., 0:4:2] = (boxes[..., 0:4:2] - pad[0]) / gain
    scaled[..., 1:4:2] = (boxes[..., 1:4:2] - pad[1]) / gain
    return clip_boxes(scaled, to_shape)
