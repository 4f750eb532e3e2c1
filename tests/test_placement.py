"""Where attention goes, what its arguments mean, and models that say what is wrong with them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import yaml
from test_models import small_file

from models.placement import find_place, parse_flag
from models.yolo import BLOCKS, DetectionModel, model_file_text, resolve_model_file
from utils import ROOT
from utils.config import ConfigError, load_model_file, read_yaml

YOLO = "models/yolov5n.yaml"


def blocks(cfg, *flags) -> list[tuple[int, str, tuple[int, ...]]]:
    """(number, block, sources) of every layer."""
    return [(layer.index, layer.block, layer.sources) for layer in DetectionModel(cfg, attention=flags).layers]


@pytest.mark.parametrize(
    ("cfg", "stages", "backbone", "neck", "head"),
    [
        (YOLO, [2, 4, 6, 8], [9], [13, 17, 20, 23], [17, 20, 23]),
        ("models/hub/yolov5n6.yaml", [2, 4, 6, 8, 10], [11], [15, 19, 23, 26, 29, 32], [23, 26, 29, 32]),
        ("models/hub/yolov5-fpn.yaml", [2, 4, 6, 8], [9], [14, 18], [18, 14, 10]),
        ("models/hub/yolov5-bifpn.yaml", [2, 4, 6, 8], [9], [13, 17, 20, 23], [17, 20, 23]),
        ("models/hub/yolov3.yaml", [2, 4, 6, 8, 10], [10], [19, 26], [27, 22, 15]),
        ("models/hub/yolov5s-ghost.yaml", [2, 4, 6, 8], [9], [13, 17, 20, 23], [17, 20, 23]),
    ],
)
def test_named_places(cfg, stages, backbone, neck, head):
    raw = load_model_file(cfg)
    found = [find_place(place, raw, cfg) for place in ("stages", "backbone", "neck", "head")]
    assert found == [stages, backbone, neck, head]


def test_named_places_in_a_file_equal_numbers():
    named = {**load_model_file(YOLO), "attention": [{"block": "SE", "after": ["stages", "backbone"]}]}
    numbers = {**load_model_file(YOLO), "attention": [{"block": "SE", "after": [2, 4, 6, 8, 9]}]}
    assert blocks(named) == blocks(numbers)
    flagged = {**load_model_file(YOLO)}
    assert blocks(flagged, "se@stages,backbone") == blocks(numbers)


def test_head_placement_is_what_detect_reads():
    layers = DetectionModel(YOLO, attention=["cbam@head"]).layers
    gates = [layer.index for layer in layers if layer.block == "CBAM"]
    assert list(layers[-1].sources) == gates == [18, 22, 26]
    # the path-aggregation layers behind them read the attended maps too
    assert layers[19].sources == (18,)


def test_several_flags_and_the_files_own_add_up():
    found = blocks("models/attention/yolov5n-se.yaml", "eca@neck", "cbam@9")
    names = [name for _, name, _ in found]
    assert (names.count("SE"), names.count("ECA"), names.count("CBAM")) == (4, 4, 1)
    assert found[14][1:] == ("CBAM", (13,))  # behind SPPF, which four blocks have moved from 9 to 13


def test_inside_c3_keeps_numbers_and_names():
    plain, inside = DetectionModel(YOLO), DetectionModel(YOLO, attention=["cbam@C3"])
    assert [layer.block.replace("C3CBAM", "C3") for layer in inside.layers] == [x.block for x in plain.layers]
    assert [layer.sources for layer in inside.layers] == [layer.sources for layer in plain.layers]
    assert set(plain.state_dict()) <= set(inside.state_dict())
    written = DetectionModel({**load_model_file(YOLO), "attention": [{"block": "CBAM", "inside": "C3"}]})
    assert written.layers == inside.layers


@pytest.mark.parametrize(
    ("flag", "entry"),
    [
        ("cbam@neck", {"block": "cbam", "after": ["neck"]}),
        ("se@2,4, stages", {"block": "se", "after": [2, 4, "stages"]}),
        ("eca@c3", {"block": "eca", "inside": "C3"}),
    ],
)
def test_flags(flag, entry):
    assert parse_flag(flag) == entry


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("cbam", "expected BLOCK@PLACE"),
        ("@neck", "expected BLOCK@PLACE"),
        ("cbam@", "expected BLOCK@PLACE"),
        ("cbam@C3,neck", "cannot be combined"),
        ("cbam@nek", "'nek' is no place, did you mean neck"),
        ("cbam@99", "after 99: no such layer"),
        ("cbamm@neck", "unknown block 'cbamm', did you mean cbam"),
        ("SimAM@C3", "there is no C3SimAM"),
    ],
)
def test_wrong_flags(flag, words):
    with pytest.raises(ConfigError, match=words):
        DetectionModel(YOLO, attention=[flag])


def gate(args: list, block: str = "CBAM", width: float = 0.5, channels: int = 1024):
    """The attention block that a line with these arguments builds behind a C3 of `channels`."""
    cfg = small_file(width_multiple=width, backbone=[[-1, 1, "C3", [channels]], [-1, 1, block, args]])
    return DetectionModel(cfg).model[1]


@pytest.mark.parametrize("args", [[], [1024], [1024, 1024], [512], [512, 512]])
def test_channels_come_from_the_layer_before(args):
    block = gate(args)
    assert block.channel.fc1.in_channels == 512 and block.channel.fc1.out_channels == 32
    assert block.spatial.conv.kernel_size == (7, 7)


@pytest.mark.parametrize(("args", "kernel"), [([1024, 7], 7), ([1024, 1024, 3], 3), ([7], 7), ([3], 3), ([1024, 5], 5)])
@pytest.mark.parametrize("width", [0.25, 1.25])
def test_a_kernel_is_never_scaled(args, kernel, width):
    assert gate(args, width=width).spatial.conv.kernel_size == (kernel, kernel)


def test_a_ratio_is_never_scaled():
    assert gate([1024, 7, 8]).channel.fc1.out_channels == 64
    assert gate([1024, 4], "SE").fc1.out_channels == 128
    assert gate([4], "SE", width=0.25).fc1.out_channels == 64


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([4], "4 is neither the channels of the layer before .512. nor a value of 'k' .an odd"),
        ([256], "256 is neither the channels"),
        ([1024, 1024, 1024], "1024 is neither"),
        ([1024, 7, 16, 3], "beside them it takes k, ratio"),
        (["big"], "big is neither"),
    ],
)
def test_what_cannot_be_meant_names_the_layer(args, words):
    with pytest.raises(ConfigError, match=f"layer 1: .*{words}"):
        gate(args)


def test_a_concat_of_unequal_sizes_names_its_sources():
    cfg = small_file(
        backbone=[[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]], [[-1, 0], 1, "Concat", [1]]],
    )
    with pytest.raises(ConfigError) as error:
        DetectionModel(cfg)
    text = str(error.value)
    assert "layer 2: Concat reads maps of unequal sizes: layer 1 (Conv) 64x64, layer 0 (Conv) 128x128" in text


def test_maps_that_a_block_cannot_read_are_named():
    cfg = small_file(backbone=[[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Contract", [3]]])
    with pytest.raises(ConfigError, match=r"layer 1: Contract cannot read layer 0 \(Conv\) \[1, 8, 128, 128\]"):
        DetectionModel(cfg)


def test_detect_must_read_in_the_order_of_stride():
    cfg = load_model_file(YOLO)
    cfg["head"][-1][0] = [17, 23, 20]
    with pytest.raises(ConfigError) as error:
        DetectionModel(cfg)
    assert "layer 24: Detect must read its maps in the order of stride: layer 17 (stride 8)" in str(error.value)
    assert "layer 23 (stride 32), layer 20 (stride 16)" in str(error.value)


def test_a_reader_that_goes_around_attention_is_remarked():
    """As happens when CBAM is typed into a file and the later numbers are not shifted."""
    cfg = load_model_file(YOLO)
    cfg["backbone"].insert(7, [-1, 1, "CBAM", []])
    cfg["head"] = [
        [[s if s < 7 else s + 1 for s in line[0]] if isinstance(line[0], list) else line[0], *line[1:]]
        for line in cfg["head"]
    ]
    model = DetectionModel(cfg)
    assert model.remarks == ("layer 13 (Concat) reads layer 6 (C3) before its attention (layer 7, CBAM)",)
    assert "note: layer 13" in model.summary(64)
    assert DetectionModel(YOLO, attention=["cbam@stages", "eca@head"]).remarks == ()


@pytest.mark.parametrize(
    ("file", "words"),
    [("data/hyps/hyp.scratch-low.yaml", "a hyperparameter file"), ("data/shapes.yaml", "a data set file")],
)
def test_files_of_another_kind_are_named(file, words):
    with pytest.raises(ConfigError, match=words):
        DetectionModel(ROOT / file)


def test_attention_start_is_part_of_the_full_file():
    model = DetectionModel(YOLO, attention=["se@stages"], attention_init="identity")
    assert model.model_file["attention_init"] == "identity"
    again = DetectionModel(model.model_file)
    images = torch.rand(1, 3, 64, 64)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(model.eval()(images), again.eval()(images)))
    with pytest.raises(ConfigError, match="attention_init must be"):
        resolve_model_file({**load_model_file(YOLO), "attention_init": "zero"})


@pytest.mark.parametrize("flag", ["cbam@stages", "se@neck", "eca@head", "cbam@C3", "cbam@backbone"])
def test_identity_start_leaves_the_outputs_alone(flag):
    """Bit for bit: the attention model with the plain one's weights gives the plain one's outputs."""
    from utils.checkpoint import Weights, transfer_weights

    plain = DetectionModel(YOLO, nc=3).eval()
    attended = DetectionModel(YOLO, nc=3, attention=[flag], attention_init="identity").eval()
    source = Weights(plain.state_dict(), plain.names, plain.model_file)
    carried = transfer_weights(source, attended.state_dict(), attended.names, keep_anchors=True)
    assert carried.transferred == carried.total == 349
    attended.load_state_dict(carried.state, strict=False)
    images = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(plain(images), attended(images)))


def test_resolved_text_builds_the_same_model(tmp_path):
    model = DetectionModel("models/attention/yolov5n-cbam.yaml", nc=3)
    path = tmp_path / "model.yaml"
    path.write_text(model_file_text(model.model_file), encoding="utf-8")
    assert read_yaml(path) == yaml.safe_load(yaml.safe_dump(model.model_file))
    assert DetectionModel(path).layers == model.layers


def test_command_line():
    command = [sys.executable, "-m", "models.yolo", "--cfg", YOLO, "--attention", "cbam@neck", "--resolved"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line[2] for line in yaml.safe_load(done.stdout)["head"]].count("CBAM") == 4
    assert all(block in BLOCKS or block == "Detect" for _, _, block, _ in yaml.safe_load(done.stdout)["head"])
