"""One training run, alone in its process, so that its peak memory is its own."""

import ctypes
import io
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import seqtile
from seqtile.recipes.job import Job
from seqtile.recipes.pretrained import load_model

MIB = 2**20


class RunOutOfMemory(Exception):
    """A run had too little memory, or its process was killed, which is what too little host memory looks like."""


@dataclass(frozen=True)
class RunResult:
    """What one run measured; lists have one entry a step."""

    losses: list[float]
    step_seconds: list[float]
    tokens_per_second: float
    peak_mib: float
    status: str


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


def train(job: Job, sequences: torch.Tensor, *, tiled: bool, save_to: Path | None) -> RunResult:
    """Full-parameter AdamW over `sequences` [steps, seq_len], one a step, under activation checkpointing.

    In bfloat16 the model and its loss run under autocast; weights, gradients and optimizer state are float32.
    Saves the trained model to `save_to` as safetensors, if given.
    """
    torch.manual_seed(job.seed)
    if job.device == "cpu":
        return_freed_memory()
    name = "seqtile" if tiled else "untiled"
    losses, seconds = [], []
    console = Console()
    with progress_bars(console) as progress:
        loading = progress.add_task(f"{name}: loading", total=1, figures="")
        with redirect_stderr(io.StringIO()):  # Hugging Face's own bars
            model = load_model(job.model).to(job.device).train()
        enable_checkpointing(model)
        if tiled:
            seqtile.apply_seqtile(model)
        progress.advance(loading)

        optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0)
        training = progress.add_task(f"{name}: training", total=job.steps, figures="")
        for ids in sequences.unsqueeze(1).to(job.device):
            start = time.perf_counter()
            with torch.autocast(job.device, torch.bfloat16, enabled=job.dtype == "bfloat16"):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            rate = f"{job.seq_len / seconds[-1]:,.0f} tokens/s"
            figures = f"loss {losses[-1]:.4f}  {rate}  peak {peak_mib(job.device):,.0f} MiB"
            progress.update(training, advance=1, figures=figures)
            if not console.is_terminal:
                print(f"{name}: step {len(losses)}/{job.steps}  {figures}", flush=True)
    result = RunResult(
        losses=losses,
        step_seconds=seconds,
        tokens_per_second=job.steps * job.seq_len / sum(seconds),
        peak_mib=peak_mib(job.device),
        status=str(seqtile.status(model)) if tiled else "untiled",
    )
    if save_to is not None:
        with redirect_stderr(io.StringIO()):
            model.save_pretrained(save_to)
    return result


def progress_bars(console: Console) -> Progress:
    """One line a phase: what, how far, and its latest figures; nothing if the console is no terminal."""
    return Progress(
        TextColumn("{task.description:<17}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console,
        disable=not console.is_terminal,
    )


def return_freed_memory() -> None:
    """Makes glibc give every freed tensor back to the system at once, so that the resident set is what is in use.

    By default it keeps blocks of up to 32 MiB, a tensor of 8,192 tokens here, and fragments: twice the memory in use.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        m_mmap_threshold = -3  # malloc.h
        mallopt(m_mmap_threshold, MIB)


def enable_checkpointing(model: torch.nn.Module) -> None:
    """Activation checkpointing by the name that the installed transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def peak_mib(device: str) -> float:
    """The peak memory of this process: allocated on the GPU, or the resident set on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    if sys.platform == "linux":  # not ru_maxrss: a new process begins with its parent's
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
