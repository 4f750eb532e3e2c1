"""Options: YOLOv5's names and defaults, help without loading PyTorch, folders of runs, exit statuses."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from utils import ROOT, UsageError, UserError
from utils.options import (
    DetectOptions,
    TrainOptions,
    ValOptions,
    as_plain_dict,
    changed_flags,
    new_run_folder,
    options_from,
    parse_detect,
    parse_train,
    parse_val,
    run_script,
)


def test_defaults_are_yolov5s():
    options = parse_train([])
    assert (options.epochs, options.batch_size, options.imgsz, options.patience) == (100, 16, 640, 100)
    assert (options.workers, options.seed, options.optimizer, options.freeze) == (8, 0, "SGD", (0,))
    assert (options.name, options.save_period, options.deterministic_mode) == ("exp", -1, "strict")
    assert options.data == "data/shapes.yaml"
    options = parse_val([])
    assert (options.batch_size, options.imgsz, options.conf_thres, options.iou_thres) == (32, 640, 0.001, 0.6)
    assert options.max_det == 300
    options = parse_detect([])
    assert (options.imgsz, options.conf_thres, options.iou_thres, options.max_det) == ((640,), 0.25, 0.45, 1000)
    assert (options.line_thickness, options.classes) == (3, None)


def test_spellings_and_abbreviations_of_yolov5():
    for flag in ("--imgsz", "--img", "--img-size"):
        assert parse_train([flag, "320"]).imgsz == 320
    assert parse_train(["--batch", "8"]).batch_size == 8  # as in every tutorial
    assert parse_train(["--freeze", "0", "1", "2"]).freeze == (0, 1, 2)
    assert parse_train(["--resume"]).resume == "newest"
    assert parse_train(["--resume", "x/last.pt"]).resume == "x/last.pt"
    assert parse_detect(["--classes", "0", "2", "--img", "320", "640"]).classes == (0, 2)
    assert parse_detect(["--img", "320", "640"]).imgsz == (320, 640)


@pytest.mark.parametrize(
    ("parse", "flags", "words"),
    [
        (parse_train, ["--epochs", "x"], "invalid whole number value: 'x'"),
        (parse_train, ["--batch-size", "0"], "must be 1 or more"),
        (parse_train, ["--label-smoothing", "2"], "between 0 and 1"),
        (parse_train, ["--optimizer", "Lion"], "invalid choice"),
        (parse_train, ["--epoch-count", "3"], "unrecognized arguments"),
        (parse_val, ["--task", "x"], "invalid choice"),
        (parse_detect, ["--conf-thres", "-1"], "between 0 and 1"),
    ],
)
def test_bad_flags_exit_with_2(parse, flags, words, capsys):
    with pytest.raises(SystemExit) as error:
        parse(flags)
    assert error.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("parse", "options"), [(parse_train, TrainOptions), (parse_detect, DetectOptions)])
def test_every_option_is_in_the_help(parse, options, capsys):
    with pytest.raises(SystemExit) as error:
        parse(["--help"])
    text = capsys.readouterr().out
    assert error.value.code == 0
    for field in dataclasses.fields(options):
        assert "--" + field.name.replace("_", "-") in text


def test_plain_dict_round_trip():
    options = TrainOptions(freeze=(1, 2), cos_lr=True)
    plain = as_plain_dict(options)
    assert plain["freeze"] == [1, 2]
    assert options_from(TrainOptions, {**plain, "flag_of_another_version": 1}) == options


def test_changed_flags():
    options = TrainOptions(epochs=3, device="cpu", cos_lr=True)
    assert changed_flags(options, ("device",)) == ["--epochs", "--cos-lr"]


def test_run_folders_count_up(tmp_path):
    names = [new_run_folder(str(tmp_path), "train", "exp", False).name for _ in range(3)]
    assert names == ["exp", "exp2", "exp3"]
    assert new_run_folder(str(tmp_path), "train", "exp", True).name == "exp"
    assert new_run_folder(str(tmp_path / "a" / "b"), "train", "exp", False).is_dir()


@pytest.mark.parametrize("name", ["", "../x", "/x"])
def test_run_names_stay_below_their_folder(name, tmp_path):
    with pytest.raises(UsageError, match="--name"):
        new_run_folder(str(tmp_path), "train", name, False)


def test_a_project_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="choose another folder with --project"):
        new_run_folder(str(tmp_path / "file"), "train", "exp", False)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (UserError("a: broken"), 1, "error: a: broken\n"),
        (UsageError("b"), 2, "error: b\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_line_and_a_status(error, status, text, capsys):
    def main(_):
        raise error

    with pytest.raises(SystemExit) as exit_error:
        run_script(main, lambda: None)
    assert exit_error.value.code == status
    assert capsys.readouterr().err.endswith(text)


@pytest.mark.parametrize("script", ["train", "val", "detect"])
def test_help_loads_no_heavy_library(script):
    code = (
        f"import runpy, sys; sys.argv = ['{script}.py', '--help']\n"
        f"try: runpy.run_path('{script}.py', run_name='__main__')\n"
        "except SystemExit as e: print(e.code, sorted({'torch', 'cv2', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("0 []\n"), done.stderr


def test_val_options_have_no_field_without_a_group():
    for options in (TrainOptions, ValOptions, DetectOptions):
        assert all(field.metadata["group"] and field.metadata["help"] for field in dataclasses.fields(options))
