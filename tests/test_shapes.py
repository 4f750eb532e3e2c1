"""The built-in data set: the same everywhere, and a task that is worth training on."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from utils import ROOT, UserError, shapes
from utils.config import load_data_config
from utils.dataloaders import load_split
from utils.labels import find_images, load_labels, read_image

DRAWN = "9a0debe93973cfdecc4230ad34c828eb219f4d2ebd693243774f9c9b3889eeda"
"""sha256 over names, pixels and labels of the whole set: changing the pictures changes every published figure."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "shapes"
    shapes.draw_shapes(root, progress=False)
    return root


def test_drawn_the_same_on_every_machine(root):
    whole = hashlib.sha256()
    for image in find_images([root / "images"]):
        pixels = read_image(image)
        label = root / "labels" / image.parent.name / f"{image.stem}.txt"
        whole.update(f"{image.relative_to(root).as_posix()} {pixels.shape}\n".encode())
        whole.update(pixels.tobytes() + label.read_bytes())
    assert whole.hexdigest() == DRAWN


def test_set_is_clean_varied_and_complete(root):
    for split, count in shapes.COUNTS.items():
        labels = load_labels(find_images([root / "images" / split]), len(shapes.NAMES), cache=None, progress=False)
        assert len(labels) == count and labels.problems == []
        assert (labels.missing, labels.corrupt, labels.duplicates, labels.clipped) == (0, 0, 0, 0)
        assert (labels.shapes == shapes.SIDE).all()
        assert labels.empty > 0  # background belongs to the task
        boxes = np.concatenate(labels.boxes)
        classes = np.bincount(boxes[:, 0].astype(int))
        assert len(classes) == len(shapes.NAMES) and classes.min() > 0.7 * classes.mean()
        sides = np.sqrt(boxes[:, 3] * boxes[:, 4]) * shapes.SIDE
        assert (sides < 20).mean() > 0.2 and (sides > 40).mean() > 0.1
        assert len(boxes) / count > 4


def test_splits_share_no_picture(root):
    digests = [hashlib.sha256(read_image(path).tobytes()).digest() for path in find_images([root / "images"])]
    assert len(set(digests)) == sum(shapes.COUNTS.values())


def test_shapes_overlap(root):
    overlapping = 0
    for number in range(40):
        _, boxes = shapes.draw_picture("train", number)
        corners = np.array([box[1:] for box in boxes]).reshape(-1, 4)
        low, high = np.maximum(corners[:, None, :2], corners[:, :2]), np.minimum(corners[:, None, 2:], corners[:, 2:])
        overlapping += int(np.triu((high > low).all(2), 1).sum())
    assert overlapping > 20


def test_boxes_touch_their_shapes(monkeypatch):
    """White shapes on black: where a picture's shapes end is where its boxes end."""
    monkeypatch.setattr(shapes, "_background", lambda dice, base: np.zeros((shapes.SIDE, shapes.SIDE, 3), np.int64))
    monkeypatch.setattr(shapes, "_add_bar", lambda *_: None)
    monkeypatch.setattr(shapes, "_surface", lambda *_: np.full((1, 1, 3), 255))
    alone = set()
    for number in range(60):
        image, boxes = shapes.draw_picture("val", number)
        if not boxes:
            assert image.max() < 50
            continue
        rows, columns = np.nonzero(image[:, :, 1] > 100)
        corners = np.array([box[1:] for box in boxes])
        around = (*corners[:, :2].min(0), *corners[:, 2:].max(0))
        assert around == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        if len(boxes) <= 2:
            alone.update(box[0] for box in boxes)
    assert alone == {0, 1, 2, 3}


def test_directions_are_unit_vectors_15_degrees_apart():
    for step in range(24):
        expected = 256 * np.exp(1j * np.pi * step / 12)
        assert np.abs(shapes._direction(step) - np.array([expected.real, expected.imag])).max() <= 1


def test_config_draws_the_set_on_first_use(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "COUNTS", {"train": 3, "val": 2})
    shipped = load_data_config(ROOT / "data" / "shapes.yaml")
    assert shipped.names == shapes.NAMES and shipped.root == ROOT / "data" / "shapes"
    root = tmp_path / "new" / "shapes"
    data = replace(
        shipped, root=root, train=(root / "images" / "train",), val=(root / "images" / "val",), file=tmp_path / "s.yaml"
    )
    assert len(load_split(data, "val", progress=False)) == 2
    assert len(load_split(data, "train", progress=False)) == 3
    first = (root / "images/train/0000.png").stat().st_mtime_ns
    load_split(data, "train", progress=False)
    assert (root / "images/train/0000.png").stat().st_mtime_ns == first
    assert [path.name for path in root.parent.iterdir()] == ["shapes"]  # no temporary folder stays


def test_a_set_drawn_by_another_process_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "COUNTS", {"train": 1})
    (tmp_path / "shapes" / "labels").mkdir(parents=True)
    (tmp_path / "shapes" / "labels" / "mine").write_text("")
    shapes.draw_shapes(tmp_path / "shapes", progress=False)
    assert [path.name for path in (tmp_path / "shapes").rglob("*")] == ["labels", "mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_interrupted_drawing_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shapes, "draw_picture", interrupt)
    with pytest.raises(KeyboardInterrupt):
        shapes.draw_shapes(tmp_path / "shapes", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_place_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="shapes: the built-in data set cannot be drawn there"):
        shapes.draw_shapes(tmp_path / "file" / "shapes", progress=False)
