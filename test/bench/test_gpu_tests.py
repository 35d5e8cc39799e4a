"""What `make test-gpu` runs, as far as it can be seen without a GPU."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from benchmark.device import LOST
from dev.gpu_tests import ALONE, SIDE_BY_SIDE, options

import on_gpu
import tiny
from on_gpu import Failures
from tiny import broken_interpreter

ROOT = Path(__file__).parent.parent.parent


def collected(marks: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", *options(marks), "--collect-only", "-q", "-q", "-o", "addopts="]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command += ["--strict-markers", "--import-mode=importlib"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return [line.removeprefix("test/") for line in found.stdout.splitlines() if "::" in line]


@pytest.mark.full("10 to 20 s each of processes that start processes; make bench-smoke starts the same")
def test_side_by_side() -> None:
    """Of 5,200 tests those that a GPU can break, every kernel's whole: meant for four minutes of eight processes."""
    found = collected(SIDE_BY_SIDE)
    files = Counter(name.partition("::")[0] for name in found)
    assert 900 < len(found) < 1300
    assert files["kernels/test_cross_entropy.py"] > 180 and "kernels/test_compiled.py" not in files
    for file in ("ops/test_gated_mlp.py", "modules/test_loss.py", "models/test_gradients.py", "sp/test_on_gpu.py"):
        assert files[file] > 2, file
    assert not {"offload/test_on_gpu.py", "memory/test_on_gpu.py", "ops/test_at_size.py"} & files.keys()


@pytest.mark.full("10 to 20 s each of processes that start processes; make bench-smoke starts the same")
def test_alone() -> None:
    found = {name.partition("[")[0].partition("::")[2] for name in collected(ALONE)}
    assert found == {
        "test_row_offsets_are_int64",
        "test_offsets_are_int64",
        "test_mlp_chunk_beyond_int32",
        "test_loss_chunk_beyond_int32",
        "test_loss_allocates_what_it_says",
        "test_the_device_is_never_waited_for_without_ignored_tokens",
        "test_the_same_bits",
        "test_flat_in_the_number_of_layers",
        "test_the_host_never_waits",
        "test_an_exception_leaks_nothing",
        "test_measured_peaks",
    }


@dataclass
class Plugins:
    """A configuration of pytest's, as far as `Failures` asks: its terminal, what is written there."""

    lines: list[str] = field(default_factory=list)

    @property
    def pluginmanager(self) -> "Plugins":
        return self

    def getplugin(self, name: str) -> "Plugins | None":
        return self if name == "terminalreporter" else None

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def reported(failures: Failures, outcome: str) -> None:
    report = pytest.TestReport("test[a]", ("file", 1, "test"), {}, outcome, "it is wrong", "call")
    failures.pytest_runtest_logreport(report)
    failures.pytest_runtest_logfinish()


def test_a_failure_is_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    failures = Failures(plugins := Plugins())
    reported(failures, "passed")
    assert plugins.lines == []
    reported(failures, "failed")
    assert plugins.lines == ["", "it is wrong"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_gpu_that_is_lost_ends_its_process(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the test that lost it, of several processes; the next test does not ask again."""
    asked, ended = [], []
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    monkeypatch.setattr(on_gpu, "is_lost", lambda: bool(asked.append(1)) or lost)
    monkeypatch.setattr(on_gpu.os, "_exit", ended.append)
    failures = Failures(plugins := Plugins())
    for outcome in ("passed", "failed", "passed"):
        reported(failures, outcome)
    assert len(asked) == 1 and ended == [LOST] * lost and plugins.lines == []


@pytest.mark.skipif(tiny.triton is None, reason="needs triton")
@pytest.mark.parametrize(
    ("of_triton", "of_numpy", "broken"),
    [("3.6.0", "2.5.2", True), ("3.7.1", "2.5.2", False), ("3.6.0", "2.4.6", False)],
)
def test_an_interpreter_that_fails(
    of_triton: str, of_numpy: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny.triton, "__version__", of_triton)
    monkeypatch.setattr(tiny.numpy, "__version__", of_numpy)
    assert bool(broken_interpreter()) == broken
