"""The import rule of the layout: one direction, scripts on top, and importing changes nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from utils import ROOT

SCRIPTS = {"train", "val", "detect"}
THIRD_PARTY_ONLY = set("boxes options config determinism checkpoint optim devices swap signals verify".split())
MAY_IMPORT = {
    **{name: set() for name in THIRD_PARTY_ONLY},
    "loss": {"boxes", "config"},
    "metrics": {"boxes", "config"},
    "augmentations": {"boxes", "config"},
    "labels": {"boxes", "config"},
    "audit": {"determinism", "swap"},
    "shapes": set(),
    "loggers": set(),
    "dataloaders": {"augmentations", "labels", "shapes", "config", "determinism"},
    "plots": {"boxes", "metrics", "config", "labels"},
    "sources": {"augmentations", "labels", "config"},
}


def imports_of(path) -> set[str]:
    """Modules of this project that a file imports, anywhere in it, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if (ROOT / node.module).is_dir()}
    return {name for name in found if name.split(".")[0] in {"utils", "models", *SCRIPTS}}


@pytest.mark.parametrize("path", sorted((ROOT / "utils").glob("*.py")), ids=lambda p: p.stem)
def test_utils_import_downwards_only(path):
    if path.stem == "__init__":
        assert not imports_of(path)
        return
    assert path.stem in MAY_IMPORT, f"utils/{path.name} is new: say in this test what it may import"
    parts = {name.split(".")[1] for name in imports_of(path) if name.startswith("utils.")}
    modules = {part for part in parts if (ROOT / "utils" / f"{part}.py").is_file()}
    assert modules <= MAY_IMPORT[path.stem], f"utils/{path.name} imports {modules - MAY_IMPORT[path.stem]}"
    assert not any(name.split(".")[0] in {"models", *SCRIPTS} for name in imports_of(path))


def test_blocks_import_nothing_of_the_project():
    assert not imports_of(ROOT / "models" / "common.py")


@pytest.mark.parametrize("folder", ["utils", "models"])
def test_nobody_imports_a_script(folder):
    for path in (ROOT / folder).glob("*.py"):
        assert not any(name.split(".")[0] in SCRIPTS for name in imports_of(path)), path


def test_importing_changes_nothing(tmp_path):
    """In a fresh process: no environment variable, torch setting, folder or file after importing every module."""
    modules = sorted(f"utils.{p.stem}" for p in (ROOT / "utils").glob("*.py") if p.stem != "__init__")
    modules += ["models.common", "models.yolo", "train", "val", "detect"]
    code = f"""
import os, random, sys
sys.path.insert(0, {str(ROOT)!r})
import cv2, matplotlib, numpy, torch, torchvision
before = (dict(os.environ), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,
          torch.backends.cudnn.deterministic, torch.get_num_threads(), cv2.getNumThreads(), random.getstate(),
          torch.initial_seed(), str(numpy.random.get_state()), numpy.get_printoptions(), matplotlib.get_backend())
for name in {modules!r}:
    __import__(name)
after = (dict(os.environ), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,
         torch.backends.cudnn.deterministic, torch.get_num_threads(), cv2.getNumThreads(), random.getstate(),
         torch.initial_seed(), str(numpy.random.get_state()), numpy.get_printoptions(), matplotlib.get_backend())
assert before == after, [(a, b) for a, b in zip(before, after) if a != b]
assert not os.listdir('.'), os.listdir('.')
"""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
