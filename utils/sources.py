"""What `detect.py` reads: an image, a video, a folder, a glob or a text file that lists them, as one run of frames."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from utils import ROOT, UserError
from utils.augmentations import letterbox
from utils.labels import IMAGE_SUFFIXES, read_image

VIDEO_SUFFIXES = frozenset(
    (".asf", ".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm", ".wmv")
)
"""File name endings that are read as videos; lower case."""


class SourceError(UserError):
    """A source that names nothing that can be read."""


@dataclass(frozen=True)
class VideoInfo:
    """A video's frame rate, size in pixels and announced number of frames (0 when the file does not say)."""

    fps: float
    width: int
    height: int
    frames: int


@dataclass(frozen=True)
class Frame:
    """One picture to look at.

    `image` is uint8 BGR `[h, w, 3]` as read, `network` the same letterboxed, uint8 RGB `[3, H, W]`.
    `index` of `count` numbers the files from 1; `stem` is the file's name without ending, made unique in the run.
    `video` is `None` for a picture; `number` counts a video's frames from 1.
    """

    path: Path
    image: np.ndarray
    network: np.ndarray
    index: int
    count: int
    stem: str
    video: VideoInfo | None = None
    number: int = 0

    @property
    def title(self) -> str:
        """How the log names it: `image 1/2 bus.jpg` or `video 1/2 (7/250) cars.mp4`."""
        if self.video is None:
            return f"image {self.index}/{self.count} {self.path}"
        total = max(self.video.frames, self.number) if self.video.frames else "?"
        return f"video {self.index}/{self.count} ({self.number}/{total}) {self.path}"

    @property
    def result_stem(self) -> str:
        """Name, without ending, of what is written about this one frame."""
        return self.stem if self.video is None else f"{self.stem}_{self.number}"


def is_video(path: Path) -> bool:
    """Whether a file counts as a video, by its ending."""
    return path.suffix.lower() in VIDEO_SUFFIXES


def _is_readable_kind(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES or is_video(path)


def _listed(file: Path) -> list[Path]:
    """The files that a text file lists, one a line; as seen from the working folder, else from the list's own."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file}: cannot be read as a UTF-8 list of files ({error})") from None
    found = []
    for line in filter(None, map(str.strip, lines)):
        given = Path(line).expanduser()
        places = [place for place in (given, file.parent / given) if place.exists() or glob.glob(str(place))]
        # A line that leads nowhere stays in the list: it is reported where a broken file would be.
        found += _expanded(places[0]) if places else [given]
    return found


def _expanded(path: Path) -> list[Path]:
    """The image and video files that a path means: itself, a folder's (not its subfolders'), or a glob's."""
    if path.is_file():
        return [path]
    candidates = sorted(path.iterdir() if path.is_dir() else map(Path, glob.glob(str(path), recursive=True)))
    return [file for file in candidates if file.is_file() and _is_readable_kind(file)]


def find_sources(source: str) -> list[Path]:
    """The files that `--source` names, absolute, images before videos.

    Raises `SourceError` when there are none, or for a camera or web address.
    """
    if "://" in source or source.isdecimal():
        raise SourceError(f"--source {source}: cameras and web addresses cannot be read; name a file, folder or glob")
    given = Path(source).expanduser()
    places = [given] if given.is_absolute() else [given, ROOT / given]
    path = next((place for place in places if place.exists()), None)
    if path is not None and path.is_file() and path.suffix.lower() == ".txt":
        files = _listed(path)
    elif path is not None and path.is_file() and not _is_readable_kind(path):
        known = " ".join(sorted(IMAGE_SUFFIXES) + sorted(VIDEO_SUFFIXES))
        raise SourceError(f"--source {source}: '{path.suffix}' is none of the known endings: .txt {known}")
    else:
        files = next((found for found in map(_expanded, [path] if path else places) if found), [])
    if not files:
        reason = "there are no images or videos in it" if path is not None else "no such file, folder or glob"
        raise SourceError(f"--source {source}: {reason}")
    files = list(dict.fromkeys(Path(file).absolute() for file in files))
    return sorted(files, key=is_video)  # a stable sort: otherwise the order stays


