"""A run keeps its measurements, however a process dies, and continues where it stopped."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmark import rows, run
from benchmark.device import LOST
from benchmark.results import Results, load

MACHINE = {"device": "NVIDIA H200", "matmul_tflops": 800.0, "copy_gbs": 4000.0}


def line(contestant: str, status: str = "measured") -> dict[str, Any]:
    row = {"subject": "gated_mlp", "contestant": contestant, "status": status, "tokens": 1, "shape": "tiny", "why": ""}
    row |= {"both_ms": 1.0, "rounds": 2, "peak_bytes": 1} if status == "measured" else {}
    return {"id": f"test[{contestant}]", "row": row}


class Processes:
    """Replaces pytest: each call writes the next rows and returns the next status; an exception is raised."""

    def __init__(self, *ends: tuple[list[dict[str, Any]] | None, int | type[BaseException]]):
        self.ends, self.calls, self.machines = list(ends), [], []  # machines that were known before

    def __call__(
        self, subject: str, results: Results, commit: str | None, seconds: float, file: Path, without: list[str]
    ) -> int:
        machine, done = rows.read(file)
        self.machines.append(machine)
        self.calls.append((subject, list(done), list(without)))
        lines, code = self.ends.pop(0)
        if lines is not None:
            for entry in [*([] if machine else [MACHINE | {"commit": commit}]), *lines]:
                rows.append(file, entry)
        if isinstance(code, type):
            raise code
        return code


def contestants(subject: run.SubjectResults) -> dict[str, str]:
    return {row["contestant"]: row["status"] for row in subject.rows}


@pytest.mark.parametrize("left", [("c", "seqtile"), ()])
def test_a_lost_device(left: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process continues without the failed contestant and the finished measurements, if others are left."""
    others = ([line(name) for name in left], 0 if left else pytest.ExitCode.NO_TESTS_COLLECTED)
    processes = Processes(([line("a"), line("b", "failed")], LOST), others)
    found = measured(processes, tmp_path, monkeypatch)
    assert contestants(found) == {"a": "measured", "b": "failed"} | dict.fromkeys(left, "measured")
    assert processes.calls == [("gated_mlp", [], []), ("gated_mlp", ["test[a]", "test[b]"], ["b"])]
    assert processes.machines == [{}, MACHINE | {"commit": "abc"}]
    assert found.matmul_tflops == 800 and found.copy_gbs == 4000 and not run.failed(found)


@pytest.mark.parametrize("found_before", [[line("a")], [], None])
def test_a_process_that_dies(found_before: list | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Processes((found_before, -11)), tmp_path, monkeypatch)
    assert contestants(found) == {"a": "measured"} | {"(all)": "failed"} if found_before else {"(all)": "failed"}
    assert run.failed(found) and found.rows[-1]["why"] == "pytest ended with -11"


