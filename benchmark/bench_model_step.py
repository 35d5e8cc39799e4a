"""A training step of a model of Llama-8B's size, at growing length until memory is full: the longest sequence of each
method.

The longest steps take minutes a layer, and their time grows with the square. By calculation, at 400 TFLOP/s on 139 GiB,
all methods but the last four come to their ends in this subject's share of 29 minutes, and all in 60 minutes of its
own; on 80 GB in 29 of its own.

Each method is a process of its own, since patches are a process's and so is a memory that nobody else used. See
`benchmark/longest_sequence.py` for what is trained, and `benchmark/left_out_layers.py` for what stands for the layers
left out.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark.conftest import DEADLINE, MACHINE, directory
from benchmark.device import DEVICE, free_memory
from benchmark.longest_sequence import LIMITS
from benchmark.methods import METHODS
from benchmark.subject import Absent, needs

SHARES = dict(zip(METHODS, (2, 4, 4, 3, 4, 7, 10, 3, 4, 3, 5, 1, 2, 2, 3, 9), strict=True))
"""Of the time; what one leaves the next have."""
STARTING = 15  # seconds that a method's process takes before its first step
PATIENCE = 60  # seconds beyond its own that a method has to end
FEWER = {
    "smoke": ("huggingface_lora", "seqtile_head_groups_offload_weights"),
    "quick": tuple(name for name, method in METHODS.items() if method.frozen),
    "full": tuple(name for name, method in METHODS.items() if not method.frozen),
}
"""Of a size: the methods, where these are not all; of a quick run the lines of README's picture."""
ROOT = Path(__file__).parent.parent


def methods(size: str) -> list[str]:
    return list(FEWER.get(size, METHODS))


def seconds_of(method: str, left: float, size: str = "full") -> float:
    """Of those left, how many a method has: what its process takes to start, and its share of the rest."""
    names = methods(size)
    shares = [SHARES[name] for name in names[names.index(method) :]]
    return STARTING + (left - STARTING * len(shares)) * shares[0] / sum(shares)


def limit_of(size: str, gigabytes: float | None) -> int:
    """Bytes that a step may take."""
    if DEVICE == "cpu":
        return LIMITS.get(size, LIMITS["cpu"])
    free_memory()
    free, total = torch.cuda.mem_get_info()
    return min(free, int(gigabytes * 1e9) if gigabytes else total)


def longest_of(method: str, size: str, limit: int, deadline: float, tflops: float, file: Path) -> dict[str, Any]:
    """What the process of a method found, before it died, if it did; in `file` while it runs."""
    command = [sys.executable, "-m", "benchmark.longest_sequence", method, str(file)]
    command += ["--size", size, "--limit", str(limit), "--deadline", str(deadline), "--matmul-tflops", str(tflops)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    patience = None if deadline == math.inf else max(0, deadline - time.time()) + PATIENCE
    file.unlink(missing_ok=True)  # of a run that was killed
    with tempfile.TemporaryFile("w+") as log:
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, stderr=log, timeout=patience).returncode
        except subprocess.TimeoutExpired:
            code = f"nothing after {patience:.0f} s"
        log.seek(0)
        said = log.read()
    found = json.loads(file.read_text()) if file.exists() else {"status": "failed"}
    file.unlink(missing_ok=True)
    if code:
        found |= {"why": f"ended with {code}: {said.strip()[-400:]}"}
        found |= {} if found.get("steps") else {"status": "failed"}
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("contestant", methods(metafunc.config.getoption("--size")))


def test_model_step(record, request: pytest.FixtureRequest, contestant: str) -> None:
    option, now = request.config.getoption, time.time()
    size, tflops = option("--size"), request.config.stash[MACHINE]["matmul_tflops"]
    seconds = seconds_of(contestant, request.config.stash[DEADLINE] - now, size)
    file = directory(request.config) / f"model_step-{contestant}.unfinished"
    row: dict[str, Any] = {"status": "no time left"}
    try:
        for package in METHODS[contestant].needs:
            needs(package, gpu=package != "peft")
        if seconds > 0:
            limit = limit_of(size, option("--memory-limit"))
            with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
                row = longest_of(contestant, size, limit, now + seconds, tflops, file)
    except Absent as absent:
        row = {"status": "absent", "why": str(absent)}
    steps = row.get("steps", [])
    row |= {"tokens": steps[-1]["tokens"]} if steps else {}
    record({"subject": "model_step", "contestant": contestant} | row, [steps[-1]["seconds"]] if steps else [])
    assert not contestant.startswith("seqtile") or row["status"] not in ("wrong", "failed"), row["why"]
