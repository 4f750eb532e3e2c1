"""Attention blocks inside detection models: files as they are found in the wild, weights kept, small sets learned."""

from __future__ import annotations

import math
from dataclasses import replace

import cv2
import pytest
import torch
from reference import SHARED, needs_shared
from test_models import small_file

from models.build import attention_start
from models.placement import ALIASES
from models.yolo import BLOCKS, DetectionModel, has_attention
from train import train
from utils import ROOT
from utils.boxes import nms
from utils.checkpoint import Weights, read_weights, transfer_weights
from utils.config import Hyperparameters, load_data_config, load_model_file
from utils.dataloaders import DetectionDataset, collate, load_split
from utils.determinism import DeterministicMode, backward_guard, configure
from utils.loss import DetectionLoss
from utils.optim import auto_lr_scale, parameter_groups
from utils.options import TrainOptions
from val import evaluate

ATTENTION = sorted(name for name, (_, rule) in BLOCKS.items() if rule == "attention")
WRAPPED = sorted(name for name in BLOCKS if has_attention(name) and name not in ATTENTION)
OFFICIAL = SHARED / "weights" / "yolov5n.pt"
FILES = sorted((ROOT / "models" / "attention").glob("*.yaml"))
PLACEMENTS = ["stages", "backbone", "neck", "head", "2,4,9"]


def at_layer_9(name: str) -> dict:
    """YOLOv5s with a block typed in behind the last C3, every later number shifted by hand."""
    cfg = load_model_file("models/yolov5s.yaml")
    cfg["backbone"].insert(9, [-1, 1, name, [1024]])
    cfg["head"] = [
        [[s + 1 if s > 8 else s for s in line[0]] if isinstance(line[0], list) else line[0], *line[1:]]
        for line in cfg["head"]
    ]
    return cfg


def before_detect(name: str) -> dict:
    """YOLOv5s with three blocks typed in at the end, which Detect reads."""
    cfg = load_model_file("models/yolov5s.yaml")
    detect = cfg["head"].pop()
    cfg["head"] += [[17, 1, name, [256]], [20, 1, name, [512]], [23, 1, name, [1024]]]
    cfg["head"].append([[24, 25, 26], 1, "Detect", detect[3]])
    return cfg


def in_c3s_place(name: str) -> dict:
    """YOLOv5s with the C3 before SPPF replaced, as the wrapped forms are used."""
    cfg = load_model_file("models/yolov5s.yaml")
    cfg["backbone"][8] = [-1, 3, name, [1024]]
    return cfg


