"""A training step of a model of Llama-8B's size, at growing length until memory is full: the ladder.

Each rung is a process of its own, since patches are a process's and so is a memory that nobody else used. See
`benchmark/ladder.py` for what is trained, and `benchmark/missing.py` for what stands for the layers left out.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark.conftest import DEADLINE
from benchmark.device import DEVICE, free_memory
from benchmark.ladder import LIMITS
from benchmark.rungs import RUNGS
from benchmark.subject import Absent, needs

CONTESTANTS = RUNGS
ROOT = Path(__file__).parent.parent


def limit_of(size: str, gigabytes: float | None) -> int:
    """Bytes that a step may take."""
    if DEVICE == "cpu":
        return LIMITS.get(size, LIMITS["cpu"])
    free_memory()
    free, total = torch.cuda.mem_get_info()
    return min(free, int(gigabytes * 1e9) if gigabytes else total)


def climbed(rung: str, size: str, limit: int, seconds: float, file: Path) -> dict[str, Any]:
    """What the process of a rung found, or how it died."""
    command = [sys.executable, "-m", "benchmark.ladder", rung, str(file)]
    command += ["--size", size, "--limit", str(limit), "--seconds", str(seconds)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "test"), os.environ.get("PYTHONPATH", "")])
    environment, patience = os.environ | {"PYTHONPATH": path}, seconds + 120
    try:
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "why": f"it had not ended after {patience:.0f} s"}
    if result.returncode:
        return {"status": "failed", "why": result.stderr.strip()[-400:]}
    return json.loads(file.read_text())


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_model_step(record, request: pytest.FixtureRequest, tmp_path: Path, contestant: str) -> None:
    option = request.config.getoption
    left = list(CONTESTANTS)[list(CONTESTANTS).index(contestant) :]
    seconds = (request.config.stash[DEADLINE] - time.time()) / len(left) * (2 if len(left) > 1 else 1)
    row: dict[str, Any] = {"status": "no time left"}
    try:
        for package in RUNGS[contestant].needs:
            needs(package)
        if seconds > 0:
            limit = limit_of(option("--size"), option("--memory-limit"))
            row = climbed(contestant, option("--size"), limit, seconds, tmp_path / "found.json")
    except Absent as absent:
        row = {"status": "absent", "why": str(absent)}
    steps = row.get("steps", [])
    row |= {"tokens": steps[-1]["tokens"]} if steps else {}
    record({"subject": "model_step", "contestant": contestant} | row, [steps[-1]["seconds"]] if steps else [])
    assert not contestant.startswith("seqtile") or row["status"] not in ("wrong", "failed"), row["why"]
    assert not (row["status"] == "measured" and row["ended_by"] == "memory") or steps, "not even the shortest fits"
