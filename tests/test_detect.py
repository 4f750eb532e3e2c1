"""Detection from end to end: with a stand-in model that finds fixed boxes, and with YOLOv5's weights where they lie."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import models.yolo
from detect import detect, safe_folder_names
from utils import ROOT, UsageError
from utils.options import DetectOptions, parse_detect, run_script

SHARED = ROOT.parent / "shared"
WEIGHTS = SHARED / "weights" / "yolov5n.pt"
REAL_LOADER = models.yolo.load_model
NAMES = ("cat/dog", "cat_dog", "bird")


class FixedModel:
    """Finds a box of class 0 (confidence 0.9) and a smaller one of class 2 (0.5) wherever it looks.

    Input pixels: the first spans x 8…40, y 8…24, the second x 40…56, y 8…24; nothing in dark pictures.
    """

    names = NAMES
    nc = 3
    stride = torch.tensor([8.0, 16, 32])

    def __call__(self, images):
        return [images]

    def decode(self, raw):
        found = torch.zeros(1, 2, 8)
        found[0, :, :5] = torch.tensor([[24, 16, 32, 16, 1.0], [48, 16, 16, 16, 1.0]])
        found[0, 0, 5], found[0, 1, 7] = 0.9, 0.5
        return found * (raw[0].mean() > 0.2)

    augmented = __call__


@pytest.fixture(autouse=True)
def fixed_model(monkeypatch):
    monkeypatch.setattr("models.yolo.load_model", lambda *_, **__: FixedModel())


def save(path: Path, height=64, width=64, value=200) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.full((height, width, 3), value, np.uint8)
    path.write_bytes(cv2.imencode(path.suffix, image)[1].tobytes())
    return path


def options(tmp_path, source, **changes):
    changes = {"imgsz": (64,), "device": "cpu", "project": str(tmp_path / "runs"), "name": "exp", **changes}
    return DetectOptions(weights="fixed.pt", source=str(source), **changes)


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_everything_that_is_written(tmp_path, capsys):
    save(tmp_path / "in" / "a.png", 128, 128)
    save(tmp_path / "in" / "dark.png", value=0)
    results = detect(options(tmp_path, tmp_path / "in", save_txt=True, save_csv=True, save_conf=True, save_crop=True))
    run = tmp_path / "runs" / "exp"
    assert files(run) == [
        "a.png",
        "crops/bird/a.jpg",
        "crops/cat_dog/a.jpg",
        "dark.png",
        "labels/a.txt",
        "predictions.csv",
    ]
    # The picture is twice the input's size: the first box spans x 16…80, y 16…48 of 128 pixels.
    assert results[0].detections[0].tolist() == pytest.approx([16, 16, 80, 48, 0.9, 0])
    assert len(results[1].detections) == 0
    rows = [[float(v) for v in line.split()] for line in (run / "labels/a.txt").read_text().splitlines()]
    assert rows == [pytest.approx([0, 0.375, 0.25, 0.5, 0.25, 0.9]), pytest.approx([2, 0.75, 0.25, 0.25, 0.25, 0.5])]
    with (run / "predictions.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.reader(file))
    assert table == [
        ["Image Name", "Prediction", "Confidence"],
        ["a.png", "cat/dog", "0.90"],
        ["a.png", "bird", "0.50"],
    ]
    drawn = cv2.imread(str(run / "a.png"))
    assert drawn.shape == (128, 128, 3)
    assert (drawn != 200).any()
    assert (cv2.imread(str(run / "dark.png")) == 0).all()
    crop = cv2.imread(str(run / "crops/cat_dog/a.jpg"))
    assert abs(crop.shape[1] - (64 * 1.02 + 10)) <= 1
    assert abs(crop.shape[0] - (32 * 1.02 + 10)) <= 1
    assert (abs(crop.astype(int) - 200) < 4).all()  # cut from the picture without its boxes

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"image 1/2 {tmp_path / 'in' / 'a.png'}: 64x64 1 cat/dog, 1 bird, ")
    assert lines[0].endswith("ms")
    assert lines[1].startswith(f"image 2/2 {tmp_path / 'in' / 'dark.png'}: 64x64 (no detections), ")
    assert lines[2].startswith("Speed: ")
    assert lines[2].endswith("ms NMS per image at shape (1, 3, 64, 64)")
    assert f"Results saved to {run}" in lines


def test_equal_names_from_two_folders_are_kept_apart(tmp_path):
    for folder, width in (("x", 64), ("y", 128)):
        save(tmp_path / folder / "bus.png", 64, width)
    (tmp_path / "list.txt").write_text(f"{tmp_path}/x/bus.png\n{tmp_path}/y/bus.png\n", encoding="utf-8")
    detect(options(tmp_path, tmp_path / "list.txt", save_txt=True, save_crop=True))
    run = tmp_path / "runs" / "exp"
    assert cv2.imread(str(run / "bus.png")).shape[1] == 64
    assert cv2.imread(str(run / "bus-2.png")).shape[1] == 128
    assert [name for name in files(run) if "bird" in name] == ["crops/bird/bus-2.jpg", "crops/bird/bus.jpg"]
    assert len((run / "labels/bus.txt").read_text().splitlines()) == 2
    assert len((run / "labels/bus-2.txt").read_text().splitlines()) == 2


def test_a_second_run_into_the_same_folder_replaces_and_does_not_append(tmp_path):
    image = save(tmp_path / "a.png")
    same = {"save_txt": True, "save_csv": True, "save_crop": True, "exist_ok": True}
    detect(options(tmp_path, image, **same))
    run = tmp_path / "runs" / "exp"
    before = {name: (run / name).read_bytes() for name in files(run)}
    detect(options(tmp_path, image, **same))
    assert {name: (run / name).read_bytes() for name in files(run)} == before
    save(image, value=0)
    detect(options(tmp_path, image, **same))
    assert not (run / "labels/a.txt").exists()  # nothing is found now, and the old file would say otherwise


def test_runs_without_exist_ok_get_folders_of_their_own(tmp_path):
    for _ in range(2):
        detect(options(tmp_path, save(tmp_path / "a.png")))
    assert [folder.name for folder in sorted((tmp_path / "runs").iterdir())] == ["exp", "exp2"]


def test_nosave_leaves_no_folder(tmp_path, capsys):
    detect(options(tmp_path, save(tmp_path / "a.png"), nosave=True))
    assert not (tmp_path / "runs").exists()
    assert "saved" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"), [({"classes": (2,)}, [2]), ({"conf_thres": 0.7}, [0]), ({"max_det": 1}, [0])]
)
def test_detections_can_be_narrowed_down(tmp_path, flags, expected):
    (result,) = detect(options(tmp_path, save(tmp_path / "a.png"), nosave=True, **flags))
    assert result.detections[:, 5].tolist() == expected


@pytest.mark.parametrize(
    ("flags", "words"), [({"classes": (3,)}, "--classes 3.*0 to 2"), ({"imgsz": (64, 64, 64)}, "found 3 numbers")]
)
def test_options_that_cannot_be_meant(tmp_path, flags, words):
    with pytest.raises(UsageError, match=words):
        detect(options(tmp_path, save(tmp_path / "a.png"), **flags))


def test_names_come_from_the_data_file_when_given(tmp_path, capsys):
    (tmp_path / "d.yaml").write_text("val: x\nnames: [one, two, three]\n", encoding="utf-8")
    detect(options(tmp_path, save(tmp_path / "a.png"), nosave=True, data=str(tmp_path / "d.yaml")))
    assert "1 one, 1 three" in capsys.readouterr().out
    (tmp_path / "d.yaml").write_text("val: x\nnames: [one]\n", encoding="utf-8")
    with pytest.raises(UsageError, match="3 classes.*names 1"):
        detect(options(tmp_path, save(tmp_path / "a.png"), data=str(tmp_path / "d.yaml")))


def test_a_size_that_is_no_multiple_of_the_stride_is_rounded_up(tmp_path, capsys):
    detect(options(tmp_path, save(tmp_path / "a.png", 100, 100), imgsz=(50,), nosave=True))
    out = capsys.readouterr().out
    assert "50 50 is no multiple of the model's stride 32: using 64 64" in out
    assert ": 64x64 " in out


def test_a_video_keeps_its_size_rate_and_length(tmp_path):
    video = tmp_path / "clip.mp4"
    writer = cv2.VideoWriter(str(video), cv2.VideoWriter_fourcc(*"mp4v"), 12.5, (96, 64))
    for _ in range(5):
        writer.write(np.full((64, 96, 3), 200, np.uint8))
    writer.release()
    results = detect(options(tmp_path, video, save_txt=True))
    assert [result.frame for result in results] == [1, 2, 3, 4, 5]
    run = tmp_path / "runs" / "exp"
    assert files(run) == ["clip.mp4", *(f"labels/clip_{i}.txt" for i in range(1, 6))]
    capture = cv2.VideoCapture(str(run / "clip.mp4"))
    assert capture.get(cv2.CAP_PROP_FPS) == pytest.approx(12.5)
    frames = [capture.read() for _ in range(6)]
    capture.release()
    assert [there for there, _ in frames] == [True] * 5 + [False]
    assert frames[0][1].shape == (64, 96, 3)
    assert frames[0][1].std() > 10  # boxes are drawn


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["detect.py", *map(str, arguments)])
    run_script(detect, parse_detect)


def test_a_broken_picture_among_good_ones_does_not_fail_the_run(tmp_path, monkeypatch, capsys):
    save(tmp_path / "in" / "a.png")
    (tmp_path / "in" / "b.png").write_bytes(b"no picture")
    run_main(monkeypatch, "--source", tmp_path / "in", "--project", tmp_path / "runs", "--imgsz", 64, "--device", "cpu")
    out = capsys.readouterr().out
    assert f"image 2/2 {tmp_path / 'in' / 'b.png'}: " in out
    assert "1 of 2 files left out" in out


def test_only_broken_pictures_fail_the_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "b.png").write_bytes(b"no picture")
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, "--source", tmp_path / "b.png", "--project", tmp_path / "runs", "--device", "cpu")
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"detect.py: error: {tmp_path / 'b.png'}")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_folder_names_are_safe_and_different():
    names = ["person", "a/b", "a_b", "A_B", "..", "", "con", "Nul.txt", "x" * 300, "trail. ", "größe", 'q:*?"<>|']
    folders = safe_folder_names(names)
    assert folders[:4] == ["person", "a_b", "a_b-2", "A_B-3"]
    assert folders[10] == "größe"
    assert len({folder.casefold() for folder in folders}) == len(names)
    for folder in folders:
        assert folder
        assert len(folder) <= 110
        assert not set(folder) & set('/\\:*?"<>|')
        assert folder.strip(". ") == folder
        assert folder.split(".")[0].casefold() not in ("con", "nul")


@pytest.mark.parametrize("script", ["detect.py", "val.py"])
def test_help_is_answered_at_once(script):
    times = []
    for _ in range(3):  # the best of three: the machine may be busy
        start = time.perf_counter()
        done = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start)
    assert "--conf-thres" in done.stdout
    assert min(times) < 0.5


@pytest.mark.skipif(not WEIGHTS.is_file(), reason="../shared/weights is not there")
@pytest.mark.parametrize("size", [640, 320])
def test_detections_equal_yolov5(monkeypatch, size):
    monkeypatch.setattr("models.yolo.load_model", REAL_LOADER)
    expected = json.loads((SHARED / "reference" / "detect_images.json").read_text(encoding="utf-8"))["images"]
    settings = {
        "conf_thres=0.25 iou_thres=0.45": {},
        "conf_thres=0.1 iou_thres=0.6 agnostic=True": {"conf_thres": 0.1, "iou_thres": 0.6, "agnostic_nms": True},
    }
    for text, flags in settings.items():
        given = DetectOptions(
            weights=str(WEIGHTS), source=str(SHARED / "images"), imgsz=(size,), device="cpu", nosave=True, **flags
        )
        for result in detect(given):
            theirs = torch.tensor(expected[result.path.stem][f"imgsz={size} {text}"])
            assert result.detections[:, 5].tolist() == theirs[:, 5].tolist()
            assert (result.detections[:, :4] - theirs[:, :4]).abs().max() < 0.1
            assert (result.detections[:, 4] - theirs[:, 4]).abs().max() < 1e-3
