"""Attention blocks against plain NumPy, their shapes at any width, and gradients that are exact and deterministic."""

from __future__ import annotations

import math
import re

import attention_numpy as plain
import numpy as np
import pytest
import torch
from reference import random_state
from torch import nn

from models.attention_zoo import C3CA, C3CBAM, C3ECA, C3SE, ConvCBAM
from models.common import (
    BAM,
    C3,
    CA,
    CBAM,
    ECA,
    SCSE,
    SE,
    Conv,
    SimAM,
    global_max,
)

BLOCKS = {"SE": SE, "ECA": ECA, "CBAM": CBAM}


REFERENCES = [
    (SE, (8,), plain.se),
    (ECA, (), plain.eca),
    (CBAM, (3, 8), plain.cbam),
    (BAM, (), plain.bam),
    (SCSE, (), plain.scse),
    (CA, (), plain.ca),
    (SimAM, (), plain.simam),
]


@pytest.mark.parametrize(("block", "args", "reference"), REFERENCES, ids=[row[0].__name__ for row in REFERENCES])
def test_blocks_equal_plain_numpy(block, args, reference):
    module = random_state(block(32, *args).double()).eval()
    state = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    x = torch.randn(2, 32, 5, 4, dtype=torch.float64)
    wanted = np.stack([reference(image, state) for image in x.numpy()])
    np.testing.assert_allclose(module(x).detach().numpy(), wanted, rtol=1e-10, atol=1e-12)


def test_gates_by_hand():
    """Numbers that one can check on paper: a map of 1, 2, 3, 6 has mean 3, variance 14 / 3."""
    x = torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 1, 2, 2)
    se = SE(1)
    se.fc1.weight.data.fill_(2)
    se.fc2.weight.data.fill_(0.5)
    gate = 1 / (1 + math.exp(-3))
    torch.testing.assert_close(se(x), x * gate)
    scse = SCSE(1)
    scse.load_state_dict({**se.state_dict(), "conv.weight": torch.ones(1, 1, 1, 1)})
    assert scse(x)[0, 0, 1, 1].item() == pytest.approx(6 * (gate + 1 / (1 + math.exp(-6))))
    v = 14 / 3
    assert SimAM(1)(x)[0, 0, 1, 1].item() == pytest.approx(6 / (1 + math.exp(-(9 / (4 * (v + 1e-4)) + 0.5))))


def test_default_outputs_did_not_change_with_the_identity_flag():
    """Positional order, names of parameters and plain sigmoid: what trained checkpoints rely on."""
    cbam = CBAM(32, 5, 8)
    assert list(cbam.state_dict()) == ["channel.fc1.weight", "channel.fc2.weight", "spatial.conv.weight"]
    assert cbam.spatial.conv.kernel_size == (5, 5) and cbam.channel.fc1.out_channels == 4
    assert list(SE(32, 4).state_dict()) == ["fc1.weight", "fc2.weight"] and SE(32, 4).fc1.out_channels == 8
    assert list(ECA(32, 7).state_dict()) == ["conv.weight"] and ECA(32, 7).conv.kernel_size == (7,)
    se = SE(8)
    nn.init.zeros_(se.fc2.weight)
    x = torch.randn(2, 8, 3, 3)
    assert torch.equal(se(x), x * 0.5)


WRAPPED = {C3SE: SE, C3ECA: ECA, C3CA: CA, C3CBAM: CBAM}


@pytest.mark.parametrize("wrapped", WRAPPED, ids=lambda c: c.__name__)
@pytest.mark.parametrize("shortcut", [True, False])
def test_c3_forms_start_as_c3(wrapped, shortcut):
    """Same names, the attention's own beside them, and the same output bit for bit."""
    c3, mine = C3(16, 24, 2, shortcut), wrapped(16, 24, 2, shortcut, identity=True)
    missing, unexpected = mine.load_state_dict(c3.state_dict(), strict=False)
    assert not unexpected and missing and all(re.match(r"m\.[01]\.attention\.", name) for name in missing)
    assert [type(b.attention) for b in mine.m] == [WRAPPED[wrapped]] * 2
    x = torch.randn(2, 16, 6, 5)
    for training in (True, False):
        assert torch.equal(mine.train(training)(x), c3.train(training)(x))
    assert not torch.equal(wrapped(16, 24, 2, shortcut)(x), c3(x))


def test_attention_comes_before_the_shortcut():
    """With a gate that is closed, a bottleneck is its shortcut alone."""
    c3 = C3ECA(8, 8, 1).eval()
    with torch.no_grad():
        c3.m[0].cv2.bn.bias.fill_(5)  # means are positive
        c3.m[0].attention.conv.weight.fill_(-1e4)
        x = torch.randn(1, 8, 4, 4)
        torch.testing.assert_close(c3(x), c3.cv3(torch.cat((c3.cv1(x), c3.cv2(x)), 1)))


def test_conv_cbam_starts_as_conv_and_fuses():
    conv, mine = Conv(6, 8, 3, 2), ConvCBAM(6, 8, 3, 2, identity=True)
    missing, unexpected = mine.load_state_dict(conv.state_dict(), strict=False)
    assert not unexpected and missing and all(name.startswith("attention.") for name in missing)
    x = torch.randn(2, 6, 9, 8)
    assert torch.equal(mine.train()(x), conv.train()(x))
    paper = ConvCBAM(6, 8, 3).eval()
    paper.bn.running_mean.uniform_(-1, 1)
    before = paper(x)
    torch.testing.assert_close(before, CBAM.forward(paper.attention, Conv.forward(paper, x)))
    paper.fuse()
    assert isinstance(paper.bn, nn.Identity)
    torch.testing.assert_close(paper(x), before, rtol=1e-4, atol=1e-4)


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