def train_one_step(cfg: dict) -> DetectionModel:
    model = DetectionModel(cfg, nc=3).train()
    criterion = DetectionLoss(model.detect.anchors, 3, Hyperparameters().scaled(3, 3, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    targets = torch.tensor([[0, 1, 0.4, 0.5, 0.3, 0.3], [1, 2, 0.6, 0.3, 0.2, 0.5]])
    with configure(DeterministicMode.STRICT, 0):
        loss, _ = criterion(model(torch.rand(2, 3, 64, 64)), targets)
        with backward_guard(DeterministicMode.STRICT):
            loss.backward()
    assert loss.isfinite()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing
    optimizer.step()
    return model


@pytest.mark.parametrize("name", [*ATTENTION, "SEAttention", "CoordAtt", "GAMAttention", "PSA_s", "EffectiveSELayer"])
@pytest.mark.parametrize("form", [at_layer_9, before_detect], ids=lambda f: f.__name__)
def test_files_of_the_wild_build_and_train_a_step(form, name):
    model = train_one_step(form(name))
    if form is at_layer_9:
        assert model.layers[9].block == ALIASES.get(name, name) and model.layers[9].args[0] == 512


@pytest.mark.parametrize("width", [0.125, 0.25, 0.5, 0.75, 1.0, 1.25])
@pytest.mark.parametrize("name", ATTENTION)
def test_any_width_multiple(name, width):
    """Channels come from the layer before, whatever the multiple makes of the number in the line."""
    cfg = small_file(width_multiple=width, backbone=[[-1, 1, "Conv", [64, 3, 2]], [-1, 1, name, [64]]])
    model = DetectionModel(cfg).train()
    assert model.layers[1].args[0] == math.ceil(64 * width / 8) * 8
    assert model(torch.rand(1, 3, 32, 32))[0].isfinite().all()


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_forms_build_and_train_a_step(name):
    train_one_step(in_c3s_place(name))


def test_every_name_of_the_field_resolves():
    """The names that issue trackers and collections use."""
    for alias in (
        "SEAttention ECAAttention CoordAtt GAMAttention NAMAttention ShuffleAttention SpatialGroupEnhance "
        "EffectiveSELayer GlobalContextBlock PSA_s SKAttention TripletAttention DoubleAttention CrissCrossAttention "
        "ParNetAttention EMAAttention BAMBlock CBAMBlock LSKA MHSA SimAM scSE CA"
    ).split():
        assert has_attention(alias), alias
    assert set(ALIASES.values()) <= set(ATTENTION)
    assert not set(ALIASES) & set(BLOCKS)


def test_the_documents_list_every_block_and_alias():
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in (*ATTENTION, *WRAPPED, *ALIASES))


def attended(cfg, *flags) -> tuple[DetectionModel, float]:
    """A model with official weights carried over and identity start, and the share of them that found a place."""
    weights = read_weights(OFFICIAL)
    model = DetectionModel(cfg, names=weights.names, attention=flags, attention_init="identity")
    carried = transfer_weights(weights, model.state_dict(), model.names, keep_anchors=True)
    model.load_state_dict(carried.state, strict=False)
    return model.eval().requires_grad_(False), carried.transferred / carried.total


def detections(model: DetectionModel) -> list[torch.Tensor]:
    found = []
    for name in ("bus", "zidane"):
        image = cv2.resize(cv2.imread(str(SHARED / "images" / f"{name}.jpg")), (320, 320))
        images = torch.from_numpy(image[..., ::-1].transpose(2, 0, 1).copy())[None].float() / 255
        found += nms(model.decode(model(images)))
    return found


@pytest.fixture(scope="module")
def plain_detections():
    model, _ = attended("models/yolov5n.yaml")
    return detections(model)


@needs_shared
@pytest.mark.parametrize("path", [p for p in FILES if p.stem.startswith("yolov5n")], ids=lambda p: p.stem)
def test_shipped_files_start_with_the_detections_of_plain_yolov5n(path, plain_detections):
    model, share = attended(path)
    assert share >= 0.99
    assert all(torch.equal(a, b) for a, b in zip(detections(model), plain_detections))


@needs_shared
@pytest.mark.parametrize("flag", [*(f"cbam@{p}" for p in PLACEMENTS), *(f"{n}@stages" for n in ATTENTION), "cbam@C3"])
def test_placements_start_with_the_detections_of_plain_yolov5n(flag, plain_detections):
    model, share = attended("models/yolov5n.yaml", flag)
    assert share >= 0.99 and sum(len(found) for found in plain_detections) > 4
    assert all(torch.equal(a, b) for a, b in zip(detections(model), plain_detections))


def test_what_auto_means():
    plain, cbam = load_model_file("models/yolov5n.yaml"), "models/attention/yolov5n-cbam.yaml"
    weights = Weights({}, ("a",), plain)
    assert attention_start("auto", cbam, None) == "paper"
    assert attention_start("auto", cbam, weights) == "identity"
    assert attention_start("paper", cbam, weights) == "paper"
    assert attention_start("auto", {**plain, "attention_init": "paper"}, weights) == "paper"
    # weights of a model with attention were trained in one form, which stays
    for form in ("paper", "identity"):
        trained = Weights({}, ("a",), {**DetectionModel(cbam, attention_init=form).model_file})
        assert attention_start("auto", cbam, trained) == form


def test_learning_rate_by_block():
    def scale(*blocks):
        return auto_lr_scale(("Conv", "C3", "Detect", *blocks))

    assert (scale(), scale("SE"), scale("CBAM"), scale("ECA")) == (1.0, 1.0, 0.8, 1.2)
    assert (scale("C3CBAM"), scale("ConvCBAM"), scale("C3ECA"), scale("ECA", "CBAM")) == (0.8, 0.8, 1.2, 0.8)


def test_the_scale_reaches_the_schedule(tiny_data, tmp_path, capsys):
    options = dict(
        data=str(tiny_data), imgsz=64, batch_size=8, epochs=1, workers=0, noplots=True, device="cpu",
        cfg="models/yolov5n.yaml", attention=("eca@stages",), project=str(tmp_path),
    )  # fmt: skip
    rates = {}
    for text in ("1.0", "auto", "0.5"):
        result = train(TrainOptions(**options, lr_scale=text))
        row = (result.folder / "results.csv").read_text(encoding="utf-8").splitlines()[1]
        rates[text] = float(row.split(",")[-1])
    assert rates["auto"] == pytest.approx(1.2 * rates["1.0"]) and rates["0.5"] == pytest.approx(0.5 * rates["1.0"])
    assert "--lr-scale auto: lr0 0.01 x 1.2" in capsys.readouterr().out


def eight_pictures(tiny_data) -> DetectionDataset:
    """Eight training pictures of the built-in set at 128 px, without augmentation."""
    labels = load_split(load_data_config(tiny_data), "train", cache=False, progress=False)
    labels = replace(
        labels,
        images=labels.images[1:9],
        shapes=labels.shapes[1:9],
        boxes=labels.boxes[1:9],
        segments=labels.segments[1:9],
    )
    return DetectionDataset(labels, 128, hyp=Hyperparameters())


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("name", ["", *ATTENTION])
def test_eight_pictures_are_learned_by_heart(name, tiny_data):
    """Every block behind every stage, in its paper's form: mAP50 > 0.9 on the pictures trained on, as without any.

    MHSA takes the place of its map without a shortcut; as in its paper it comes at the end of the backbone only
    (behind every stage it reaches 0.33). From yolov5n.pt, 150 epochs at most, two batches an epoch and an optimizer
    step after each (accumulation to 64 images would leave 19 steps in all).
    """
    dataset = eight_pictures(tiny_data)
    flags = [f"{name}@{'backbone' if name == 'MHSA' else 'stages'}"] if name else []
    model = DetectionModel("models/yolov5n.yaml", names=("circle", "square", "triangle", "cross"), attention=flags)
    carried = transfer_weights(read_weights(OFFICIAL), model.state_dict(), model.names, keep_anchors=True)
    model.load_state_dict(carried.state, strict=False)
    hyp = replace(Hyperparameters(), obj=7.5, cls=4.0).scaled(3, 4, 128)
    criterion = DetectionLoss(model.detect.anchors, 4, hyp)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.0), lr=1e-3)
    batches = [collate([dataset[0, i] for i in part]) for part in (range(4), range(4, 8))]
    best = 0.0
    for epoch in range(150):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (epoch + 1) / 25) * (1 - epoch / 150)
        for batch in batches:
            loss, _ = criterion(model.train()(batch.images.float() / 255), batch.targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        if (epoch + 1) % 25 == 0:
            best = max(best, evaluate(model, batches, device=torch.device("cpu"), progress=False).map50)
            if best > 0.9:
                return
    pytest.fail(f"{name or 'plain'}: mAP50 {best:.3f} after 150 epochs")
