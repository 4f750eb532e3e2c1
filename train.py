"""Train a detection model: options → `train` → `train_one_epoch`.

    python train.py --imgsz 128 --epochs 40
    python train.py --weights yolov5n.pt --cfg models/attention/yolov5n-cbam.yaml --data bccd.yaml --imgsz 320

A run writes into its folder: weights/last.pt and best.pt, results.csv, opt.yaml, hyp.yaml, model.yaml (the full model
file, attention put in) and pictures.
"""

from __future__ import annotations

from utils.options import TrainOptions, parse_train, run_script

if __name__ == "__main__":
    parse_train()  # --help and a mistyped flag are answered before PyTorch is loaded

import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from tqdm import tqdm

from models.build import build_model, freeze_layers
from models.yolo import DetectionModel, load_model, model_file_text
from utils import ROOT, UserError
from utils.audit import audit, by_real_run, by_table, format_alerts, verdict
from utils.checkpoint import read_checkpoint, save_checkpoint, strip_checkpoint, weights_sha256
from utils.config import (
    DataConfig,
    Hyperparameters,
    find_file,
    hyperparameters_from,
    load_data_config,
    load_hyperparameters,
)
from utils.dataloaders import DetectionDataset, collate, create_loader, load_split
from utils.determinism import (
    DeterministicMode,
    NonDeterministicError,
    OperationRecord,
    backward_guard,
    configure,
    rng_state,
    run_report,
    set_rng_state,
)
from utils.devices import describe, memory_text, select_device
from utils.loggers import ResultsLog
from utils.loss import DetectionLoss
from utils.metrics import Metrics
from utils.optim import ModelEma, Schedule, auto_lr_scale, build_optimizer, decayed_for_batch
from utils.options import as_plain_dict, changed_flags, new_run_folder, options_from
from utils.signals import RunStopped, StopRequest, stop_noted
from utils.swap import swap_modules
from utils.verify import StepObserver, verify
from val import evaluate

MAX_GRADIENT_NORM = 10.0
RESUME_MAY_CHANGE = ("resume", "device", "workers")


@dataclass
class Progress:
    """Where a run stands: what a resumed run needs besides weights and optimizer."""

    epoch: int = 0  # epochs completed
    batch: int = 0  # batches done of the epoch after them
    loss_total: torch.Tensor | tuple[float, ...] = (0.0, 0.0, 0.0)  # sums over these batches
    step: int = 0  # batches done in all
    last_update: int = -1  # batch of the last optimizer step
    best_fitness: float = -1.0
    best_epoch: int = 0


@dataclass(frozen=True)
class TrainResult:
    """What a training returns: folder, the best model's metrics, epochs run, fingerprint of the last EMA weights."""

    folder: Path
    metrics: Metrics
    epochs: int
    sha256: str


def train_one_epoch(
    model: DetectionModel,
    loader: DataLoader,
    criterion: DetectionLoss,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    ema: ModelEma,
    schedule: Schedule,
    progress: Progress,
    *,
    device: torch.device,
    mode: DeterministicMode,
    epochs: int,
    after_step: Callable[[], None],
) -> list[float]:
    """Train on the batches of the loader that `progress` has not seen; returns the epoch's mean losses.

    `after_step` is called when a batch is done and `progress` says so; it may raise to end the run there.
    """
    model.train()
    total = torch.tensor(progress.loss_total, device=device)
    bar = tqdm(loader, dynamic_ncols=True, initial=progress.batch, total=schedule.steps_per_epoch)
    for batch in bar:
        settings = schedule.at(progress.step)
        settings.apply(optimizer)
        images = batch.images.to(device, non_blocking=True).float() / 255
        targets = batch.targets.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.float16, enabled=scaler.is_enabled()):
            raw = model(images)
            loss, parts = criterion(raw, targets)
        with backward_guard(mode):
            scaler.scale(loss).backward()

        if progress.step - progress.last_update >= settings.accumulate:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            ema.update(model)
            progress.last_update = progress.step
        total += parts
        progress.step += 1
        progress.batch += 1
        progress.loss_total = total
        if progress.batch % 10 == 0 or progress.batch == schedule.steps_per_epoch:
            bar.set_description(_bar_text(progress.epoch, epochs, total / progress.batch, batch, device))
        after_step()
    return (total / progress.batch).tolist()


