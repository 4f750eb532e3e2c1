"""Stopping a run in good order: SIGTERM and SIGINT are noted, and the run ends after the step it is in."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from utils import UserError


class RunStopped(UserError):
    """A run that was asked to stop and did, after writing its checkpoint; exits as the signal would (143, 130)."""

    def __init__(self, number: int, text: str):
        super().__init__(text)
        self.exit_status = 128 + number


class StopRequest:
    """Which signal has asked the run to stop; 0 while none has."""

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return self.number != 0

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number else ""


@contextlib.contextmanager
def stop_noted() -> Iterator[StopRequest]:
    """Within it SIGTERM and SIGINT are only noted; a second SIGINT interrupts at once. Handlers are put back after.

    Outside the main thread, where Python allows no handlers, nothing is changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: object) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.number = number

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
