"""Deterministic equivalents of standard modules: equal outputs and gradients, and nothing left that alerts."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils.audit import by_table
from utils.swap import can_swap, swap_modules

POOL_SIZES = [1, 2, 3, 7, (1, None), (None, 1), (3, 5), (9, 4), (None, None), (13, 2)]
MAP_SIZES = [(1, 1), (8, 8), (7, 9), (12, 5), (1, 6)]


def swapped(module: nn.Module) -> nn.Module:
    """A copy of a module with a deterministic equivalent in its place."""
    holder = nn.Sequential(copy.deepcopy(module))
    assert len(swap_modules(holder)) == 1
    assert type(holder[0]) is not type(module)
    return holder[0]


def both(module: nn.Module, x: torch.Tensor, *args, **kwargs):
    """Output and gradient of a module and of its equivalent, under an uneven gradient from above."""
    results = []
    for each in (module, swapped(module)):
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = each(leaf, *args, **kwargs)
        weights = torch.arange(1, y.numel() + 1, dtype=torch.float64).sin().view(y.shape).to(y.dtype)
        y.backward(weights)
        results.append((y.detach(), leaf.grad))
    return results


def assert_close(module: nn.Module, x: torch.Tensor, *args, **tolerance) -> None:
    (y1, g1), (y2, g2) = both(module, x, *args)
    assert y1.dtype == y2.dtype
    tolerance = tolerance or {"rtol": 2e-6, "atol": 3e-6}
    torch.testing.assert_close(y2, y1, **tolerance)
    torch.testing.assert_close(g2, g1, **tolerance)


def assert_equal(module: nn.Module, x: torch.Tensor, *args, **kwargs) -> None:
    """Same values and places bit by bit; gradients that meet in one place may be added in another order."""
    (y1, g1), (y2, g2) = both(module, x, *args, **kwargs)
    assert torch.equal(y1, y2)
    torch.testing.assert_close(g2, g1, rtol=2e-6, atol=1e-6)
    assert torch.equal(g1 != 0, g2 != 0)


def ties(*shape: int) -> torch.Tensor:
    """Few different values, so that most windows have several maxima."""
    return torch.randint(0, 3, shape).float()


@pytest.mark.parametrize("size", POOL_SIZES)
def test_max_pooling(size):
    for shape in MAP_SIZES:
        assert_equal(nn.AdaptiveMaxPool2d(size), ties(2, 3, *shape))
        assert_equal(nn.AdaptiveMaxPool2d(size), torch.randn(2, 3, *shape))


def test_max_pooling_of_one_value_gives_the_first_place_everything():
    x = torch.full((1, 1, 6, 7), 2.0, requires_grad=True)
    swapped(nn.AdaptiveMaxPool2d(1))(x).sum().backward()
    assert x.grad.flatten().tolist() == [1.0] + [0.0] * 41


class GatheredPlaces(TorchDispatchMode):
    """Keeps the places that values are taken from."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "gather":
            self.places.append(args[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("have", "want"), [(3, 2), (7, 3), (9, 4), (4, 7), (1, 5), (8, 4)])
def test_max_pooling_never_takes_a_value_twice_at_once(have, want):
    """The gradient of taking one twice would be a sum in no certain order on CUDA."""
    x = torch.zeros(1, 1, have, have)
    x[..., have // 2 :: 2, :] = x[..., have // 2 :: 2] = 1  # maxima where windows overlap
    with GatheredPlaces() as gathered:
        y = swapped(nn.AdaptiveMaxPool2d(want))(x)
    assert sum(places.numel() for places in gathered.places) == y.numel()
    for places in gathered.places:
        assert places.flatten().unique().numel() == places.numel()


def test_max_pooling_returns_places():
    x = ties(2, 3, 7, 9)
    module = nn.AdaptiveMaxPool2d((3, 4), return_indices=True)
    for a, b in zip(module(x), swapped(module)(x), strict=True):
        assert torch.equal(a, b)


def test_max_pooling_passes_nan_on():
    x = torch.randn(1, 1, 6, 6)
    x[0, 0, 1, 4] = float("nan")
    y = swapped(nn.AdaptiveMaxPool2d(2))(x)
    assert y.isnan().flatten().tolist() == [False, True, False, False]


@pytest.mark.parametrize("size", POOL_SIZES)
def test_average_pooling(size):
    for shape in MAP_SIZES:
        assert_close(nn.AdaptiveAvgPool2d(size), torch.randn(2, 3, *shape))


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize(
    "wanted",
    [{"size": s} for s in (1, 5, 16, (3, 17), (2, 1))]
    + [{"scale_factor": f} for f in (2, 4, 1.7, 0.6, (1.0, 2.5), (3, 0.5))],
    ids=str,
)
def test_bilinear_upsampling(wanted, corners):
    for height, width in [(8, 8), (7, 9), (12, 5), (2, 6)]:
        x = torch.randn(2, 3, height, width)
        assert_close(nn.Upsample(mode="bilinear", align_corners=corners, **wanted), x)
        if corners:
            assert_close(nn.UpsamplingBilinear2d(**wanted), x)


@pytest.mark.parametrize("recompute", [None, False, True])
def test_bilinear_upsampling_by_a_factor_that_does_not_divide(recompute):
    module = nn.Upsample(scale_factor=1.55, mode="bilinear", recompute_scale_factor=recompute)
    assert_close(module, torch.randn(1, 2, 9, 11))


def test_large_bilinear_upsampling():
    assert_close(nn.Upsample(scale_factor=2, mode="bilinear"), torch.randn(1, 2, 320, 5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, None, 0), (3, 2, 1), (3, 3, 0), ((2, 3), (2, 3), 0)])
def test_unpooling(kernel, stride, padding):
    pool = nn.MaxPool2d(kernel, stride, padding, return_indices=True)
    unpool = nn.MaxUnpool2d(kernel, stride, padding)
    for height, width in [(12, 12), (13, 15)]:
        x, places = pool(torch.randn(2, 3, height, width))
        assert_equal(unpool, x, places, output_size=(2, 3, height, width))
        if (height, width) == (12, 12) and padding == 0:
            assert_equal(unpool, x, places)


def test_unpooling_into_an_impossible_size_is_an_error():
    x, places = F.max_pool2d(torch.randn(1, 1, 8, 8), 2, return_indices=True)
    with pytest.raises(ValueError, match="output_size"):
        swapped(nn.MaxUnpool2d(2))(x, places, output_size=(12, 8))


@pytest.mark.parametrize("padding", [1, 3, (2, 0), (0, 4), (-1, 2), (-2, -1)])
def test_reflection_of_a_line(padding):
    for shape in [(2, 3, 8), (3, 5)]:
        assert_equal(nn.ReflectionPad1d(padding), torch.randn(shape))


@pytest.mark.parametrize("padding", [1, 4, (2, 0, 1, 3), (0, 4, 0, 0), (-1, 2, 3, -2)])
def test_reflection_of_a_map(padding):
    for shape in [(2, 3, 8, 6), (3, 5, 7)]:
        assert_equal(nn.ReflectionPad2d(padding), torch.randn(shape))


def test_reflection_of_a_volume():
    assert_equal(nn.ReflectionPad3d((1, 2, 0, 3, 2, 1)), torch.randn(1, 2, 4, 5, 6))


def test_reflection_beyond_the_map_is_an_error():
    with pytest.raises(ValueError, match="smaller than the size 4"):
        swapped(nn.ReflectionPad2d((4, 0, 0, 0)))(torch.randn(1, 1, 6, 4))


MODULES = {
    "max": nn.AdaptiveMaxPool2d((3, 5)),
    "max one": nn.AdaptiveMaxPool2d(1),
    "average": nn.AdaptiveAvgPool2d((3, 5)),
    "average of rows": nn.AdaptiveAvgPool2d((None, 1)),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear corners": nn.UpsamplingBilinear2d(size=(5, 9)),
    "reflection": nn.ReflectionPad2d((1, 2, 3, 0)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided"])
def test_layouts_of_memory(name, layout):
    x = torch.randn(2, 3, 8, 14)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.transpose(2, 3)
    else:
        x = x[:, :, ::2, 1::2]
    assert_close(MODULES[name], x)


@pytest.mark.parametrize("name", [name for name in MODULES if "bilinear" not in name])
def test_one_picture_without_a_batch(name):
    assert_close(MODULES[name], torch.randn(3, 8, 14))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_dtypes(name, dtype, tolerance):
    assert_close(MODULES[name], torch.randn(2, 3, 8, 7).to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODULES)
def test_autocast_leaves_precision_alone(name):
    x = torch.randn(2, 3, 8, 7)
    exact = swapped(MODULES[name])(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(swapped(MODULES[name])(x), exact)


@pytest.mark.parametrize("name", MODULES)
def test_gradients(name):
    x = torch.randn(1, 2, 5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swapped(MODULES[name]), x)


def test_gradients_of_unpooling():
    x, places = F.max_pool2d(torch.randn(1, 2, 4, 6, dtype=torch.float64), 2, return_indices=True)
    unpool = swapped(nn.MaxUnpool2d(2))
    assert torch.autograd.gradcheck(lambda x: unpool(x, places), x.requires_grad_())


@pytest.mark.parametrize("size", [1, (3, 5), (None, 1), (9, 2), (12, 12)])
def test_nothing_alerts_any_more(size):
    modules = [*MODULES.values(), nn.AdaptiveMaxPool2d(size), nn.AdaptiveAvgPool2d(size), nn.ReflectionPad1d(1)]
    for module in modules:
        x = torch.randn(2, 3, 7, 9) if not isinstance(module, nn.ReflectionPad1d) else torch.randn(2, 3, 9)
        each = swapped(module)
        work = lambda each=each, x=x: each(x.requires_grad_()).sum().backward()  # noqa: E731
        assert not by_table(work)


def test_unpooling_does_not_alert_for_real():
    """`max_unpool2d` raises on the CPU too."""
    x, places = F.max_pool2d(torch.randn(1, 2, 4, 6), 2, return_indices=True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic"):
            nn.MaxUnpool2d(2)(x, places)
        swapped(nn.MaxUnpool2d(2))(x.requires_grad_(), places).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class NaiveGate(nn.Module):
    """Two pooled branches as people write them, one module used by two names."""

    def __init__(self, channels: int = 4):
        super().__init__()
        self.avg, self.max = nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)
        self.same = self.max
        self.mlp = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU(inplace=True))

    def forward(self, x):
        return x * (self.mlp(self.avg(x)) + self.mlp(self.max(x)) + self.same(x))


def test_swapping_keeps_everything_but_the_class():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), NaiveGate()).eval()
    x = torch.randn(2, 3, 8, 8)
    before, names, gate = model(x), list(model.state_dict()), model[1]
    held = gate.max
    assert swap_modules(model) == [
        "1.avg: AdaptiveAvgPool2d → DeterministicAdaptiveAvgPool2d",
        "1.max: AdaptiveMaxPool2d → DeterministicAdaptiveMaxPool2d",
    ]
    assert list(model.state_dict()) == names and not model[1].max.training
    assert gate.max is held and gate.same is held and isinstance(held, nn.AdaptiveMaxPool2d)
    torch.testing.assert_close(model(x), before)
    assert swap_modules(model) == []
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))


