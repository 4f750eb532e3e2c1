"""Parameter groups, the schedule as a pure function of the step, and the moving average of the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

NOMINAL_BATCH = 64
"""Images behind one optimizer step: smaller batches are accumulated to it."""

LR_SCALES = {
    "ECA": 1.2,
    **dict.fromkeys(("CBAM", "BAM", "scSE", "CA", "GAM", "EMA", "ShuffleAttention", "TripletAttention"), 0.8),
    **dict.fromkeys(("PolarizedSequential", "ParNetAttention"), 0.8),
}
"""`--lr-scale auto` by attention block: 0.8 for those that mix channel and space; 1.0 for all that are not listed."""

_NORMS = tuple(cls for name, cls in vars(nn).items() if isinstance(cls, type) and "Norm" in name)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Three groups in YOLOv5's order: biases, weights (with decay), weights of normalisation layers."""
    biases, weights, norms = [], [], []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                biases.append(parameter)
            elif name == "weight" and isinstance(module, _NORMS):
                norms.append(parameter)
            else:
                weights.append(parameter)
    return [
        {"params": biases, "weight_decay": 0.0},
        {"params": weights, "weight_decay": weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]


def auto_lr_scale(blocks: Iterable[str]) -> float:
    """Factor on lr0 for a model of these block names, the smallest where several ask for one; 1.0 without attention.

    Wrapped forms (`C3CBAM`, `ConvCBAM`) count as what they wrap.
    """
    bare = {name.removeprefix("C3").removeprefix("Conv") for name in blocks}
    return min((LR_SCALES[name] for name in bare if name in LR_SCALES), default=1.0)


def build_optimizer(
    model: nn.Module, name: str, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, Adam or AdamW (momentum as beta1) over `parameter_groups`."""
    groups = parameter_groups(model, weight_decay)
    if name == "SGD":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=True)
    return {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[name](groups, lr=lr, betas=(momentum, 0.999))


@dataclass(frozen=True)
class StepSettings:
    """What the optimizer works with at one step."""

    bias_lr: float
    lr: float
    momentum: float
    accumulate: int

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Set learning rates and momentum of the three groups of `parameter_groups`."""
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = self.bias_lr if index == 0 else self.lr
            if "momentum" in group:
                group["momentum"] = self.momentum
            else:
                group["betas"] = (self.momentum, group["betas"][1])


@dataclass(frozen=True)
class Schedule:
    """Learning rates, momentum and accumulation as a pure function of the step (counted in batches from 0).

    The rate falls from `lr0` to `lr0 · lrf` over the epochs, on a line or a half cosine, constant within an epoch.
    Over the first `warmup_steps` batches it rises from 0 (biases: it falls from `warmup_bias_lr`), momentum rises
    from `warmup_momentum`, and accumulation from 1 batch.
    """

    epochs: int
    steps_per_epoch: int
    batch_size: int
    lr0: float
    lrf: float
    momentum: float
    warmup_epochs: float
    warmup_momentum: float
    warmup_bias_lr: float
    cosine: bool = False

    @property
    def warmup_steps(self) -> int:
        """At least 100 batches, unless warm-up is switched off."""
        return max(round(self.warmup_epochs * self.steps_per_epoch), 100) if self.warmup_epochs > 0 else 0

    def factor(self, epoch: int) -> float:
        """Share of `lr0` in an epoch."""
        part = epoch / self.epochs
        if self.cosine:
            return (1 - math.cos(part * math.pi)) / 2 * (self.lrf - 1) + 1
        return (1 - part) * (1 - self.lrf) + self.lrf

    def at(self, step: int) -> StepSettings:
        """Settings of batch number `step`."""
        lr = self.lr0 * self.factor(step // self.steps_per_epoch)
        batches = NOMINAL_BATCH / self.batch_size
        if step > self.warmup_steps or not self.warmup_steps:
            return StepSettings(lr, lr, self.momentum, max(round(batches), 1))
        part = step / self.warmup_steps
        return StepSettings(
            bias_lr=self.warmup_bias_lr + (lr - self.warmup_bias_lr) * part,
            lr=lr * part,
            momentum=self.warmup_momentum + (self.momentum - self.warmup_momentum) * part,
            accumulate=max(round(1 + (batches - 1) * part), 1),
        )


def decayed_for_batch(weight_decay: float, batch_size: int) -> float:
    """Weight decay scaled to the images that really stand behind an optimizer step."""
    return weight_decay * batch_size * max(round(NOMINAL_BATCH / batch_size), 1) / NOMINAL_BATCH


class ModelEma:
    """Exponential moving average of a model's weights and statistics.

    The decay grows as `decay · (1 - exp(-updates / tau))`, so that early weights are forgotten soon.
    """

    def __init__(self, model: nn.Module, updates: int = 0, decay: float = 0.9999, tau: float = 2000):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.updates = updates
        self.decay = decay
        self.tau = tau

    def decay_at(self, updates: int) -> float:
        return self.decay * (1 - math.exp(-updates / self.tau))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards `model`; counters (whole numbers) are taken over."""
        self.updates += 1
        decay = self.decay_at(self.updates)
        current = model.state_dict()
        averages, values = [], []
        for name, average in self.model.state_dict().items():
            if average.is_floating_point():
                averages.append(average)
                values.append(current[name])
            else:
                average.copy_(current[name])
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, values, alpha=1 - decay)