def _bar_text(epoch: int, epochs: int, losses: torch.Tensor, batch: Any, device: torch.device) -> str:
    box, obj, cls = losses.tolist()
    return (
        f"{f'{epoch}/{epochs - 1}':>9}{memory_text(device):>9}{box:>10.4g}{obj:>10.4g}{cls:>10.4g}"
        f"{len(batch.targets):>10}{batch.images.shape[3]:>7}"
    )


BAR_HEADER = f"{'Epoch':>9}{'GPU_mem':>9}{'box_loss':>10}{'obj_loss':>10}{'cls_loss':>10}{'Instances':>10}{'Size':>7}"


def make_loaders(
    options: TrainOptions, data: DataConfig, hyp: Hyperparameters, imgsz: int, stride: int
) -> tuple[DataLoader, DataLoader]:
    """Loader of augmented training batches and of rectangular validation batches."""
    splits = {}
    for split in ("train", "val"):
        labels = load_split(data, split)
        if options.single_cls:
            for boxes in labels.boxes:
                boxes[:, 0] = 0
        print(f"{split}: {labels.report()}")
        splits[split] = labels
    train_set = DetectionDataset(splits["train"], imgsz, hyp=hyp, seed=options.seed, augment=True, stride=stride)
    val_batch = options.batch_size * 2
    val_set = DetectionDataset(splits["val"], imgsz, hyp=hyp, rect=True, batch_size=val_batch, stride=stride, pad=0.5)
    workers, seed = options.workers, options.seed
    return (
        create_loader(train_set, batch_size=options.batch_size, workers=workers, shuffle=True, seed=seed),
        create_loader(val_set, batch_size=val_batch, workers=workers, shuffle=False, seed=seed),
    )


