"""A training run alone in its process, so that its peak memory is its own."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread

import torch
from rich.console import Console

from seqtile.recipes.job import Job
from seqtile.recipes.train import RunResult, train


class RunOutOfMemory(Exception):
    """A run had too little memory, or its process was killed, which is what too little host memory looks like."""


def run_alone(job: Job, sequences: torch.Tensor, *, tiled: bool, save_to: Path | None) -> RunResult:
    """`train` in a process of its own, which ends when this one is interrupted or ends."""
    others = set(active_children())
    context = get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=end_with_parent) as pool:
        try:
            with interrupts_blocked():
                running = pool.submit(train, job, sequences, tiled=tiled, save_to=save_to)
            return running.result()
        except KeyboardInterrupt:
            for worker in set(active_children()) - others:
                worker.kill()
            raise
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            name = "tiled" if tiled else "untiled"
            raise RunOutOfMemory(f"the {name} run had too little memory; a shorter --seq-len needs less") from error
        finally:
            Console().show_cursor()  # a killed process leaves it hidden


def end_with_parent() -> None:
    """Ends this process at once when the one that started it has ended, however that came about."""

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A process started inside never sees Ctrl-C, which a terminal sends to it too; this one sees it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory was short: a killed process, torch's exception for a GPU, its message for the host."""
    return isinstance(error, BrokenProcessPool | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
