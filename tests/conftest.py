"""Fixtures of all tests: nothing may leak, and a small data set to train on."""

from __future__ import annotations

import os
import warnings

import cv2
import pytest
import torch

from utils.determinism import CUBLAS_VARIABLE
from utils.shapes import NAMES, draw_picture

NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that pytest and PyTorch's optimizers set on their own."""


def _settings() -> dict:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad enabled": torch.is_grad_enabled(),
        "showwarning": warnings.showwarning,
        "cublas": os.environ.get(CUBLAS_VARIABLE),
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)},
        "folder": os.getcwd(),
    }


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test after which a determinism flag, the environment or another process-wide setting differs."""
    before = _settings()
    yield
    after = _settings()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"left changed: {changed}"


@pytest.fixture(autouse=True)
def seeded():
    """Models that tests build start from the same weights whichever tests run."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A data set file over 36 + 8 pictures of the built-in set."""
    root = tmp_path_factory.mktemp("tiny")
    for split, count in (("train", 36), ("val", 8)):
        images, labels = root / "images" / split, root / "labels" / split
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for number in range(count):
            picture, boxes = draw_picture(split, number)
            height, width = picture.shape[:2]
            cv2.imwrite(str(images / f"{number}.png"), picture)
            rows = [
                f"{c} {(x1 + x2) / 2 / width} {(y1 + y2) / 2 / height} {(x2 - x1) / width} {(y2 - y1) / height}"
                for c, x1, y1, x2, y2 in boxes
            ]
            (labels / f"{number}.txt").write_text("\n".join(rows), encoding="utf-8")
    file = root / "tiny.yaml"
    file.write_text(f"train: images/train\nval: images/val\nnames: [{', '.join(NAMES)}]\n", encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def reference_run(tiny_data, tmp_path_factory):
    """Four epochs in one go; with 6 batches of 7, gradients wait at the ends of epochs 2 and 4."""
    from training import FOUR_EPOCHS, options

    from train import train

    return train(options(tiny_data, tmp_path_factory.mktemp("straight"), **FOUR_EPOCHS))
