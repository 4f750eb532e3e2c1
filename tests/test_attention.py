"""Attention blocks against plain NumPy, their shapes at any width, and gradients that are exact and deterministic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from models.common import CBAM, ECA, SE, global_max

BLOCKS = {"SE": SE, "ECA": ECA, "CBAM": CBAM}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def se_numpy(x, w1, w2):
    out = np.empty_like(x)
    for b in range(len(x)):
        squeezed = np.array([channel.mean() for channel in x[b]])
        gate = sigmoid(w2 @ np.maximum(w1 @ squeezed, 0))
        for c, g in enumerate(gate):
            out[b, c] = x[b, c] * g
    return out


def eca_numpy(x, kernel):
    out, reach = np.empty_like(x), len(kernel) // 2
    for b in range(len(x)):
        means = [channel.mean() for channel in x[b]]
        for c in range(x.shape[1]):
            total = sum(kernel[k] * means[c + k - reach] for k in range(len(kernel)) if 0 <= c + k - reach < x.shape[1])
            out[b, c] = x[b, c] * sigmoid(total)
    return out


def cbam_numpy(x, w1, w2, kernel):
    out, reach = np.empty_like(x), kernel.shape[1] // 2
    for b in range(len(x)):
        mean = np.array([channel.mean() for channel in x[b]])
        peak = np.array([channel.max() for channel in x[b]])
        gate = sigmoid(w2 @ np.maximum(w1 @ mean, 0) + w2 @ np.maximum(w1 @ peak, 0))
        y = x[b] * gate[:, None, None]
        maps = np.stack([y.mean(0), y.max(0)])
        _, h, w = maps.shape
        for i in range(h):
            for j in range(w):
                total = 0.0
                for di in range(-reach, reach + 1):
                    for dj in range(-reach, reach + 1):
                        if 0 <= i + di < h and 0 <= j + dj < w:
                            total += (kernel[:, di + reach, dj + reach] * maps[:, i + di, j + dj]).sum()
                out[b, :, i, j] = y[:, i, j] * sigmoid(total)
    return out


def test_blocks_equal_plain_numpy():
    x = torch.randn(2, 32, 5, 4, dtype=torch.float64)
    se, eca, cbam = SE(32, 8).double(), ECA(32).double(), CBAM(32, 3, 8).double()
    flat = lambda conv: conv.weight.detach().numpy()[:, :, 0, 0]  # noqa: E731
    cases = [
        (se, se_numpy(x.numpy(), flat(se.fc1), flat(se.fc2))),
        (eca, eca_numpy(x.numpy(), eca.conv.weight.detach().numpy()[0, 0])),
        (
            cbam,
            cbam_numpy(
                x.numpy(), flat(cbam.channel.fc1), flat(cbam.channel.fc2), cbam.spatial.conv.weight.detach().numpy()[0]
            ),
        ),
    ]
    for block, wanted in cases:
        np.testing.assert_allclose(block(x).detach().numpy(), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("channels", "kernel"), [(8, 3), (64, 3), (128, 5), (256, 5), (512, 5), (1024, 5)])
def test_eca_kernel_by_the_papers_formula(channels, kernel):
    """|log2(C) / 2 + 1 / 2|, the odd number at or above its whole part."""
    assert ECA(channels).conv.kernel_size == (kernel,)
    whole = int(abs(math.log2(channels) / 2 + 0.5))
    assert kernel in (whole, whole + 1) and kernel % 2 == 1


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("channels", [1, 3, 8, 17, 64])
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (11, 13)])
def test_any_width_and_size(name, channels, size):
    block = BLOCKS[name](channels).train()
    x = torch.randn(1, channels, *size, requires_grad=True)
    y = block(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    y.sum().backward()
    assert all(p.grad is not None and p.numel() > 0 for p in block.parameters())


@pytest.mark.parametrize("name", BLOCKS)
def test_dtypes_and_memory_format(name):
    block = BLOCKS[name](16)
    x = torch.randn(2, 16, 6, 5)
    assert block(x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)
    assert block.double()(x.double()).dtype == torch.float64
    assert block.to(torch.bfloat16)(x.to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_by_finite_differences(name):
    block = BLOCKS[name](4).double()
    x = torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    parameters = tuple(block.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: block(x), (x, *parameters))


def adaptive_reference(x: torch.Tensor, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = nn.AdaptiveMaxPool2d(1)(x)
    y.backward(upstream)
    return y.detach(), x.grad


@pytest.mark.parametrize("fill", ["random", "ties", "constant", "one pixel", "channels last"])
def test_global_max_has_the_values_and_gradients_of_adaptive_pooling(fill):
    x = torch.randn(3, 5, 6, 7)
    if fill == "ties":
        x = torch.randint(0, 3, (3, 5, 6, 7)).float()
    elif fill == "constant":
        x = torch.full((3, 5, 6, 7), -1.5)
    elif fill == "one pixel":
        x = torch.randn(3, 5, 1, 1)
    elif fill == "channels last":
        x = torch.randint(0, 3, (3, 5, 6, 7)).float().to(memory_format=torch.channels_last)
    upstream = torch.randn(3, 5, 1, 1)
    value, gradient = adaptive_reference(x.contiguous(), upstream)
    mine = x.clone().requires_grad_()
    y = global_max(mine)
    y.backward(upstream)
    assert torch.equal(y, value)
    assert torch.equal(mine.grad, gradient)


def test_a_shared_maximum_would_be_another_gradient():
    """Why `amax` is not used: it splits a tie, adaptive pooling gives it to the first position."""
    x = torch.zeros(1, 1, 2, 2, requires_grad=True)
    x.amax((2, 3)).sum().backward()
    assert x.grad.flatten().tolist() == [0.25] * 4
    x.grad = None
    global_max(x).sum().backward()
    assert x.grad.flatten().tolist() == [1, 0, 0, 0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", BLOCKS)
def test_backward_on_cuda_raises_no_alert(name):
    block = BLOCKS[name](64).cuda()
    x = torch.randn(4, 64, 40, 40, device="cuda", requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        block(x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
