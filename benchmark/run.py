"""make bench: every subject in a process of its own, one result file, tables and pictures.

A subject that was measured today, from this commit, by the same settings is not measured again: so a run that was
interrupted goes on where it was. Its file is written anew after each subject.
"""

import datetime
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import pytest
import typer
from benchmark import device, pictures, terminal
from benchmark.results import RESULTS, Results, Row, Subject, load, save
from benchmark.shapes import UNHURRIED
from rich.console import Console

HERE = Path(__file__).parent
SUBJECTS = {
    "linear_cross_entropy": 18,
    "masked_prompt": 4,
    "gated_mlp": 8,
    "decoder_layer": 18,
    "model_step": 56,
    "offload": 4,
    "tile_of_mlp": 2,
    "tile_of_loss": 2,
    "ulysses": 1,
}
"""How the time of a run is shared: what one subject leaves is there for the next ones."""
MINUTES = {"smoke": math.inf, "small": math.inf, "cpu": 60.0, "quick": 9.5, "full": 29.0}
STARTING = 10  # seconds that a process takes to start and to end
PATIENCE = 60  # seconds beyond its own that one has to end
OF_ULYSSES = 1200  # seconds: it needs several GPUs, and then takes its own
ALL = "(all)"  # the contestant of a row that says how a process ended

console = Console()


def failed(subject: Subject) -> bool:
    return any(row["contestant"] == ALL for row in subject.rows)


def file_of(subject: str) -> Path:
    return HERE / "sp" / "bench_ulysses.py" if subject == "ulysses" else HERE / f"bench_{subject}.py"


def name_of(results: Results) -> str:
    """<gpu>-<date>, and what was not the usual."""
    parts = [re.sub(r"[^a-z0-9]+", "-", results.device.lower()).strip("-"), results.date]
    parts += [results.size] if results.size in ("quick", *UNHURRIED) else []
    parts += [f"{results.memory_limit_gb:g}gb"] if results.memory_limit_gb else []
    return "-".join(parts)


def measured(subject: str, results: Results, commit: str | None, until: float) -> Subject:
    """Runs a benchmark file, and again without a contestant that took the device with it. Rows that were measured
    before a process died are kept, and one more says how it died."""
    started = time.time()
    rows: dict[str, Row] = {}
    without: list[str] = []
    code = device.LOST
    while code == device.LOST and (not rows or time.time() < until):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "rows.jsonl"
            code = ran(subject, results, until - time.time(), file, [*rows], without)
            machine, *lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [{}]
        rows |= {line["id"]: line["row"] for line in lines}
        without += [lines[-1]["row"]["contestant"]] if code == device.LOST else []
    if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):  # none are left where all others are measured
        rows[ALL] = {"subject": subject, "contestant": ALL, "status": "failed", "why": f"pytest ended with {code}"}
    ceilings = {name: machine.pop(name, None) for name in ("matmul_tflops", "copy_gbs")}
    results.machine = machine or results.machine
    return Subject(commit, round(time.time() - started, 1), rows=list(rows.values()), **ceilings)


def ran(subject: str, results: Results, seconds: float, file: Path, done: list[str], without: list[str]) -> int:
    """The exit status of pytest; what it prints is shown."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-o", "timeout=0"]
    command += [str(file_of(subject)), f"--size={results.size}", f"--seconds={seconds}", f"--rows={file}"]
    command += [f"--memory-limit={results.memory_limit_gb}"] if results.memory_limit_gb else []
    command += [f"--deselect={test}" for test in done] + [f"--without={name}" for name in without]
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ  # ALST, 3.3
    process = subprocess.Popen(command, cwd=HERE.parent, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=None if seconds == math.inf else max(0, seconds) + PATIENCE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        os.killpg(process.pid, signal.SIGKILL)  # with all that it started
        process.wait()
        if isinstance(error, KeyboardInterrupt):
            raise
        return -signal.SIGKILL


def until(subject: str, left: list[str], end: float) -> float:
    """When this subject's share of what is left of the time is over."""
    now = time.time()
    if end == math.inf:
        return end
    if subject == "ulysses":
        return now + OF_ULYSSES
    shared = end - now - STARTING * len(left)
    return now + shared * SUBJECTS[subject] / sum(SUBJECTS[name] for name in left)


def main(
    size: Annotated[str, typer.Option(help="full, quick, small or smoke; cpu; default: by the device.")] = "",
    subjects: Annotated[str, typer.Option(help=f"Some of {', '.join(SUBJECTS)}; default: all.")] = "",
    memory_limit: Annotated[float | None, typer.Option(help="Emulate a GPU of so many 10**9 bytes.")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where results go; of small and smoke nowhere, by default.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="In all, instead of 29, or 9.5 of a quick run.")] = None,
    commit: Annotated[str, typer.Option(help="What is measured, where git cannot say.")] = "",
) -> None:
    """Compares seqtile with its peers, on this machine."""
    size = size or ("full" if device.DEVICE == "cuda" else "cpu")
    wanted = subjects.replace(",", " ").split() or list(SUBJECTS)
    if unknown := set(wanted) - SUBJECTS.keys():
        raise typer.BadParameter(f"subjects: expected some of {', '.join(SUBJECTS)}; got {', '.join(sorted(unknown))}")
    if size not in MINUTES:
        raise typer.BadParameter(f"size: expected one of {', '.join(MINUTES)}; got {size}")
    now = commit or device.commit()
    results = Results(device.name(), datetime.date.today().isoformat(), size, memory_limit)
    directory = directory or (Path(tempfile.mkdtemp()) if size in UNHURRIED else RESULTS)
    file = directory / f"{name_of(results)}.json"
    results = load(file) if file.exists() else results
    failures = []
    end = time.time() + 60 * (minutes or MINUTES[size])
    for number, subject in enumerate(wanted, 1):
        done = results.subjects.get(subject)
        if done and now and done.commit == now and not now.endswith("+") and not failed(done):
            console.rule(f"{number} of {len(wanted)}: {subject}: measured already, see {file}")
            continue
        console.rule(f"{number} of {len(wanted)}: {subject}")
        results.subjects[subject] = measured(subject, results, now, until(subject, wanted[number - 1 :], end))
        save(results, file)
        failures += [subject] * failed(results.subjects[subject])
    terminal.print_tables(results)
    pictures.draw(results, file)
    tiny = "sizes were tiny: their figures say nothing"
    console.print(tiny if size in UNHURRIED else f"in {file}, with pictures beside it")
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")


if __name__ == "__main__":
    typer.run(main)
