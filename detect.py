"""Detect objects in images and videos: `python detect.py --weights yolov5n.pt --source bus.jpg`.

Torch and OpenCV are imported inside the functions, so that `--help` and a mistyped flag are answered at once.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils import UsageError, UserError
from utils.options import DetectOptions, new_run_folder, parse_detect, run_script

if TYPE_CHECKING:
    import numpy as np
    import torch

    from models.gains import AttentionGain
    from models.yolo import DetectionModel
    from utils.sources import Frame

CROP_GAIN, CROP_MARGIN = 1.02, 10
"""Crops show this many times the box plus this many pixels."""

_RESERVED_NAMES = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(10))}


@dataclass(frozen=True)
class FrameResult:
    """Detections `[n, 6]` (xyxy in pixels of the picture, confidence, class) of a picture or video frame on the CPU.

    `frame` counts a video's frames from 1 and is 0 for a picture.
    """

    path: Path
    frame: int
    detections: torch.Tensor


def safe_folder_names(names: Sequence[str]) -> list[str]:
    """A folder name for each class that every file system takes; different classes never share one."""
    taken: set[str] = set()
    folders = []
    for name in names:
        base = re.sub(r"[^\w.+\- ]", "_", name)[:100].strip(". ") or "_"
        if base.split(".")[0].casefold() in _RESERVED_NAMES:
            base = f"_{base}"
        number, folder = 1, base
        while folder.casefold() in taken:
            number += 1
            folder = f"{base}-{number}"
        taken.add(folder.casefold())
        folders.append(folder)
    return folders


class ResultWriter:
    """Writes what a run finds; its folder is made with the first thing to write.

    `close` it at the end. Names are unique within the run and files are written anew, never appended to:
    what an older run left in the same folder does not mix in.
    """

    def __init__(self, options: DetectOptions, names: Sequence[str]) -> None:
        self.options = options
        self.names = names
        self.folders = safe_folder_names(names)
        self.label_files = 0
        self._folder: Path | None = None
        self._stack = ExitStack()
        self._csv: Any = None
        self._video: tuple[Path, Any] | None = None
        self._crops: set[tuple[str, str]] = set()

    def close(self) -> None:
        """Finishes the video and the CSV file."""
        self._close_video()
        self._stack.close()

    @property
    def used(self) -> bool:
        """Whether anything was written."""
        return self._folder is not None

    @property
    def folder(self) -> Path:
        """The run's folder, made on first use."""
        if self._folder is None:
            self._folder = new_run_folder(self.options.project, "detect", self.options.name, self.options.exist_ok)
        return self._folder

    def write(self, frame: Frame, detections: torch.Tensor) -> None:
        """Writes all that the options ask for about one frame; detections `[n, 6]` in the picture's pixels."""
        rows = [
            (round(x1), round(y1), round(x2), round(y2), conf, int(c))
            for x1, y1, x2, y2, conf, c in detections.tolist()
        ]
        try:
            if self.options.save_txt:
                self._write_labels(frame, rows)
            if self.options.save_csv:
                self._write_csv(frame, rows)
            if self.options.save_crop:
                self._write_crops(frame, rows)
            if not self.options.nosave:
                self._write_media(frame, rows)
        except OSError as error:
            raise UserError(f"{error.filename or self.folder}: cannot be written ({error.strerror})") from None

    def write_attention(self, frame: Frame, gains: Sequence[AttentionGain]) -> None:
        """Draws the gain of every attention block on one frame, below `attention`."""
        from utils.plots import plot_attention

        rows = [
            (f"layer {gain.name.removeprefix('model.')}, {gain.block}", gain.channel, gain.spatial) for gain in gains
        ]
        file = self.folder / "attention" / f"{frame.result_stem}.png"
        file.parent.mkdir(exist_ok=True)
        # the network sees red first; pictures are written blue first
        plot_attention(frame.network.transpose(1, 2, 0)[..., ::-1].copy(), rows, file)

    def _write_labels(self, frame: Frame, rows: list[tuple]) -> None:
        height, width = frame.image.shape[:2]
        file = self.folder / "labels" / f"{frame.result_stem}.txt"
        file.parent.mkdir(exist_ok=True)
        lines = []
        for x1, y1, x2, y2, conf, number in rows:
            box = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
            values = (number, *box, conf) if self.options.save_conf else (number, *box)
            lines.append(" ".join(f"{value:g}" for value in values) + "\n")
        if lines:
            file.write_text("".join(lines), encoding="utf-8", newline="\n")
            self.label_files += 1
        else:
            file.unlink(missing_ok=True)  # a file of an older run (--exist-ok) would speak for this one

    def _write_csv(self, frame: Frame, rows: list[tuple]) -> None:
        if self._csv is None:
            file = self.folder / "predictions.csv"
            self._csv = csv.writer(self._stack.enter_context(file.open("w", encoding="utf-8", newline="")))
            self._csv.writerow(("Image Name", "Prediction", "Confidence"))
        name = frame.stem + frame.path.suffix
        self._csv.writerows((name, self.names[number], f"{conf:.2f}") for *_, conf, number in rows)

    def _write_crops(self, frame: Frame, rows: list[tuple]) -> None:
        from utils.plots import write_image

        height, width = frame.image.shape[:2]
        for x1, y1, x2, y2, _, number in rows:
            half_w, half_h = ((b - a) * CROP_GAIN / 2 + CROP_MARGIN / 2 for a, b in ((x1, x2), (y1, y2)))
            x, y = (x1 + x2) / 2, (y1 + y2) / 2
            left, right = max(int(x - half_w), 0), min(int(x + half_w), width)
            top, bottom = max(int(y - half_h), 0), min(int(y + half_h), height)
            if right <= left or bottom <= top:
                continue
            folder = self.folder / "crops" / self.folders[number]
            folder.mkdir(parents=True, exist_ok=True)
            write_image(folder / self._crop_name(folder.name, frame.result_stem), frame.image[top:bottom, left:right])

    def _crop_name(self, folder: str, stem: str) -> str:
        """`bus.jpg`, then `bus2.jpg`, …: a name that no crop of this run has."""
        number, name = 1, stem
        while (folder, name.casefold()) in self._crops:
            number += 1
            name = f"{stem}{number}"
        self._crops.add((folder, name.casefold()))
        return f"{name}.jpg"

    def _write_media(self, frame: Frame, rows: list[tuple]) -> None:
        from utils.plots import class_colour, draw_boxes, write_image

        labels = []
        for *_, conf, number in rows:
            name = self.names[number] if self.options.hide_conf else f"{self.names[number]} {conf:.2f}"
            labels.append("" if self.options.hide_labels else name)
        # The first is the surest: it is drawn last, on top.
        image = draw_boxes(
            frame.image,
            [row[:4] for row in rows][::-1],
            labels[::-1],
            [class_colour(row[5]) for row in rows][::-1],
            line_thickness=self.options.line_thickness,
        )
        if frame.video is None:
            write_image(self.folder / (frame.stem + frame.path.suffix), image)
        else:
            self._write_video(frame, image)

    def _write_video(self, frame: Frame, image: np.ndarray) -> None:
        import cv2

        if self._video is None or self._video[0] != frame.path:
            self._close_video()
            file = self.folder / f"{frame.stem}.mp4"
            size = (frame.video.width, frame.video.height)
            writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"mp4v"), frame.video.fps, size)
            if not writer.isOpened():
                raise UserError(f"{file}: this OpenCV cannot write the video; use --nosave, or install opencv-python")
            self._video = (frame.path, writer)
        if image.shape[:2] != (frame.video.height, frame.video.width):
            image = cv2.resize(image, (frame.video.width, frame.video.height))
        self._video[1].write(image)

    def _close_video(self) -> None:
        if self._video is not None:
            self._video[1].release()
            self._video = None


