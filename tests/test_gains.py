"""What attention does to a map, taken apart into channels and positions."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

from detect import detect
from models.common import CBAM, SE
from models.gains import attention_modules, recorded_gains, split_gain
from models.yolo import DetectionModel
from utils import UsageError
from utils.checkpoint import save_checkpoint
from utils.options import DetectOptions


def test_channel_gates_are_found_exactly():
    x, gates = torch.randn(5, 7, 6), torch.tensor([0.1, 0.5, 1.0, 0.9, 0.3])
    channel, spatial = split_gain(x, x * gates[:, None, None])
    torch.testing.assert_close(channel, gates)
    assert spatial is None


def test_spatial_gates_are_found_up_to_their_median():
    x, gates = torch.randn(5, 7, 6), torch.rand(7, 6) + 0.1
    channel, spatial = split_gain(x, x * gates)
    assert channel is None
    torch.testing.assert_close(spatial / spatial.mean(), gates / gates.mean())


def test_products_are_taken_apart_and_zeros_forgiven():
    x = torch.randn(9, 8, 8)
    x[3] = 0.0
    x[:, 2, 2] = 0.0
    a, b = torch.rand(9) + 0.2, torch.rand(8, 8) + 0.2
    channel, spatial = split_gain(x, x * a[:, None, None] * b)
    live = [i for i in range(9) if i != 3]
    # medians over positions differ by the few zeros, so the channel gains agree up to a little
    torch.testing.assert_close(channel[live] / channel[0], a[live] / a[0], rtol=0.05, atol=0)
    place = torch.ones(8, 8, dtype=torch.bool)
    place[2, 2] = False
    torch.testing.assert_close(spatial[place] / spatial[0, 0], b[place] / b[0, 0], rtol=0.05, atol=0)


def test_a_block_that_does_nothing_has_no_gain():
    x = torch.randn(4, 5, 5)
    assert split_gain(x, x) == (None, None)


def test_every_block_of_a_model_is_recorded_once_a_pass():
    model = DetectionModel("models/attention/yolov5n-cbam.yaml", attention=["se@head"]).eval()
    assert [type(m) for m in attention_modules(model).values()] == [CBAM] * 4 + [SE] * 3
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad(), recorded_gains(model) as gains:
        model(images)
    assert [g.block for g in gains] == ["CBAM"] * 4 + ["SE"] * 3
    assert gains[0].name == "model.3" and gains[0].spatial.shape == (16, 16) and len(gains[0].channel) == 32
    assert all(g.spatial is None for g in gains[4:])
    with torch.no_grad():
        model(images)
    assert len(gains) == 7  # the hooks are gone


def weights_of(model: DetectionModel, path) -> str:
    save_checkpoint(
        path,
        {"model": model.state_dict(), "ema": None, "names": list(model.names), "model_file": model.model_file},
    )
    return str(path)


def test_detect_draws_a_sheet_for_each_picture(tmp_path):
    weights = weights_of(DetectionModel("models/attention/yolov5n-cbam.yaml", nc=2), tmp_path / "w.pt")
    picture = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), picture)
    options = DetectOptions(
        weights=weights,
        source=str(tmp_path / "a.png"),
        imgsz=(64,),
        visualize_attention=True,
        nosave=True,
        project=str(tmp_path / "runs"),
    )
    detect(options)
    sheet = cv2.imread(str(tmp_path / "runs" / "exp" / "attention" / "a.png"))
    assert sheet.shape[0] > 1000 and sheet.std() > 10


def test_a_model_without_attention_says_so(tmp_path):
    weights = weights_of(DetectionModel("models/yolov5n.yaml", nc=2), tmp_path / "w.pt")
    with pytest.raises(UsageError, match="no attention block"):
        detect(DetectOptions(weights=weights, source=str(tmp_path), visualize_attention=True))
