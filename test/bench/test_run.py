"""A run keeps what was measured, whatever a process dies of, and goes on where it was."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from benchmark import run
from benchmark.device import LOST
from benchmark.results import Results, load

MACHINE = {"device": "NVIDIA H200", "matmul_tflops": 800.0, "copy_gbs": 4000.0}


def line(contestant: str, status: str = "measured") -> dict[str, Any]:
    row = {"subject": "gated_mlp", "contestant": contestant, "status": status, "tokens": 1, "shape": "tiny", "why": ""}
    row |= {"both_ms": 1.0, "rounds": 2, "peak_bytes": 1} if status == "measured" else {}
    return {"id": f"test[{contestant}]", "row": row}


class Processes:
    """What pytest would do: writes these rows and ends with this status, one pair a call."""

    def __init__(self, *ends: tuple[list[dict[str, Any]], int]):
        self.ends = list(ends)
        self.calls: list[tuple[str, list[str], list[str]]] = []

    def __call__(
        self, subject: str, results: Results, seconds: float, file: Path, done: list[str], without: list[str]
    ) -> int:
        self.calls.append((subject, list(done), list(without)))
        rows, code = self.ends.pop(0)
        if rows is not None:
            file.write_text("\n".join(json.dumps(entry) for entry in [MACHINE, *rows]))
        return code


@pytest.fixture
def results() -> Results:
    return Results("NVIDIA H200", "2026-11-21", "smoke")


def contestants(subject: run.Subject) -> dict[str, str]:
    return {row["contestant"]: row["status"] for row in subject.rows}


def test_a_lost_device(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process goes on without the contestant, and without what was measured."""
    processes = Processes(([line("a"), line("b", "failed")], LOST), ([line("c"), line("seqtile")], 0))
    monkeypatch.setattr(run, "ran", processes)
    found = run.measured("gated_mlp", results, "abc", time.time() + 60)
    assert contestants(found) == {"a": "measured", "b": "failed", "c": "measured", "seqtile": "measured"}
    assert processes.calls == [("gated_mlp", [], []), ("gated_mlp", ["test[a]", "test[b]"], ["b"])]
    assert found.matmul_tflops == 800 and results.machine == {"device": "NVIDIA H200"} and not run.failed(found)


def test_a_lost_device_at_the_end(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(([line("a"), line("b", "failed")], LOST), ([], pytest.ExitCode.NO_TESTS_COLLECTED))
    monkeypatch.setattr(run, "ran", processes)
    found = run.measured("gated_mlp", results, "abc", time.time() + 60)
    assert contestants(found) == {"a": "measured", "b": "failed"} and not run.failed(found)


@pytest.mark.parametrize("rows", [[line("a")], [], None])
def test_a_process_that_dies(results: Results, monkeypatch: pytest.MonkeyPatch, rows: list | None) -> None:
    monkeypatch.setattr(run, "ran", Processes((rows, -11)))
    found = run.measured("gated_mlp", results, "abc", time.time() + 60)
    assert contestants(found) == {"a": "measured"} | {"(all)": "failed"} if rows else {"(all)": "failed"}
    assert run.failed(found) and found.rows[-1]["why"] == "pytest ended with -11"


def test_a_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The subject that failed is run again, the other not; from another commit both are."""
    monkeypatch.setattr(run.pictures, "draw", lambda results, file: [])
    options: dict[str, Any] = {"size": "smoke", "subjects": "gated_mlp, offload", "directory": tmp_path}
    processes = Processes(([line("a")], 0), ([line("b")], 1))
    monkeypatch.setattr(run, "ran", processes)
    with pytest.raises(SystemExit, match="failed: offload"):
        run.main(**options, memory_limit=None, minutes=None, commit="abc")
    processes.ends = [([line("b")], 0)]
    run.main(**options, memory_limit=None, minutes=None, commit="abc")
    assert [subject for subject, *_ in processes.calls] == ["gated_mlp", "offload", "offload"]
    (file,) = tmp_path.glob("*.json")
    assert {name: contestants(subject) for name, subject in load(file).subjects.items()} == {
        "gated_mlp": {"a": "measured"},
        "offload": {"b": "measured"},
    }
    processes.ends = [([line("a")], 0), ([line("b")], 0)]
    run.main(**options, memory_limit=None, minutes=None, commit="def")
    assert not processes.ends


@pytest.mark.parametrize("options", [{"subjects": "gated_mlp mlp"}, {"size": "huge"}])
def test_what_is_refused(options: dict[str, str], tmp_path: Path) -> None:
    given = {"size": "smoke", "subjects": "", "memory_limit": None, "minutes": None, "commit": ""} | options
    with pytest.raises(run.typer.BadParameter, match=r"expected .* got (mlp|huge)"):
        run.main(**given, directory=tmp_path)
    assert not list(tmp_path.iterdir())


def rows_of(tmp_path: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a benchmark file writes: what it was measured on, and rows."""
    results, file = Results("CPU", "2026-11-21", "small"), tmp_path / "rows.jsonl"
    command = [run.sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(run.file_of("gated_mlp"))]
    command += [f"--size={results.size}", f"--rows={file}", f"--benchmark-json={tmp_path / 'theirs.json'}", *options]
    environment = {name: value for name, value in run.os.environ.items() if not name.startswith("PYTEST_")}
    assert run.subprocess.run(command, cwd=run.HERE.parent, env=environment, timeout=900).returncode == 0
    machine, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    return machine, [entry["row"] for entry in lines]


def test_what_a_file_writes(tmp_path: Path) -> None:
    """Its rows are what pytest-benchmark has; both ceilings are there."""
    machine, rows = rows_of(tmp_path, "-k", "tiny-300 and not compiled")
    assert machine["matmul_tflops"] > 0 and machine["copy_gbs"] > 0 and machine["versions"]["torch"]
    theirs = json.loads((tmp_path / "theirs.json").read_text())["benchmarks"]
    assert [row["contestant"] for row in rows] == [entry["extra_info"]["contestant"] for entry in theirs]
    for row, entry in zip(rows, theirs, strict=True):
        if row["status"] == "measured":
            assert row["both_ms"] == pytest.approx(1000 * entry["stats"]["median"]) and row["rounds"] == 2
            assert row["forward_ms"] + row["backward_ms"] == pytest.approx(row["both_ms"], rel=1e-3)
    assert {row["contestant"] for row in rows if row["status"] == "measured"} >= {"huggingface", "seqtile"}


def test_time_that_is_up(tmp_path: Path) -> None:
    """Every case is named."""
    _, rows = rows_of(tmp_path, "--seconds=0")
    assert len(rows) == 18 and {row["status"] for row in rows} == {"no time left"}
