"""Command-line options of the three scripts: one frozen dataclass a script, from which its parser is made.

A field carries its default, help and group, so that name, default and meaning stand in one place.
Only the standard library is imported here: `--help` and a mistyped flag are answered at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from utils import ROOT, UsageError, UserError

Options = TypeVar("Options")

DETERMINISTIC_MODES = ("strict", "warn", "scoped-off")


def option(default: Any, text: str, *, group: str, **argument: Any) -> Any:
    """A dataclass field that is also a command-line flag; `argument` goes to `add_argument`.

    `also` lists further spellings of the flag.
    """
    return field(default=default, metadata={"help": text, "group": group, "argument": argument})


def _whole(minimum: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be {minimum} or more, found {value}")
        return value

    whole.__name__ = "whole number"
    return whole


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, found {value}")
    return value


_fraction.__name__ = "number"


def _scale(text: str) -> str:
    """`auto` or a positive number, as text."""
    if text != "auto" and not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be auto or a positive number, found {text}")
    return text


_scale.__name__ = "scale"


@dataclass(frozen=True)
class TrainOptions:
    """Options of `train.py`."""

    weights: str = option("", "pretrained weights (.pt); empty trains from scratch", group="model", metavar="FILE")
    cfg: str = option(
        "",
        "model file; default: the one in --weights, else models/attention/yolov5n-cbam.yaml",
        group="model",
        metavar="FILE",
    )
    attention: tuple[str, ...] = option(
        (),
        "attention to put into the model: cbam@neck, se@stages, eca@2,4,6, ca@C3 (places: layer numbers, stages, "
        "backbone, neck, head, C3); without --cfg and --weights into yolov5n",
        group="model",
        nargs="+",
        metavar="BLOCK@PLACE",
    )
    attention_init: str = option(
        "auto",
        "start of attention blocks: identity leaves the model's outputs as they were, paper is the papers'; auto is "
        "identity with pretrained weights, paper without",
        group="model",
        choices=["auto", "paper", "identity"],
    )
    freeze: tuple[int, ...] = option(
        (0,),
        "layers of the model file to freeze: one number N freezes 0 to N-1, several freeze just those",
        group="model",
        nargs="+",
        type=int,
        metavar="N",
    )
    data: str = option("data/shapes.yaml", "data set file", group="data", metavar="FILE")
    imgsz: int = option(640, "image size in pixels", group="data", type=_whole(32), also=["--img", "--img-size"])
    single_cls: bool = option(False, "treat all classes as one", group="data")
    workers: int = option(8, "data loading processes", group="data", type=_whole(0), metavar="N")
    hyp: str = option("", "hyperparameter file; default: YOLOv5's hyp.scratch-low", group="training", metavar="FILE")
    epochs: int = option(100, "epochs in all", group="training", type=_whole(1))
    batch_size: int = option(16, "images in a batch", group="training", type=_whole(1))
    optimizer: str = option("SGD", "optimizer", group="training", choices=["SGD", "Adam", "AdamW"])
    lr_scale: str = option(
        "1.0",
        "factor on lr0; auto goes by the attention block: ECA 1.2, CBAM and other mixed blocks 0.8, else 1.0",
        group="training",
        type=_scale,
        metavar="X",
    )
    cos_lr: bool = option(False, "cosine instead of linear learning rate schedule", group="training")
    label_smoothing: float = option(0.0, "label smoothing epsilon", group="training", type=_fraction, metavar="E")
    patience: int = option(
        100, "stop after this many epochs without a better fitness (0: never)", group="training", type=_whole(0)
    )
    seed: int = option(0, "seed of weights, order and augmentation", group="training", type=_whole(0))
    device: str = option(
        "", "cpu, or the number of a CUDA device; default: the first CUDA device, else cpu", group="training"
    )
    deterministic_mode: str = option(
        "strict",
        "operations without a deterministic implementation: strict stops at one, warn reports each once, "
        "scoped-off lifts the check inside the backward pass only",
        group="reproducibility",
        choices=DETERMINISTIC_MODES,
    )
    deterministic_swap: bool = option(
        False,
        "replace standard modules without a deterministic backward pass (adaptive pooling, bilinear upsampling, "
        "unpooling, reflection padding) by equivalents that have one",
        group="reproducibility",
    )
    verify_reproducibility: int = option(
        0,
        "train N batches twice in fresh processes and compare loss and every tensor bit by bit; exit status 0 or 1",
        group="reproducibility",
        type=_whole(1),
        metavar="N",
    )
    resume: str = option(
        "",
        "continue an interrupted run: a last.pt, or nothing for the newest run",
        group="run",
        nargs="?",
        const="newest",
        metavar="FILE",
    )
    project: str = option("", "folder of runs; default: runs/train below the project", group="run", metavar="DIR")
    name: str = option("exp", "name of the run's folder; a number is appended when it exists", group="run")
    exist_ok: bool = option(False, "write into an existing folder of that name", group="run")
    save_steps: int = option(
        0,
        "also write last.pt every N batches, so that a killed run loses at most these (0: off)",
        group="run",
        type=_whole(0),
        metavar="N",
    )
    save_period: int = option(-1, "also keep a checkpoint every N epochs (-1: off)", group="run", type=int, metavar="N")
    noval: bool = option(False, "validate after the last epoch only", group="run")
    nosave: bool = option(False, "write no checkpoints but the last epoch's", group="run")
    noplots: bool = option(False, "draw no pictures", group="run")


@dataclass(frozen=True)
class ValOptions:
    """Options of `val.py`."""

    data: str = option("data/shapes.yaml", "data set file", group="data", metavar="FILE")
    weights: str = option("yolov5s.pt", "weights (.pt)", group="model", metavar="FILE")
    batch_size: int = option(32, "images in a batch", group="data", type=_whole(1))
    imgsz: int = option(640, "image size in pixels", group="data", type=_whole(32), also=["--img", "--img-size"])
    task: str = option("val", "the split to validate on", group="data", choices=["train", "val", "test"])
    workers: int = option(8, "data loading processes", group="data", type=_whole(0), metavar="N")
    single_cls: bool = option(False, "treat all classes as one", group="data")
    conf_thres: float = option(0.001, "least confidence of a detection", group="detection", type=_fraction, metavar="P")
    iou_thres: float = option(
        0.6, "NMS: highest IoU of two boxes kept", group="detection", type=_fraction, metavar="IOU"
    )
    max_det: int = option(300, "most detections in an image", group="detection", type=_whole(1), metavar="N")
    augment: bool = option(False, "test-time augmentation", group="detection")
    half: bool = option(False, "half precision (CUDA only)", group="detection")
    device: str = option(
        "", "cpu, or the number of a CUDA device; default: the first CUDA device, else cpu", group="model"
    )
    verbose: bool = option(False, "print every class", group="run")
    project: str = option("", "folder of runs; default: runs/val below the project", group="run", metavar="DIR")
    name: str = option("exp", "name of the run's folder; a number is appended when it exists", group="run")
    exist_ok: bool = option(False, "write into an existing folder of that name", group="run")


@dataclass(frozen=True)
class DetectOptions:
    """Options of `detect.py`."""

    weights: str = option("yolov5s.pt", "weights (.pt)", group="model", metavar="FILE")
    source: str = option(
        "data/images", "image, video, folder, glob, or text file that lists them", group="data", metavar="SOURCE"
    )
    data: str = option(
        "", "data set file that names the classes; default: the names in the weights", group="data", metavar="FILE"
    )
    imgsz: tuple[int, ...] = option(
        (640,),
        "image size in pixels, or height and width",
        group="data",
        nargs="+",
        type=_whole(32),
        also=["--img", "--img-size"],
        metavar="N",
    )
    conf_thres: float = option(0.25, "least confidence of a detection", group="detection", type=_fraction, metavar="P")
    iou_thres: float = option(
        0.45, "NMS: highest IoU of two boxes kept", group="detection", type=_fraction, metavar="IOU"
    )
    max_det: int = option(1000, "most detections in an image", group="detection", type=_whole(1), metavar="N")
    classes: tuple[int, ...] | None = option(
        None, "keep these class numbers only", group="detection", nargs="+", type=_whole(0), metavar="N"
    )
    agnostic_nms: bool = option(False, "NMS across classes", group="detection")
    augment: bool = option(False, "test-time augmentation", group="detection")
    device: str = option(
        "", "cpu, or the number of a CUDA device; default: the first CUDA device, else cpu", group="model"
    )
    save_txt: bool = option(False, "write detections as label files", group="output")
    save_csv: bool = option(False, "write detections into one CSV file", group="output")
    save_conf: bool = option(False, "confidences in the label files too", group="output")
    save_crop: bool = option(False, "write a picture of every detection", group="output")
    visualize_attention: bool = option(
        False, "draw what each attention block raises and lowers (of videos the first frame)", group="output"
    )
    nosave: bool = option(False, "write no annotated images or videos", group="output")
    line_thickness: int = option(3, "thickness of the boxes in pixels", group="output", type=_whole(1), metavar="N")
    hide_labels: bool = option(False, "draw boxes without names", group="output")
    hide_conf: bool = option(False, "draw names without confidences", group="output")
    project: str = option("", "folder of runs; default: runs/detect below the project", group="output", metavar="DIR")
    name: str = option("exp", "name of the run's folder; a number is appended when it exists", group="output")
    exist_ok: bool = option(False, "write into an existing folder of that name", group="output")


def build_parser(options: type, prog: str, description: str) -> argparse.ArgumentParser:
    """The parser of an options dataclass, its flags in groups, defaults in the help."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    groups: dict[str, Any] = {}
    for item in fields(options):
        title = item.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        argument = dict(item.metadata["argument"])
        flags = ["--" + item.name.replace("_", "-"), *argument.pop("also", [])]
        text = item.metadata["help"]
        if isinstance(item.default, bool):
            groups[title].add_argument(*flags, dest=item.name, action="store_true", help=text)
            continue
        if item.default not in ("", None, ()):
            shown = " ".join(map(str, item.default)) if isinstance(item.default, tuple) else item.default
            text += f" (default: {shown})"
        groups[title].add_argument(*flags, dest=item.name, default=item.default, help=text, **argument)
    return parser