class Trainer:
    """One training run: everything that lives from its first to its last epoch.

    `resume` is the content of a checkpoint of the same run.
    """

    def __init__(
        self,
        options: TrainOptions,
        data: DataConfig,
        hyp: Hyperparameters,
        folder: Path,
        record: OperationRecord,
        stop: StopRequest,
        resume: dict[str, Any] | None,
        observer: StepObserver | None = None,
    ):
        self.options, self.hyp, self.folder, self.record, self.stop = options, hyp, folder, record, stop
        self.observer = observer
        self.mode = DeterministicMode(options.deterministic_mode)
        self.device = select_device(options.device)
        names = ("item",) if options.single_cls else data.names
        if resume:
            model = DetectionModel(resume["model_file"], names=names)
            model.load_state_dict(resume["model"])  # before the loss is made: it takes its anchors from there
        else:
            model = build_model(options, names)
        print(model.summary(options.imgsz))
        self.model = model.to(self.device)
        freeze_layers(model, options.freeze)
        stride = max(int(model.stride.max()), 32)
        self.imgsz = math.ceil(options.imgsz / stride) * stride
        if self.imgsz != options.imgsz:
            print(f"--imgsz {options.imgsz} is no multiple of the model's stride {stride}: using {self.imgsz}")
        self.check_determinism(stride)
        self.train_loader, self.val_loader = make_loaders(options, data, hyp, self.imgsz, stride)
        scaled = hyp.scaled(len(model.stride), model.nc, self.imgsz)
        self.criterion = DetectionLoss(model.detect.anchors, model.nc, scaled)
        decay = decayed_for_batch(hyp.weight_decay, options.batch_size)
        lr0 = hyp.lr0 * self.lr_scale()
        self.optimizer = build_optimizer(model, options.optimizer, lr0, hyp.momentum, decay)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.device.type == "cuda")
        self.ema = ModelEma(model)
        self.schedule = Schedule(
            epochs=options.epochs,
            steps_per_epoch=len(self.train_loader),
            batch_size=options.batch_size,
            lr0=lr0,
            lrf=hyp.lrf,
            momentum=hyp.momentum,
            warmup_epochs=hyp.warmup_epochs,
            warmup_momentum=hyp.warmup_momentum,
            warmup_bias_lr=hyp.warmup_bias_lr,
            cosine=options.cos_lr,
        )
        self.progress = Progress()
        if resume:
            self.restore(resume)
        self.log = ResultsLog(folder / "results.csv", self.progress.epoch)

    def check_determinism(self, stride: int) -> None:
        """Swap modules where asked for; in strict, find every operation that would end the run before it begins."""
        if self.options.deterministic_swap:
            swapped = swap_modules(self.model)
            print("\n".join(swapped) or "--deterministic-swap: there is nothing to replace")
        if self.mode is not DeterministicMode.SCOPED_OFF:
            with torch.autocast(self.device.type, dtype=torch.float16, enabled=self.device.type == "cuda"):
                alerts = audit(self.model, self.imgsz, by_real_run)
            if alerts and self.mode is DeterministicMode.STRICT:
                raise NonDeterministicError(f"strict cannot train this model:\n{format_alerts(alerts)}")
            for alert in alerts:
                self.record.layers.setdefault(alert.operation, []).append(alert.module)
        if self.device.type == "cpu":
            print(verdict(audit(self.model, max(stride, 64), by_table)))

    @property
    def last(self) -> Path:
        return self.folder / "weights" / "last.pt"

    @property
    def best(self) -> Path:
        return self.folder / "weights" / "best.pt"

    def lr_scale(self) -> float:
        """The factor of `--lr-scale`, told where it is not 1."""
        text = self.options.lr_scale
        scale = auto_lr_scale(layer.block for layer in self.model.layers) if text == "auto" else float(text)
        if text == "auto" or scale != 1.0:
            print(f"--lr-scale {text}: lr0 {self.hyp.lr0:g} x {scale:g}")
        return scale

    def content(self) -> dict[str, Any]:
        """The run as a checkpoint: plain values and tensors on the CPU.

        Gradients that wait for their optimizer step are part of it, so that a resumed run equals one that went through.
        """
        waiting = {name: p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        return {
            "model": _on_cpu(self.model.state_dict()),
            "ema": _on_cpu(self.ema.model.state_dict()),
            "ema_updates": self.ema.updates,
            "optimizer": self.optimizer.state_dict(),
            "gradients": waiting,
            "scaler": self.scaler.state_dict(),
            "progress": {**vars(self.progress), "loss_total": torch.as_tensor(self.progress.loss_total).tolist()},
            "rng": rng_state(),
            "model_file": self.model.model_file,
            "names": list(self.model.names),
            "hyperparameters": self.hyp.as_dict(),
            "options": as_plain_dict(self.options),
            "determinism": self.report(),
            "versions": describe(self.device),
        }

    def report(self) -> dict[str, Any]:
        """The determinism report of the run so far."""
        return run_report(self.mode, self.options.seed, self.record, self.device)

    def restore(self, content: dict[str, Any]) -> None:
        """Continue where the checkpoint was written."""
        self.ema.model.load_state_dict(content["ema"])
        self.ema.updates = content["ema_updates"]
        self.optimizer.load_state_dict(content["optimizer"])
        self.scaler.load_state_dict(content["scaler"])
        for name, parameter in self.model.named_parameters():
            if name in content["gradients"]:
                parameter.grad = content["gradients"][name].to(self.device)
        self.progress = Progress(**content["progress"])
        self.record.counts.update(content["determinism"]["operations"])
        set_rng_state(content["rng"])

    def validate(self, model: DetectionModel, *, pictures: bool = False) -> Metrics:
        return evaluate(
            model,
            self.val_loader,
            device=self.device,
            criterion=self.criterion,
            half=self.scaler.is_enabled(),
            single_cls=self.options.single_cls,
            save_dir=self.folder if pictures else None,
        )

    def run(self) -> TrainResult:
        """All epochs, then the best model measured."""
        options, progress = self.options, self.progress
        self.last.parent.mkdir(exist_ok=True)
        if progress.step == 0:
            self.write_settings()
        started = time.time()
        first = progress.epoch
        print(
            f"{len(self.train_loader.dataset)} images, {len(self.train_loader)} batches an epoch; run in {self.folder}"
        )
        while progress.epoch < options.epochs:
            print(BAR_HEADER)
            self.train_loader.sampler.set_epoch(progress.epoch, start=progress.batch * options.batch_size)
            losses = train_one_epoch(
                self.model,
                self.train_loader,
                self.criterion,
                self.optimizer,
                self.scaler,
                self.ema,
                self.schedule,
                progress,
                device=self.device,
                mode=self.mode,
                epochs=options.epochs,
                after_step=self.after_step,
            )
            if not np.isfinite(losses).all():
                raise UserError(f"epoch {progress.epoch}: the loss is not finite ({losses}); lower lr0 in --hyp")
            if self.finish_epoch(losses):
                break
        hours = (time.time() - started) / 3600
        print(f"{progress.epoch - first} epochs completed in {hours:.3f} hours")
        return self.finish()

    def after_step(self) -> None:
        """Write last.pt where `--save-steps` asks for it or the run is to stop, and stop then."""
        if self.observer:
            self.observer(self.progress.step, self.tensors())
        every = self.options.save_steps
        if self.stop or (every and self.progress.step % every == 0):
            save_checkpoint(self.last, self.content())
        self.stop_if_asked()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a step changes, by name: losses, weights, their average, optimizer state, waiting gradients."""
        found = {"loss": torch.as_tensor(self.progress.loss_total)}
        found |= {f"model {name}": tensor for name, tensor in self.model.state_dict().items()}
        found |= {f"EMA {name}": tensor for name, tensor in self.ema.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            found |= {f"optimizer {name} {k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
            if parameter.grad is not None:
                found[f"gradient {name}"] = parameter.grad
        return found

    def stop_if_asked(self) -> None:
        """End the run where a signal asked for it; its checkpoint has just been written."""
        if self.stop:
            raise RunStopped(
                self.stop.number,
                f"stopped by {self.stop.name} after batch {self.progress.step}; "
                f"continue with python train.py --resume {self.last}",
            )

    def finish_epoch(self, losses: list[float]) -> bool:
        """Validate, log, save; True when early stopping ends the run."""
        options, progress = self.options, self.progress
        rates = [group["lr"] for group in self.optimizer.param_groups]
        epoch = progress.epoch
        last_epoch = epoch + 1 == options.epochs
        metrics = self.validate(self.ema.model) if last_epoch or not options.noval else None
        if metrics:
            print(metrics.table(per_class=False))
        if metrics and metrics.fitness > progress.best_fitness:
            progress.best_fitness, progress.best_epoch = metrics.fitness, epoch
        progress.epoch, progress.batch, progress.loss_total = epoch + 1, 0, (0.0, 0.0, 0.0)
        self.log.append(_results_row(epoch, losses, metrics, rates))
        stop = bool(options.patience) and bool(metrics) and epoch - progress.best_epoch >= options.patience
        if stop:
            print(f"stopped early: no better fitness for {options.patience} epochs since epoch {progress.best_epoch}")
        if not options.nosave or last_epoch or stop or self.stop:
            content = self.content()
            # best.pt first: a run killed between the two does this epoch again, from a last.pt that knows nothing of it
            if metrics and progress.best_epoch == epoch:
                save_checkpoint(self.best, content)
            save_checkpoint(self.last, content)
            if options.save_period > 0 and progress.epoch % options.save_period == 0:
                save_checkpoint(self.last.with_name(f"epoch{epoch}.pt"), content)
        if not stop and not last_epoch:
            self.stop_if_asked()
        return stop

    def finish(self) -> TrainResult:
        """Strip best.pt to the EMA weights, measure it, draw the pictures, sum up."""
        if not self.best.is_file():  # saved on better epochs only, which --nosave may have skipped
            save_checkpoint(self.best, read_checkpoint(self.last))
        strip_checkpoint(self.best)
        print(f"validating {self.best}")
        best = load_model(self.best, self.device)
        if self.options.deterministic_swap:
            swap_modules(best)
        metrics = self.validate(best, pictures=not self.options.noplots)
        print(metrics.table(per_class=True))
        if not self.options.noplots:
            from utils.plots import plot_results

            plot_results(self.log.path)
        report = self.report()
        (self.folder / "determinism.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
        if self.record.summary():
            print(self.record.summary())
        print(f"bit-reproducible: {'yes' if report['bit_reproducible'] else 'no, ' + '; '.join(report['reasons'])}")
        sha256 = weights_sha256(self.ema.model.state_dict())
        print(f"sha256 of the final weights {sha256}\nresults saved to {self.folder}")
        return TrainResult(self.folder, metrics, self.progress.epoch, sha256)

    def write_settings(self) -> None:
        """opt.yaml, hyp.yaml, model.yaml and, with pictures, label statistics and the first batches."""
        for name, values in (("opt.yaml", as_plain_dict(self.options)), ("hyp.yaml", self.hyp.as_dict())):
            text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
            (self.folder / name).write_text(text, encoding="utf-8")
        (self.folder / "model.yaml").write_text(model_file_text(self.model.model_file), encoding="utf-8")
        if self.options.noplots:
            return
        from utils.plots import plot_batch, plot_labels

        dataset = self.train_loader.dataset
        plot_labels(dataset.boxes, self.model.names, self.folder / "labels.jpg")
        order = iter(self.train_loader.sampler)
        for number in range(3):
            samples = [dataset[key] for key in itertools.islice(order, self.options.batch_size)]
            if samples:
                batch = collate(samples)
                path = self.folder / f"train_batch{number}.jpg"
                plot_batch(batch.images, batch.targets, self.model.names, path, paths=batch.paths)


def _on_cpu(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def _results_row(epoch: int, losses: list[float], metrics: Metrics | None, rates: list[float]) -> dict[str, float]:
    nan = float("nan")
    measured = (
        (metrics.precision, metrics.recall, metrics.map50, metrics.map50_95, *metrics.loss) if metrics else (nan,) * 7
    )
    names = ("metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95")
    names += ("val/box_loss", "val/obj_loss", "val/cls_loss")
    return {
        "epoch": epoch,
        **dict(zip(("train/box_loss", "train/obj_loss", "train/cls_loss"), losses)),
        **dict(zip(names, measured)),
        **{f"x/lr{i}": rate for i, rate in enumerate(rates)},
    }


def newest_checkpoint(project: str) -> Path:
    """The last.pt written last below the folder of runs."""
    parent = Path(project).expanduser() if project else ROOT / "runs" / "train"
    found = sorted(parent.glob("*/weights/last.pt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"--resume: no run with weights/last.pt below {parent}")
    return found[-1]


def resumed(options: TrainOptions) -> tuple[TrainOptions, dict[str, Any], Path]:
    """Options, checkpoint and folder of the run that `--resume` names."""
    path = newest_checkpoint(options.project) if options.resume == "newest" else find_file(options.resume)
    content = read_checkpoint(path)
    if "optimizer" not in content:
        raise UserError(f"{path}: stripped at the end of its run; resume from last.pt beside it")
    given = changed_flags(options, (*RESUME_MAY_CHANGE, "project"))
    if given:
        raise UserError(f"--resume continues with the options of its run; leave out {', '.join(given)}")
    stored = options_from(TrainOptions, content["options"])
    if content["progress"]["epoch"] >= stored.epochs:
        raise UserError(f"{path}: this run has finished its {stored.epochs} epochs; nothing to resume")
    changes = {"device": options.device or stored.device, "resume": str(path)}
    if options.workers != TrainOptions.workers:
        changes["workers"] = options.workers
    return replace(stored, **changes), content, path.resolve().parents[1]


def train(options: TrainOptions, observer: StepObserver | None = None) -> TrainResult:
    """A whole training run; every process-wide setting it changes is put back at the end.

    `observer` sees the state after every batch. Raises `UserError` for what its user can mend.
    """
    content = None
    if options.resume:
        options, content, folder = resumed(options)
        hyp, _ = hyperparameters_from(content["hyperparameters"], options.resume)
        print(f"resuming {folder} at epoch {content['progress']['epoch']} of {options.epochs}")
    else:
        hyp, missing = load_hyperparameters(options.hyp) if options.hyp else (Hyperparameters(), [])
        if missing:
            print(f"{options.hyp}: at their default: {', '.join(missing)}")
        if options.label_smoothing:
            hyp = replace(hyp, label_smoothing=options.label_smoothing)
    data = load_data_config(options.data)
    options = replace(options, data=str(data.file))
    device = select_device(options.device)
    if content is None:
        folder = new_run_folder(options.project, "train", options.name, options.exist_ok)
    mode = DeterministicMode(options.deterministic_mode)
    with configure(mode, options.seed) as record, stop_noted() as stop:
        print(f"{describe(device)} deterministic-mode {mode.value} seed {options.seed}")
        return Trainer(options, data, hyp, folder, record, stop, content, observer).run()


def main(options: TrainOptions) -> None:
    """Train, or verify where that was asked for."""
    if options.verify_reproducibility:
        verify(train, options, options.verify_reproducibility)
    else:
        train(options)


if __name__ == "__main__":
    run_script(main, parse_train)
