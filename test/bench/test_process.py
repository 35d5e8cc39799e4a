"""A command that runs out of time is interrupted, then killed with all processes that it started. If the run itself is
ended, its processes are killed too."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmark.process import KILLED, ROOT, run_until

WORKS = "trap '{trap}' INT; sleep 30 & echo $! >{file}; wait"


@pytest.fixture(autouse=True)
def ctrl_c_is_not_ignored() -> Iterator[None]:
    """Ctrl-C is ignored in background jobs and their children; the tests need it active."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def bash(script: str) -> list[str]:
    return ["bash", "-c", script]


def once_written(file: Path) -> int:
    until = time.time() + 600
    while not (file.exists() and file.read_text().endswith("\n")) and time.time() < until:
        time.sleep(0.01)
    return int(file.read_text())


def is_gone(pid: int) -> bool:
    """Whether the process is gone, now or after the system has cleaned up."""
    state, until = Path(f"/proc/{pid}/stat"), time.time() + 600
    while time.time() < until:
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_time_enough() -> None:
    assert run_until(bash("exit $CODE"), 600, CODE="7") == 7


@pytest.mark.parametrize(("trap", "patience", "code"), [("exit 5", 600, 5), ("", 0.1, KILLED)])
def test_time_that_is_up(tmp_path: Path, trap: str, patience: float, code: int) -> None:
    """A process that handles Ctrl-C ends by itself."""
    assert run_until(bash(WORKS.format(trap=trap, file=tmp_path / "pid")), 1, patience) == code
    assert is_gone(once_written(tmp_path / "pid"))


def test_ended_itself(tmp_path: Path) -> None:
    """SIGTERM, sent twice, ends a run that ignores Ctrl-C."""
    works = bash(WORKS.format(trap="", file=tmp_path / "pid"))
    outer = f"from benchmark.process import *; end_by_signals(); run_until({works!r}, 600)"
    ignored = ["bash", "-c", 'trap "" INT; exec "$@"', "-", sys.executable, "-c", outer]
    process = subprocess.Popen(ignored, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    started = once_written(tmp_path / "pid")
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
    assert "KeyboardInterrupt" in process.communicate(timeout=600)[1]
    assert is_gone(started)