def _parse(options: type[Options], prog: str, description: str, argv: Sequence[str] | None) -> Options:
    values = vars(build_parser(options, prog, description).parse_args(argv))
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def parse_train(argv: Sequence[str] | None = None) -> TrainOptions:
    """Options of `train.py` from the command line; a bad one exits with status 2."""
    return _parse(TrainOptions, "train.py", "Train a YOLOv5 detection model.", argv)


def parse_val(argv: Sequence[str] | None = None) -> ValOptions:
    """Options of `val.py` from the command line; a bad one exits with status 2."""
    return _parse(ValOptions, "val.py", "Measure a model's mAP on a data set.", argv)


def parse_detect(argv: Sequence[str] | None = None) -> DetectOptions:
    """Options of `detect.py` from the command line; a bad one exits with status 2."""
    return _parse(DetectOptions, "detect.py", "Detect objects in images and videos.", argv)


def as_plain_dict(options: Any) -> dict[str, Any]:
    """Options as plain values for YAML and checkpoints."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(options).items()}


def options_from(options: type[Options], values: dict[str, Any]) -> Options:
    """Options again from `as_plain_dict`; flags unknown to this version are left out."""
    known = {item.name for item in fields(options)}
    return options(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known})


def changed_flags(options: Any, allowed: Sequence[str]) -> list[str]:
    """Flags that differ from their default, other than the `allowed` ones, as they are typed."""
    return [
        "--" + item.name.replace("_", "-")
        for item in fields(options)
        if item.name not in allowed and getattr(options, item.name) != item.default
    ]


def new_run_folder(project: str, task: str, name: str, exist_ok: bool) -> Path:
    """Create and return the folder of a run: `project/name`, or `name2`, `name3`, … when it exists.

    An empty `project` is `runs/<task>` below the project's folder.
    """
    parent = Path(project).expanduser() if project else ROOT / "runs" / task
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UsageError(f"--name {name!r} must be the name of a folder below {parent}")
    try:
        for number in range(1, 100_000):
            folder = parent / (name if number == 1 else f"{name}{number}")
            if exist_ok or not folder.exists():
                folder.mkdir(parents=True, exist_ok=exist_ok)
                return folder
    except OSError as error:
        raise UserError(
            f"{parent}: cannot write there ({error.strerror}); choose another folder with --project"
        ) from None
    raise UserError(f"{parent}: no free name like {name}")


def run_script(main: Callable[[Options], object], parse: Callable[[], Options]) -> None:
    """Run a script: a user's mistake ends in one line on stderr and its exit status, Ctrl-C in status 130."""
    try:
        main(parse())
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