def unique_stems(files: Sequence[Path]) -> list[str]:
    """A name for each file's results: its stem, with -2, -3, … where another file has that one already.

    Names that differ in case only count as equal, since some file systems cannot keep them apart; so does
    `clip_7` beside a video `clip`, whose seventh frame's results are called that.
    """
    taken: set[str] = set()
    videos: set[str] = set()

    def clashes(name: str, video: bool) -> bool:
        frame_of = re.fullmatch(r"(.+)_\d+", name)
        if name in taken or (frame_of and frame_of[1] in videos):
            return True
        return video and any(re.fullmatch(re.escape(name) + r"_\d+", other) for other in taken)

    stems = []
    for file in files:
        number, stem = 1, file.stem
        while clashes(stem.casefold(), is_video(file)):
            number += 1
            stem = f"{file.stem}-{number}"
        taken.add(stem.casefold())
        if is_video(file):
            videos.add(stem.casefold())
        stems.append(stem)
    return stems


class FileSource:
    """The frames of a list of files, read one by one.

    A file that cannot be read is left out and noted in `skipped` (path, reason); `on_skip` hears of it at once.
    Iterating raises `SourceError` at the end when not one file could be read.
    """

    def __init__(
        self,
        files: Sequence[Path],
        imgsz: tuple[int, int],
        stride: int,
        auto: bool,
        on_skip: Callable[[str], object] | None = None,
    ) -> None:
        self.files = list(files)
        self.stems = unique_stems(self.files)
        self.imgsz = imgsz
        self.stride = stride
        self.auto = auto
        self.on_skip = on_skip
        self.skipped: list[tuple[Path, str]] = []

    def __len__(self) -> int:
        """Number of files."""
        return len(self.files)

    def __iter__(self) -> Iterator[Frame]:
        self.skipped = []
        for index, (path, stem) in enumerate(zip(self.files, self.stems), 1):
            yield from (self._video if is_video(path) else self._picture)(path, index, stem)
        if len(self.skipped) == len(self.files):
            path, reason = self.skipped[0]
            more = f" (nor any of the {len(self.files) - 1} other files)" if len(self.files) > 1 else ""
            raise SourceError(f"{path}: {reason}{more}")

    def _skip(self, index: int, path: Path, reason: str) -> None:
        self.skipped.append((path, reason))
        if self.on_skip is not None:
            kind = "video" if is_video(path) else "image"
            self.on_skip(f"{kind} {index}/{len(self)} {path}: {reason}, skipped")

    def _network(self, image: np.ndarray) -> np.ndarray:
        boxed = letterbox(image, self.imgsz, auto=self.auto, stride=self.stride)[0]
        return np.ascontiguousarray(boxed[..., ::-1].transpose(2, 0, 1))

    def _picture(self, path: Path, index: int, stem: str) -> Iterator[Frame]:
        if not path.is_file():
            return self._skip(index, path, "no such file")
        try:
            image = read_image(path)
        except UserError as error:
            return self._skip(index, path, str(error).removeprefix(f"{path}: "))
        yield Frame(path, image, self._network(image), index, len(self), stem)

    def _video(self, path: Path, index: int, stem: str) -> Iterator[Frame]:
        if not path.is_file():
            return self._skip(index, path, "no such file")
        capture = cv2.VideoCapture(str(path))
        number = 0
        try:
            info = None
            while True:
                there, image = capture.read()
                if not there or image is None:
                    break
                number += 1
                info = info or _video_info(capture, image)
                yield Frame(path, image, self._network(image), index, len(self), stem, info, number)
        finally:
            capture.release()
        if not number:
            self._skip(index, path, "not a video that OpenCV can read")


def _video_info(capture: cv2.VideoCapture, image: np.ndarray) -> VideoInfo:
    """A video's data; the size is that of its first frame, which OpenCV turns upright where the file says so."""
    fps, frames = capture.get(cv2.CAP_PROP_FPS), capture.get(cv2.CAP_PROP_FRAME_COUNT)
    return VideoInfo(
        fps=fps if np.isfinite(fps) and fps > 0 else 30.0,
        width=image.shape[1],
        height=image.shape[0],
        frames=int(frames) if np.isfinite(frames) and 0 < frames < 1e9 else 0,
    )


def open_source(
    source: str,
    imgsz: tuple[int, int],
    stride: int = 32,
    auto: bool = True,
    *,
    on_skip: Callable[[str], object] | None = None,
) -> FileSource:
    """The frames that `--source` names.

    Args:
        source: an image, video, folder, glob or text list; `find_sources` says how it is understood.
        imgsz: height and width of the network's input.
        stride: with `auto`, the letterbox is cut to the fewest multiples of it that hold the picture.
        auto: whether inputs may be smaller than `imgsz`.
        on_skip: called with a line about each file that cannot be read.
    """
    return FileSource(find_sources(source), imgsz, stride, auto, on_skip)
