"""Training end to end on a few pictures of the built-in set: reproducible, resumable, guarded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from test_determinism import PutInBackward
from torch import nn
from training import FOUR_EPOCHS, assert_same_run, options, rows

import train as train_module
from detect import detect
from models.common import Attention
from models.yolo import BLOCKS, DetectionModel, load_model
from train import train
from utils import ROOT, UserError
from utils.checkpoint import read_checkpoint, read_weights, weights_sha256
from utils.determinism import NonDeterministicError
from utils.options import DetectOptions, TrainOptions, ValOptions
from val import main as val_main


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_run_again_is_identical(workers, reference_run, tiny_data, tmp_path):
    assert_same_run(reference_run, train(options(tiny_data, tmp_path, workers=workers, **FOUR_EPOCHS)))


def test_another_seed_is_another_run(reference_run, tiny_data, tmp_path):
    assert train(options(tiny_data, tmp_path, seed=1, **FOUR_EPOCHS)).sha256 != reference_run.sha256


def test_two_epochs_and_resume_equal_four(reference_run, tiny_data, tmp_path, monkeypatch):
    save = train_module.save_checkpoint

    def save_and_stop(path, content):
        save(path, content)
        if path.name == "last.pt" and content["progress"]["epoch"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "save_checkpoint", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        train(options(tiny_data, tmp_path, **FOUR_EPOCHS))
    monkeypatch.undo()
    last = tmp_path / "exp" / "weights" / "last.pt"
    assert read_checkpoint(last)["progress"]["epoch"] == 2 and read_checkpoint(last)["gradients"]
    # a row of an epoch that the checkpoint does not know is dropped when that epoch runs again
    with open(tmp_path / "exp" / "results.csv", "a", encoding="utf-8") as file:
        file.write("2," + ",".join("9" * 13) + "\n")
    resumed = train(TrainOptions(resume=str(last)))
    assert resumed.folder == tmp_path / "exp"
    assert_same_run(reference_run, resumed)


def test_what_a_run_leaves_behind(reference_run):
    folder = reference_run.folder
    written = {"weights", "results.csv", "opt.yaml", "hyp.yaml", "model.yaml", "determinism.json"}
    assert {p.name for p in folder.iterdir()} == written
    assert {p.name for p in (folder / "weights").iterdir()} == {"last.pt", "best.pt"}
    table = rows(reference_run)
    assert [row["epoch"] for row in table] == ["0", "1", "2", "3"]
    assert all(torch.isfinite(torch.tensor([float(v) for v in row.values()])).all() for row in table)
    assert float(table[0]["x/lr0"]) > float(table[0]["x/lr1"]) > 0  # biases come down to their rate
    resolved = yaml.safe_load((folder / "model.yaml").read_text(encoding="utf-8"))
    assert [line[2] for line in resolved["backbone"]].count("CBAM") == 4 and resolved["nc"] == 4
    assert len(DetectionModel(folder / "model.yaml").layers) == 29
    assert yaml.safe_load((folder / "opt.yaml").read_text(encoding="utf-8"))["deterministic_mode"] == "strict"


def test_checkpoints_are_plain_and_best_is_stripped(reference_run):
    last, best = (torch.load(reference_run.folder / "weights" / f"{n}.pt", weights_only=True) for n in ("last", "best"))
    assert last["names"] == best["names"] == ["circle", "square", "triangle", "cross"]
    assert last["determinism"]["mode"] == "strict" and last["optimizer"]["state"]
    assert "optimizer" not in best and best["ema"] is None
    assert all(t.dtype in (torch.float32, torch.int64) for t in best["model"].values())
    model = load_model(reference_run.folder / "weights" / "best.pt", fuse=False)
    assert model.names == tuple(best["names"])
    assert weights_sha256(model.state_dict()) == weights_sha256(best["model"])


def test_the_report_says_that_the_run_repeats(reference_run):
    report = json.loads((reference_run.folder / "determinism.json").read_text(encoding="utf-8"))
    assert report["bit_reproducible"] is True and report["reasons"] == [] and report["operations"] == {}
    assert report["mode"] == "strict" and report["seed"] == 0 and report["device"] == "cpu"
    assert report["flags"]["deterministic_algorithms"] and not report["flags"]["warn_only"]
    assert not report["flags"]["fill_uninitialized_memory"]
    assert report["versions"]["torch"] == torch.__version__ and report["threads"] == torch.get_num_threads()
    saved = torch.load(reference_run.folder / "weights" / "best.pt", weights_only=True)["determinism"]
    assert saved == report


def test_finished_runs_and_stripped_files_cannot_be_resumed(reference_run):
    with pytest.raises(UserError, match="finished its 4 epochs"):
        train(TrainOptions(resume=str(reference_run.folder / "weights" / "last.pt")))
    with pytest.raises(UserError, match="resume from last.pt"):
        train(TrainOptions(resume=str(reference_run.folder / "weights" / "best.pt")))
    with pytest.raises(UserError, match="leave out --batch-size, --cos-lr"):
        train(TrainOptions(resume=str(reference_run.folder / "weights" / "last.pt"), batch_size=4, cos_lr=True))


class Alerting(nn.Module):
    """A block as users bring them: fine forward, no deterministic backward."""

    def __init__(self, c1):
        super().__init__()

    def forward(self, x):
        return PutInBackward.apply(x) if x.requires_grad else x


@pytest.fixture
def alerting_model(monkeypatch, tmp_path):
    monkeypatch.setitem(BLOCKS, "Alerting", (Alerting, "attention"))
    file = tmp_path / "alerting.yaml"
    base = ROOT / "models" / "yolov5n.yaml"
    file.write_text(f"extends: {base}\nattention:\n  - {{block: Alerting, after: [8]}}\n", encoding="utf-8")
    return str(file)


def test_strict_stops_before_the_data_are_read(alerting_model, tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "load_split", lambda *a, **k: pytest.fail("the data were read"))
    with pytest.raises(NonDeterministicError) as error:
        train(options(tiny_data, tmp_path, cfg=alerting_model, epochs=1))
    text = str(error.value)
    assert "strict cannot train this model" in text
    row = next(line for line in text.splitlines() if "put_" in line)
    assert row.split()[:4] == ["9", "Alerting", "model.9", "(Alerting)"]
    assert "--deterministic-mode warn" in text and "scoped-off" in text


class Unpooling(Attention):
    """Halves a map and blows it up again with `MaxUnpool2d`, which alerts on the CPU as well."""

    def __init__(self, c1, *, identity=False):
        super().__init__(identity)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x):
        return self.unpool(*self.pool(x), output_size=x.shape[2:])


def test_swapped_modules_train_in_strict(tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(BLOCKS, "Unpooling", (Unpooling, "attention"))
    flags = {"cfg": "models/yolov5n.yaml", "attention": ("Unpooling@4",), "epochs": 1}
    with pytest.raises(NonDeterministicError, match="model.5.unpool"):
        train(options(tiny_data, tmp_path, **flags))
    result = train(options(tiny_data, tmp_path, deterministic_swap=True, **flags))
    assert "model.5.unpool: MaxUnpool2d" in capsys.readouterr().out
    assert result.epochs == 1


def test_warn_trains_it_and_lists_the_operation(alerting_model, tiny_data, tmp_path, capsys):
    result = train(options(tiny_data, tmp_path, cfg=alerting_model, epochs=1, deterministic_mode="warn"))
    text = capsys.readouterr().out
    assert text.count("not deterministic: put_ in model.9 has no") == 1
    assert "put_ in model.9 (5 times)" in text  # 36 pictures in batches of 8
    saved = read_checkpoint(result.folder / "weights" / "last.pt")["determinism"]
    assert saved["operations"] == {"put_": 5} and saved["layers"] == {"put_": ["model.9"]} and saved["mode"] == "warn"
    assert saved["bit_reproducible"] is False and "put_" in saved["reasons"][0]
    assert "bit-reproducible: no, put_ has no deterministic implementation" in text


def test_scoped_off_trains_it(alerting_model, tiny_data, tmp_path):
    train(options(tiny_data, tmp_path, cfg=alerting_model, epochs=1, deterministic_mode="scoped-off"))


def test_modes_give_equal_weights_where_nothing_alerts(tiny_data, tmp_path):
    hashes = {
        train(options(tiny_data, tmp_path, epochs=1, deterministic_mode=mode)).sha256
        for mode in ("strict", "warn", "scoped-off")
    }
    assert len(hashes) == 1


def test_frozen_layers_keep_their_weights(tiny_data, tmp_path):
    cfg = "models/yolov5n.yaml"
    runs = [train(options(tiny_data, tmp_path, cfg=cfg, epochs=1, freeze=f)) for f in ((2,), (0, 1, 23))]
    a, b = (read_checkpoint(run.folder / "weights" / "last.pt")["model"] for run in runs)
    kernels = [name for name in a if name.endswith("conv.weight")]  # after five steps some norms are still at 1
    same = {name for name in kernels if torch.equal(a[name], b[name])}
    assert same == {"model.0.conv.weight", "model.1.conv.weight"}
    with pytest.raises(UserError, match="layers are 0 to 24"):
        train(options(tiny_data, tmp_path, cfg=cfg, freeze=(3, 40)))
    with pytest.raises(UserError, match="nothing is left to train"):
        train(options(tiny_data, tmp_path, cfg=cfg, freeze=(25,)))


def test_early_stopping_and_periods(tiny_data, tmp_path, monkeypatch, capsys):
    """Fitness falls from the first epoch on: patience 2 ends the run after three."""
    evaluate = train_module.evaluate
    scores = iter([0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1])

    def falling(*args, **kwargs):
        from dataclasses import replace

        return replace(evaluate(*args, **kwargs), map50=0.0, map50_95=next(scores))

    monkeypatch.setattr(train_module, "evaluate", falling)
    result = train(options(tiny_data, tmp_path, epochs=6, patience=2, save_period=2))
    assert result.epochs == 3 and "stopped early" in capsys.readouterr().out
    weights = result.folder / "weights"
    assert {p.name for p in weights.iterdir()} == {"last.pt", "best.pt", "epoch1.pt"}
    assert torch.load(weights / "best.pt", weights_only=True)["progress"]["epoch"] == 1


def test_noval_measures_at_the_end_only(tiny_data, tmp_path):
    result = train(options(tiny_data, tmp_path, noval=True))
    assert [row["metrics/mAP_0.5"] == "nan" for row in rows(result)] == [True, False]


def test_single_class_and_pretrained_weights(reference_run, tiny_data, tmp_path, capsys):
    weights = str(reference_run.folder / "weights" / "best.pt")
    result = train(options(tiny_data, tmp_path, weights=weights, single_cls=True, epochs=1))
    text = capsys.readouterr().out
    total = len(read_weights(weights).state)
    assert f"transferred {total} of {total} tensors, 6 of them in part" in text
    assert read_checkpoint(result.folder / "weights" / "last.pt")["names"] == ["item"]
    assert result.metrics.names == ("item",)


@pytest.mark.parametrize("flags", [{"optimizer": "Adam"}, {"optimizer": "AdamW", "cos_lr": True}])
def test_other_optimizers_and_schedules_train(flags, tiny_data, tmp_path, reference_run):
    result = train(options(tiny_data, tmp_path, epochs=1, **flags))
    assert all(float(v) == float(v) for v in rows(result)[0].values())
    assert read_checkpoint(result.folder / "weights" / "last.pt")["options"]["optimizer"] == flags["optimizer"]


def test_pictures_of_a_run(tiny_data, tmp_path):
    result = train(options(tiny_data, tmp_path, epochs=1, noplots=False))
    names = {p.name for p in result.folder.iterdir()}
    assert {"labels.jpg", "train_batch0.jpg", "results.png", "confusion_matrix.png", "PR_curve.png"} <= names


def test_validate_and_detect_with_the_trained_weights(reference_run, tiny_data, tmp_path):
    weights = str(reference_run.folder / "weights" / "best.pt")
    metrics = val_main(
        ValOptions(weights=weights, data=str(tiny_data), imgsz=64, workers=0, project=str(tmp_path), batch_size=14)
    )
    # the same batches as in the training's own validation, the fused model: equal up to rounding
    assert metrics.map50 == pytest.approx(reference_run.metrics.map50, abs=1e-3)
    found = detect(
        DetectOptions(
            weights=weights,
            source=str(tiny_data.parent / "images" / "val"),
            imgsz=(64,),
            conf_thres=0.0001,
            project=str(tmp_path),
            save_txt=True,
        )
    )
    assert len(found) == 8
    assert {p.name for p in (tmp_path / "exp2").glob("*.png")} == {f"{i}.png" for i in range(8)}


def run(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, env={**os.environ}
    )


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--epochs", "0"], 2, "must be 1 or more"),
        (["--deterministic-mode", "off"], 2, "invalid choice"),
        (["--device", "99"], 2, "no such CUDA device"),
        (["--data", "nowhere.yaml"], 1, "nowhere.yaml: no such file"),
        (["--weights", "nowhere.pt"], 1, "nowhere.pt: no such file"),
        (["--resume", "nowhere.pt"], 1, "nowhere.pt: no such file"),
    ],
)
def test_mistakes_end_in_one_line(flags, status, words, tmp_path):
    done = run(ROOT / "train.py", "--project", tmp_path / "runs", *flags, cwd=tmp_path)
    assert done.returncode == status
    assert words in done.stderr and "Traceback" not in done.stderr
