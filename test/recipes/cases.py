"""Runs of `seqtile finetune` and `evaluate` in tests, on ranks too, and events that end a run early."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from unittest.mock import patch

import torch
from typer.testing import CliRunner

from seqtile.cli import app
from seqtile.offload.host_memory import KEPT_FREE, available
from seqtile.recipes import finetune as training
from seqtile.recipes.tuner import Tuner


class Killed(BaseException):
    """Ends a run at once, as a kill does."""


def kill() -> None:
    raise Killed


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def as_in_a_terminal() -> Iterator[None]:
    """Lets Ctrl-C interrupt, also if the process that started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def rank() -> int:
    return int(os.environ.get("RANK", 0))


@contextmanager
def ended_in(step: int, by: Callable[[], None], of_rank: int = 0) -> Iterator[None]:
    """Calls `by` in the given step of a run, if this process has that rank."""
    steps, original = count(1), Tuner.training_step

    def training_step(self, *arguments: object, **options: object) -> torch.Tensor:
        if next(steps) == step and rank() == of_rank:
            by()
        return original(self, *arguments, **options)

    with patch.object(Tuner, "training_step", training_step):
        yield


def on_rank(*arguments: str, command: str = "finetune") -> tuple[int, str]:
    """Runs a seqtile command in this process, on its rank if it has one. Returns its exit code and its output."""
    ended = []
    with (
        as_in_a_terminal(),
        patch.object(os, "_exit"),  # a successful command of a rank ends with it
        patch.object(training, "return_freed_memory"),  # which changes the process for good
        patch("seqtile.cli.end_by", ended.append),
    ):
        result = CliRunner().invoke(app, [command, "--device", "cpu", *map(str, arguments)])
    if isinstance(result.exception, Killed):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return (128 + ended[0] if ended else result.exit_code), result.output


def evaluated_on_rank(*arguments: str) -> tuple[int, str]:
    return on_rank(*arguments, command="evaluate")


def interrupted_on_rank(*arguments: str) -> tuple[int, str]:
    """The same, but the last rank alone gets Ctrl-C in its second step."""
    with ended_in(2, press_ctrl_c, of_rank=1):
        return on_rank(*arguments)


def fitted_on_rank(model: str, directory: str, sizes: tuple[int, ...]) -> tuple[int, str]:
    """Runs a step with `--fit` on a rank whose machine has its own number of free bytes."""
    proc = Path(directory) / f"{sizes} {rank()}"
    proc.mkdir()
    (proc / "meminfo").write_text(f"MemAvailable: {(sizes[rank()] + KEPT_FREE) // 1024 + 1} kB\n")
    with patch.object(available, "__defaults__", (proc, proc)):
        return on_rank(
            "--model", model, "--output", f"{directory}/run {sizes}", "--fit", "--margin", "0", "--steps", "1"
        )


def on_rank_without_room(directory: str) -> tuple[int, str]:
    """Runs a step whose model cannot be saved in the output."""
    save = Tuner.save_model

    def no_room(self, path: str, **options: object) -> None:
        if f"{directory}/run" in path and rank() == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, path, **options)

    with patch.object(Tuner, "save_model", no_room):
        job = ("--model", f"{directory}/start", "--output", f"{directory}/run", "--steps", "1", "--seq-len", "300")
        return on_rank(*job)


def on_slow_rank(directory: str) -> tuple[int, str]:
    """Runs a step; the last rank writes its random state late."""
    save = Tuner._save_rng_state

    def late(self, path: str) -> None:
        time.sleep(rank())
        save(self, path)

    with patch.object(Tuner, "_save_rng_state", late):
        job = ("--model", f"{directory}/start", "--output", f"{directory}/run", "--steps", "1", "--seq-len", "300")
        return on_rank(*job, "--save-every", "1")
