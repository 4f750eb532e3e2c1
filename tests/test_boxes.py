"""Boxes: conversions, overlap, NMS and mapping back, by hand and by property."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import load_json

from utils import ROOT
from utils.augmentations import letterbox
from utils.boxes import box_iou, clip_boxes, nms, paired_iou, scale_boxes, xywh2xyxy, xyxy2xywh

LETTERBOX = load_json(ROOT / "tests" / "data" / "figures.json")["letterbox"]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_conversion_by_hand(make):
    corners = make([[1.0, 2.0, 5.0, 10.0, 0.75]])
    centre = xyxy2xywh(corners)
    assert centre.tolist() == [[3.0, 6.0, 4.0, 8.0, 0.75]]
    assert xywh2xyxy(centre).tolist() == corners.tolist()
    assert type(centre) is type(corners)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-1000, 1000, width=32)] * 4), min_size=1, max_size=20))
def test_conversions_are_inverse(rows):
    boxes = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(xywh2xyxy(xyxy2xywh(boxes)), boxes, atol=1e-9, rtol=1e-9)


def test_iou_by_hand():
    a = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 1.0, 1.0]])
    b = torch.tensor([[1.0, 1.0, 3.0, 3.0], [0.0, 0.0, 2.0, 2.0], [5.0, 5.0, 6.0, 6.0]])
    assert box_iou(a, b).flatten().tolist() == pytest.approx([1 / 7, 1, 0, 0, 1 / 4, 0], abs=1e-6)
    assert box_iou(torch.zeros(0, 4), b).shape == (0, 3)


def test_giou_diou_by_hand():
    """Unit squares side by side with a gap of one: hull 3 x 1, centres 2 apart, diagonal² 10."""
    a, b = torch.tensor([[0.5, 0.5, 1.0, 1.0]]), torch.tensor([[2.5, 0.5, 1.0, 1.0]])
    assert paired_iou(a, b, "giou").item() == pytest.approx(-1 / 3, abs=1e-5)
    assert paired_iou(a, b, "diou").item() == pytest.approx(-4 / 10, abs=1e-5)
    assert paired_iou(a, b, "ciou").item() == pytest.approx(-4 / 10, abs=1e-5)  # equal shapes
    with pytest.raises(ValueError, match="unknown kind"):
        paired_iou(a, b, "xiou")


@pytest.mark.parametrize(
    "case", LETTERBOX, ids=lambda c: f"{c['in']}-{c['new_shape']}-{'auto' if c['auto'] else 'fix'}"
)
def test_mapping_back_is_yolov5s(case):
    box = torch.tensor([[10.0, 12.0, 50.0, 300.0]])
    out = case["out"][:2]
    assert scale_boxes(box, tuple(out), tuple(case["in"]))[0].tolist() == pytest.approx(
        case["unscaled_box_10_12_50_300"], abs=1e-4
    )


def test_mapping_back_undoes_the_letterbox():
    image = np.zeros((300, 500, 3), np.uint8)
    padded, ratio, pad = letterbox(image, (320, 416))
    box = torch.tensor([[100.0, 50.0, 400.0, 250.0]])
    inside = box * torch.tensor([ratio[0], ratio[1], ratio[0], ratio[1]]) + torch.tensor([*pad, *pad])
    back = scale_boxes(inside, padded.shape[:2], image.shape[:2], ((ratio[1], ratio[0]), pad))
    torch.testing.assert_close(back, box, atol=0.5, rtol=0)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_clipping_leaves_its_argument_alone(make):
    boxes = make([[-5.0, -6.0, 700.0, 500.0, 0.3]])
    assert clip_boxes(boxes, (480, 640)).tolist() == [[0.0, 0.0, 640.0, 480.0, pytest.approx(0.3)]]
    assert boxes[0, 0] == -5


def prediction(*rows) -> torch.Tensor:
    """Rows (x, y, w, h, objectness, class scores…) of one image."""
    return torch.tensor([rows])


def test_nms_by_hand():
    found = nms(
        prediction(
            [50, 50, 20, 20, 0.9, 0.9, 0.1],
            [51, 50, 20, 20, 0.8, 0.9, 0.1],  # same object
            [51, 50, 20, 20, 0.8, 0.1, 0.9],  # same place, other class
            [150, 50, 20, 20, 0.9, 0.2, 0.3],  # 0.27
            [250, 50, 20, 20, 0.2, 0.9, 0.9],  # objectness too low
        )
    )[0]
    assert found[:, 5].tolist() == [0, 1, 1]
    assert found[:, 4].tolist() == pytest.approx([0.81, 0.72, 0.27])
    assert found[0, :4].tolist() == [40, 40, 60, 60]


def test_nms_options():
    both = prediction([50, 50, 20, 20, 1.0, 0.9, 0.8], [51, 50, 20, 20, 1.0, 0.7, 0.1])
    assert nms(both, multi_label=True)[0][:, 5].tolist() == [0, 1]
    assert nms(both, agnostic=True, multi_label=True)[0][:, 5].tolist() == [0]
    assert nms(both, classes=[1], multi_label=True)[0][:, 5].tolist() == [1]
    assert len(nms(both, classes=[1])[0]) == 0  # class 1 is nobody's best
    assert len(nms(both, multi_label=True, max_det=1)[0]) == 1
    assert len(nms(both, iou_thres=0.95)[0]) == 2


def test_nms_without_candidates():
    found = nms(torch.zeros(2, 10, 7))
    assert [f.shape for f in found] == [(0, 6), (0, 6)]
    assert nms(torch.zeros(1, 0, 7))[0].shape == (0, 6)


def test_nms_is_per_image():
    one = prediction([50, 50, 20, 20, 0.9, 0.9])
    assert [len(f) for f in nms(torch.cat((one, torch.zeros_like(one), one)))] == [1, 0, 1]


def test_nms_result_is_sorted_and_spread():
    generator = torch.Generator().manual_seed(0)
    boxes = torch.rand(1, 400, 8, generator=generator)
    boxes[..., :4] *= torch.tensor([600.0, 600.0, 80.0, 80.0])
    found = nms(boxes, conf_thres=0.1, iou_thres=0.5, max_det=1000)[0]
    assert (found[:-1, 4] >= found[1:, 4]).all()
    for cls in range(3):
        iou = box_iou(found[found[:, 5] == cls, :4], found[found[:, 5] == cls, :4])
        assert (iou - torch.eye(len(iou))).max() <= 0.5 + 1e-5


def test_a_thousand_identical_boxes_leave_one():
    same = torch.tensor([[[50.0, 50.0, 20.0, 20.0, 0.9, 0.9]]]).repeat(1, 1000, 1)
    assert len(nms(same)[0]) == 1
