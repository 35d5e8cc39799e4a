"""Several real processes, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path


def torchrun_command(ranks: int, *command: str | Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *map(str, command)]


def torchrun(ranks: int, *command: str | Path, check: bool = True, **environment: str) -> str:
    """What the ranks print; a failure of theirs is this test's if `check`, their last words included."""
    result = subprocess.run(
        torchrun_command(ranks, *command),
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    if check:
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    else:
        assert result.returncode != 0, result.stdout[-3000:]
    return result.stdout + ("" if check else result.stderr)