def _class_names(options: DetectOptions, model: DetectionModel) -> tuple[str, ...]:
    """The names in the weights, or in `--data`; checks `--classes` against them."""
    names = tuple(model.names)
    if options.data:
        from utils.config import load_data_config

        names = load_data_config(options.data).names
        if len(names) != model.nc:
            raise UsageError(f"{options.weights} detects {model.nc} classes but {options.data} names {len(names)}")
    beyond = [number for number in options.classes or () if number >= len(names)]
    if beyond:
        raise UsageError(f"--classes {beyond[0]}: {options.weights} knows the classes 0 to {len(names) - 1}")
    return names


def _network_size(imgsz: tuple[int, ...], stride: int) -> tuple[int, int]:
    """Height and width of the network's input, rounded up to multiples of the stride."""
    if len(imgsz) > 2:
        raise UsageError(f"--imgsz takes one number, or height and width; found {len(imgsz)} numbers")
    height, width = imgsz if len(imgsz) == 2 else imgsz * 2
    rounded = -(-height // stride) * stride, -(-width // stride) * stride
    if rounded != (height, width):
        print(
            f"--imgsz {height} {width} is no multiple of the model's stride {stride}: using {rounded[0]} {rounded[1]}"
        )
    return rounded


def _summary(detections: torch.Tensor, names: Sequence[str]) -> str:
    """`4 persons, 1 bus`: how many of each class, by class number."""
    counts = sorted(Counter(detections[:, 5].int().tolist()).items())
    plural = {c: "s" if n > 1 and not names[c].endswith("s") else "" for c, n in counts}
    return ", ".join(f"{n} {names[c]}{plural[c]}" for c, n in counts) or "(no detections)"


def detect(options: DetectOptions) -> list[FrameResult]:
    """Runs a model over all that `options.source` names, prints a line a frame, and writes what the options ask for.

    Raises a `UserError` when weights or sources cannot be read; one bad file among good ones is left out with a line.
    """
    import torch

    from models.gains import attention_modules, recorded_gains
    from models.yolo import load_model
    from utils.boxes import nms, scale_boxes
    from utils.devices import select_device
    from utils.metrics import StageTimer
    from utils.sources import open_source

    device = select_device(options.device)
    model = load_model(options.weights, device)
    names = _class_names(options, model)
    if options.visualize_attention and not attention_modules(model):
        raise UsageError(f"--visualize-attention: there is no attention block in {options.weights}")
    stride = max(int(model.stride.max()), 32)
    imgsz = _network_size(options.imgsz, stride)
    source = open_source(options.source, imgsz, stride, on_skip=print)
    timer, results = StageTimer(3, device), []
    with torch.inference_mode(), closing(ResultWriter(options, names)) as writer:
        if device.type == "cuda":
            model(
                torch.zeros(1, 3, *imgsz, device=device)
            )  # the first pass sets the device up; keep it out of the times
        for frame in source:
            with timer.measure(0):
                images = torch.from_numpy(frame.network).to(device)[None].float() / 255
            if options.visualize_attention and frame.number <= 1:
                with recorded_gains(model) as gains:
                    model(images)
                writer.write_attention(frame, gains)
            with timer.measure(1):
                predictions = model.augmented(images) if options.augment else model.decode(model(images))
            inference = timer.last
            with timer.measure(2):
                found = nms(
                    predictions,
                    conf_thres=options.conf_thres,
                    iou_thres=options.iou_thres,
                    classes=options.classes,
                    agnostic=options.agnostic_nms,
                    max_det=options.max_det,
                )[0]
            found = scale_boxes(found, images.shape[2:], frame.image.shape[:2]).cpu()
            size = "x".join(map(str, images.shape[2:]))
            print(f"{frame.title}: {size} {_summary(found, names)}, {inference * 1000:.1f}ms")
            writer.write(frame, found)
            results.append(FrameResult(frame.path, frame.number, found))
    _report(source, writer, timer.milliseconds(len(results)), (1, 3, *imgsz))
    return results


def _report(source: Any, writer: ResultWriter, speed: tuple[float, ...], shape: tuple[int, ...]) -> None:
    """Prints times, files left out, and where the results are."""
    stages = ", ".join(f"{ms:.1f}ms {stage}" for ms, stage in zip(speed, ("pre-process", "inference", "NMS")))
    print(f"Speed: {stages} per image at shape {shape}")
    if source.skipped:
        listed = "; ".join(f"{path} ({reason})" for path, reason in source.skipped)
        print(f"{len(source.skipped)} of {len(source)} files left out: {listed}")
    if writer.used:
        print(f"Results saved to {writer.folder}")
    if writer.label_files:
        print(f"{writer.label_files} label files saved to {writer.folder / 'labels'}")


if __name__ == "__main__":
    run_script(detect, parse_detect)
