"""The recorder of operations finds what alerts on CUDA, and nothing in the blocks of this project."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.yolo import BLOCKS
from utils.audit import alerting_operations, operations_of

ATTENTION = sorted(name for name, (_, rule) in BLOCKS.items() if rule == "attention")


def passes(function):
    """Work that runs a function of a map forward and backward."""

    def work():
        x = torch.randn(2, 8, 6, 6, requires_grad=True)
        function(x).sum().backward()

    return work


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (nn.AdaptiveMaxPool2d(1), ["AdaptiveMaxPool2d"]),
        (nn.AdaptiveAvgPool2d((None, 1)), ["AdaptiveAvgPool2d"]),
        (nn.AdaptiveAvgPool2d(1), []),  # PyTorch turns this one into a mean
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ["bilinear interpolation"]),
        (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), []),
        (nn.ReflectionPad2d(1), ["ReflectionPad2d"]),
        (nn.MaxPool2d(3, 1, 1), []),
        (lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2)), ["grid_sample"]),
        (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), ["MaxUnpool2d"]),
    ],
)
def test_known_cases(function, found):
    assert alerting_operations(passes(function)) == found


def test_backward_operations_are_seen():
    assert {"convolution", "convolution_backward"} <= operations_of(passes(nn.Conv2d(8, 4, 1)))


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("identity", [False, True])
def test_no_block_of_this_project_alerts(name, identity):
    assert alerting_operations(passes(BLOCKS[name][0](8, identity=identity))) == []
