"""One training run: the model and its optimizer, in this process or sharded over the ranks, step by step until it is
saved."""

import ctypes
import io
import math
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress
from transformers import PreTrainedConfig, PreTrainedModel

import seqtile
from seqtile import sp
from seqtile.fitting import of_every_rank
from seqtile.recipes import Job
from seqtile.recipes.output import RunResult, save_model
from seqtile.recipes.state import REMEDY, Run, Training, load_checkpoint, loaded, rank, save_checkpoint

MIB = 2**20
RECENT = 10  # steps, by which the time that is left is told


def train(run: Run, ctx: sp.SequenceParallel | None = None) -> RunResult:
    """Trains all parameters with AdamW over a run's sequences, under activation checkpointing.

    In one process there is one group; with `ctx` each data-parallel group of ranks trains on its sequence of a step and
    each rank on its part of that, and weights, gradients and optimizer state are sharded over all ranks. Losses are
    means over the groups, peaks those of the rank that needs most.

    In bfloat16 the model and its loss run under autocast; weights, gradients and optimizer state are float32.
    Saves the trained model to `run.save_to`, if given, or to a temporary directory if that fails, and checkpoints as
    the job says; with `resume` it goes on from the checkpoint, and the result is of all steps, those before included.
    Ctrl-C, once it trains, ends it after the step at hand: the result has fewer steps, and they are saved, as a
    checkpoint too. On ranks it is enough that one of them gets it.

    Raises ValueError once a loss or weight is not finite; nothing is saved then.
    """
    torch.manual_seed(run.job.seed)
    if run.job.device == "cpu":
        return_freed_memory()
    else:  # tensors of other sizes a layer, a chunk and a step do not leave the memory in pieces
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    by_blocks = run.tiled and ctx is None and has_square_mask(run.config, run.job.seq_len)
    console = Console(quiet=rank() != 0, soft_wrap=True, highlight=False)
    with sequence_group(run.job) if by_blocks else nullcontext(ctx) as group:
        with console.status(f"{'seqtile' if run.tiled else 'untiled'}: loading"):
            training = loaded(run, group)
        with interrupts_noted(run, console) as interrupts:
            result = take_steps(training, run, group, interrupts, console)
            if run.save_to is None or not (weights := training.weights()):  # the main process has them
                return result
            with redirect_stderr(io.StringIO()):  # Hugging Face has bars of its own
                saved = save_model(training.unwrapped, weights, run.tokenizer, run.save_to)
            return replace(result, saved=str(saved))


@contextmanager
def interrupts_noted(run: Run, console: Console) -> Iterator[list[int]]:
    """Yields a list to which Ctrl-C adds a number, so that the step at hand is finished and saved. A second one raises
    KeyboardInterrupt; not on ranks, to which torchrun passes on what their terminal has told them already."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        if run.job.local_rank is None:
            signal.signal(signal.SIGINT, before)  # which raises for a second one
            newline = "\n" if console.is_terminal else ""  # there a bar ends without one
            console.print(f"{newline}interrupted: after this step the model is saved; Ctrl-C again ends it at once")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def has_square_mask(config: PreTrainedConfig, seq_len: int) -> bool:
    """Returns whether Hugging Face would build a mask of length x length in one process: for windows shorter than the
    sequence, or capped scores. Sequence parallelism, also of one process, attends by blocks."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    windowed = window is not None and window < seq_len and "sliding_attention" in kinds
    return windowed or getattr(config, "attn_logit_softcapping", None) is not None


