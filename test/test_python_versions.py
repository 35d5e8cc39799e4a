"""The oldest supported Python and a newer one compile all of the source, and plan without torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PLAN = """
from seqtile import arch, memory, rules
print(memory.plan("meta-llama/Llama-3.1-8B", seq_len=100_000, gpus=8))
"""


def interpreter(version: str) -> str:
    """Returns a working Python of that version: on the path, or next to the current one."""
    beside = Path(sys.base_prefix).parent.glob(f"{version}*/bin/python{version}")
    for python in (*filter(None, [shutil.which(f"python{version}")]), *map(str, sorted(beside))):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"no Python {version} here")


@pytest.mark.full("the newer one seldom lacks anything", but=("3.10",))
@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_another_python(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "PYTHONPYCACHEPREFIX": str(tmp_path)}
    for command in (["-m", "compileall", "-q", SOURCE], ["-W", "error", "-c", PLAN]):
        ran = subprocess.run([python, *command], env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    here = subprocess.check_output([sys.executable, "-c", PLAN], env=environment, cwd=tmp_path, text=True)
    assert ran.stdout == here and "GiB: fits" in here
