"""What every attention block promises, on every block, and the further blocks against plain NumPy."""

from __future__ import annotations

from functools import partial

import attention_numpy as plain
import numpy as np
import pytest
import torch
from reference import random_state
from torch import nn

from models import attention_zoo as zoo
from models import common, yolo
from models.attention_zoo import largest_divisor
from models.common import Attention, BatchNorm

COMMON = (common.SE, common.ECA, common.CBAM, common.BAM, common.SCSE, common.CA, common.SimAM)
ZOO = tuple(
    c for c in vars(zoo).values() if isinstance(c, type) and issubclass(c, Attention) and c.__module__ == zoo.__name__
)
BLOCKS = COMMON + ZOO
SIZES = [(1, 1), (1, 7), (11, 13)]

every_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda c: c.__name__)
both_modes = pytest.mark.parametrize("identity", [False, True], ids=["paper", "identity"])


def test_the_zoo_is_complete():
    assert len(BLOCKS) == 22
    assert len({block.__name__ for block in BLOCKS}) == 22


REFERENCES = [
    (zoo.GAM, partial(zoo.GAM, k=3), plain.gam),
    (zoo.NAM, zoo.NAM, plain.nam),
    (zoo.EMA, partial(zoo.EMA, g=4), partial(plain.ema, g=4)),
    (zoo.SK, partial(zoo.SK, g=4), partial(plain.sk, g=4)),
    (zoo.ShuffleAttention, partial(zoo.ShuffleAttention, g=2), partial(plain.shuffle, g=2)),
    (zoo.TripletAttention, zoo.TripletAttention, plain.triplet),
    (zoo.SGE, partial(zoo.SGE, g=4), partial(plain.sge, g=4)),
    (zoo.GlobalContext, zoo.GlobalContext, plain.global_context),
    (zoo.EffectiveSE, zoo.EffectiveSE, plain.effective_se),
    (zoo.PolarizedSequential, zoo.PolarizedSequential, plain.polarized),
    (zoo.DoubleAttention, zoo.DoubleAttention, plain.double),
    (zoo.CrissCross, zoo.CrissCross, plain.criss_cross),
    (zoo.ParNetAttention, zoo.ParNetAttention, plain.parnet),
    (zoo.LSKA, zoo.LSKA, plain.lska),
    (zoo.MHSA, zoo.MHSA, partial(plain.mhsa, heads=4)),
]


@pytest.mark.parametrize(("block", "make", "reference"), REFERENCES, ids=[row[0].__name__ for row in REFERENCES])
def test_the_zoo_equals_plain_numpy(block, make, reference):
    module = random_state(make(16)).double().eval()
    state = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    x = torch.randn(2, 16, 5, 4, dtype=torch.float64)
    wanted = np.stack([reference(image, state) for image in x.numpy()])
    np.testing.assert_allclose(module(x).detach().numpy(), wanted, rtol=1e-9, atol=1e-11)


def test_every_block_of_the_zoo_has_a_reference():
    assert {row[0] for row in REFERENCES} == set(ZOO)


@every_block
@both_modes
def test_gradients_by_finite_differences(block, identity):
    module = random_state(block(6, identity=identity)).double()
    x = torch.randn(3, 6, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: module(x), (x, *module.parameters()), fast_mode=True)


@every_block
@pytest.mark.parametrize("channels", [1, 3, 8, 17, 40, 64, 80])
def test_any_width_and_size_with_batch_one_in_training_mode(block, channels):
    module = block(channels).train()
    for size in SIZES:
        x = torch.randn(1, channels, *size, requires_grad=True)
        y = module(x)
        assert y.shape == x.shape and y.dtype == x.dtype
        y.sum().backward()
        assert x.grad.isfinite().all()
    assert all(p.numel() > 0 and p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@every_block
def test_a_large_map(block):
    x = torch.randn(1, 4, 64, 64)
    y = block(4).train()(x)
    assert y.shape == x.shape and y.isfinite().all()


@every_block
@both_modes
def test_dtypes(block, identity):
    x = torch.randn(2, 16, 6, 5)
    module = random_state(block(16, identity=identity)).eval()
    wanted = module(x)
    tolerance = 0.06 * wanted.abs().max().item()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            for given in (x, x.to(dtype)):
                y = module(given)
                assert y.dtype == given.dtype
                torch.testing.assert_close(y.float(), wanted, rtol=0, atol=tolerance)
    assert module.double()(x.double()).dtype == torch.float64
    torch.testing.assert_close(module.double()(x.double()).float(), wanted, rtol=1e-4, atol=1e-5)
    for dtype in (torch.float16, torch.bfloat16):
        y = module.to(dtype)(x.to(dtype))
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), wanted, rtol=0, atol=tolerance)