def measured(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run.SubjectResults:
    monkeypatch.setattr(run, "run_pytest", processes)
    results = Results("NVIDIA H200", "2026-11-21", "smoke")
    return run.measure("gated_mlp", results, "abc", time.time() + 60, tmp_path / "rows.jsonl")


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Runs two subjects at tiny size, into a new directory."""
    monkeypatch.setattr(run.pictures, "draw", lambda results, file: [])
    monkeypatch.setattr(run.process, "end_by_signals", lambda: None)
    options: dict[str, Any] = {"size": "smoke", "subjects": "gated_mlp, offload", "directory": tmp_path}
    return partial(run.main, **options, memory_limit=None, minutes=None)


def test_a_run_goes_on(main: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The failed subject runs again, the other does not; from another commit both run again. Each run's first process
    determines its machine."""
    processes = Processes(([line("a")], 0), ([line("b")], 1))
    monkeypatch.setattr(run, "run_pytest", processes)
    with pytest.raises(SystemExit, match="failed: offload"):
        main(commit="abc")
    processes.ends = [([line("b")], 0)]
    main(commit="abc")
    assert [subject for subject, *_ in processes.calls] == ["gated_mlp", "offload", "offload"]
    assert processes.machines == [{}, MACHINE | {"commit": "abc"}, {}]
    (file,) = tmp_path.iterdir()
    found = load(file)
    statuses = {name: contestants(subject) for name, subject in found.subjects.items()}
    assert statuses == {"gated_mlp": {"a": "measured"}, "offload": {"b": "measured"}}
    assert found.machine == {"device": "NVIDIA H200"}
    assert [subject.matmul_tflops for subject in found.subjects.values()] == [800, 800]
    processes.ends = [([line("a")], 0), ([line("b")], 0)]
    main(commit="def")
    assert not processes.ends


@pytest.mark.parametrize(("commit", "counts"), [("abc", True), ("def", False), ("abc+", False)])
def test_a_run_that_is_killed(
    main: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commit: str, counts: bool
) -> None:
    """A killed run leaves its rows. Those of the same commit count, except cases without time and a half-written
    line."""
    first = "abc+" if commit == "abc+" else "abc"
    processes = Processes(([line("a"), line("b"), line("c", "no time left")], KeyboardInterrupt))
    monkeypatch.setattr(run, "run_pytest", processes)
    with pytest.raises(KeyboardInterrupt):
        main(commit=first)
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("-smoke-gated_mlp.jsonl")
    with file.open("a") as lines:
        lines.write('{"id": "test[d]", "ro')
    assert contestants(rows.subject_of(file)) == {"a": "measured", "b": "measured", "c": "no time left"}
    processes.ends = [([line("c"), line("d")], 0), ([line("e")], 0)]
    main(commit=commit)
    assert processes.calls[1:] == [("gated_mlp", ["test[a]", "test[b]"] * counts, []), ("offload", [], [])]
    (file,) = tmp_path.iterdir()
    assert list(contestants(load(file).subjects["gated_mlp"])) == ["a", "b"] * counts + ["c", "d"]


@pytest.mark.parametrize(
    "options", [{"subjects": "gated_mlp mlp"}, {"size": "huge"}, {"size": "first", "subjects": "gated_mlp offload"}]
)
def test_what_is_refused(options: dict[str, str], tmp_path: Path) -> None:
    given = {"size": "smoke", "subjects": "", "memory_limit": None, "minutes": None, "commit": ""} | options
    with pytest.raises(run.typer.BadParameter, match=r"expected .* got (mlp|huge|offload)"):
        run.main(**given, directory=tmp_path)
    assert not list(tmp_path.iterdir())


def rows_of(tmp_path: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what a benchmark file writes: its machine and its rows."""
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(run.file_of("gated_mlp"))]
    command += ["--size=small", f"--rows={file}", f"--benchmark-json={tmp_path / 'theirs.json'}", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    assert subprocess.run(command, cwd=run.HERE.parent, env=environment, timeout=900).returncode == 0
    machine, found = rows.read(file)
    return machine, list(found.values())


@pytest.mark.full("10 to 20 s each of processes that start processes; make bench-smoke starts the same")
def test_what_a_file_writes(tmp_path: Path) -> None:
    """Rows that were timed are those of pytest-benchmark, of which others are none; both ceilings are present."""
    machine, found = rows_of(tmp_path, "-k", "tiny-300 and not compiled", "--commit=abc")
    assert machine["matmul_tflops"] > 0 and machine["copy_gbs"] > 0 and machine["versions"]["torch"]
    assert machine["commit"] == "abc"
    theirs = json.loads((tmp_path / "theirs.json").read_text())["benchmarks"]
    timed = [row for row in found if row["status"] == "measured"]
    assert [row["contestant"] for row in timed] == [entry["extra_info"]["contestant"] for entry in theirs]
    for row, entry in zip(timed, theirs, strict=True):
        assert row["both_ms"] == pytest.approx(1000 * entry["stats"]["median"]) and row["rounds"] == 2
        assert row["forward_ms"] + row["backward_ms"] == pytest.approx(row["both_ms"], rel=1e-3)
    assert len(timed) < len(found) and {row["contestant"] for row in timed} >= {"huggingface", "seqtile"}


@pytest.mark.full("7 s; smoke runs have no deadline")
def test_time_that_is_up(tmp_path: Path) -> None:
    """Every case is listed. Known properties of the machine are not measured again."""
    rows.append(tmp_path / "rows.jsonl", MACHINE)
    machine, found = rows_of(tmp_path, "--seconds=0")
    assert len(found) == 18 and {row["status"] for row in found} == {"no time left"}
    assert machine == MACHINE
