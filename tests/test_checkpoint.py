"""Checkpoints: atomic and plain, official weights without running code, transfer to other numbers and classes."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import SHARED, needs_shared

from models.yolo import DetectionModel, load_model
from utils.checkpoint import (
    CheckpointError,
    Weights,
    align_layers,
    read_archive,
    read_checkpoint,
    read_weights,
    save_checkpoint,
    transfer_weights,
    weights_sha256,
)

OFFICIAL = SHARED / "weights" / "yolov5n.pt"


def write_archive(path, data: bytes, **storages: bytes) -> None:
    """A zip archive as PyTorch lays it out, around any pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        for key, content in storages.items():
            archive.writestr(f"archive/data/{key}", content)


class Attack:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("place", ["top", "inside", "in ema", "key"])
@pytest.mark.parametrize("function", [os.system, exec, eval, open, pickle.loads, __import__])
def test_code_in_a_checkpoint_is_refused_and_not_run(place, function, tmp_path):
    marker = tmp_path / "ran"
    argument = {
        os.system: f"touch {marker}",
        exec: f"open({str(marker)!r}, 'w')",
        eval: f"open({str(marker)!r}, 'w')",
        open: str(marker),
        pickle.loads: pickle.dumps(Attack(os.system, f"touch {marker}")),
        __import__: "this",
    }[function]
    attack = Attack(function, argument, "w") if function is open else Attack(function, argument)
    content = {
        "top": attack,
        "inside": {"model": {"a": [attack]}},
        "in ema": {"format": "yolov5-attention/1", "ema": attack},
        "key": {(1, attack): 2} if function is not exec else {"a": attack},
    }[place]
    path = tmp_path / "x.pt"
    write_archive(path, pickle.dumps(content, protocol=2))
    with pytest.raises(CheckpointError, match="nothing of it was run"):
        read_archive(path)
    assert not marker.exists()


def test_functions_of_the_reader_cannot_be_altered(tmp_path):
    """A BUILD on the rebuild function would change it for later files."""
    path = tmp_path / "x.pt"
    code = b"\x80\x02ctorch._utils\n_rebuild_parameter\n}X\x01\x00\x00\x00ah\x00sb."
    write_archive(path, code.replace(b"h\x00", b"K\x01"))
    with pytest.raises(CheckpointError):
        read_archive(path)


@pytest.mark.parametrize("count", [10**9, 3])
def test_a_storage_must_have_the_size_it_claims(count, tmp_path):
    good = tmp_path / "good.pt"
    torch.save({"a": torch.arange(4.0)}, good)
    with zipfile.ZipFile(good) as archive:
        names = archive.namelist()
        data = archive.read([n for n in names if n.endswith("data.pkl")][0])
    assert data.count(b"K\x04") >= 2
    path = tmp_path / "x.pt"
    write_archive(path, data.replace(b"K\x04", b"J" + count.to_bytes(4, "little")), **{"0": bytes(16)})
    with pytest.raises(CheckpointError, match="size it claims|elements in a storage"):
        read_archive(path)


@pytest.mark.parametrize("cut", [0, 10, 0.5])
def test_a_cut_file_is_damaged(cut, tmp_path):
    path = tmp_path / "x.pt"
    save_checkpoint(path, {"model": {"a": torch.zeros(1000)}})
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * cut) if isinstance(cut, float) else cut])
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(path)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_give_a_value_or_the_projects_error(tmp_path_factory, data, wrapped):
    path = tmp_path_factory.mktemp("bytes") / "x.pt"
    if wrapped:
        write_archive(path, data)
    else:
        path.write_bytes(data)
    try:
        read_archive(path)
    except CheckpointError as error:
        assert str(path) in str(error)


def test_no_file():
    with pytest.raises(CheckpointError, match="no such file"):
        read_archive("nowhere.pt")


def test_content_is_plain_and_returns_as_it_was(tmp_path):
    path = tmp_path / "x.pt"
    tensors = {"a": torch.randn(3, 2), "half": torch.randn(4).half(), "n": torch.tensor(7), "none": torch.zeros(0, 2)}
    shared = torch.arange(6.0)
    content = {"model": tensors, "views": [shared[1:3], shared.view(2, 3).t()], "epoch": 3, "names": ["x"], "f": 0.5}
    save_checkpoint(path, content)
    mine, torchs = read_checkpoint(path), torch.load(path, weights_only=True)
    for read in (mine, torchs):
        assert read["epoch"] == 3 and read["names"] == ["x"] and read["f"] == 0.5
        for name, tensor in tensors.items():
            assert torch.equal(read["model"][name], tensor) and read["model"][name].dtype == tensor.dtype
        assert torch.equal(read["views"][0], shared[1:3]) and torch.equal(read["views"][1], shared.view(2, 3).t())


