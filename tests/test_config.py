"""YAML files: numbers, names, paths, and one-line errors that name the place."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from utils import ROOT
from utils.config import (
    ConfigError,
    Hyperparameters,
    class_names,
    find_file,
    load_data_config,
    load_hyperparameters,
    load_model_file,
    read_yaml,
)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_exponents_without_a_dot_are_numbers(tmp_path):
    values = read_yaml(write(tmp_path / "a.yaml", "a: 1e-3\nb: 5E2\nc: -1e3\nd: 1.5e-3\ne: e3\nf: 12\n"))
    assert values == {"a": 0.001, "b": 500.0, "c": -1000.0, "d": 0.0015, "e": "e3", "f": 12}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", ["line 3", "'a' is given twice"]),
        ("a: [1, 2\nb: 3\n", ["line 2", "not valid YAML"]),
        ("- 1\n- 2\n", ["expected 'key: value'"]),
        ("a: !!python/object/apply:os.system ['true']\n", ["not valid YAML", "line 1"]),
        ("{[1]: 2}\n", ["a key must be plain"]),
    ],
)
def test_bad_yaml_is_one_line(tmp_path, text, words):
    path = write(tmp_path / "a.yaml", text)
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    for word in [str(path), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_mapping_or_the_projects_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "a.yaml"
    path.write_bytes(data)
    try:
        assert isinstance(read_yaml(path), dict)
    except ConfigError as error:
        assert str(path) in str(error)


def test_hyperparameters(tmp_path):
    hyp, missing = load_hyperparameters(write(tmp_path / "h.yaml", "lr0: 1e-2\nmosaic: 0\nanchors: 3\n"))
    assert hyp == Hyperparameters(mosaic=0.0)
    assert "lrf" in missing and "mosaic" not in missing and "label_smoothing" not in missing


def test_shipped_hyperparameters_are_the_defaults():
    hyp, missing = load_hyperparameters("hyp.scratch-low.yaml")
    assert hyp == Hyperparameters() and not missing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: 0.1\n", "unknown hyperparameter 'lr', did you mean lr"),
        ("lr0: fast\n", "lr0 must be a number, found 'fast'"),
        ("lr0: .nan\n", "lr0 must be a number"),
        ("lr0: yes\n", "lr0 must be a number"),
        ("mosaic: 1.5\n", "mosaic must lie between 0 and 1"),
        ("degrees: -3\n", "degrees must not be negative"),
    ],
)
def test_wrong_hyperparameters(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        load_hyperparameters(write(tmp_path / "h.yaml", text))


def test_gains_scale_as_yolov5s():
    hyp = Hyperparameters().scaled(layers=3, classes=3, imgsz=64)
    assert (hyp.box, hyp.cls, hyp.obj) == pytest.approx((0.05, 0.01875, 0.01))
    hyp = Hyperparameters().scaled(layers=4, classes=4, imgsz=128)
    assert (hyp.box, hyp.cls, hyp.obj) == pytest.approx((0.0375, 0.01875, 0.03))


@pytest.mark.parametrize(
    ("names", "nc", "wanted"),
    [
        (["a", "b"], None, ("a", "b")),
        ({0: "a", 1: "b"}, 2, ("a", "b")),
        ({"0": "a", "1": "b"}, None, ("a", "b")),
        ({1: "b", 0: "a"}, None, ("a", "b")),
        (None, 2, ("class0", "class1")),
        ([1, 2.5], None, ("1", "2.5")),
    ],
)
def test_class_names(names, nc, wanted):
    assert class_names(names, nc, "x") == wanted


@pytest.mark.parametrize(
    ("names", "nc", "words"),
    [
        (None, None, "'names' is missing"),
        ({0: "a", 2: "b"}, None, "no entry for class 1"),
        ([False, True], None, "quotes"),
        (["a", "b"], 3, "nc is 3 but 'names' has 2"),
        ({"x": "a"}, None, "not a whole number"),
        ([], None, "must be a list"),
        (None, 0, "nc must be"),
        (None, True, "nc must be"),
    ],
)
def test_wrong_class_names(names, nc, words):
    with pytest.raises(ConfigError, match=words):
        class_names(names, nc, "x")


def test_data_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "sets").mkdir()
    file = write(tmp_path / "sets" / "d.yaml", "path: ../pictures\ntrain: a\nval: [b, c]\nnames: [x]\n")
    monkeypatch.chdir(tmp_path)
    data = load_data_config("sets/d.yaml")
    assert data.root == (tmp_path / "pictures").resolve()
    assert data.train == (data.root / "a",) and data.val == (data.root / "b", data.root / "c") and data.test == ()
    assert data.file == file.resolve() and data.nc == 1


def test_a_file_that_is_no_data_set(tmp_path):
    with pytest.raises(ConfigError, match="none of 'train', 'val', 'test'"):
        load_data_config(write(tmp_path / "d.yaml", "names: [x]\n"))
    with pytest.raises(ConfigError, match="'train' must be a path"):
        load_data_config(write(tmp_path / "d.yaml", "train: {a: b}\nnames: [x]\n"))


def test_shipped_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_file("models/yolov5n.yaml") == ROOT / "models" / "yolov5n.yaml"
    assert find_file("shapes.yaml", "data") == ROOT / "data" / "shapes.yaml"
    write(tmp_path / "shapes.yaml", "x: 1\n")
    assert find_file("shapes.yaml", "data") == tmp_path / "shapes.yaml"  # the working folder comes first
    with pytest.raises(ConfigError, match="no such file.*looked for"):
        find_file("nowhere.yaml", "data")


def test_extends(tmp_path):
    write(tmp_path / "base.yaml", "nc: 80\nhead: [1]\n")
    child = write(tmp_path / "child.yaml", "extends: base.yaml\nnc: 3\n")
    assert load_model_file(child) == {"nc": 3, "head": [1]}
    write(tmp_path / "base.yaml", "extends: child.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        load_model_file(child)
    with pytest.raises(ConfigError, match="names no file"):
        load_model_file(write(tmp_path / "c.yaml", "extends: lost.yaml\n"))


def test_shipped_yaml_files_are_valid():
    files = [p for folder in ("models", "data") for p in (ROOT / folder).rglob("*.yaml")]
    assert len(files) > 25
    for path in files:
        assert yaml.safe_load(path.read_text(encoding="utf-8"))
        read_yaml(path)
