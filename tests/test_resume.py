"""Runs that are stopped, killed or interrupted anywhere continue bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from training import FOUR_EPOCHS, assert_same_run, options, rows

import train as train_module
from train import train
from utils import ROOT
from utils.checkpoint import CheckpointError, read_checkpoint, save_checkpoint
from utils.options import TrainOptions
from utils.signals import RunStopped, stop_noted


@pytest.fixture
def at_step(monkeypatch):
    """Do something in the backward pass of the run's n-th step."""

    def arrange(step: int, action) -> None:
        guard, count = train_module.backward_guard, iter(range(1, 1000))

        def guard_and_act(mode):
            if next(count) == step:
                action()
            return guard(mode)

        monkeypatch.setattr(train_module, "backward_guard", guard_and_act)

    return arrange


# six batches an epoch: in the middle, at the first and at the last batch of an epoch
@pytest.mark.parametrize(
    ("step", "number", "status"),
    [(3, signal.SIGTERM, 143), (7, signal.SIGINT, 130), (12, signal.SIGINT, 130), (20, signal.SIGTERM, 143)],
)
def test_a_signal_ends_the_step_and_resume_goes_on_there(
    step, number, status, reference_run, tiny_data, tmp_path, at_step, monkeypatch
):
    at_step(step, lambda: os.kill(os.getpid(), number))
    with pytest.raises(RunStopped, match=f"stopped by {number.name} after batch {step}") as stopped:
        train(options(tiny_data, tmp_path, **FOUR_EPOCHS))
    assert stopped.value.exit_status == status
    monkeypatch.undo()
    last = tmp_path / "exp" / "weights" / "last.pt"
    saved = read_checkpoint(last)["progress"]
    assert (saved["step"], saved["epoch"], saved["batch"]) == (step, (step - 1) // 6, (step - 1) % 6 + 1)
    assert_same_run(reference_run, train(TrainOptions(resume=str(last))))


def test_save_steps_bound_what_a_kill_loses(reference_run, tiny_data, tmp_path, at_step, monkeypatch):
    class Killed(BaseException):
        pass

    def kill():
        raise Killed

    at_step(11, kill)
    with pytest.raises(Killed):
        train(options(tiny_data, tmp_path, save_steps=4, **FOUR_EPOCHS))
    monkeypatch.undo()
    last = tmp_path / "exp" / "weights" / "last.pt"
    assert read_checkpoint(last)["progress"]["step"] == 8
    assert_same_run(reference_run, train(TrainOptions(resume=str(last))))


def test_killed_between_best_and_last(reference_run, tiny_data, tmp_path, monkeypatch):
    """best.pt of the second epoch is written, last.pt is still the first's: the epoch runs again."""
    save = train_module.save_checkpoint

    def killed_before_last(path, content):
        if path.name == "last.pt" and content["progress"]["epoch"] == 2:
            raise KeyboardInterrupt
        save(path, content)

    monkeypatch.setattr(train_module, "save_checkpoint", killed_before_last)
    with pytest.raises(KeyboardInterrupt):
        train(options(tiny_data, tmp_path, **FOUR_EPOCHS))
    monkeypatch.undo()
    last = tmp_path / "exp" / "weights" / "last.pt"
    assert read_checkpoint(last)["progress"]["epoch"] == 1
    resumed = train(TrainOptions(resume=str(last)))
    assert_same_run(reference_run, resumed)
    bests = [torch.load(r.folder / "weights" / "best.pt", weights_only=True) for r in (reference_run, resumed)]
    assert all(torch.equal(bests[0]["model"][name], tensor) for name, tensor in bests[1]["model"].items())


def test_anchors_of_the_weights_survive_a_resume(reference_run, tiny_data, tmp_path, at_step, monkeypatch):
    """They are in the tensors only: the model file still has those it was written with."""
    content = read_checkpoint(reference_run.folder / "weights" / "best.pt")
    content["model"] = {k: v * 1.25 if k.endswith("anchors") else v for k, v in content["model"].items()}
    save_checkpoint(tmp_path / "w.pt", content)
    flags = {"weights": str(tmp_path / "w.pt"), "epochs": 1, "batch_size": 7}
    straight = train(options(tiny_data, tmp_path / "straight", **flags))
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(RunStopped):
        train(options(tiny_data, tmp_path, **flags))
    monkeypatch.undo()
    resumed = train(TrainOptions(resume=str(tmp_path / "exp" / "weights" / "last.pt")))
    assert rows(resumed) == rows(straight) and resumed.sha256 == straight.sha256


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError), stop_noted() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert stop and stop.name == "SIGTERM"
        raise KeyError
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_ctrl_c_interrupts():
    with pytest.raises(KeyboardInterrupt), stop_noted() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert stop.number == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)


def test_other_threads_change_no_handlers():
    found = []

    def work():
        before = signal.getsignal(signal.SIGTERM)
        with stop_noted() as stop:
            found.append((bool(stop), signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, True)]


def start(arguments, tmp_path) -> subprocess.Popen:
    command = [sys.executable, ROOT / "train.py", *map(str, arguments)]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


COMMON = ["--imgsz", 64, "--batch-size", 7, "--epochs", 4, "--noplots", "--device", "cpu"]


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_from_outside_exits_with_143(workers, tiny_data, tmp_path):
    run = start([*COMMON, "--data", tiny_data, "--project", tmp_path, "--workers", workers, "--epochs", 500], tmp_path)
    last = tmp_path / "exp" / "weights" / "last.pt"
    for _ in range(1200):
        if last.exists() or run.poll() is not None:
            break
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    error = run.communicate(timeout=60)[1]
    assert run.returncode == 143 and "Traceback" not in error
    assert "stopped by SIGTERM" in error and "--resume" in error
    assert read_checkpoint(last)["progress"]["step"] > 0


@pytest.mark.slow
def test_twenty_kills_at_random_moments(reference_run, tiny_data, tmp_path):
    """kill -9 during steps, validation and saving: the resumed run ends with the weights of the uninterrupted one."""
    dice, interrupted = random.Random(0), 0
    for repetition in range(20):
        project = tmp_path / str(repetition)
        last = project / "exp" / "weights" / "last.pt"
        run = start([*COMMON, "--data", tiny_data, "--project", project, "--workers", 0, "--save-steps", 1], tmp_path)
        while not last.exists() and run.poll() is None:
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 2.5))
        run.kill()
        run.communicate()
        try:
            finished = read_checkpoint(last)["progress"]["epoch"] == 4
        except CheckpointError as error:
            pytest.fail(f"repetition {repetition}: {error}")
        if finished:
            continue
        interrupted += 1
        resumed = train(TrainOptions(resume=str(last)))
        assert resumed.sha256 == reference_run.sha256, repetition
    print(f"{interrupted} of 20 kills hit a run that was not finished")
    assert interrupted >= 10
