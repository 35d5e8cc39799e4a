"""Runs a command with a time limit, and ends it with every process that it has started."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
KILLED = -signal.SIGKILL  # the exit status of what had to be


def end_by_signals() -> None:
    """SIGTERM is to this process what Ctrl-C is, and Ctrl-C that, even where whoever started it ignores it; once, since
    some send it twice and what is running has still to be ended."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, interrupted)


def run_until(command: Sequence[str], seconds: float | None, patience: float = 0, **environment: str) -> int:
    """The exit status of a command, in this project's directory. After `seconds` it is interrupted, as by Ctrl-C, and
    after `patience` more it is killed; at once, if this process is interrupted itself. What it leaves is killed too."""
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, process_group=0)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"time is up after {seconds:.0f} s", flush=True)
        process.send_signal(signal.SIGINT)
        return _wait(process, patience)
    finally:
        with suppress(ProcessLookupError):  # none is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen, patience: float) -> int:
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        return KILLED
