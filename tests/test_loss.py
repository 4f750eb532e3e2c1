"""Target assignment by hand, and properties of the loss. Parity with YOLOv5's numbers is in test_parity.py."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from utils.config import Hyperparameters
from utils.loss import DetectionLoss, assign_targets, binary_cross_entropy


def cells(targets, anchors=((2.0, 2.0),), grid=(4, 4), anchor_t=4.0) -> set[tuple[int, int, int]]:
    """(anchor, row, column) of every assignment."""
    found = assign_targets(torch.tensor(targets), torch.tensor(anchors), grid, anchor_t)
    return set(zip(found.anchor.tolist(), found.row.tolist(), found.column.tolist()))


def target(x: float, y: float, w: float = 0.5, h: float = 0.5) -> list[float]:
    return [0, 0, x, y, w, h]


def test_a_target_takes_its_cell_and_the_two_nearest():
    # 4 x 4 cells; centre at (1.3, 2.8): nearer to the left and to the lower neighbour
    assert cells([target(1.3 / 4, 2.8 / 4)]) == {(0, 2, 1), (0, 2, 0), (0, 3, 1)}
    # centre at (2.6, 1.2): right and upper
    assert cells([target(2.6 / 4, 1.2 / 4)]) == {(0, 1, 2), (0, 1, 3), (0, 0, 2)}


def test_no_neighbour_outside_the_map():
    assert cells([target(0.3 / 4, 0.3 / 4)]) == {(0, 0, 0)}
    assert cells([target(3.7 / 4, 3.7 / 4)]) == {(0, 3, 3)}


def test_a_centre_in_the_middle_has_no_nearest_neighbour():
    assert cells([target(1.5 / 4, 1.5 / 4)]) == {(0, 1, 1)}


def test_anchors_by_ratio():
    anchors = ((1.0, 1.0), (2.0, 2.0), (9.0, 2.0))
    # 2 x 2 cells: ratios 2, 1, 4.5
    assert {a for a, _, _ in cells([target(1.5 / 4, 1.5 / 4)], anchors)} == {0, 1}
    assert {a for a, _, _ in cells([target(1.5 / 4, 1.5 / 4)], anchors, anchor_t=1.9)} == {1}


def test_boxes_are_relative_to_their_cell():
    found = assign_targets(
        torch.tensor([target(1.3 / 4, 2.8 / 4, 0.25, 0.75)]), torch.tensor([[2.0, 2.0]]), (4, 4), 4.0
    )
    for row, column, box in zip(found.row, found.column, found.box):
        assert (box[:2] + torch.stack((column, row))).tolist() == pytest.approx([1.3, 2.8], rel=1e-5)
        assert box[2:].tolist() == [1.0, 3.0]


def test_non_square_maps():
    # 2 rows, 6 columns: x in columns, y in rows
    assert cells([target(4.5 / 6, 0.5 / 2, 2 / 6, 1.0)], grid=(2, 6)) == {(0, 0, 4)}


def one_map(nc: int, size: int = 4) -> torch.Tensor:
    return torch.zeros(1, 1, size, size, 5 + nc)


def criterion(nc: int, **hyp) -> DetectionLoss:
    return DetectionLoss(torch.tensor([[[2.0, 2.0]]]), nc, Hyperparameters(**hyp))


def test_perfect_prediction_by_hand():
    """One target in the middle of a cell with its anchor's size: CIoU 1, objectness wanted 1 there, 0 elsewhere."""
    raw = one_map(2)
    raw[0, 0, :, :, 4] = -20
    raw[0, 0, 1, 1, 4:] = torch.tensor([20.0, -20.0, 20.0])
    targets = torch.tensor([[0, 1, 1.5 / 4, 1.5 / 4, 0.5, 0.5]])
    total, parts = criterion(2)([raw], targets)
    assert parts.tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    # with zeros everywhere: box still right, objectness and classes at log 2
    _, parts = criterion(2)([one_map(2)], targets)
    # one map weighs 4.0 in objectness
    assert parts.tolist() == pytest.approx([0, 4 * math.log(2), 0.5 * math.log(2)], abs=1e-6)


def test_total_is_the_sum_times_the_batch():
    raw = torch.randn(3, 1, 4, 4, 7)
    targets = torch.tensor([[2, 1, 0.4, 0.4, 0.5, 0.5], [0, 0, 0.7, 0.2, 0.4, 0.6]])
    total, parts = criterion(2)([raw], targets)
    assert total.item() == pytest.approx(3 * parts.sum().item(), rel=1e-6)
    assert not parts.requires_grad


def test_one_class_has_no_class_loss():
    _, parts = criterion(1)([torch.randn(1, 1, 4, 4, 6)], torch.tensor([[0, 0, 0.4, 0.4, 0.5, 0.5]]))
    assert parts[2] == 0


def test_no_targets_leave_gradients_finite():
    raw = torch.randn(2, 1, 4, 4, 7, requires_grad=True)
    total, parts = criterion(2)([raw], torch.zeros(0, 6))
    total.backward()
    assert parts[0] == parts[2] == 0 and torch.isfinite(raw.grad).all() and raw.grad[..., 4].abs().sum() > 0


def test_focal_by_hand():
    """Probability 0.8 where 1 is wanted: 0.25 · 0.2^2 · -log 0.8."""
    logit = torch.tensor([math.log(0.8 / 0.2)])
    loss = binary_cross_entropy(logit, torch.ones(1), 1.0, gamma=2.0)
    assert loss.item() == pytest.approx(0.25 * 0.04 * -math.log(0.8), rel=1e-5)


def test_positive_weight_by_hand():
    logit = torch.tensor([0.0, 0.0])
    loss = binary_cross_entropy(logit, torch.tensor([1.0, 0.0]), 3.0, gamma=0.0)
    assert loss.item() == pytest.approx(2 * math.log(2))


def test_label_smoothing_by_hand():
    raw = one_map(2)
    raw[0, 0, 1, 1, 5:] = torch.tensor([1.0, -1.0])
    _, parts = criterion(2, label_smoothing=0.2)([raw], torch.tensor([[0, 0, 1.5 / 4, 1.5 / 4, 0.5, 0.5]]))
    wanted = F.binary_cross_entropy(torch.tensor([1.0, -1.0]).sigmoid(), torch.tensor([0.9, 0.1]))
    assert parts[2].item() == pytest.approx(0.5 * wanted.item(), rel=1e-5)


def test_gradient_descent_finds_the_target():
    raw = torch.zeros(1, 1, 4, 4, 7, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.1)
    targets = torch.tensor([[0, 1, 1.4 / 4, 2.6 / 4, 0.3, 0.7]])
    for _ in range(300):
        optimizer.zero_grad()
        criterion(2)([raw], targets)[0].backward()
        optimizer.step()
    y = raw.detach()[0, 0, 2, 1].sigmoid()
    assert (y[:2] * 2 - 0.5).tolist() == pytest.approx([0.4, 0.6], abs=0.02)
    assert ((y[2:4] * 2) ** 2 * 2).tolist() == pytest.approx([1.2, 2.8], abs=0.05)
    assert y[4] > 0.9 and y[6] > 0.9 > 0.1 > y[5]
