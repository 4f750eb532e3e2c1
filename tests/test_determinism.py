"""Modes, guard and settings of a run, with operations that alert on the CPU as adaptive pooling does on CUDA."""

from __future__ import annotations

import os
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from utils.determinism import (
    CUBLAS_VARIABLE,
    DeterministicMode,
    NonDeterministicError,
    backward_guard,
    configure,
    operation_of,
    rng_state,
    set_rng_state,
)

STRICT, WARN, SCOPED_OFF = DeterministicMode.STRICT, DeterministicMode.WARN, DeterministicMode.SCOPED_OFF


class PutInBackward(torch.autograd.Function):
    """Identity whose backward calls `put_`, which has no deterministic implementation on the CPU either."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        index = torch.arange(gradient.numel())
        return torch.zeros_like(gradient).put_(index, gradient.flatten())


class UnpoolInBackward(torch.autograd.Function):
    """Identity whose backward calls `max_unpool2d`, which alerts as well."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        index = torch.arange(gradient.numel()).view_as(gradient)
        return F.max_unpool2d(gradient, index, 1)


@pytest.fixture
def flags_restored():
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def flags() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def backward_of(function=PutInBackward) -> torch.Tensor:
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    function.apply(x).sum().backward()
    return x.grad


STATES = [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("mode", DeterministicMode)
def test_guard_restores_flag_and_warn_only(mode, state, flags_restored):
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])
    with backward_guard(mode):
        inside = flags()
    assert flags() == state
    assert inside == {STRICT: (True, False), WARN: (True, True), SCOPED_OFF: (False, False)}[mode]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("mode", DeterministicMode)
def test_guard_restores_after_an_exception(mode, state, flags_restored):
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])
    with pytest.raises(ZeroDivisionError), backward_guard(mode):
        _ = 1 / 0
    assert flags() == state


def test_guards_nest(flags_restored):
    torch.use_deterministic_algorithms(True, warn_only=True)
    with backward_guard(SCOPED_OFF):
        with backward_guard(STRICT):
            assert flags() == (True, False)
            with backward_guard(SCOPED_OFF):
                assert flags() == (False, False)
            assert flags() == (True, False)
        assert flags() == (False, False)
    assert flags() == (True, True)


def test_guard_sets_nothing_where_flags_are_right(flags_restored, monkeypatch):
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *a, **k: pytest.fail("set without need"))
    with backward_guard(STRICT):
        pass
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("function", "operation"), [(PutInBackward, "put_"), (UnpoolInBackward, "max_unpooling2d_forward_out")]
)
def test_strict_names_the_operation_and_the_ways_out(function, operation):
    with pytest.raises(NonDeterministicError) as error, configure(STRICT, 0):
        with backward_guard(STRICT):
            backward_of(function)
    text = str(error.value)
    assert operation in text and "warn" in text and "scoped-off" in text and "\n" not in text
    assert isinstance(error.value.__cause__, RuntimeError)


def test_strict_explains_the_forward_pass_too():
    with pytest.raises(NonDeterministicError, match="put_"), configure(STRICT, 0):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))


def test_other_runtime_errors_pass_unchanged():
    with pytest.raises(RuntimeError, match="size mismatch|shape|multiplied") as error, configure(STRICT, 0):
        with backward_guard(STRICT):
            torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not isinstance(error.value, NonDeterministicError)


def test_scoped_off_frees_the_backward_pass_only():
    with configure(SCOPED_OFF, 0):
        with backward_guard(SCOPED_OFF):
            assert torch.equal(backward_of(), torch.ones(1, 1, 2, 2))
        assert flags() == (True, False)
        with pytest.raises(RuntimeError, match="put_"):
            backward_of()


@pytest.mark.parametrize("filters", ["default", "always", "error", "ignore"])
def test_warn_reports_once_and_counts(filters, recwarn):
    lines = []
    with warnings.catch_warnings():
        warnings.simplefilter(filters)
        with configure(WARN, 0, report=lines.append) as record:
            for _ in range(5):
                with backward_guard(WARN):
                    backward_of()
            with backward_guard(WARN):
                backward_of(UnpoolInBackward)
    assert record.counts == {"put_": 5, "max_unpooling2d_forward_out": 1}
    assert len(lines) == 2 and "put_" in lines[0] and "max_unpooling2d_forward_out" in lines[1]
    assert "put_ (5 times)" in record.summary()
    assert not [w for w in recwarn if "deterministic" in str(w.message)]


def test_warn_lets_other_warnings_through():
    with pytest.warns(UserWarning, match="something else"), configure(WARN, 0) as record:
        warnings.warn("something else", stacklevel=1)
    assert not record.counts


def test_no_record_no_summary():
    with configure(WARN, 0) as record:
        torch.ones(2, requires_grad=True).sum().backward()
    assert record.summary() == ""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", DeterministicMode)
def test_configure_restores_everything(mode, fails, monkeypatch):
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = (flags(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    try:
        with configure(mode, 3):
            assert flags() == (True, mode is WARN)
            assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
            assert not torch.utils.deterministic.fill_uninitialized_memory
            assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
            random.random(), np.random.rand(), torch.rand(1)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert (flags(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == before
    assert torch.utils.deterministic.fill_uninitialized_memory == fill
    assert CUBLAS_VARIABLE not in os.environ
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])


def test_configure_keeps_the_users_cublas_setting(monkeypatch):
    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with configure(STRICT, 0):
        assert os.environ[CUBLAS_VARIABLE] == ":16:8"


def test_an_invalid_cublas_setting_is_refused_with_the_valid_ones(monkeypatch):
    monkeypatch.setenv(CUBLAS_VARIABLE, ":8:8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(NonDeterministicError, match="=:8:8.*:4096:8 or :16:8"), configure(WARN, 0):
        pass
    assert os.environ[CUBLAS_VARIABLE] == ":8:8"


@pytest.mark.parametrize("mode", DeterministicMode)
def test_strict_wants_the_variable_before_cuda_is_in_use(mode, monkeypatch):
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [])
    try:
        with configure(mode, 0):
            assert mode is not STRICT
    except NonDeterministicError as error:
        assert mode is STRICT and "in use already" in str(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_no_cublas_variable_without_cuda(monkeypatch):
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    with configure(STRICT, 0):
        assert CUBLAS_VARIABLE not in os.environ


def test_same_seed_same_numbers():
    def draw(seed):
        with configure(STRICT, seed):
            return random.random(), np.random.rand(), torch.rand(3).tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_rng_state_round_trip(tmp_path):
    """As plain values through a checkpoint's own reading rules."""
    before = rng_state()
    torch.save(before, tmp_path / "rng.pt")
    first = random.random(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (random.random(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()) == first
    set_rng_state(before)


def test_operation_names_as_pytorch_writes_them():
    text = "adaptive_max_pool2d_backward_cuda does not have a deterministic implementation, but you set 'torch.use_"
    assert operation_of(text) == "adaptive_max_pool2d_backward_cuda"
    assert operation_of("CUDA out of memory") is None
