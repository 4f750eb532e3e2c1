"""Choosing the device and telling what a run runs on."""

from __future__ import annotations

import platform

import torch

from utils import UsageError


def select_device(name: str) -> torch.device:
    """The device for `--device`: `cpu`, a CUDA device's number, or empty for the first CUDA device, else the CPU."""
    name = name.strip().lower().removeprefix("cuda:")
    if name == "cpu" or (name == "" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name == "":
        name = "0"
    if not name.isdigit():
        raise UsageError(f"--device {name!r}: expected cpu or the number of one CUDA device")
    if int(name) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: no such CUDA device ({torch.cuda.device_count()} found); use --device cpu")
    return torch.device("cuda", int(name))


def describe(device: torch.device) -> str:
    """Versions and device in one line."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        place = f"CUDA:{device.index} ({properties.name}, {properties.total_memory / 2**20:.0f} MiB)"
    else:
        place = f"CPU ({torch.get_num_threads()} threads)"
    return f"Python-{platform.python_version()} torch-{torch.__version__} {place}"


def memory_text(device: torch.device) -> str:
    """Memory that PyTorch holds on the device, as `1.23G`."""
    used = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    return f"{used / 1e9:.3g}G"
