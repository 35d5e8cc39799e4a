"""Rows in a file as they are measured, so that a run that is killed leaves what it has: lines of JSON.

The first line says on what was measured and from which commit, with the two ceilings. Every other has a row, and the id
of the test that it is from; of two with the same id the later counts.
"""

import json
from pathlib import Path
from typing import Any

from benchmark.results import Row, SubjectResults

CEILINGS = ("matmul_tflops", "copy_gbs")

Machine = dict[str, Any]


def append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(line, allow_nan=False) + "\n")


def read(file: Path) -> tuple[Machine, dict[str, Row]]:
    """What was measured on, and rows by the ids of their tests. A line that a killed process has not ended is none."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    machine, *rows = [json.loads(line) for line in lines] or [{}]
    return machine, {line["id"]: line["row"] for line in rows}


def begin(file: Path, commit: str | None, machine: Machine) -> None:
    """Leaves of an earlier run what was measured from this commit, but for what it had no time for. Writes, where it is
    known, on what is measured now."""
    known, rows = read(file)
    if not commit or commit.endswith("+") or known.get("commit") != commit:
        known, rows = machine, {}
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True, parents=True)
    if known:
        append(file, known | {"commit": commit})
    for test, row in rows.items():
        if row["status"] != "no time left":
            append(file, {"id": test, "row": row})


def subject_of(file: Path, seconds: float = 0.0) -> SubjectResults:
    machine, rows = read(file)
    return SubjectResults(
        machine.get("commit"), seconds, *(machine.get(name) for name in CEILINGS), rows=list(rows.values())
    )