@every_block
def test_training_under_autocast(block):
    module = block(8).train()
    x = torch.randn(2, 8, 6, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    y.float().square().sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in module.parameters())


WITHOUT_PRODUCTS_OF_PIXELS = [block for block in BLOCKS if block not in (zoo.CrissCross, zoo.MHSA)]


@pytest.mark.parametrize("block", WITHOUT_PRODUCTS_OF_PIXELS, ids=lambda c: c.__name__)
def test_large_values_in_half_precision(block):
    """Values of 300 have squares that fp16 cannot hold; q · k of self-attention is such a product by its nature."""
    module = block(16).eval().half()
    x = torch.randn(1, 16, 8, 8).sign().mul(300).half()
    assert not module(x).isnan().any()


@every_block
@both_modes
@pytest.mark.parametrize("channels", [8, 17])
def test_channels_last_stays(block, identity, channels):
    module = random_state(block(channels, identity=identity)).eval()
    x = torch.randn(2, channels, 6, 5)
    y = module(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, module(x), rtol=1e-4, atol=1e-5)


@every_block
@both_modes
def test_state_round_trip(block, identity):
    first, second = random_state(block(16, identity=identity)).eval(), block(16, identity=identity).eval()
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 16, 5, 6)
    assert torch.equal(first(x), second(x))


@every_block
def test_nothing_is_allocated_elsewhere(block):
    """On the meta device, where a tensor made on the CPU would be refused."""
    module = block(16).to("meta").eval()
    assert module(torch.empty(2, 16, 5, 6, device="meta")).shape == (2, 16, 5, 6)


@every_block
@pytest.mark.parametrize("channels", [1, 3, 8, 17, 40, 64])
def test_the_identity_at_the_start_is_exact(block, channels):
    for size in SIZES:
        module = block(channels, identity=True)
        x = torch.randn(2, channels, *size) * 10
        assert torch.equal(module.train()(x), x) and torch.equal(module.eval()(x), x)


ALREADY_THE_IDENTITY = {zoo.GlobalContext, zoo.CrissCross}


@every_block
def test_the_papers_form_is_the_default(block):
    """No parameters beyond the identity form's gain, and another output unless the paper starts at the identity."""
    paper, identity = block(16), block(16, identity=True)
    added = set(identity.state_dict()) - set(paper.state_dict())
    assert added <= {"gain"} and set(paper.state_dict()) <= set(identity.state_dict())
    x = torch.randn(2, 16, 5, 6)
    assert torch.equal(paper(x), x) == (block in ALREADY_THE_IDENTITY)


@every_block
def test_all_parameters_learn_from_the_identity(block):
    torch.manual_seed(1)
    module = block(64, identity=True).train()
    start = {name: value.clone() for name, value in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    x, target = torch.randn(4, 64, 7, 9), torch.randn(4, 64, 7, 9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), target).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.3)  # a larger first step would close CBAM's gates
        optimizer.step()
    still = [name for name, value in module.named_parameters() if torch.equal(value, start[name])]
    assert start and not still
    assert not torch.equal(module(x), x)


