"""Finding, reading, checking and caching images and labels."""

import os
import struct
from dataclasses import fields
from pathlib import Path

import cv2
import numpy as np
import pytest

from utils import ROOT
from utils import labels as labels_module
from utils.labels import (
    LabelError,
    LabelSet,
    find_images,
    label_path,
    load_labels,
    parse_labels,
    read_image,
)

SMARTBAG = ROOT.parent / "shared" / "data" / "smartbag" / "dataset"


def write_image(path: Path, height: int = 20, width: int = 30, value: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    _, data = cv2.imencode(path.suffix, np.full((height, width, 3), value, np.uint8))
    path.write_bytes(data.tobytes())
    return path


def write_label(image: Path, text: str) -> Path:
    path = label_path(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def assert_same(a: LabelSet, b: LabelSet) -> None:
    for name in (f.name for f in fields(LabelSet)):
        left, right = getattr(a, name), getattr(b, name)
        if name == "shapes":
            np.testing.assert_array_equal(left, right)
        elif name == "boxes":
            assert [x.tolist() for x in left] == [x.tolist() for x in right]
        elif name == "segments":
            assert [[s.tolist() for s in x] for x in left] == [[s.tolist() for s in x] for x in right]
        else:
            assert left == right, name


# reading images


@pytest.mark.parametrize("name", ["plain.png", "größe 雪.png"])
def test_reads_any_path(tmp_path, name):
    image = read_image(write_image(tmp_path / name, 5, 7, 42))
    assert image.shape == (5, 7, 3) and image.dtype == np.uint8 and (image == 42).all()


def test_grey_deep_and_transparent_pictures_become_three_bytes(tmp_path):
    grey = np.array([[0, 100], [200, 255]], np.uint8)
    deep = grey.astype(np.uint16) * 257
    clear = np.dstack([grey, grey, grey, np.zeros_like(grey)])
    for name, pixels in {"grey": grey, "deep": deep, "clear": clear}.items():
        cv2.imwrite(str(tmp_path / f"{name}.png"), pixels)
        assert read_image(tmp_path / f"{name}.png").tolist() == np.dstack([grey] * 3).tolist(), name


def test_orientation_is_applied(tmp_path):
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, :8] = 255  # white at the left
    _, data = cv2.imencode(".jpg", pixels)
    jpeg = data.tobytes()
    # one entry: tag 0x112, short, one value, 6 = to be turned a quarter clockwise
    tiff = b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x112, 3, 1, 6, 0, 0)
    exif = b"Exif\0\0" + tiff
    (tmp_path / "a.jpg").write_bytes(jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:])
    image = read_image(tmp_path / "a.jpg")
    assert image.shape == (32, 16, 3)
    assert image[:6].min() > 200 and image[10:].max() < 50  # white on top now
    assert read_image(tmp_path / "a.jpg", reduce=2).shape == (16, 8, 3)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + bytes(50)])
def test_no_image_is_a_user_error(tmp_path, content):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(LabelError, match=r"a\.png: cannot be decoded"):
        read_image(tmp_path / "a.png")