@contextmanager
def sequence_group(job: Job) -> Iterator[sp.SequenceParallel]:
    """Yields the ranks that share a sequence with this one, of those that torchrun started; without it this process
    alone.

    Raises ValueError if there cannot be that many.
    """
    backend = "nccl" if job.device == "cuda" else "gloo"
    if job.device == "cuda":
        torch.cuda.set_device(job.local_rank or 0)
    alone = job.local_rank is None
    dist.init_process_group(backend, **({"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}))
    try:
        ctx = sp.initialize(job.sequence_parallel)
    except ValueError as error:
        raise ValueError(f"--sequence-parallel: {error}") from error
    yield ctx
    dist.barrier()
    dist.destroy_process_group()


def take_steps(
    training: Training, run: Run, ctx: sp.SequenceParallel | None, interrupts: list[int], console: Console
) -> RunResult:
    """Trains on a sequence after the other until none is left or a rank was interrupted; prints a line a step, or a bar
    where `console` is a terminal. Goes on from a checkpoint and saves some, as the job says."""
    job, name = run.job, "seqtile" if run.tiled else "untiled"
    done = load_checkpoint(training, run) if job.resume else RunResult()
    if job.resume:
        console.print(f"{name}: goes on after step {len(done.losses)} of {job.steps}")
    step, figures = "{task.description} {task.completed}/{task.total}", "{task.fields[figures]}"  # the bar gives way
    with Progress(step, BarColumn(bar_width=12), figures, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=job.steps, completed=len(done.losses), figures="")
        for batch in run.sequences[len(done.losses) :]:
            start = time.perf_counter()
            loss = loss_of(training.model, batch, job, ctx)
            training.update(loss)
            ranks = of_every_rank(loss.item(), bool(interrupts), peak_mib(job.device))
            done.losses.append(ranks[:, 0].mean().item())  # alike on every rank of a group
            done.step_seconds.append(time.perf_counter() - start)
            done.peak_mib = max(done.peak_mib, ranks[:, 2].max().item())
            said = step_figures(done, batch.numel(), job.steps)
            progress.update(bar, advance=1, figures=said)
            if not console.is_terminal:
                console.print(f"{name}: step {len(done.losses)}/{job.steps}  {said}")
            check_last_loss(done.losses)
            interrupted, count, every = ranks[:, 1].any().item(), len(done.losses), job.save_every
            due = interrupted if count < job.steps else every is not None
            if run.save_to is not None and (due or (every and count % every == 0)):
                save_checkpoint(training, run, done, console)
            if interrupted:
                break
        if run.tiled and job.compare:
            with torch.no_grad():
                done.again = loss_of(training.model, run.sequences[0], job, ctx).item()
    done.tokens_per_second = len(done.losses) * run.sequences[0].numel() / sum(done.step_seconds)
    done.note = no_layer_tiled(training.unwrapped, job) if run.tiled else None
    done.status = done.note or str(seqtile.status(training.unwrapped) if run.tiled else "untiled")
    return done


def step_figures(done: RunResult, tokens: int, steps: int) -> str:
    """Returns the loss of the last step of `tokens`, and how long the others will take."""
    seconds, left = done.step_seconds, steps - len(done.losses)
    said = f"loss {done.losses[-1]:.4f}  {tokens / seconds[-1]:,.0f} tokens/s  peak {done.peak_mib:,.0f} MiB"
    return f"{said}  {in_words(left * median(seconds[-RECENT:]))} left" if left else said


def in_words(seconds: float) -> str:
    """Returns a length of time in its two largest units at most."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def check_last_loss(losses: list[float]) -> None:
    if not math.isfinite(losses[-1]):
        first = "before any update, so --model's weights or --dtype are to blame; pass others"
        why = f"after {losses[-2]:.4f}; {REMEDY}" if len(losses) > 1 else first
        raise ValueError(f"the loss of step {len(losses)} is {losses[-1]}, {why}; nothing was saved")


def loss_of(model: torch.nn.Module, batch: torch.Tensor, job: Job, ctx: sp.SequenceParallel | None) -> torch.Tensor:
    """Returns the loss of this group's sequence of `batch` [groups, seq_len]."""
    with torch.autocast(job.device, torch.bfloat16, enabled=job.dtype == "bfloat16"):
        ids = (batch if ctx is None else batch[ctx.data_parallel_rank, None]).to(job.device)
        return model(input_ids=ids, labels=ids, use_cache=False).loss


def no_layer_tiled(model: PreTrainedModel, job: Job) -> str | None:
    """Returns that no layer was tiled, and why, where the sequence, or a rank's part of it, is no longer than a
    chunk."""
    status = seqtile.status(model)
    sizes = [tokens for part in (status.mlp, status.layer) if part is not None for tokens in part.untiled_tokens]
    tokens = math.ceil(job.seq_len / job.sequence_parallel)
    if not sizes or tokens > min(sizes):
        return None
    tokens_are = f"{tokens:,} tokens are no more than a chunk of {min(sizes):,}"
    return f"no layer was tiled, since {tokens_are}; pass a longer --seq-len"


def return_freed_memory() -> None:
    """Makes glibc give every freed tensor back to the system at once, so that the resident set is what is in use.

    By default it keeps blocks of up to 32 MiB, a tensor of 8,192 tokens here, and fragments: twice the memory in use.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        m_mmap_threshold = -3  # malloc.h
        mallopt(m_mmap_threshold, MIB)


def peak_mib(device: str) -> float:
    """Returns the peak memory of this process: allocated on the GPU, or the resident set on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    if sys.platform == "linux":  # not ru_maxrss: a new process begins with its parent's
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
