"""What `--source` means, what is skipped, and how results are called."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.sources import SourceError, find_sources, open_source, unique_stems


def save(path: Path, height=20, width=30, colour=(0, 0, 255)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.full((height, width, 3), colour, np.uint8)
    path.write_bytes(cv2.imencode(path.suffix, image)[1].tobytes())
    return path


def save_video(path: Path, frames=4, size=(64, 48), fps=12.5) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, size)
    assert writer.isOpened()
    for i in range(frames):
        writer.write(np.full((size[1], size[0], 3), 40 * i, np.uint8))
    writer.release()
    return path


def names(source) -> list[str]:
    return [path.name for path in find_sources(str(source))]


def test_a_folder_means_its_images_then_its_videos(tmp_path):
    for name in ("b.png", "a.jpg", "c.JPG", "sub/d.png"):
        save(tmp_path / name)
    (tmp_path / "a.mp4").write_bytes(b"")
    (tmp_path / "notes.md").write_text("no picture", encoding="utf-8")
    assert names(tmp_path) == ["a.jpg", "b.png", "c.JPG", "a.mp4"]


def test_a_glob_may_go_down_the_folders(tmp_path):
    for name in ("x/1.png", "y/z/2.png", "y/3.bmp"):
        save(tmp_path / name)
    assert names(tmp_path / "**" / "*.png") == ["1.png", "2.png"]


def test_a_file_with_brackets_is_no_glob(tmp_path):
    save(tmp_path / "cat[1].png")
    assert names(tmp_path / "cat[1].png") == ["cat[1].png"]


def test_a_list_is_read_in_its_order(tmp_path, monkeypatch):
    first, second = save(tmp_path / "lists" / "two words.png"), save(tmp_path / "here.png")
    save(tmp_path / "folder" / "inside.png")
    (tmp_path / "lists" / "all.txt").write_text(
        f"\ufefftwo words.png\n\n{second}\n{tmp_path / 'folder'}\n../here.png\nnowhere.png\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    found = find_sources(str(tmp_path / "lists" / "all.txt"))
    assert found[:2] == [first, second]
    assert [path.name for path in found[2:]] == ["inside.png", "here.png", "nowhere.png"]
    # As seen from the working folder comes first.
    (tmp_path / "lists" / "near.txt").write_text("here.png\n", encoding="utf-8")
    save(tmp_path / "lists" / "here.png")
    assert find_sources("lists/near.txt") == [tmp_path / "here.png"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("0", "camera"),
        ("rtsp://camera/1", "address"),
        ("missing.jpg", "no such file"),
        ("*.png", "no such file"),
        ("empty", "no images"),
        ("file.doc", "'.doc'"),
        ("bad.txt", "UTF-8"),
    ],
)
def test_sources_that_mean_nothing(tmp_path, monkeypatch, source, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.doc").write_bytes(b"x")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(SourceError, match=words) as caught:
        find_sources(source)
    assert "\n" not in str(caught.value)


def test_a_picture_is_letterboxed_to_red_green_blue(tmp_path):
    path = save(tmp_path / "bild-ü.png", height=40, width=100, colour=(0, 0, 255))
    (frame,) = open_source(str(path), (64, 64))
    assert frame.image.shape == (40, 100, 3)
    assert frame.network.shape == (3, 32, 64)
    assert frame.network[:, 16, 32].tolist() == [255, 0, 0]
    assert frame.network[:, 0, 0].tolist() == [114] * 3
    assert (frame.title, frame.result_stem) == (f"image 1/1 {path}", "bild-ü")


def test_without_auto_the_input_has_the_full_size(tmp_path):
    (frame,) = open_source(str(save(tmp_path / "a.png", height=40, width=100)), (64, 96), auto=False)
    assert frame.network.shape == (3, 64, 96)


def test_what_cannot_be_read_is_skipped_and_told(tmp_path):
    save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"this is no picture")
    (tmp_path / "c.png").write_bytes(b"")
    save(tmp_path / "d.png")
    (tmp_path / "e.mp4").write_bytes(b"this is no video")
    told = []
    source = open_source(str(tmp_path), (32, 32), on_skip=told.append)
    assert [(frame.path.name, frame.index, frame.count) for frame in source] == [("a.png", 1, 5), ("d.png", 4, 5)]
    assert [path.name for path, _ in source.skipped] == ["b.png", "c.png", "e.mp4"]
    assert told[0].startswith(f"image 2/5 {tmp_path / 'b.png'}: ")
    assert told[0].endswith("skipped")
    assert told[2].startswith("video 5/5")


def test_nothing_readable_at_all_is_an_error(tmp_path):
    for name in ("a.png", "b.jpg"):
        (tmp_path / name).write_bytes(b"this is no picture")
    source = open_source(str(tmp_path), (32, 32))
    with pytest.raises(SourceError, match="nor any of the 1 other"):
        list(source)


def test_a_video_gives_its_frames(tmp_path):
    path = save_video(tmp_path / "clip.mp4")
    frames = list(open_source(str(path), (64, 64)))
    assert [frame.number for frame in frames] == [1, 2, 3, 4]
    assert {frame.video for frame in frames} == {frames[0].video}
    assert (frames[0].video.width, frames[0].video.height, frames[0].video.frames) == (64, 48, 4)
    assert frames[0].video.fps == pytest.approx(12.5)
    assert frames[2].title == f"video 1/1 (3/4) {path}"
    assert frames[2].result_stem == "clip_3"
    assert [round(float(frame.image.mean()) / 40) for frame in frames] == [0, 1, 2, 3]


def test_stems_of_different_files_differ():
    files = [Path(p) for p in ("a/bus.jpg", "b/bus.jpg", "b/bus.png", "c/BUS.jpg", "bus-2.jpg", "car.jpg")]
    assert unique_stems(files) == ["bus", "bus-2", "bus-3", "BUS-4", "bus-2-2", "car"]


def test_stems_do_not_meet_the_frames_of_a_video():
    assert unique_stems([Path("clip_7.jpg"), Path("clip.mp4")]) == ["clip_7", "clip-2"]
    assert unique_stems([Path("clip.mp4"), Path("clip_7.jpg"), Path("clip_x.jpg")]) == ["clip", "clip_7-2", "clip_x"]