def test_optimizer_state_returns(tmp_path):
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "x.pt", {"optimizer": optimizer.state_dict()})
    again = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
    again.load_state_dict(read_checkpoint(tmp_path / "x.pt")["optimizer"])
    assert again.param_groups[0]["lr"] == 0.1
    for p in layer.parameters():
        assert torch.equal(again.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    save_checkpoint(path, {"n": 1})

    def fails(content, file):
        file.write(b"half a file")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(CheckpointError, match="No space left.*untouched"):
        save_checkpoint(path, {"n": 2})
    monkeypatch.undo()
    assert read_checkpoint(path)["n"] == 1
    assert os.listdir(tmp_path) == ["x.pt"]


def test_foreign_files_are_told_apart(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "plain.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint of a training run"):
        read_checkpoint(tmp_path / "plain.pt")
    with pytest.raises(CheckpointError, match="no YOLOv5 checkpoint"):
        read_weights(tmp_path / "plain.pt")


def test_sha256_sees_a_single_bit():
    state = OrderedDict(a=torch.zeros(4), b=torch.tensor(3))
    same = OrderedDict(b=torch.tensor(3), a=torch.zeros(4))
    assert weights_sha256(state) == weights_sha256(same)
    same["a"] = torch.tensor([0.0, 0.0, -0.0, 0.0])  # equal in value, not in bits
    assert weights_sha256(state) != weights_sha256(same)


def as_weights(model: DetectionModel) -> Weights:
    return Weights({k: v.clone() for k, v in model.state_dict().items()}, model.names, model.model_file)


def test_alignment_follows_inserted_layers():
    plain, attended = DetectionModel("models/yolov5n.yaml"), DetectionModel("models/attention/yolov5n-cbam.yaml")
    aligned = align_layers(plain.state_dict(), attended.state_dict())
    shift = {i: i + sum(i > stage for stage in (2, 4, 6, 8)) for i in range(25)}
    with_tensors = {int(name.split(".")[1]) for name in plain.state_dict()}
    assert aligned == {i: shift[i] for i in with_tensors}
    # and back: taking attention out again
    assert align_layers(attended.state_dict(), plain.state_dict()) == {v: k for k, v in aligned.items()}


@pytest.mark.parametrize("block", ["se", "eca", "cbam"])
@pytest.mark.parametrize("size", ["n", "s"])
def test_everything_is_transferred_to_an_attention_model(size, block):
    source = as_weights(DetectionModel(f"models/yolov5{size}.yaml"))
    target = DetectionModel(f"models/attention/yolov5{size}-{block}.yaml")
    carried = transfer_weights(source, target.state_dict(), target.names, keep_anchors=True)
    assert (carried.transferred, carried.total) == (349, 349)
    target.load_state_dict(carried.state, strict=False)
    assert torch.equal(target.model[-1].m[2].weight, source.state["model.24.m.2.weight"])
    assert torch.equal(target.model[5].cv1.conv.weight, source.state["model.4.cv1.conv.weight"])


def test_head_rows_of_other_classes():
    names = ("cat", "dog", "cow")
    source = as_weights(DetectionModel("models/yolov5n.yaml", names=names))
    target = DetectionModel("models/yolov5n.yaml", names=("dog", "fish"))
    before = {k: v.clone() for k, v in target.state_dict().items()}
    carried = transfer_weights(source, target.state_dict(), target.names, keep_anchors=True)
    assert len(carried.in_part) == 6 and carried.transferred == 349
    target.load_state_dict(carried.state, strict=False)
    old = source.state["model.24.m.0.weight"].view(3, 8, 64)
    new = target.state_dict()["model.24.m.0.weight"].view(3, 7, 64)
    assert torch.equal(new[:, :5], old[:, :5])
    assert torch.equal(new[:, 5], old[:, 6])  # dog
    assert torch.equal(new[:, 6], before["model.24.m.0.weight"].view(3, 7, 64)[:, 6])  # fish starts anew
    bias = target.state_dict()["model.24.m.1.bias"].view(3, 7)
    assert torch.equal(bias[:, 5], source.state["model.24.m.1.bias"].view(3, 8)[:, 6])


def test_anchors_stay_or_come_along():
    source = as_weights(DetectionModel("models/yolov5n.yaml"))
    source.state["model.24.anchors"] *= 2
    target = DetectionModel("models/yolov5n.yaml")
    kept = transfer_weights(source, target.state_dict(), target.names, keep_anchors=True)
    assert kept.unused == ("model.24.anchors",) and "348 of 349" in kept.summary()
    taken = transfer_weights(source, target.state_dict(), target.names, keep_anchors=False)
    assert torch.equal(taken.state["model.24.anchors"], source.state["model.24.anchors"])


def test_weights_of_another_size_do_not_pass_as_transferred():
    source = as_weights(DetectionModel("models/yolov5n.yaml"))
    target = DetectionModel("models/yolov5s.yaml")
    carried = transfer_weights(source, target.state_dict(), target.names, keep_anchors=True)
    assert carried.transferred < 0.4 * carried.total and len(carried.unused) == carried.total - carried.transferred


@needs_shared
def test_official_weights():
    weights = read_weights(OFFICIAL)
    assert len(weights.state) == 349 and len(weights.names) == 80 and weights.names[5] == "bus"
    assert all(v.dtype in (torch.float32, torch.int64) for v in weights.state.values())
    model = load_model(OFFICIAL, fuse=False)
    assert model.names == weights.names and not model.training
    assert model.state_dict().keys() == weights.state.keys()


@needs_shared
def test_official_weights_to_attention_model_with_other_classes():
    target = DetectionModel("models/attention/yolov5n-cbam.yaml", names=("RBC", "WBC", "person"))
    carried = transfer_weights(read_weights(OFFICIAL), target.state_dict(), target.names, keep_anchors=True)
    assert carried.transferred >= 0.99 * carried.total == 0.99 * 349
    assert len(carried.in_part) == 6