def test_jpeg_that_is_cut_short_is_used_and_listed(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    data = cv2.imencode(".jpg", noise)[1].tobytes()
    (tmp_path / "whole.jpg").write_bytes(data)
    (tmp_path / "mark.jpg").write_bytes(data[:-2])
    (tmp_path / "more.jpg").write_bytes(data + b"written by a camera")
    (tmp_path / "half.jpg").write_bytes(data[: len(data) // 2])
    whole = read_image(tmp_path / "whole.jpg")
    np.testing.assert_array_equal(read_image(tmp_path / "mark.jpg"), whole)
    np.testing.assert_array_equal(read_image(tmp_path / "half.jpg")[:8], whole[:8])
    labels = load_labels(find_images([tmp_path]), 1, cache=None, progress=False)
    assert len(labels) == 4 and labels.cut == 2 and labels.corrupt == 0
    assert labels.problems[0] == f"{tmp_path / 'half.jpg'}: the file is cut short, its lower part is grey"
    assert "2 images whose file is cut short" in labels.summary()


def test_absent_image_is_a_user_error(tmp_path):
    with pytest.raises(LabelError, match=r"a\.png: cannot be read \(No such file"):
        read_image(tmp_path / "a.png")


# finding images


def test_label_path_changes_the_last_images_folder():
    assert label_path(Path("/images/set/images/a/b.c.jpg")) == Path("/images/set/labels/a/b.c.txt")
    assert label_path(Path("/set/my_images/a.jpg")) == Path("/set/my_images/a.txt")
    assert label_path(Path("/images/images.jpg")) == Path("/labels/images.txt")


def test_finds_folders_lists_globs_and_files_once_each_in_order(tmp_path):
    a, b, c, d = (write_image(tmp_path / name) for name in ("x/b.PNG", "x/sub/a.jpg", "y/c.png", "y/d.bmp"))
    (tmp_path / "x/notes.md").write_text("no image")
    listing = tmp_path / "lists/train.txt"
    listing.parent.mkdir()
    listing.write_text(f"\ufeff./../y/c.png\r\n\r\n../x/b.PNG\r\n{d}\n", encoding="utf-8")
    assert find_images([tmp_path / "x"]) == [a, b]
    assert find_images([listing]) == [a, c, d]
    assert find_images([tmp_path / "y" / "*.png"]) == [c]
    assert find_images([tmp_path / "*", b, tmp_path / "x"]) == [a, b, c, d]
    assert find_images([tmp_path / "lists"]) == []


def test_absent_paths_and_wrong_lines_are_user_errors(tmp_path):
    with pytest.raises(LabelError, match="nowhere: no such file or folder"):
        find_images([tmp_path / "nowhere"])
    (tmp_path / "list.txt").write_text("a.jpg\nb.txt\n")
    with pytest.raises(LabelError, match=r"list\.txt:2: 'b\.txt' is no image"):
        find_images([tmp_path / "list.txt"])


# parsing


def test_box_row():
    parsed = parse_labels("2 0.5 0.25 0.1 0.2\n", nc=3)
    np.testing.assert_array_equal(parsed.boxes, np.float32([[2, 0.5, 0.25, 0.1, 0.2]]))
    assert parsed.boxes.dtype == np.float32 and parsed.segments[0].shape == (0, 2) and parsed.problems == []


@pytest.mark.parametrize("text", ["", "\n \n\t\n", "\ufeff"])
def test_nothing_is_no_object(text):
    parsed = parse_labels(text, nc=1)
    assert parsed.boxes.shape == (0, 5) and parsed.segments == [] and parsed.problems == []


@pytest.mark.parametrize(
    "text",
    ["\ufeff0 .5 .5 .2 .2", "0\t.5\t.5\t.2\t.2\r\n", "0,.5,.5,.2,.2", "0, .5, .5, .2, .2 ,\n", "0.0 5e-1 +.5 .2 .2\r"],
)
def test_tolerated_spellings(text):
    parsed = parse_labels(text, nc=1)
    np.testing.assert_array_equal(parsed.boxes, np.float32([[0, 0.5, 0.5, 0.2, 0.2]]))


def test_polygon_becomes_box_and_segment():
    parsed = parse_labels("1 0.1 0.2 0.5 0.2 0.3 0.8\n0 .5 .5 .2 .2", nc=2)
    np.testing.assert_allclose(parsed.boxes[0], [1, 0.3, 0.5, 0.4, 0.6], rtol=1e-6)
    np.testing.assert_array_equal(parsed.segments[0], np.float32([[0.1, 0.2], [0.5, 0.2], [0.3, 0.8]]))
    assert parsed.segments[0].dtype == np.float32 and parsed.segments[1].shape == (0, 2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("3 .5 .5 .2 .2", "class 3 is out of range (the data set has classes 0 to 2)"),
        ("-1 .5 .5 .2 .2", "class -1 is out of range"),
        ("0.5 .5 .5 .2 .2", "class 0.5 is not a whole number"),
        ("1e300 .5 .5 .2 .2", "out of range"),
        ("nan .5 .5 .2 .2", "'nan' is not a finite number"),
        ("0 .5 inf .2 .2", "'inf' is not a finite number"),
        ("cat .5 .5 .2 .2", "'cat' is not a number"),
        ("0 .5 .5 .2 0_2", "'0_2' is not a finite number"),
        ("0 .5 .5 .2 .2\\n", "'.2\\n' is not a number (the two characters \\n stand where a line should end)"),
        ("0 .5 .5 .2", "found 3 values"),
        ("0 .5 .5 .2 .2 .9", "found 5 values; a confidence does not belong here"),
        ("0 .1 .1 .2 .2 .3 .3 .4", "found 7 values"),
        ("0", "found 0 values"),
        ("0 320 240 50 60", "320 lies outside 0 to 1"),
        ("0 .5 1.02 .2 .2", "1.02 lies outside 0 to 1"),
        ("0 .5 .5 -.2 .2", "-.2 lies outside 0 to 1"),
        ("0 .5 .5 0 .2", "the box has no size"),
        ("0 .5 .5 .2 -.005", "the box has no size"),
        ("0 .5 .5 .2 1e-60", "the box has no size"),
        ("0 .1 .1 .2 .1 .3 .1", "the polygon has no size"),
    ],
)
def test_refused_rows_leave_the_others(row, reason):
    parsed = parse_labels(f"\n{row}\n0 .5 .5 .2 .2\n", nc=3)
    assert len(parsed.boxes) == 1
    ((line, text),) = parsed.problems
    assert line == 2 and reason in text and "\n" not in text


def test_rounding_is_clipped_and_counted():
    parsed = parse_labels("0 1.01 .5 .2 1.000001\n0 -.01 .5 .2 .2\n0 0 1 1 1\n0 -.01 .5 .3 1.01 1.01 .2", nc=1)
    assert parsed.problems == [] and parsed.clipped == 3
    np.testing.assert_array_equal(parsed.boxes[:3, 1:3], np.float32([[1, 0.5], [0, 0.5], [0, 1]]))
    assert parsed.boxes[0, 4] == 1
    np.testing.assert_array_equal(parsed.segments[3], np.float32([[0, 0.5], [0.3, 1], [1, 0.2]]))


def test_duplicates_are_counted_once():
    parsed = parse_labels("0 .5 .5 .2 .2\n1 .5 .5 .2 .2\n0 0.50 .5 .2 .2\n0 .5 .5 .2 .2\n0 .5 .5 .2 .21", nc=2)
    assert len(parsed.boxes) == 3 and parsed.duplicates == 2
    same_box = parse_labels("0 0 0 1 0 1 1\n0 0 0 1 1 0 1", nc=1)
    assert len(same_box.boxes) == 2 and same_box.duplicates == 0


# whole sets


@pytest.fixture
def small_set(tmp_path) -> list[Path]:
    """Six images: labelled, with a polygon and bad rows, empty, without labels, and two that are none."""
    images = [write_image(tmp_path / "images" / f"{name}.png", 20, 30 + i) for i, name in enumerate("abcd")]
    write_label(images[0], "0 .5 .5 .2 .2\n0 .5 .5 .2 .2\n1 1.005 .5 .2 .2\n")
    write_label(images[1], "1 .1 .1 .9 .1 .5 .7\n7 .5 .5 .2 .2\n0 .5 .5 .1 .1\n0 a b c d\n")
    write_label(images[2], "\n")
    broken = tmp_path / "images" / "e.png"
    broken.write_bytes(b"broken")
    write_label(broken, "0 .5 .5 .2 .2\n")
    return [*images, broken, tmp_path / "images" / "gone.png"]


def test_set_lists_and_counts_everything(small_set):
    labels = load_labels(small_set, 2, cache=None, progress=False)
    assert labels.images == small_set[:4] and len(labels) == 4
    assert labels.shapes.tolist() == [[20, 30], [20, 31], [20, 32], [20, 33]] and labels.shapes.dtype == np.int32
    assert [len(boxes) for boxes in labels.boxes] == [2, 2, 0, 0]
    assert [[len(s) for s in one] for one in labels.segments] == [[0, 0], [3, 0], [], []]
    counts = (labels.missing, labels.empty, labels.corrupt, labels.refused, labels.clipped, labels.duplicates)
    assert counts == (1, 1, 2, 2, 1, 1)
    file = label_path(small_set[1])
    assert labels.problems == [
        f"{file}:2: class 7 is out of range (the data set has classes 0 to 1)",
        f"{file}:4: 'a' is not a number",
        f"{small_set[4]}: cannot be decoded as an image",
        f"{small_set[5]}: cannot be read (No such file or directory)",
    ]
    assert labels.summary() == (
        "4 images, 4 boxes, 1 without labels, 1 with an empty label file, 2 unreadable images left out, "
        "2 label rows refused, 1 duplicate rows left out, 1 rows clipped to the image"
    )


def test_file_of_refused_rows_is_not_an_empty_one(tmp_path):
    image = write_image(tmp_path / "a.png")
    write_label(image, "5 .5 .5 .2 .2")
    labels = load_labels([image], 1, cache=None, progress=False)
    assert (labels.empty, labels.missing, labels.refused, len(labels)) == (0, 0, 1, 1)


def test_files_stay_as_they_are(small_set, tmp_path):
    def state():
        return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(tmp_path.rglob("*")) if p.is_file()}

    before = state()
    load_labels(small_set, 2, cache=None, progress=False)
    assert state() == before


def test_labels_in_utf16_are_read(tmp_path):
    image = write_image(tmp_path / "a.png")
    label_path(image).write_bytes("0 .5 .5 .2 .2\r\n".encode("utf-16"))
    assert load_labels([image], 1, cache=None, progress=False).boxes[0].tolist() == [
        pytest.approx([0, 0.5, 0.5, 0.2, 0.2])
    ]


def test_bytes_that_are_no_text_are_refused(tmp_path):
    image = write_image(tmp_path / "a.png")
    label_path(image).write_bytes(b"0 .5 .5 .2 .2\n0 .5 .5 \xff\xfe .2\n")
    labels = load_labels([image], 1, cache=None, progress=False)
    assert len(labels.boxes[0]) == 1 and labels.refused == 1 and ":2: " in labels.problems[0]


# the cache


@pytest.fixture
def counted_reads(monkeypatch) -> list[Path]:
    """The images decoded so far."""
    reads, read = [], labels_module._read

    def counting(path):
        reads.append(path)
        return read(path)

    monkeypatch.setattr("utils.labels._read", counting)
    return reads


def test_cache_holds_the_same_and_is_used(small_set, tmp_path, counted_reads):
    cache = tmp_path / "c.cache"
    first = load_labels(small_set, 2, cache=cache, progress=False)
    counted_reads.clear()
    again = load_labels(small_set, 2, cache=cache, progress=False)
    assert counted_reads == []
    assert_same(first, again)
    assert all(boxes.dtype == np.float32 for boxes in again.boxes) and again.shapes.dtype == np.int32
    assert [path.name for path in tmp_path.iterdir() if "c.cache" in path.name] == ["c.cache"]  # nothing left over


def test_cache_of_nothing(tmp_path):
    image = write_image(tmp_path / "a.png")
    image.write_bytes(b"")
    for _ in range(2):
        labels = load_labels([image], 1, cache=tmp_path / "c", progress=False)
        assert len(labels) == 0 and labels.corrupt == 1 and labels.shapes.shape == (0, 2)


def test_stale_cache_is_not_used(small_set, tmp_path, counted_reads):
    cache = tmp_path / "c.cache"

    def reads(images=small_set, nc=2) -> int:
        counted_reads.clear()
        load_labels(images, nc, cache=cache, progress=False)
        return len(counted_reads)

    assert reads() == 6
    label = label_path(small_set[0])
    label.write_text("0 .5 .5 .2 .3")
    assert reads() == 6 and reads() == 0
    status = label.stat()
    os.utime(label, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert reads() == 6 and reads() == 0
    write_label(small_set[3], "")  # there was none
    assert reads() == 6 and reads() == 0
    write_image(small_set[5])
    assert reads() == 6 and reads() == 0
    assert reads(nc=3) == 6 and reads(nc=3) == 0
    assert reads(images=small_set[:5]) == 5


def test_damaged_cache_is_read_again(small_set, tmp_path, counted_reads, caplog):
    cache = tmp_path / "c.cache"
    whole = load_labels(small_set, 2, cache=cache, progress=False)
    content = cache.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (b"", content[:50], content[:-1], bytes(flipped), content + b"x", b"x" + content):
        cache.write_bytes(damaged)
        counted_reads.clear()
        assert_same(load_labels(small_set, 2, cache=cache, progress=False), whole)
        assert len(counted_reads) == 6
        assert cache.read_bytes() == content
    assert "damaged" in caplog.text


def test_cache_that_cannot_be_written_is_a_note(small_set, tmp_path, caplog):
    labels = load_labels(small_set, 2, cache=tmp_path / "absent" / "c.cache", progress=False)
    assert len(labels) == 4
    (record,) = caplog.records
    assert "not cached" in record.getMessage() and "c.cache" in record.getMessage()


def test_a_real_users_folder():
    if not SMARTBAG.is_dir():
        pytest.skip(f"{SMARTBAG} is not there")
    labels = load_labels(find_images([SMARTBAG / "images" / "train"]), 2, cache=None, progress=False)
    assert len(labels) == 658 and labels.refused == 648 and sum(map(len, labels.boxes)) == 10
    assert len(labels.problems) == 648 and all(".txt:1: " in problem for problem in labels.problems)
    val = load_labels(find_images([SMARTBAG / "images" / "val"]), 2, cache=None, progress=False)
    assert val.refused == 1 and "class 2 is out of range" in val.problems[0]
