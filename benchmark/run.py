"""make bench: every subject in a process of its own, one result file, tables and pictures.

A subject that was measured today, from this commit, by the same settings is not measured again: so a run that was
interrupted goes on where it was. Its file is written anew after each subject.
"""

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmark import device, pictures, terminal
from benchmark.results import RESULTS, Results, Row, Subject, load, save
from rich.console import Console

HERE = Path(__file__).parent
SUBJECTS = {
    "linear_cross_entropy": 15,
    "masked_prompt": 5,
    "gated_mlp": 9,
    "decoder_layer": 24,
    "model_step": 32,
    "offload": 6,
    "tile_of_mlp": 4,
    "tile_of_loss": 5,
    "ulysses": 0,
}
"""Of the seconds that a run has, how many in a hundred; ulysses, which needs several GPUs, takes its own."""
SECONDS = {"smoke": 1200, "cpu": 3600, "quick": 390, "full": 1620}
"""Of a run, beside what its processes take to start and end, 10 s each."""
OF_ULYSSES = 600
PATIENCE = 300  # seconds after its own that a subject has to end

console = Console()


def file_of(subject: str) -> Path:
    return HERE / "sp" / "bench_ulysses.py" if subject == "ulysses" else HERE / f"bench_{subject}.py"


def name_of(results: Results) -> str:
    """<gpu>-<date>, and what was not the usual."""
    parts = [re.sub(r"[^a-z0-9]+", "-", results.device.lower()).strip("-"), results.date]
    parts += [results.size] if results.size in ("quick", "smoke") else []
    parts += [f"{results.memory_limit_gb:g}gb"] if results.memory_limit_gb else []
    return "-".join(parts)


def measured(subject: str, results: Results, commit: str | None) -> Subject:
    """Runs a benchmark file. What it prints is shown; a file that fails gives the rows that it had."""
    seconds = SECONDS[results.size] * SUBJECTS[subject] / 100 or OF_ULYSSES
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory) / "found.json"
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", str(file_of(subject))]
        command += [f"--size={results.size}", f"--seconds={seconds}", f"--benchmark-json={found}", "-o", "timeout=0"]
        command += [f"--memory-limit={results.memory_limit_gb}"] if results.memory_limit_gb else []
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ  # ALST, 3.3
        started = time.time()
        code = subprocess.run(command, cwd=HERE.parent, env=environment, timeout=seconds + PATIENCE).returncode
        if not found.exists() or not found.stat().st_size:
            raise RuntimeError(f"{subject}: pytest ended with {code} and wrote nothing")
        written = json.loads(found.read_text())
    machine: dict[str, Any] = written["machine"]
    ceilings = {name: machine.pop(name) for name in ("matmul_tflops", "copy_gbs")}
    results.machine = machine
    rows: list[Row] = [_row(entry) for entry in written["benchmarks"]]
    if code:
        rows.append({"subject": subject, "contestant": "(all)", "status": "failed", "why": f"pytest ended with {code}"})
    return Subject(commit, round(time.time() - started, 1), rows=rows, **ceilings)


def _row(entry: dict[str, Any]) -> Row:
    """What a benchmark recorded; of what recorded one time for each round also pytest-benchmark's median."""
    row = dict(entry["extra_info"])
    if row["status"] == "measured" and "both_ms" not in row and entry["stats"]["median"]:
        row["both_ms"] = 1000 * entry["stats"]["median"]
    return row


def main(
    size: Annotated[str, typer.Option(help="full, quick or smoke; cpu; default: by the device.")] = "",
    subjects: Annotated[str, typer.Option(help=f"Some of {', '.join(SUBJECTS)}; default: all.")] = "",
    memory_limit: Annotated[float | None, typer.Option(help="Emulate a GPU of so many 10**9 bytes.")] = None,
    directory: Annotated[Path | None, typer.Option(help="Where results go; of smoke nowhere, by default.")] = None,
    commit: Annotated[str, typer.Option(help="What is measured, where git cannot say.")] = "",
) -> None:
    """Compares seqtile with its peers, on this machine."""
    size = size or ("full" if device.DEVICE == "cuda" else "cpu")
    wanted = subjects.replace(",", " ").split() or list(SUBJECTS)
    if unknown := set(wanted) - SUBJECTS.keys():
        raise typer.BadParameter(f"subjects: expected some of {', '.join(SUBJECTS)}; got {', '.join(sorted(unknown))}")
    if size not in SECONDS:
        raise typer.BadParameter(f"size: expected one of {', '.join(SECONDS)}; got {size}")
    now = commit or device.commit()
    results = Results(device.name(), datetime.date.today().isoformat(), size, memory_limit)
    directory = directory or (Path(tempfile.mkdtemp()) if size == "smoke" else RESULTS)
    file = directory / f"{name_of(results)}.json"
    results = load(file) if file.exists() else results
    failures = []
    for number, subject in enumerate(wanted, 1):
        done = results.subjects.get(subject)
        if done and now and done.commit == now and not now.endswith("+") and done.rows[-1]["status"] != "failed":
            console.rule(f"{number} of {len(wanted)}: {subject}: measured already, see {file}")
            continue
        console.rule(f"{number} of {len(wanted)}: {subject}")
        try:
            results.subjects[subject] = measured(subject, results, now)
            save(results, file)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            console.print(f"[red]{error}[/]")
            failures.append(subject)
            continue
        failures += [subject] * (results.subjects[subject].rows[-1]["contestant"] == "(all)")
    terminal.print_tables(results)
    pictures.draw(results, file)
    smoke = "this was a smoke run: its figures say nothing"
    console.print(smoke if size == "smoke" else f"in {file}, with pictures beside it")
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")


if __name__ == "__main__":
    typer.run(main)
