"""seqtile probe: looks for defects of long-sequence training in seqtile and in other installed packages.

Each probe knows the right answer: no output may change, or it has the gradient of one process or of float64. Other
packages run in their own processes, through their public APIs; none of them is required. Nothing slow is imported here.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seqtile.limits import installed

PROBES = {
    "leak": "outputs of document 2 that change with a token of document 1, in a packed row",
    "window": "outputs beyond a sliding window that change with a token",
    "scale": "gradient over 2 ranks, as a multiple of one process's",
    "label": "loss of the one label at a shard's boundary, as a multiple of one process's",
    "accumulation": "relative error of the gradient of two batches with unequal numbers of labels",
    "head": "relative error of the head's gradient in bfloat16 over 256 chunks",
    "memory": "growth of a step's peak memory with length, in bytes a token",
}
PEERS = ("torch", "transformers", "accelerate", "deepspeed", "trl", "liger-kernel")
TREES = {"alone": ("one process", 1), "seqtile": ("two ranks", 2), "deepspeed": ("two ranks of DeepSpeed", 2)}
"""Process trees: a description and the number of ranks."""
NOT_INSTALLED = "not installed"
TIME_LIMIT = 300  # seconds per tree
LOOK = 0.5  # seconds from one look for new rows to the next


@dataclass(frozen=True)
class Row:
    """The result of one probe of one system."""

    probe: str
    system: str
    """What ran, with its options."""
    package: str
    verdict: str
    """`right` or `wrong`; `by contract` if the package's guide announces this result and says what to do; `imprecise`
    for the head's gradient; `grows` for memory. Without a figure: `not installed`, `needs a GPU`, `not tried`,
    `refused` (with a deliberate error), `failed` (with any other error) or `not finished` (in the time limit)."""
    figure: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.probe, self.package, self.system


def probe(
    names: Sequence[str] = tuple(PROBES),
    time_limit: float = TIME_LIMIT,
    progress: Callable[[str], None] = lambda text: None,
    each: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Runs the named probes and returns their rows in the order of PROBES, seqtile first.

    `time_limit`: seconds per process tree. `progress` is called with what each probe tries and with what begins, `each`
    with each row as soon as it is there. Raises ValueError for a name that is not in PROBES.
    """
    if unknown := set(names) - PROBES.keys():
        raise ValueError(f"expected probes of {', '.join(PROBES)}, got {', '.join(sorted(unknown))}")
    for name, tried in PROBES.items():
        if name in names:
            progress(f"{name}: {tried}")
    rows = []
    for tree, about in TREES.items():
        progress(f"{about[0]} ...")
        rows += rows_of(tree, names, time_limit, each)
    order = list(PROBES)
    return sorted(rows, key=lambda row: (order.index(row.probe), row.package != "seqtile", row.package))


def rows_of(
    tree: str, names: Sequence[str], time_limit: float, each: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Returns the rows that the processes of a tree write, and calls `each` with one as soon as it is there. A case
    without a row has failed, or was not finished."""
    from seqtile.probe.tree import cases_of

    _, ranks = TREES[tree]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    cases = [case for case in cases_of(tree) if case.probe in names]
    rows: dict[tuple[str, str, str], Row] = {}

    def add(row: Row) -> None:
        rows[row.key] = row
        each(row)

    for case in cases:
        if (row := case.absent()) is not None:
            add(row)
    if len(rows) < len(cases):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "rows.jsonl"
            file.touch()
            command = [sys.executable, *launcher, "-m", "seqtile.probe.tree", tree, str(file), *names]

            def look() -> None:
                lines = file.read_text().split("\n")[:-1]  # behind the last newline is what is being written
                for row in [Row(**json.loads(line)) for line in lines]:
                    if row.key not in rows:
                        add(row)

            verdict, why = ended(command, directory, time_limit, look)
        for case in cases:
            if case.row("").key not in rows:
                add(case.row(verdict, note=why))
    return [rows[case.row("").key] for case in cases]


def ended(command: list[str], directory: str, time_limit: float, look: Callable[[], None]) -> tuple[str, str]:
    """Runs processes until they end, or kills them at the time limit; calls `look` now and then, and at the end.
    Returns the verdict on what they leave undone, and why: the first error, or that time ran out."""
    with (Path(directory) / "output").open("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=directory, start_new_session=True)
        end = time.monotonic() + time_limit
        try:
            while process.poll() is None:
                if time.monotonic() >= end:
                    return "not finished", f"in {time_limit:g} s"
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(LOOK, end - time.monotonic()))
                look()
            look()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        errors = [line.strip() for line in output if "Error" in line]
    return "failed", (errors or ["ended early"])[0][:200]


def figures_of(rows: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) | {"version": installed(row.package) or ""} for row in rows]


def markdown(rows: list[Row]) -> str:
    """Returns a Markdown table of the rows, with the versions of the installed packages."""
    lines = ["| probe | of | verdict | figure | |", "| --- | --- | --- | ---: | --- |"]
    for row in rows:
        verdict = f"**{row.verdict}**" if row.verdict == "wrong" else row.verdict
        lines.append(f"| {row.probe} | {row.package}: {row.system} | {verdict} | {row.figure} | {row.note} |")
    return "\n".join([*lines, "", f"With {versions()}."])


def versions() -> str:
    return ", ".join(f"{name} {installed(name) or 'not installed'}" for name in PEERS)
