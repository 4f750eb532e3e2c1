"""The audit finds every operation that alerts and the module it comes from, and nothing in what this project ships."""

from __future__ import annotations

import random
import runpy
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_determinism import PutInBackward
from torch import nn

from models.yolo import BLOCKS, DetectionModel
from utils import ROOT
from utils.audit import (
    ALERTING,
    audit,
    by_real_run,
    by_table,
    find_alerts,
    format_alerts,
    operations_of,
    verdict,
)
from utils.config import load_model_file
from utils.determinism import DeterministicMode, configure
from utils.swap import swap_modules

ATTENTION = sorted(name for name, (_, rule) in BLOCKS.items() if rule == "attention")
MODEL_FILES = sorted((ROOT / "models").glob("**/*.yaml"))


def passes(function):
    """Work that runs a function of a map forward and backward."""

    def work():
        x = torch.randn(2, 8, 6, 6, requires_grad=True)
        function(x).sum().backward()

    return work


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (nn.AdaptiveMaxPool2d(1), ["AdaptiveMaxPool2d"]),
        (nn.AdaptiveAvgPool2d((None, 1)), ["AdaptiveAvgPool2d"]),
        (nn.AdaptiveAvgPool2d(1), []),  # PyTorch turns this one into a mean
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ["bilinear interpolation"]),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), ["bicubic interpolation"]),
        (lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True), ["antialiased bilinear interpolation"]),
        (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), []),
        (nn.ReflectionPad2d(1), ["ReflectionPad2d"]),
        (nn.MaxPool2d(3, 1, 1), []),
        (lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2), align_corners=False), ["grid_sample"]),
        (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), ["MaxUnpool2d"]),
        (PutInBackward.apply, ["Tensor.put_"]),
        (lambda x: x.median(1).values, ["torch.median"]),
        (lambda x: x.median(), []),  # without places
        (lambda x: x * torch.histc(x.detach(), 3)[0], ["torch.histc"]),
        (lambda x: x * torch.bincount(torch.tensor([1, 2]))[0], []),
        (lambda x: x * torch.bincount(torch.tensor([1, 2]), torch.ones(2))[0], ["torch.bincount"]),
        (lambda x: x.scatter_reduce(1, torch.zeros(2, 8, 6, 6).long(), x, "prod"), ["scatter_reduce with prod"]),
        (lambda x: x.scatter_reduce(1, torch.zeros(2, 8, 6, 6).long(), x, "sum"), []),
    ],
)
def test_known_cases(function, found):
    assert sorted(by_table(passes(function))) == found


def test_backward_operations_are_seen():
    assert {"convolution", "convolution_backward"} <= operations_of(passes(nn.Conv2d(8, 4, 1)))


def test_the_table_names_operations_that_exist():
    assert [name for name in ALERTING if not hasattr(torch.ops.aten, name)] == []


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("identity", [False, True])
def test_no_block_of_this_project_alerts(name, identity):
    assert not by_table(passes(BLOCKS[name][0](8, identity=identity)))


class NaiveCBAM(nn.Module):
    """Channel gate by adaptive pooling, as in most public code."""

    def __init__(self, c1: int):
        super().__init__()
        self.avg_pool, self.max_pool = nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)
        self.mlp = nn.Sequential(nn.Conv2d(c1, 4, 1), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(4, c1, 1))

    def forward(self, x):
        return x * (self.mlp(self.avg_pool(x)) + self.mlp(self.max_pool(x))).sigmoid()


class NaiveCA(nn.Module):
    """Coordinate attention as published: adaptive pooling along each axis."""

    def __init__(self, c1: int):
        super().__init__()
        self.pool_h, self.pool_w = nn.AdaptiveAvgPool2d((None, 1)), nn.AdaptiveAvgPool2d((1, None))
        self.conv, self.norm = nn.Conv2d(c1, c1, 1), nn.BatchNorm2d(c1)

    def forward(self, x):
        h = self.pool_h(x).shape[2]
        y = self.norm(self.conv(torch.cat((self.pool_h(x), self.pool_w(x).transpose(2, 3)), 2)))
        return x * y[:, :, :h].sigmoid() * y[:, :, h:].transpose(2, 3).sigmoid()


