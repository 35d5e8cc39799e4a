"""The benchmarks run, at tiny size, so that they never rot."""

import os
import subprocess
import sys
from pathlib import Path


def test_smoke() -> None:
    command = [sys.executable, "-m", "benchmark.run"]
    root = Path(__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        command, cwd=root, env=environment | {"BENCH": "smoke"}, capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stdout + result.stderr
    subjects = {
        "linear_cross_entropy": "seqtile",
        "gated_mlp": "seqtile",
        "tile_of_mlp": "x 1/4",
        "tile_of_loss": "x 2",
        "8/2 packed": "seqtile",
        "9/3 plain": "seqtile",
    }
    for subject, ours in subjects.items():
        for contestant in ("huggingface", ours):
            assert any(subject in line and contestant in line for line in result.stdout.splitlines())
