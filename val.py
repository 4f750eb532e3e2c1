"""Measure a model on a data set: `python val.py --weights best.pt --data data.yaml`.

Torch and OpenCV are imported inside the functions, so that `--help` and a mistyped flag are answered at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils import UserError
from utils.options import ValOptions, new_run_folder, parse_val, run_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from models.yolo import DetectionModel
    from utils.dataloaders import Batch
    from utils.metrics import Metrics

PICTURED_BATCHES = 3
"""Batches of which labels and predictions are drawn."""


def evaluate(
    model: DetectionModel,
    loader: Iterable[Batch],
    *,
    device: torch.device,
    conf_thres: float = 0.001,
    iou_thres: float = 0.6,
    max_det: int = 300,
    criterion: Callable | None = None,
    save_dir: Path | None = None,
    augment: bool = False,
    half: bool = False,
    single_cls: bool = False,
    progress: bool = True,
) -> Metrics:
    """Precision, recall and mAP of a model over the batches of a loader.

    Args:
        model: put into evaluation mode for the time being; its weights are not touched.
        conf_thres, iou_thres, max_det: settings of the NMS.
        criterion: the training loss; its parts are averaged over the batches. Not together with `augment`.
        save_dir: where the curves, the confusion matrix and pictures of the first batches go; `None` draws nothing.
        augment: test-time augmentation.
        half: half precision, on CUDA only.
        single_cls: treat all classes as one.
    """
    import torch
    from tqdm import tqdm

    from utils.metrics import MetricsCollector, StageTimer

    names = tuple(model.names) if not single_cls or len(model.names) == 1 else ("item",)
    collector, timer = MetricsCollector(names), StageTimer(3, device)
    loss = torch.zeros(3, device=device)
    batches, was_training = 0, model.training
    model.eval()
    try:
        with torch.no_grad():
            bar = tqdm(loader, desc=f"{'validating':>22}", disable=not progress, leave=False, dynamic_ncols=True)
            for batch in bar:
                targets = batch.targets.to(device, copy=True)
                if single_cls:
                    targets[:, 1] = 0
                with timer.measure(0):
                    images = batch.images.to(device, non_blocking=True).float() / 255
                with timer.measure(1):
                    raw, predictions = _forward(model, images, augment, half and device.type == "cuda")
                if criterion is not None and raw is not None:
                    loss += criterion(raw, targets)[1]
                with timer.measure(2):
                    detections = _suppress(predictions, conf_thres, iou_thres, max_det, single_cls)
                _score(collector, detections, targets, batch)
                if save_dir is not None and batches < PICTURED_BATCHES:
                    _draw_batch(batch, targets, detections, names, save_dir, batches)
                batches += 1
    finally:
        model.train(was_training)
    metrics = collector.result(loss=(loss / max(batches, 1)).tolist(), speed=timer.milliseconds(collector.images))
    if save_dir is not None:
        _draw_curves(metrics, save_dir)
    return metrics


def _forward(
    model: DetectionModel, images: torch.Tensor, augment: bool, half: bool
) -> tuple[list[torch.Tensor] | None, torch.Tensor]:
    """Raw maps (`None` with test-time augmentation) and decoded predictions of a batch, in single precision."""
    import torch

    # Autocast instead of model.half(): rounding the weights of a model in training could not be taken back.
    with torch.autocast(images.device.type, dtype=torch.float16, enabled=half):
        if augment:
            return None, model.augmented(images).float()
        raw = model(images)
    raw = [level.float() for level in raw]
    return raw, model.decode(raw)


def _suppress(
    predictions: torch.Tensor, conf_thres: float, iou_thres: float, max_det: int, single_cls: bool
) -> list[torch.Tensor]:
    """Detections `[n, 6]` of each image in the network's pixels; a box may count for several classes."""
    from utils.boxes import nms

    detections = nms(
        predictions,
        conf_thres=conf_thres,
        iou_thres=iou_thres,
        agnostic=single_cls,
        multi_label=True,
        max_det=max_det,
    )
    for found in detections:
        if single_cls:
            found[:, 5] = 0
    return detections


