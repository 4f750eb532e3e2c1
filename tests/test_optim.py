"""Parameter groups, schedule and EMA against YOLOv5's figures and hand-computed values."""

from __future__ import annotations

import pytest
import torch
from reference import load_json
from torch import nn

from models.yolo import DetectionModel
from utils import ROOT
from utils.optim import ModelEma, Schedule, build_optimizer, decayed_for_batch, parameter_groups

FIGURES = load_json(ROOT / "tests" / "data" / "figures.json")


def schedule(**changes) -> Schedule:
    values = dict(
        epochs=100, steps_per_epoch=50, batch_size=16, lr0=0.01, lrf=0.01, momentum=0.937,
        warmup_epochs=3.0, warmup_momentum=0.8, warmup_bias_lr=0.1,
    )  # fmt: skip
    return Schedule(**{**values, **changes})


def test_groups_are_yolov5s():
    groups = parameter_groups(DetectionModel("models/yolov5n.yaml"), 0.0005)
    found = [
        {"n": len(g["params"]), "numel": sum(p.numel() for p in g["params"]), "weight_decay": g["weight_decay"]}
        for g in groups
    ]
    assert found == FIGURES["optimizer_groups"]


def test_every_parameter_is_in_one_group():
    model = DetectionModel("models/attention/yolov5n-cbam.yaml")
    grouped = [id(p) for g in parameter_groups(model, 0.1) for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_schedule_by_hand():
    s = schedule()
    assert s.warmup_steps == 150
    start = s.at(0)
    assert (start.lr, start.bias_lr, start.momentum, start.accumulate) == (0.0, 0.1, 0.8, 1)
    half = s.at(75)  # epoch 1: factor 0.99 · 0.99 + 0.01
    rate = 0.01 * (0.99 * 0.99 + 0.01)
    assert half.lr == pytest.approx(rate / 2)
    assert half.bias_lr == pytest.approx((0.1 + rate) / 2)
    assert half.momentum == pytest.approx((0.8 + 0.937) / 2)
    assert half.accumulate == 2  # 1 … 4, half way 2.5, rounded to even as NumPy does
    after = s.at(151)
    assert after.lr == after.bias_lr == pytest.approx(0.01 * (0.97 * 0.99 + 0.01))
    assert after.accumulate == 4 and after.momentum == 0.937
    assert s.at(99 * 50).lr == pytest.approx(0.01 * (0.01 * 0.99 + 0.01))


def test_short_data_sets_warm_up_for_100_batches():
    assert schedule(steps_per_epoch=5).warmup_steps == 100
    assert schedule(warmup_epochs=0).at(0).lr == 0.01


def test_cosine_by_hand():
    s = schedule(cosine=True)
    assert s.factor(0) == 1
    assert s.factor(50) == pytest.approx((1 + 0.01) / 2)
    assert s.factor(100) == pytest.approx(0.01)


@pytest.mark.parametrize(("batch", "accumulate"), [(1, 64), (16, 4), (24, 3), (64, 1), (256, 1)])
def test_accumulation_to_the_nominal_batch(batch, accumulate):
    assert schedule(batch_size=batch).at(10_000).accumulate == accumulate
    assert decayed_for_batch(0.0005, batch) == pytest.approx(0.0005 * batch * accumulate / 64)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_settings_reach_the_optimizer(name):
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    optimizer = build_optimizer(model, name, 0.01, 0.9, 0.1)
    assert type(optimizer).__name__ == name
    schedule().at(75).apply(optimizer)
    wanted = schedule().at(75)
    assert [g["lr"] for g in optimizer.param_groups] == [wanted.bias_lr, wanted.lr, wanted.lr]
    for group in optimizer.param_groups:
        assert group.get("momentum", group.get("betas", [None])[0]) == wanted.momentum
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.1, 0.0]


def test_ema_decay_is_yolov5s():
    ema = ModelEma(nn.Linear(1, 1))
    for updates, decay in FIGURES["ema_decay"].items():
        assert ema.decay_at(int(updates)) == pytest.approx(decay, rel=1e-12)


def test_ema_by_hand():
    model = nn.BatchNorm1d(1)
    ema = ModelEma(model, updates=1999)
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.running_mean.fill_(8.0)
        model.num_batches_tracked.fill_(5)
    ema.update(model)
    d = FIGURES["ema_decay"]["2000"]
    assert ema.model.weight.item() == pytest.approx(d * 1 + (1 - d) * 3)
    assert ema.model.running_mean.item() == pytest.approx((1 - d) * 8)
    assert ema.model.num_batches_tracked.item() == 5
    assert model.weight.item() == 3.0 and not ema.model.weight.requires_grad
