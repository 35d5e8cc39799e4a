"""make bench: every subject in a process of its own, one result file, tables and pictures.

What was measured today, from this commit, by the same settings is not measured again: so a run that was interrupted
goes on where it was. Its file is written anew after each subject; the rows of the one at hand are in a file beside it
(`<gpu>-<date>-<subject>.jsonl`), as they come.
"""

import datetime
import math
import os
import re
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest
import typer
from benchmark import device, pictures, process, report, rows
from benchmark.results import RESULTS, Results, SubjectResults, load, save
from benchmark.rows import Machine
from benchmark.shapes import UNHURRIED
from rich.console import Console

HERE = Path(__file__).parent
SUBJECTS = {
    "linear_cross_entropy": 18,
    "masked_prompt": 4,
    "linear_divergence": 4,
    "gated_mlp": 8,
    "decoder_layer": 18,
    "shared_tokens": 4,
    "model_step": 56,
    "offload": 4,
    "tile_of_mlp": 2,
    "tile_of_loss": 2,
    "ulysses": 1,
}
"""How the time of a run is shared: what one subject leaves is there for the next ones."""
FIRST = ("linear_cross_entropy", "gated_mlp", "decoder_layer")
"""The subjects of a first run."""
MINUTES = {"smoke": math.inf, "small": math.inf, "cpu": 60.0, "first": 3.0, "quick": 9.5, "full": 29.0}
STARTING = 10  # seconds that a process takes to start and to end
PATIENCE = 60  # seconds beyond its own that one has to end
ULYSSES_SECONDS = 1200  # seconds: it needs several GPUs, and then takes its own
ALL = "(all)"  # the contestant of a row that says how a process ended

console = Console()


def failed(subject: SubjectResults) -> bool:
    return any(row["contestant"] == ALL for row in subject.rows)


def file_of(subject: str) -> Path:
    return HERE / "sp" / "bench_ulysses.py" if subject == "ulysses" else HERE / f"bench_{subject}.py"


def name_of(results: Results) -> str:
    """<gpu>-<date>, and what was not the usual."""
    parts = [re.sub(r"[^a-z0-9]+", "-", results.device.lower()).strip("-"), results.date]
    parts += [results.size] if results.size in ("first", "quick", *UNHURRIED) else []
    parts += [f"{results.memory_limit_gb:g}gb"] if results.memory_limit_gb else []
    return "-".join(parts)


def measure(subject: str, results: Results, commit: str | None, until: float, file: Path) -> SubjectResults:
    """Runs a benchmark file, and again without a contestant that took the device with it. Rows come into `file`; those
    that are there are not measured again. Rows from before a process died are kept, and one more says how it died."""
    started = time.time()
    without: list[str] = []
    code = device.LOST
    while code == device.LOST and (not without or time.time() < until):
        code = run_pytest(subject, results, commit, until - time.time(), file, without)
        found = rows.subject_of(file, round(time.time() - started, 1))
        without += [found.rows[-1]["contestant"]] if code == device.LOST else []
    if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):  # none are left where all others are measured
        row = {"subject": subject, "contestant": ALL, "status": "failed", "why": f"pytest ended with {code}"}
        found.rows.append(row)
    return found


def run_pytest(
    subject: str, results: Results, commit: str | None, seconds: float, file: Path, without: list[str]
) -> int:
    """The exit status of pytest; what it prints is shown."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-o", "timeout=0"]
    command += ["--benchmark-quiet"]  # its tables are of one file, those of `report` of all
    command += [str(file_of(subject)), f"--size={results.size}", f"--seconds={seconds}", f"--rows={file}"]
    command += [f"--memory-limit={results.memory_limit_gb}"] if results.memory_limit_gb else []
    command += [f"--commit={commit}"] if commit else []
    command += [f"--deselect={test}" for test in rows.read(file)[1]] + [f"--without={name}" for name in without]
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTHONUNBUFFERED": "1"} | os.environ  # ALST, 3.3
    return process.run_until(command, None if seconds == math.inf else max(0, seconds) + PATIENCE, **environment)


def deadline_of(subject: str, left: list[str], end: float) -> float:
    """When this subject's share of what is left of the time is over."""
    now = time.time()
    if end == math.inf:
        return end
    if subject == "ulysses":
        return now + ULYSSES_SECONDS
    shared = end - now - STARTING * len(left)
    return now + shared * SUBJECTS[subject] / sum(SUBJECTS[name] for name in left)


def main(
    size: Annotated[str, typer.Option(help="full, quick, first, small or smoke; cpu; default: by the device.")] = "",
    subjects: Annotated[str, typer.Option(help=f"Some of {', '.join(SUBJECTS)}; default: all.")] = "",
    memory_limit: Annotated[float | None, typer.Option(help="Emulate a GPU of so many 10**9 bytes.")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where results go, as they come; of small and smoke nowhere, by default.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="In all, instead of 29, 9.5 of a quick run, 3 of the first.")
    ] = None,
    commit: Annotated[str, typer.Option(help="What is measured, where git cannot say.")] = "",
) -> None:
    """Compares seqtile with its peers, on this machine."""
    why = None if size in ("cpu", *UNHURRIED) else device.unusable_gpu()
    if why:
        sys.exit(f"{why}. To measure on the CPU, make bench BENCH=cpu")
    size = size or ("full" if device.DEVICE == "cuda" else "cpu")
    if size not in MINUTES:
        raise typer.BadParameter(f"size: expected one of {', '.join(MINUTES)}; got {size}")
    known = list(FIRST if size == "first" else SUBJECTS)
    wanted = subjects.replace(",", " ").split() or known
    if unknown := set(wanted).difference(known):
        raise typer.BadParameter(f"subjects: expected some of {', '.join(known)}; got {', '.join(sorted(unknown))}")
    process.end_by_signals()
    now = commit or device.commit()
    results = Results(device.name(), datetime.date.today().isoformat(), size, memory_limit)
    directory = directory or (Path(tempfile.mkdtemp()) if size in UNHURRIED else RESULTS)
    file = directory.resolve() / f"{name_of(results)}.json"
    results = load(file) if file.exists() else results
    failures = []
    machine: Machine = {}  # is measured by the first process
    end = time.time() + 60 * (minutes or MINUTES[size])
    for number, subject in enumerate(wanted, 1):
        done = results.subjects.get(subject)
        if done and now and done.commit == now and not now.endswith("+") and not failed(done):
            console.rule(f"{number} of {len(wanted)}: {subject}: measured already, see {file}")
            continue
        console.rule(f"{number} of {len(wanted)}: {subject}")
        lines = file.with_name(f"{file.stem}-{subject}.jsonl")
        rows.begin(lines, now, machine)
        found = measure(subject, results, now, deadline_of(subject, wanted[number - 1 :], end), lines)
        machine = rows.read(lines)[0] or machine
        about = {name: each for name, each in machine.items() if name not in (*rows.CEILINGS, "commit")}
        results.machine = about or results.machine
        results.subjects[subject] = replace(found, commit=now)
        save(results, file)
        lines.unlink(missing_ok=True)
        failures += [subject] * failed(found)
    report.print_tables(results)
    pictures.draw(results, file)
    tiny = "sizes were tiny: their figures say nothing"
    console.print(tiny if size in UNHURRIED else f"in {file}, with pictures beside it")
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")


if __name__ == "__main__":
    typer.run(main)