def _score(collector: Any, detections: list[torch.Tensor], targets: torch.Tensor, batch: Batch) -> None:
    """Hands detections and labels of each image to the collector, in pixels of the original image."""
    from utils.boxes import scale_boxes, xywh2xyxy

    height, width = batch.images.shape[2:]
    labels = targets.cpu().clone()
    labels[:, 2:] = xywh2xyxy(labels[:, 2:] * labels.new_tensor((width, height, width, height)))
    for index, (found, (original, ratio_pad)) in enumerate(zip(detections, batch.shapes)):
        found = scale_boxes(found.cpu(), (height, width), original, ratio_pad)
        true = labels[labels[:, 0] == index, 1:]
        true[:, 1:] = scale_boxes(true[:, 1:], (height, width), original, ratio_pad)
        collector.update(found, true)


def _draw_batch(
    batch: Batch,
    targets: torch.Tensor,
    detections: list[torch.Tensor],
    names: tuple[str, ...],
    folder: Path,
    number: int,
) -> None:
    from utils.plots import plot_batch

    plot_batch(batch.images, targets, names, folder / f"val_batch{number}_labels.jpg", paths=batch.paths)
    plot_batch(batch.images, detections, names, folder / f"val_batch{number}_pred.jpg", paths=batch.paths)


def _draw_curves(metrics: Metrics, folder: Path) -> None:
    from utils.plots import plot_confidence_curves, plot_confusion_matrix, plot_pr_curve

    plot_pr_curve(metrics, folder / "PR_curve.png")
    plot_confidence_curves(metrics, folder)
    plot_confusion_matrix(metrics.confusion.matrix, metrics.names, folder / "confusion_matrix.png")


def main(options: ValOptions) -> Metrics:
    """Validates `options.weights` on a split of `options.data`, prints the table, writes pictures into a run folder."""
    from models.yolo import load_model
    from utils.config import Hyperparameters, load_data_config
    from utils.dataloaders import DetectionDataset, create_loader, load_split
    from utils.devices import select_device

    data = load_data_config(options.data)
    device = select_device(options.device)
    model = load_model(options.weights, device)
    if model.nc != data.nc and not options.single_cls:
        raise UserError(
            f"{options.weights} detects {model.nc} classes but {options.data} names {data.nc}; "
            "validate with the data set it was trained on"
        )
    if options.half and device.type != "cuda":
        print(f"--half has no effect on {device.type}: single precision is used")
    stride = max(int(model.stride.max()), 32)
    imgsz = -(-options.imgsz // stride) * stride
    if imgsz != options.imgsz:
        print(f"--imgsz {options.imgsz} is no multiple of the model's stride {stride}: using {imgsz}")
    labels = load_split(data, options.task)
    print(f"{options.task}: {labels.summary()}")
    dataset = DetectionDataset(
        labels,
        imgsz,
        hyp=Hyperparameters(),
        rect=True,
        batch_size=options.batch_size,
        stride=stride,
        pad=0.5,
    )
    loader = create_loader(dataset, batch_size=options.batch_size, workers=options.workers, shuffle=False, seed=0)
    save_dir = new_run_folder(options.project, "val", options.name, options.exist_ok)
    metrics = evaluate(
        model,
        loader,
        device=device,
        conf_thres=options.conf_thres,
        iou_thres=options.iou_thres,
        max_det=options.max_det,
        save_dir=save_dir,
        augment=options.augment,
        half=options.half,
        single_cls=options.single_cls,
    )
    _report(metrics, options, (options.batch_size, 3, imgsz, imgsz), save_dir)
    return metrics


def _report(metrics: Metrics, options: ValOptions, shape: tuple[int, ...], save_dir: Path) -> None:
    print(metrics.table(per_class=options.verbose or len(metrics.names) < 50))
    if not metrics.instances:
        print(f"WARNING: no labels in the {options.task} split of {options.data}: nothing to measure by")
    stages = zip(metrics.speed, ("pre-process", "inference", "NMS"))
    print(f"Speed: {', '.join(f'{ms:.1f}ms {stage}' for ms, stage in stages)} per image at shape {shape}")
    print(f"Results saved to {save_dir}")


if __name__ == "__main__":
    run_script(main, parse_val)
