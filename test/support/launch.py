"""Starts new processes: by torchrun, or so that Ctrl-C interrupts them."""

import sys
from pathlib import Path


def interruptible(command: list[str]) -> list[str]:
    """Returns the command so that Ctrl-C interrupts it, even if the process that started the tests ignores Ctrl-C."""
    start = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", start, *command]


def torchrun_command(ranks: int, *command: str | Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *map(str, command)]
