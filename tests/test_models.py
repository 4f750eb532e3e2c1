"""Model files into layers: rules, attention put in, errors that name the layer, fusing, decoding."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import yaml
from torch import nn

from models.common import C3, CBAM, SE, SPP, SPPF, Contract, Conv, Expand
from models.trace import trace
from models.yolo import DetectionModel, parse_activation, resolve_model_file
from utils import ROOT
from utils.config import ConfigError, read_yaml

ATTENTION_FILES = sorted((ROOT / "models" / "attention").glob("*.yaml"))


def small_file(**changes) -> dict:
    """A three-layer model file that a test can bend."""
    cfg = {
        "nc": 2,
        "depth_multiple": 1.0,
        "width_multiple": 1.0,
        "anchors": [[4, 4, 8, 8]],
        "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 2, "C3", [16]]],
        "head": [[[-1], 1, "Detect", ["nc", "anchors"]]],
    }
    return {**cfg, **changes}


@pytest.mark.parametrize("path", ATTENTION_FILES, ids=lambda p: p.stem)
def test_attention_files_have_a_block_behind_each_stage(path):
    base = DetectionModel(read_yaml(path.parent / read_yaml(path)["extends"]))
    model = DetectionModel(path)
    block = path.stem.split("-")[1].upper()
    assert [layer.index for layer in model.layers if layer.block == block] == [3, 6, 9, 12]
    assert len(model.layers) == len(base.layers) + 4
    # the rest is the base's layers in their order, with as many parameters each
    rest = [(layer.block, sum(p.numel() for p in m.parameters())) for layer, m in zip(model.layers, model.model)]
    wanted = [(layer.block, sum(p.numel() for p in m.parameters())) for layer, m in zip(base.layers, base.model)]
    assert [entry for entry in rest if entry[0] != block] == wanted
    assert torch.equal(model.stride, base.stride)


def test_all_attention_files_are_there():
    assert {p.stem for p in ATTENTION_FILES} == {f"yolov5{s}-{a}" for s in "ns" for a in ("se", "eca", "cbam")}


def test_readers_of_an_attended_layer_read_its_attention():
    resolved, _ = resolve_model_file("models/attention/yolov5n-cbam.yaml")
    lines = [*resolved["backbone"], *resolved["head"]]
    assert len(resolved["backbone"]) == 14 and lines[9] == [-1, 1, "CBAM", []]
    concats = [line[0] for line in lines if line[2] == "Concat"]
    assert concats == [[-1, 9], [-1, 6], [-1, 18], [-1, 14]]  # base: 6, 4, 14, 10
    assert lines[-1][0] == [21, 24, 27]
    assert "attention" not in resolved and "extends" not in resolved


def test_resolved_file_builds_the_same_model(tmp_path):
    model = DetectionModel("models/attention/yolov5n-se.yaml", nc=3)
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(model.model_file), encoding="utf-8")
    again = DetectionModel(path)
    assert again.layers == model.layers
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}


def test_negative_from_numbers_survive_insertion():
    """YOLOv3 reads -2: the layer before the one before."""
    cfg = read_yaml(ROOT / "models" / "hub" / "yolov3-tiny.yaml")
    plain = DetectionModel(cfg)
    moved = DetectionModel({**cfg, "attention": [{"block": "SE", "after": [14, 15]}]})
    conv = [layer for layer in moved.layers if layer.block == "Conv" and layer.args[:2] == (256, 128)]
    assert [layer.sources for layer in conv] == [(15,)]  # the SE behind layer 14
    plain_conv = [layer for layer in plain.layers if layer.block == "Conv" and layer.args[:2] == (256, 128)]
    assert [layer.sources for layer in plain_conv] == [(14,)]


def test_two_blocks_behind_one_layer_follow_each_other():
    cfg = small_file(attention=[{"block": "SE", "after": 1}, {"block": "CBAM", "after": [1, 0], "args": [3]}])
    model = DetectionModel(cfg)
    assert [layer.block for layer in model.layers] == ["Conv", "CBAM", "C3", "SE", "CBAM", "Detect"]
    assert model.layers[-1].sources == (4,)
    assert model.model[1].spatial.conv.kernel_size == (3, 3)


def test_a_plain_file_with_attention_written_out_builds():
    cfg = small_file(
        backbone=[[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "CBAM", []], [-1, 1, "ECA", []], [-1, 2, "C3", [16]]]
    )
    assert [type(m).__name__ for m in DetectionModel(cfg).model] == ["Conv", "CBAM", "ECA", "C3", "Detect"]


def test_width_and_depth_multiples():
    cfg = small_file(width_multiple=0.5, depth_multiple=0.33, backbone=[[-1, 1, "Conv", [40]], [-1, 9, "C3", [36]]])
    model = DetectionModel(cfg)
    assert model.model[0].conv.out_channels == 24  # 20 up to a multiple of 8
    assert model.model[1].cv3.conv.out_channels == 24  # 18
    assert len(model.model[1].m) == 3  # 9 · 0.33 = 2.97


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backbone": [[-1, 1, "Convv", [8]], [-1, 1, "C3", [8]]]}, ["layer 0", "Convv", "did you mean Conv"]),
        ({"backbone": [[-1, 1, "Conv", [8]], [3, 1, "C3", [8]]]}, ["layer 1", "'from' 3"]),
        ({"backbone": [[-1, 1, "Conv", [8]], [-1, 0, "C3", [8]]]}, ["layer 1", "number"]),
        ({"backbone": [[-1, 1, "Conv", [8]], [-1, 1, "C3"]]}, ["layer 1", "expected [from"]),
        ({"backbone": [[-1, 1, "Conv", []], [-1, 1, "C3", [8]]]}, ["layer 0", "channels"]),
        ({"backbone": [[-1, 1, "Conv", [8]], [-1, 1, "CBAM", [4]]]}, ["layer 1", "odd"]),
        ({"backbone": [[-1, 1, "Conv", [8, "x"]], [-1, 1, "C3", [8]]]}, ["layer 0", "Conv does not take"]),
        ({"head": [[-1, 1, "Conv", [8]]]}, ["layer 2", "Detect must be the last"]),
        ({"anchors": [[1, 2], [3, 4]]}, ["layer 2", "1 maps", "2 rows"]),
        ({"activation": "nn.Swoosh()"}, ["activation", "nn.Swoosh"]),
        ({"activation": "__import__('os').system('true')"}, ["activation"]),
        ({"width_multiple": 0}, ["width_multiple"]),
        ({"attention": [{"block": "CBAMM", "after": [0]}]}, ["CBAMM", "did you mean cbam"]),
        ({"attention": [{"block": "CBAM", "after": [7]}]}, ["after 7", "no such layer"]),
        ({"attention": [{"blok": "CBAM", "after": [0]}]}, ["expected {block"]),
    ],
)
def test_a_wrong_file_names_the_place(changes, words):
    with pytest.raises(ConfigError) as error:
        DetectionModel(small_file(**changes))
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_part_is_named():
    cfg = small_file()
    del cfg["backbone"]
    with pytest.raises(ConfigError, match="'backbone' is missing"):
        DetectionModel(cfg)


def test_activation_key_changes_conv_blocks_only():
    model = DetectionModel(small_file(activation="nn.LeakyReLU(0.2)"))
    slopes = {m.act.negative_slope for m in model.modules() if isinstance(m, Conv)}
    assert slopes == {0.2}
    first = parse_activation("nn.ReLU()", "x")
    assert first() is not first()


def test_names_and_classes():
    assert DetectionModel(small_file(), names=("a", "b", "c")).nc == 3
    assert DetectionModel(small_file(), nc=4).names == ("class0", "class1", "class2", "class3")
    with pytest.raises(ConfigError, match="2 classes, but 3 names"):
        DetectionModel(small_file(), nc=2, names=("a", "b", "c"))


def test_building_does_not_touch_statistics_or_mode():
    model = DetectionModel(small_file())
    assert model.training
    assert all(m.num_batches_tracked == 0 for m in model.modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize("cfg", ["models/yolov5n.yaml", "models/hub/yolov5s-ghost.yaml", ATTENTION_FILES[0]])
def test_fuse_keeps_outputs(cfg):
    model = DetectionModel(cfg, nc=3)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.uniform_(-0.2, 0.2)
            m.running_var.uniform_(0.5, 1.5)
    model.eval()
    images = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        before = model.decode(model(images))
        after = model.fuse().decode(model.fuse()(images))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


def test_decode_by_hand():
    model = DetectionModel("models/yolov5n.yaml", nc=1)
    raw = [torch.zeros(1, 3, 64 // s, 64 // s, 6) for s in (8, 16, 32)]
    raw[2][0, 1, 1, 0] = torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0, -2.0])
    decoded = model.decode(raw)
    assert decoded.shape == (1, 3 * (64 + 16 + 4), 6)
    # P5, anchor 1 (156 x 198 px), cell (row 1, column 0): centre in its middle, anchor's own size
    entry = decoded[0, 3 * (64 + 16) + 4 + 2]
    wanted = [0.5 * 32, 1.5 * 32, 156, 198, torch.tensor(2.0).sigmoid(), torch.tensor(-2.0).sigmoid()]
    assert entry.tolist() == pytest.approx([float(w) for w in wanted], rel=1e-6)


def test_augmented_maps_boxes_back():
    """With zero raw outputs every box sits in its cell's middle with its anchor's size, whatever the pass."""
    model = DetectionModel("models/yolov5n.yaml", nc=1).eval()
    for conv in model.detect.m:
        nn.init.zeros_(conv.weight)
        nn.init.zeros_(conv.bias)
    with torch.no_grad():
        decoded = model.augmented(torch.rand(1, 3, 64, 64))[0]
    first = 3 * (64 + 16)  # 64 px without P5
    second = 3 * (64 + 16 + 4)  # 0.83 · 64 is padded to 64
    third = 3 * (16 + 4)  # 0.67 · 64 = 42.9 is padded to 64, without P3
    assert len(decoded) == first + second + third
    centres = (torch.arange(8) + 0.5) * 8
    assert torch.equal(decoded[:64, 0].view(8, 8)[0], centres)
    mirrored = decoded[first : first + 64]
    torch.testing.assert_close(mirrored[:8, 0], 64 - centres / 0.83)
    torch.testing.assert_close(mirrored[0, 2:4], torch.tensor([10.0, 13.0]) / 0.83)
    torch.testing.assert_close(decoded[-1, :4], torch.tensor([48.0, 48.0, 373.0, 326.0]) / 0.67)


def test_sppf_equals_spp():
    spp, sppf = SPP(8, 8).eval(), SPPF(8, 8, 5).eval()
    spp.load_state_dict(sppf.state_dict())
    x = torch.randn(2, 8, 11, 7)
    torch.testing.assert_close(spp(x), sppf(x))


def test_expand_undoes_contract():
    x = torch.randn(2, 4, 6, 8)
    assert torch.equal(Expand(2)(Contract(2)(x)), x)
    assert Contract(2)(x).shape == (2, 16, 3, 4)


def test_trace_counts_by_hand():
    model = DetectionModel(small_file(backbone=[[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "SE", [2]]]))
    traces = trace(model, (32, 32))
    assert traces[0].shape == ((1, 8, 16, 16),)
    assert traces[0].macs == 8 * 16 * 16 * (3 * 3 * 3) + 4 * 8 * 16 * 16  # convolution, batch norm
    assert traces[1].macs == 2 * 8 * 4  # two 1x1 convolutions on 1x1 maps
    assert traces[2].shape == ((1, 2, 16, 16, 7),)
    assert model.gflops(32) == pytest.approx(2e-9 * sum(t.macs for t in traces))


def test_summary_from_the_command_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "models.yolo", "--cfg", "models/attention/yolov5n-cbam.yaml"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("CBAM") == 4 and "29 layers" in done.stdout and "GFLOPs" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "models.yolo", "--cfg", "nowhere.yaml"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr and "nowhere.yaml: no such file" in done.stderr


def test_resolving_leaves_its_argument_alone():
    cfg = small_file(attention=[{"block": "SE", "after": [0]}])
    copy = yaml.safe_load(yaml.safe_dump(cfg))
    resolve_model_file(cfg, ["cbam@0"])
    assert cfg == copy


def test_modules_are_of_the_named_class():
    model = DetectionModel("models/attention/yolov5n-cbam.yaml")
    assert isinstance(model.model[3], CBAM) and isinstance(model.model[2], C3)
    assert isinstance(DetectionModel("models/attention/yolov5s-se.yaml").model[12], SE)
