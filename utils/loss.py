"""Target assignment and the detection loss of YOLOv5.

Each target is given to the anchors of every map whose width and height ratios are below `anchor_t`, in its own
grid cell and in the two neighbouring cells it is nearest to. The loss has three parts: 1 - CIoU of the assigned
boxes, binary cross-entropy of objectness against that IoU at every position, and binary cross-entropy of classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from utils.boxes import paired_iou
from utils.config import Hyperparameters

BALANCE = {3: (4.0, 1.0, 0.4)}
"""Weights of the objectness loss by map, fine to coarse, for three maps."""
BALANCE_OTHERWISE = (4.0, 1.0, 0.25, 0.06, 0.02)

NEIGHBOUR_REACH = 0.5
"""A target nearer than this (in cells) to a border of its cell is given to the cell behind it too."""


@dataclass(frozen=True)
class Assignment:
    """Targets assigned to one map: position of each (image, anchor, row, column), box in cells, class."""

    image: torch.Tensor
    anchor: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    box: torch.Tensor  # [n, 4] centre relative to the cell, size in cells
    anchor_size: torch.Tensor  # [n, 2]
    cls: torch.Tensor


def assign_targets(targets: torch.Tensor, anchors: torch.Tensor, grid: tuple[int, int], anchor_t: float) -> Assignment:
    """Assign targets `[N, 6]` (image, class, x, y, w, h normalised) to one map.

    `anchors` `[A, 2]` in cells, `grid` (rows, columns).
    """
    ny, nx = grid
    gain = targets.new_tensor([nx, ny, nx, ny])
    box = targets[:, 2:6] * gain
    ratio = box[None, :, 2:4] / anchors[:, None]
    anchor, target = (torch.maximum(ratio, 1 / ratio).amax(2) < anchor_t).nonzero(as_tuple=True)
    box, image, cls = box[target], targets[target, 0].long(), targets[target, 1].long()

    centre = box[:, 0:2]
    opposite = gain[:2] - centre  # distance to the far border
    near = (centre % 1 < NEIGHBOUR_REACH) & (centre > 1)
    far = (opposite % 1 < NEIGHBOUR_REACH) & (opposite > 1)
    use = torch.stack((torch.ones_like(near[:, 0]), near[:, 0], near[:, 1], far[:, 0], far[:, 1]))
    shift = centre.new_tensor([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1]]) * NEIGHBOUR_REACH
    direction, entry = use.nonzero(as_tuple=True)

    cell = (centre[entry] - shift[direction]).long()
    relative = torch.cat((centre[entry] - cell, box[entry, 2:4]), 1)
    return Assignment(
        image[entry],
        anchor[entry],
        cell[:, 1].clamp(0, ny - 1),
        cell[:, 0].clamp(0, nx - 1),
        relative,
        anchors[anchor[entry]],
        cls[entry],
    )


def binary_cross_entropy(
    logits: torch.Tensor, wanted: torch.Tensor, pos_weight: float, gamma: float, alpha: float = 0.25
) -> torch.Tensor:
    """Mean binary cross-entropy of logits; with `gamma` > 0 its focal form (arXiv:1708.02002)."""
    weight = None if pos_weight == 1.0 else logits.new_tensor([pos_weight])
    if gamma <= 0:
        return F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight)
    loss = F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction="none")
    p = logits.sigmoid()
    p_right = wanted * p + (1 - wanted) * (1 - p)
    alpha_factor = wanted * alpha + (1 - wanted) * (1 - alpha)
    return (loss * alpha_factor * (1 - p_right) ** gamma).mean()


class DetectionLoss:
    """Loss of raw maps against targets.

    `anchors` `[maps, A, 2]` in units of the stride, `hyp` with gains already scaled for the model
    (`Hyperparameters.scaled`).
    """

    def __init__(self, anchors: torch.Tensor, nc: int, hyp: Hyperparameters):
        self.anchors = anchors.detach().clone()
        self.nc = nc
        self.hyp = hyp
        self.balance = BALANCE.get(len(anchors), BALANCE_OTHERWISE)

    def __call__(self, raw: Sequence[torch.Tensor], targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Total loss (sum of the parts times the batch size) and the detached parts `[3]`: box, objectness, class.

        `raw` are maps `[B, A, ny, nx, 5 + nc]`, `targets` `[N, 6]` image, class, x, y, w, h normalised.
        """
        device = raw[0].device
        box_loss, obj_loss, cls_loss = (torch.zeros((), device=device) for _ in range(3))
        hyp = self.hyp
        for y, anchors, balance in zip(raw, self.anchors, self.balance):
            wanted = torch.zeros(y.shape[:4], dtype=y.dtype, device=device)
            found = assign_targets(targets, anchors, (y.shape[2], y.shape[3]), hyp.anchor_t)
            if found.image.numel():
                position = found.image, found.anchor, found.row, found.column
                centre, size, _, scores = y[position].split((2, 2, 1, self.nc), 1)
                predicted = torch.cat((centre.sigmoid() * 2 - 0.5, (size.sigmoid() * 2) ** 2 * found.anchor_size), 1)
                iou = paired_iou(predicted, found.box, "ciou")
                box_loss = box_loss + (1 - iou).mean()
                # several targets can claim one position: the last one stays, as with YOLOv5
                wanted[position] = iou.detach().clamp(0).to(wanted.dtype)
                if self.nc > 1:
                    cls_loss = cls_loss + self._class_loss(scores, found.cls)
            obj_loss = obj_loss + balance * binary_cross_entropy(y[..., 4], wanted, hyp.obj_pw, hyp.fl_gamma)
        parts = torch.stack((box_loss * hyp.box, obj_loss * hyp.obj, cls_loss * hyp.cls))
        return parts.sum() * raw[0].shape[0], parts.detach()

    def _class_loss(self, scores: torch.Tensor, cls: torch.Tensor) -> torch.Tensor:
        smoothing = self.hyp.label_smoothing
        wanted = torch.full_like(scores, 0.5 * smoothing)
        wanted.scatter_(1, cls[:, None], 1 - 0.5 * smoothing)
        return binary_cross_entropy(scores, wanted, self.hyp.cls_pw, self.hyp.fl_gamma)