def graph_of(y: torch.Tensor) -> set[str]:
    """Names of the operations that the backward pass from `y` goes through."""
    seen, waiting, names = set(), [y.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            waiting += [before for before, _ in node.next_functions]
    return names


NOT_DETERMINISTIC = (
    *("AdaptiveMaxPool", "AdaptiveAvgPool", "MaxPool3D", "Upsample", "Im2Col", "IndexAdd", "IndexPut", "IndexBackward"),
    *("IndexSelect", "Gather", "Scatter", "Cumsum", "ScaledDot", "GridSample", "ReflectionPad", "ReplicationPad"),
    *("Amax", "Embedding", "Median", "Kthvalue", "PutBackward", "Repeat"),
)


@every_block
@both_modes
def test_no_operation_with_a_nondeterministic_gradient(block, identity):
    module = block(16, identity=identity).train()
    names = graph_of(module(torch.randn(2, 16, 6, 5, requires_grad=True)))
    assert names and not [name for name in names if any(bad.lower() in name.lower() for bad in NOT_DETERMINISTIC)]
    assert not [type(m).__name__ for m in module.modules() if "Adaptive" in type(m).__name__]


def test_the_search_for_nondeterministic_operations_finds_one():
    y = nn.AdaptiveMaxPool2d(1)(torch.randn(1, 2, 4, 4, requires_grad=True))
    assert any("AdaptiveMaxPool" in name for name in graph_of(y * 2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_block
def test_gradients_on_cuda_are_deterministic(block):
    module = random_state(block(64)).cuda()
    x = torch.randn(4, 64, 20, 20, device="cuda", requires_grad=True)
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            results.append(torch.autograd.grad(module(x).square().sum(), (x, *module.parameters())))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.parametrize(
    ("channels", "groups", "wanted"), [(64, 8, 8), (17, 8, 1), (3, 8, 3), (40, 64, 40), (1, 4, 1), (20, 8, 5)]
)
def test_groups_always_divide(channels, groups, wanted):
    assert largest_divisor(channels, groups) == wanted


@pytest.mark.parametrize(
    ("block", "args", "text"),
    [
        (common.SE, (0,), "reduction"),
        (common.ECA, (4,), "odd"),
        (common.CBAM, (2,), "odd"),
        (zoo.GAM, (4, 6), "odd"),
        (zoo.TripletAttention, (0,), "odd"),
        (zoo.LSKA, (8,), "odd"),
        (zoo.EMA, (0,), "groups"),
        (zoo.MHSA, (-1,), "groups or heads"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(block, args, text):
    with pytest.raises(ValueError, match=text):
        block(16, *args)


def test_batch_norm_of_one_value_uses_the_running_statistics():
    norm = BatchNorm(2).train()
    norm.running_mean.copy_(torch.tensor([1.0, 2.0]))
    norm.running_var.copy_(torch.tensor([4.0, 9.0]))
    y = norm(torch.tensor([3.0, 8.0]).view(1, 2, 1, 1)).flatten()
    torch.testing.assert_close(y, torch.tensor([1.0, 2.0]), rtol=1e-4, atol=0)
    assert norm.running_mean.tolist() == [1, 2] and norm.num_batches_tracked == 0
    x = torch.randn(2, 2, 1, 3)
    torch.testing.assert_close(norm(x), nn.BatchNorm2d(2)(x))


def test_nam_survives_scales_that_are_all_zero():
    module = zoo.NAM(4)
    nn.init.zeros_(module.bn.weight)
    x = torch.randn(2, 4, 3, 3)
    assert torch.equal(module(x), x * 0.5)


def test_criss_cross_reaches_every_pixel_in_two():
    """Once, a pixel feels its row and column; twice, the whole map."""
    module = random_state(zoo.CrissCross(8))
    for times, reached in ((1, 4 + 5 - 1), (2, 20)):
        x = torch.randn(1, 8, 4, 5, requires_grad=True)
        y = x
        for _ in range(times):
            y = module(y)
        y[0, :, 1, 2].sum().backward()
        assert (x.grad.abs().sum((0, 1)) > 0).sum() == reached


def small_file(block: str) -> dict:
    return {
        "nc": 2,
        "anchors": [[10, 13, 16, 30]],
        "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, block, []], [-1, 1, "Conv", [16, 3, 2]], [-1, 2, block, []]],
        "head": [[-1, 1, "C3", [16]], [[-1], 1, "Detect", ["nc", "anchors"]]],
    }


@every_block
def test_fused_models_give_the_same(block, monkeypatch):
    monkeypatch.setitem(yolo.BLOCKS, block.__name__, (block, "attention"))
    model = random_state(yolo.DetectionModel(small_file(block.__name__))).eval()
    x = torch.rand(1, 3, 32, 48)
    with torch.no_grad():
        (before,), (after,) = model(x), model.fuse()(x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


EXPORTED = [*BLOCKS, zoo.ConvCBAM, zoo.C3SE, zoo.C3ECA, zoo.C3CA, zoo.C3CBAM]


@pytest.mark.slow
@both_modes
@pytest.mark.parametrize("block", EXPORTED, ids=lambda c: c.__name__)
@pytest.mark.filterwarnings("ignore")
def test_onnx_export_with_dynamic_sizes(block, identity, tmp_path):
    pytest.importorskip("onnx", reason="ONNX export needs the package onnx")
    pytest.importorskip("onnxscript", reason="ONNX export needs the package onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="running the export needs the package onnxruntime")
    channels = (16,) if issubclass(block, Attention) else (16, 16)
    module = random_state(block(*channels, identity=identity)).eval()
    path = tmp_path / "block.onnx"
    dynamic = {0: torch.export.Dim("batch"), 2: torch.export.Dim("height"), 3: torch.export.Dim("width")}
    torch.onnx.export(
        module, (torch.randn(2, 16, 10, 12),), path, dynamo=True, dynamic_shapes=(dynamic,), verbose=False
    )
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for shape in ((2, 16, 10, 12), (1, 16, 7, 19), (3, 16, 24, 20)):
        x = torch.randn(shape)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(y, module(x).detach().numpy(), rtol=1e-3, atol=1e-4)
