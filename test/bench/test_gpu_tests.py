"""Checks `make test-gpu` as far as possible without a GPU."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmark.device import LOST

from support import on_gpu
from support.on_gpu import Failures

ROOT = Path(__file__).parent.parent.parent


def collected() -> tuple[list[str], list[str]]:
    """Returns the ids of the tests that run in parallel processes, and of those that run alone."""
    command = [sys.executable, "-m", "dev.gpu_tests", "--seconds=900", "--workers=0", "--collect-only", "-qq"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    _, side_by_side, alone = re.split("^== ", found.stdout, flags=re.MULTILINE)
    return tuple([name for name in part.splitlines() if "::" in name] for part in (side_by_side, alone))


@pytest.mark.full("30 s of two processes that import everything")
def test_what_a_gpu_runs() -> None:
    """Runs the tests that a GPU can break, and all kernel tests: at most four minutes in eight processes. Sizes beyond
    int32 and measurements of the host run alone."""
    side_by_side, alone = collected()
    files = Counter(name.partition("::")[0].removeprefix("test/") for name in side_by_side)
    assert 900 < len(side_by_side) < 1400 and 11 <= len(alone) < 60
    assert files["kernels/test_cross_entropy.py"] > 180 and "kernels/test_compiled.py" not in files
    several = ("ops/test_gated_mlp.py", "modules/test_loss.py", "models/test_gradients.py")
    for file in (*several, "attention/test_on_gpu.py", "sp/test_on_gpu.py"):
        assert files[file] > 2, file
    assert not {"offload/test_on_gpu.py", "memory/test_on_gpu.py", "ops/test_at_size.py"} & files.keys()
    assert not set(side_by_side) & set(alone)
    for test in ("test_mlp_chunk_beyond_int32", "test_the_host_never_waits", "test_measured_peaks"):
        assert any(f"::{test}" in name for name in alone), test


def failures() -> tuple[Failures, list[str]]:
    """Returns what pytest would report to a terminal, and the written lines."""
    lines: list[str] = []
    terminal = SimpleNamespace(write_line=lines.append)
    plugins = SimpleNamespace(getplugin=lambda name: terminal if name == "terminalreporter" else None)
    return Failures(SimpleNamespace(pluginmanager=plugins)), lines


def reported(failures: Failures, outcome: str) -> None:
    report = pytest.TestReport("test[a]", ("file", 1, "test"), {}, outcome, "it is wrong", "call")
    failures.pytest_runtest_logreport(report)
    failures.pytest_runtest_logfinish()


def test_a_failure_is_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    of_one, lines = failures()
    reported(of_one, "passed")
    assert lines == []
    reported(of_one, "failed")
    assert lines == ["", "it is wrong"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_gpu_that_is_lost_ends_its_process(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends after the test that lost the GPU; with several processes, the next test does not query it
    again."""
    asked, ended = [], []
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    monkeypatch.setattr(on_gpu, "is_lost", lambda: bool(asked.append(1)) or lost)
    monkeypatch.setattr(on_gpu.os, "_exit", ended.append)
    of_several, lines = failures()
    for outcome in ("passed", "failed", "passed"):
        reported(of_several, outcome)
    assert len(asked) == 1 and ended == [LOST] * lost and lines == []
