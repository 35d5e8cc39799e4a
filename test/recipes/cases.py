"""The ranks of `seqtile finetune` in tests, and events that end a run early."""

import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from torch.optim.optimizer import register_optimizer_step_post_hook
from typer.testing import CliRunner

from seqtile.cli import app
from seqtile.offload.host_memory import KEPT_FREE, available
from seqtile.recipes import Job
from seqtile.recipes import train as training_run
from seqtile.recipes.data import load_config
from seqtile.recipes.finetune import finetune, fitted
from seqtile.recipes.state import Run, loaded
from seqtile.recipes.train import peak_mib, return_freed_memory, sequence_group

STEPS = 5
JOB = Job(seq_len=50, steps=STEPS, learning_rate=1e-3, device="cpu")


class Killed(BaseException):
    """Ends a run at once."""


def kill() -> None:
    raise Killed


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def ended_in(step: int, by: Callable[[], None], rank: int = 0) -> Iterator[None]:
    """Calls `by` in the given step of a run, if this process has that rank."""
    steps, true_loss_of = count(1), training_run.loss_of

    def loss_of(*arguments: object) -> torch.Tensor:
        if next(steps) == step and int(os.environ.get("RANK", 0)) == rank:
            by()
        return true_loss_of(*arguments)

    with patch.object(training_run, "loss_of", loss_of):
        yield


def on_rank(*arguments: str, command: str = "finetune") -> tuple[int, str]:
    """Runs a seqtile command in this process, on its rank if it has one. Returns its exit code and its output."""
    with patch.object(os, "_exit"):  # a successful command ends with it
        result = CliRunner().invoke(app, [command, "--device", "cpu", *arguments])
    return result.exit_code, result.output


def evaluated_on_rank(*arguments: str) -> tuple[int, str]:
    return on_rank(*arguments, command="evaluate")


def rank() -> int:
    return int(os.environ["RANK"])


def interrupted_on_rank(*arguments: str) -> tuple[int, str]:
    """The same, but the last rank alone gets Ctrl-C after its second step."""
    steps = count(1)
    if rank() == 1:
        register_optimizer_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT) if next(steps) == 2 else None)
    return on_rank(*arguments)


def chosen_by_fit(model: str, directory: str, sizes: tuple[int, ...]) -> tuple[bool, object]:
    """Returns the features that `--fit` chooses on a rank whose machine has its own number of free bytes."""
    proc = Path(directory) / f"{sizes} {rank()}"
    proc.mkdir()
    (proc / "meminfo").write_text(f"MemAvailable: {(sizes[rank()] + KEPT_FREE) // 1024 + 1} kB\n")
    job = Job(model, seq_len=100_000, fit=True, device="cpu", sequence_parallel=2, local_rank=rank())
    with patch.object(available, "__defaults__", (proc, proc)), sequence_group(job):
        found = fitted(job, Console(quiet=True))
    return found.layer, found.head_groups


def memory_to_load(directory: str, shard: str) -> float:
    """Returns the peak memory in MiB that a rank adds until its model is sharded."""
    job = Job(directory, device="cpu", local_rank=rank(), shard=shard)
    run = Run(job, load_config(directory), torch.zeros(1, 1, 2, dtype=torch.int64), tiled=True)
    with sequence_group(job) as ctx:
        return_freed_memory()
        before = peak_mib("cpu")
        loaded(run, ctx)
        return peak_mib("cpu") - before


def run_of_a_rank(directory: str, shard: str, name: str) -> str:
    """Returns a rank's output for a run that the other rank's Ctrl-C ends, for the resumed run, or for an undisturbed
    one."""
    home, own, said = Path(directory), int(os.environ["RANK"]), io.StringIO()
    job = replace(JOB, model=str(home / "start"), shard=shard, output=home / "run", local_rank=own)
    with redirect_stdout(said):
        if name == "part":
            with ended_in(2, press_ctrl_c, rank=1), pytest.raises(KeyboardInterrupt, match=f"step 2 of {STEPS}"):
                finetune(job, Console(quiet=own > 0))
        else:
            changes = {"resume": True} if name == "rest" else {"output": home / "whole"}
            finetune(replace(job, **changes), Console(quiet=own > 0))
    return said.getvalue()