class Unpooled(nn.Module):
    """Max pooling and its inverse, a list of modules between."""

    def __init__(self, c1: int):
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.steps = nn.ModuleList([nn.Conv2d(c1, c1, 1), nn.MaxUnpool2d(2)])

    def forward(self, x):
        y, places = self.pool(x)
        return self.steps[1](self.steps[0](y), places)


class OwnAndChild(nn.Module):
    """Bilinear interpolation by a module and, once more, by the block itself."""

    def __init__(self, c1: int):
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x):
        return F.interpolate(self.up(x), size=x.shape[2:], mode="bilinear")


class PutBlock(nn.Module):
    """Alerts on the CPU; work in place, random numbers and statistics around it."""

    def __init__(self, c1: int):
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm2d(c1), nn.ReLU(inplace=True), nn.Dropout(0.5), Put())
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        random.random(), np.random.rand()
        return self.inner(x)


class Put(nn.Module):
    def forward(self, x):
        return PutInBackward.apply(x)


class Breaking(nn.Module):
    """Changes its statistics, then fails in the backward pass."""

    def __init__(self, c1: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(c1)

    def forward(self, x):
        y = self.norm(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.view(3, 5, 7, 11, 13))
        return y


@pytest.fixture
def model_with(monkeypatch):
    """Build yolov5n with user blocks behind given layers."""

    def build(**places: str) -> DetectionModel:
        for block in (NaiveCBAM, NaiveCA, Unpooled, OwnAndChild, PutBlock, Breaking):
            monkeypatch.setitem(BLOCKS, block.__name__, (block, "attention"))
        attention = [f"{name}@{place}" for name, place in places.items()]
        return DetectionModel(ROOT / "models" / "yolov5n.yaml", nc=2, attention=attention)

    return build


def found(alerts) -> list[tuple]:
    return [(a.layer, a.block, a.module, a.kind, a.operation) for a in alerts]


def test_naive_blocks_are_named_with_layer_module_and_operation(model_with):
    model = model_with(NaiveCBAM="2", NaiveCA="4", Unpooled="6")
    alerts = audit(model, 64, by_table)
    assert found(alerts) == [
        (3, "NaiveCBAM", "model.3.max_pool", "AdaptiveMaxPool2d", "AdaptiveMaxPool2d"),
        (6, "NaiveCA", "model.6.pool_h", "AdaptiveAvgPool2d", "AdaptiveAvgPool2d"),
        (6, "NaiveCA", "model.6.pool_w", "AdaptiveAvgPool2d", "AdaptiveAvgPool2d"),
        (9, "Unpooled", "model.9.steps.1", "MaxUnpool2d", "MaxUnpool2d"),
    ]
    assert all(alert.swappable and not alert.remark for alert in alerts)


def test_bilinear_upsampling_is_named_and_remarked(model_with):
    file = dict(model_with().model_file)
    file["head"] = [list(line) for line in file["head"]]
    file["head"][1] = [-1, 1, "nn.Upsample", [None, 2, "bilinear"]]
    alerts = audit(DetectionModel(file), 64, by_table)
    assert found(alerts) == [(11, "nn.Upsample", "model.11", "Upsample", "bilinear interpolation")]
    assert "2.1" in alerts[0].remark and alerts[0].swappable


def test_operations_of_a_block_itself_and_of_its_child_are_told_apart(model_with):
    alerts = audit(model_with(OwnAndChild="4"), 64, by_table)
    assert [(a.module, a.kind, a.swappable) for a in alerts] == [
        ("model.5", "OwnAndChild", False),
        ("model.5.up", "Upsample", True),
    ]


def test_a_real_run_finds_all_that_alerts_here(model_with):
    model = model_with(PutBlock="2,6", Unpooled="4")
    assert found(audit(model, 64, by_real_run)) == [
        (3, "PutBlock", "model.3.inner.3", "Put", "put_"),
        (6, "Unpooled", "model.6.steps.1", "MaxUnpool2d", "max_unpooling2d_forward_out"),
        (9, "PutBlock", "model.9.inner.3", "Put", "put_"),
    ]


def test_what_needs_no_gradient_in_the_model_needs_none_in_the_audit(model_with):
    """Frozen layers up to a block's: no backward pass gets there, so nothing alerts."""
    model = model_with(NaiveCBAM="2")
    model.model[:4].requires_grad_(False)
    assert audit(model, 64, by_table) == []
    model.model[0].requires_grad_(True)
    assert [a.module for a in audit(model, 64, by_table)] == ["model.3.max_pool"]


class Tiny(nn.Module):
    """The least that the audit takes for a model; its own forward alerts."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.model = nn.Sequential(*layers)
        self.layers = tuple(type("Layer", (), {"block": type(layer).__name__})() for layer in layers)

    def forward(self, x):
        for layer in self.model:
            x = layer(x)
        return {"maps": (x, [F.adaptive_max_pool2d(x, 2)])}


class Quiet(nn.Module):
    """A child without gradient, one whose operation is the block's own, and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.silent, self.twice = nn.AdaptiveAvgPool2d(3), nn.ReflectionPad2d(1)

    def forward(self, x):
        with torch.no_grad():
            gate = self.silent(x).mean()
        return self.twice(self.twice(x)) * gate + F.adaptive_avg_pool2d(x, (1, 3)).mean()


def test_any_model_with_layers():
    model = Tiny(nn.Conv2d(3, 4, 1), Quiet())
    assert found(find_alerts(model, torch.randn(1, 3, 9, 9), by_table)) == [
        (None, "", "", "Tiny", "AdaptiveMaxPool2d"),
        (1, "Quiet", "model.1", "Quiet", "AdaptiveAvgPool2d"),
        (1, "Quiet", "model.1.twice", "ReflectionPad2d", "ReflectionPad2d"),
    ]


def state_of(model: nn.Module) -> dict:
    return {
        "tensors": {name: t.clone() for name, t in model.state_dict().items()},
        "gradients": {name: (id(p.grad), p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None},
        "training": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "calls": [m.calls for m in model.modules() if isinstance(m, PutBlock)],
        "flags": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.is_grad_enabled(),
        ),
        "random": (random.getstate(), torch.from_numpy(np.random.get_state()[1]).clone(), torch.get_rng_state()),
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


@pytest.mark.parametrize("detect", [by_table, by_real_run])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", [None, *DeterministicMode])
def test_everything_is_as_before(mode, fails, detect, model_with):
    model = model_with(PutBlock="2", **({"Breaking": "4"} if fails else {})).eval()
    model.model[3].train()
    for parameter in list(model.parameters())[:5]:
        parameter.grad = torch.randn_like(parameter)

    def check():
        before = state_of(model)
        try:
            alerts = audit(model, 32, detect)
        except RuntimeError as error:
            assert fails and "shape" in str(error)
        else:
            assert not fails and [a.module for a in alerts] == ["model.3.inner.3"]
        after = state_of(model)
        assert [key for key in before if not same(before[key], after[key])] == []

    if mode is None:
        check()
        return
    lines = []
    with configure(mode, 0, report=lines.append) as record:
        check()
    assert not record.counts and not lines


def test_the_rehearsal_shows_no_warnings(model_with):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(audit(model_with(PutBlock="2"), 32, by_real_run)) == 1


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
def test_no_shipped_model_file_alerts(path):
    file = load_model_file(path)
    model = DetectionModel({**file, "depth_multiple": 0.33, "width_multiple": 0.25})
    assert audit(model, max(64, int(model.stride.max())), by_table) == []


def test_after_swapping_a_naive_model_is_clean(model_with):
    model = model_with(NaiveCBAM="2", NaiveCA="4", Unpooled="6").eval()
    x = torch.rand(1, 3, 64, 64)
    before = model(x)
    names = list(model.state_dict())
    lines = swap_modules(model)
    assert len(lines) == 5 and "model.3.max_pool: AdaptiveMaxPool2d → DeterministicAdaptiveMaxPool2d" in lines
    assert audit(model, 64, by_table) == [] and audit(model, 64, by_real_run) == []
    assert list(model.state_dict()) == names
    for a, b in zip(model(x), before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_table_of_alerts(model_with):
    alerts = audit(model_with(NaiveCBAM="2", OwnAndChild="4"), 64, by_table)
    lines = format_alerts(alerts).splitlines()
    assert lines[0].split() == ["layer", "block", "module", "operation", "what", "to", "do"]
    assert lines[1].split()[:4] == ["3", "NaiveCBAM", "model.3.max_pool", "(AdaptiveMaxPool2d)"]
    assert "--deterministic-swap" in lines[1] and "a block of this project" in lines[1]
    assert "--deterministic-swap" not in lines[2] and "a block of this project" in lines[2]
    assert "2.1" in lines[4] and lines[4].startswith("bilinear interpolation")
    assert all(way in lines[5] for way in ("block of this project", "--deterministic-swap", "warn", "scoped-off"))
    assert len(lines) == 6
    assert "\n" not in verdict(alerts) and "AdaptiveMaxPool2d in model.3.max_pool" in verdict(alerts)


def test_nothing_found():
    assert format_alerts([]) == ""
    assert "every operation" in verdict([])


def run_in_process(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["determinism", *arguments])
    status = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
            runpy.run_module("utils.determinism", run_name="__main__")
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def test_command_line(tmp_path):
    """A model file whose neck upsamples bilinearly, in a process of its own."""
    text = (ROOT / "models" / "yolov5n.yaml").read_text(encoding="utf-8")
    assert text.count("nearest") == 2
    file = tmp_path / "bilinear.yaml"
    file.write_text(text.replace("nearest", "bilinear"), encoding="utf-8")
    command = [sys.executable, "-m", "utils.determinism", "--cfg", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert "model.11 (Upsample)" in done.stdout and "model.15 (Upsample)" in done.stdout


def test_command_line_on_a_clean_model(monkeypatch, capsys):
    arguments = ("--cfg", "yolov5n.yaml", "--attention", "cbam@neck", "--imgsz", "50")
    status, out, err = run_in_process(monkeypatch, capsys, *arguments)
    assert (status, err) == (0, "") and out.startswith("determinism: every operation") and out.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--cfg", "nowhere.yaml"], 1, "nowhere.yaml"),
        (["--cfg", "yolov5n.yaml", "--attention", "nothing@neck"], 1, "nothing"),
        (["--cfg", "yolov5n.yaml", "--imgsz", "0"], 2, "--imgsz"),
    ],
)
def test_command_line_mistakes_end_in_one_line(arguments, status, words, monkeypatch, capsys):
    code, out, err = run_in_process(monkeypatch, capsys, *arguments)
    assert code == status and not out and words in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_run_on_cuda(model_with, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = model_with(NaiveCBAM="2", NaiveCA="4", OwnAndChild="6").cuda()
    by_gpu = [(a.module, a.operation.removesuffix("_cuda")) for a in audit(model, 64, by_real_run)]
    assert [module for module, _ in by_gpu] == ["model.3.max_pool", "model.6.pool_h", "model.6.pool_w"]
    assert by_gpu[0][1] == "adaptive_max_pool2d_backward"
    swap_modules(model)
    assert audit(model, 64, by_real_run) == []
