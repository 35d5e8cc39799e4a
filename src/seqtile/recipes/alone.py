"""A training run alone in its process, so that its peak memory is its own."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from rich.console import Console

from seqtile.recipes.job import Job
from seqtile.recipes.out_of_memory import RunOutOfMemory, is_out_of_memory
from seqtile.recipes.save import remove_incomplete
from seqtile.recipes.train import RunResult, train


def run_alone(
    job: Job, sequences: torch.Tensor, *, tiled: bool, save_to: Path | None, tokenizer: Path | None = None
) -> RunResult:
    """`train` in a process of its own, which ends when this one ends.

    At the first Ctrl-C a run that is to be saved finishes its step and is saved; at a second one, or if nothing is to
    be saved, it ends at once and KeyboardInterrupt is raised.
    """
    others = set(active_children())
    console = Console(soft_wrap=True)
    newline = "\n" if console.is_terminal else ""  # there a bar ends without one
    context = get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=end_with_parent) as pool:
        try:
            with interrupts("BLOCK"):
                options = {"tiled": tiled, "save_to": save_to, "tokenizer": tokenizer}
                running = pool.submit(train_interruptibly, job, sequences, **options)
            try:
                return running.result()
            except KeyboardInterrupt:
                if save_to is None:
                    raise
                console.print(f"{newline}interrupted: after this step the model is saved; Ctrl-C again ends it at once")
                for worker in set(active_children()) - others:  # a terminal has told it too, `kill` has not
                    os.kill(worker.pid, signal.SIGINT)
                return running.result()
        except KeyboardInterrupt:
            for worker in set(active_children()) - others:
                worker.kill()
                worker.join()
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            name = "tiled" if tiled else "untiled"
            raise RunOutOfMemory(f"the {name} run had too little memory; a shorter --seq-len needs less") from error
        finally:
            if save_to is not None:
                remove_incomplete(save_to)
            console.show_cursor()  # a killed process leaves it hidden


def end_with_parent() -> None:
    """Ends this process at once when the one that started it has ended, however that came about."""

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def train_interruptibly(*args: Any, **options: Any) -> RunResult:
    """`train`, in a process where Ctrl-C waits outside of it."""
    with interrupts("UNBLOCK"):
        return train(*args, **options)


@contextmanager
def interrupts(how: str) -> Iterator[None]:
    """Inside, Ctrl-C is let through, or waits: in this process and in one that is started inside, to which a terminal
    sends it too."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(getattr(signal, f"SIG_{how}"), {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