def test_hooks_stay():
    seen = []
    model = nn.Sequential(nn.AdaptiveMaxPool2d(1))
    model[0].register_forward_hook(lambda *_: seen.append(1))
    swap_modules(model)
    model(torch.randn(1, 1, 3, 3))
    assert seen == [1]


def test_other_modules_are_left_alone():
    class Special(nn.AdaptiveMaxPool2d):
        def forward(self, x):
            return -super().forward(-x)

    left = [
        Special(1),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2),
        nn.Upsample(size=4, mode="bicubic"),
        nn.Identity(),
    ]
    assert not any(can_swap(module) for module in left)
    model = nn.Sequential(*left)
    assert swap_modules(model) == [] and [type(m) for m in model] == [type(m) for m in left]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODULES)
def test_on_cuda(name, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = torch.randn(2, 3, 8, 14)
    (y, gradient), _ = both(MODULES[name], x)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            leaf = x.cuda().requires_grad_()
            out = swapped(MODULES[name])(leaf)
            weights = torch.arange(1, y.numel() + 1, dtype=torch.float64).sin().view(y.shape).float()
            out.backward(weights.cuda())
            results.append((out.detach().cpu(), leaf.grad.cpu()))
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    for a, b in itertools.pairwise(results):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    torch.testing.assert_close(results[0][0], y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0][1], gradient, rtol=1e-4, atol=1e-4)
