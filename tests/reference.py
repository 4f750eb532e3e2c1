"""Where the reference data lie beside the project, and the formula that fills a model and its inputs (DESIGN §5)."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from utils import ROOT

SHARED = ROOT.parent / "shared"
"""Reference data and pictures; not part of the project."""

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the reference data are not beside the project")


def wave(n: int, phase: float, step: float) -> np.ndarray:
    return np.sin(np.arange(n, dtype=np.float64) * step + phase)


def formula_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of the same shapes filled by the formula; anchors and counters as they are."""
    filled = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point() or name.endswith("anchors"):
            filled[name] = tensor.clone()
            continue
        w = wave(tensor.numel(), 2 * math.pi * (zlib.crc32(name.encode()) % 1000) / 1000, 0.7)
        if name.endswith("running_var"):
            w = 1 + 0.25 * w
        elif name.endswith("running_mean"):
            w = 0.05 * w
        elif name.endswith("bn.weight"):
            w = 1 + 0.1 * w
        elif name.endswith("bias"):
            w = 0.1 * w
        else:
            w = w * math.sqrt(2 / math.prod(tensor.shape[1:]))
        filled[name] = torch.from_numpy(w.reshape(tensor.shape)).float()
    return filled


def formula_images(shape: list[int]) -> torch.Tensor:
    return torch.from_numpy((0.5 + 0.5 * wave(math.prod(shape), 0.3, 0.013)).reshape(shape)).float()


def formula_targets(nc: int) -> torch.Tensor:
    rows = [
        [
            i % 2,
            7 * i % nc,
            0.5 + 0.4 * math.sin(1.3 * i),
            0.5 + 0.4 * math.cos(0.9 * i),
            0.1 + 0.09 * math.sin(2.1 * i),
            0.15 + 0.12 * math.cos(1.7 * i),
        ]
        for i in range(17)
    ]
    return torch.tensor(rows, dtype=torch.float64).float()


def formula_nms_predictions() -> torch.Tensor:
    """`[2, 300, 11]`: i = 0…299 for the first image, 300…599 for the second, six classes."""
    i = np.arange(600, dtype=np.float64)
    columns = [
        320 + 200 * np.sin(0.37 * i),
        240 + 150 * np.cos(0.23 * i),
        40 + 30 * np.sin(0.11 * i),
        50 + 35 * np.cos(0.19 * i),
        0.5 + 0.5 * np.sin(0.71 * i),
        *(0.5 + 0.5 * np.sin((0.41 + 0.05 * c) * i + c) for c in range(6)),
    ]
    return torch.from_numpy(np.stack(columns, 1)).float().view(2, 300, 11)


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def random_state(module: torch.nn.Module) -> torch.nn.Module:
    """Every parameter and running statistic away from its start, so that no projection is zero."""
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith("running_var"):
                value.uniform_(0.5, 2)
            elif value.is_floating_point():
                value.add_(torch.randn_like(value) * 0.3)
    return module
