"""Ctrl-C while training: the step at hand is finished, and what was trained so far is kept."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        self.asked = True


@contextmanager
def stop_on_interrupt() -> Iterator[Stop]:
    """Inside, Ctrl-C only sets `asked`; whoever started this process may still kill it."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
