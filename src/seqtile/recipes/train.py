"""One training run, in one process or spread over ranks."""

import ctypes
import io
import math
import re
import sys
import time
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import seqtile
from seqtile import offload, sp
from seqtile.models.status import ModelStatus
from seqtile.offload.checkpoint import enable_checkpointing
from seqtile.recipes.job import Job
from seqtile.recipes.pretrained import load_config, load_model
from seqtile.recipes.ranks import group_of_one
from seqtile.recipes.save import save_model
from seqtile.recipes.spread import REMEDY, SPREADS, Whole
from seqtile.recipes.stop import stop_on_interrupt

MIB = 2**20


@dataclass(frozen=True)
class RunResult:
    """What one run measured; lists have one entry a step."""

    losses: list[float]
    step_seconds: list[float]
    tokens_per_second: float
    peak_mib: float
    status: str
    again: float | None = None
    """The first step's loss once more at the end, where runs are compared; one number, of the same sequences."""
    saved: str | None = None
    """Where the model is, of a run that saved it."""
    note: str | None = None
    """What else there is to say."""


def train(
    job: Job,
    sequences: torch.Tensor,
    *,
    tiled: bool,
    save_to: Path | None,
    tokenizer: Path | None = None,
    ctx: sp.SequenceParallel | None = None,
) -> RunResult:
    """Full-parameter AdamW over `sequences` [steps, groups, seq_len] under activation checkpointing.

    In one process there is one group; with `ctx` each data-parallel group of ranks trains on its sequence of a step and
    each rank on its part of that, and weights, gradients and optimizer state are spread over all ranks. Losses are
    means over the groups, peaks those of the rank that needs most.

    In bfloat16 the model and its loss run under autocast; weights, gradients and optimizer state are float32.
    Saves the trained model to `save_to`, if given, or to a temporary directory if that fails, with the files of the
    directory `tokenizer`.
    Ctrl-C, once it trains, ends it after the step at hand: the result has fewer steps, and they are saved. On ranks it
    is enough that one of them gets it.

    Raises ValueError once a loss or weight is not finite; nothing is saved then.
    """
    torch.manual_seed(job.seed)
    if job.device == "cpu":
        return_freed_memory()
    else:  # tensors of other sizes a layer, a tile and a step do not leave the memory in pieces
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if tiled and ctx is None:
        with group_of_one(job, load_config(job.model).get_text_config()) as group:
            return _train(job, sequences, tiled, save_to, tokenizer, group)
    return _train(job, sequences, tiled, save_to, tokenizer, ctx)


def _train(
    job: Job,
    sequences: torch.Tensor,
    tiled: bool,
    save_to: Path | None,
    tokenizer: Path | None,
    ctx: sp.SequenceParallel | None,
) -> RunResult:
    name = "seqtile" if tiled else "untiled"
    console = Console(quiet=ctx is not None and dist.get_rank() > 0)
    with progress_bars(console) as progress:
        loading = progress.add_task(f"{name}: loading", total=1, figures="")
        spread = loaded(job, tiled, ctx)
        progress.advance(loading)

        training = progress.add_task(f"{name}: training", total=job.steps, figures="")
        losses, seconds = [], []
        with stop_on_interrupt() as stop:
            for batch in sequences:
                start = time.perf_counter()
                loss = loss_of(spread.model, batch, job, ctx)
                spread.update(loss)
                mean, stopped = over_ranks(loss.detach(), stop.asked, ctx)
                losses.append(mean)
                seconds.append(time.perf_counter() - start)
                rate = f"{batch.numel() / seconds[-1]:,.0f} tokens/s"
                figures = f"loss {mean:.4f}  {rate}  peak {peak_mib(job.device):,.0f} MiB"
                progress.update(training, advance=1, figures=figures)
                if not console.is_terminal:
                    console.print(f"{name}: step {len(losses)}/{job.steps}  {figures}", highlight=False, soft_wrap=True)
                check_finite(losses)
                if stopped:
                    break
            status = seqtile.status(spread.unwrapped) if tiled else "untiled"
            note = no_tile(status, job, ctx) if tiled else None
            again = loss_again(spread.model, sequences[0], job, ctx) if tiled and job.compare else None
            result = RunResult(
                losses=losses,
                step_seconds=seconds,
                tokens_per_second=len(losses) * sequences[0].numel() / sum(seconds),
                peak_mib=largest(peak_mib(job.device), ctx),
                status=note or str(status),
                note=note,
                again=again,
            )
            if save_to is not None and (weights := spread.weights()):  # every rank takes part, the first one has them
                with redirect_stderr(io.StringIO()):
                    saved = save_model(spread.unwrapped, weights, tokenizer, save_to)
                result = replace(result, saved=str(saved))
            return result


def check_finite(losses: list[float]) -> None:
    """Raises ValueError unless the last loss is finite."""
    if math.isfinite(losses[-1]):
        return
    if len(losses) == 1:
        why = "before any update, so --model's weights or --dtype are to blame; pass others"
    else:
        why = f"after {losses[-2]:.4f}; {REMEDY}"
    raise ValueError(f"the loss of step {len(losses)} is {losses[-1]}, {why}; nothing was saved")


def no_tile(status: ModelStatus, job: Job, ctx: sp.SequenceParallel | None) -> str | None:
    """Where the sequence, or a rank's part of it, is no longer than a tile: that no layer was tiled."""
    sizes = [tokens for part in (status.mlp, status.layer) if part is not None for tokens in part.chunk_tokens]
    tokens = math.ceil(job.seq_len / (1 if ctx is None else ctx.size))
    if not sizes or tokens > min(sizes):
        return None
    return (
        f"no layer was tiled, since {tokens:,} tokens are no more than a tile of {min(sizes):,}; "
        "pass a longer --seq-len"
    )


def loaded(job: Job, tiled: bool, ctx: sp.SequenceParallel | None) -> Whole:
    """The model and its optimizer, ready to be trained."""
    with redirect_stderr(io.StringIO()):  # Hugging Face's own bars
        model = load_model(job.model).train()
    if tiled:
        seqtile.apply_seqtile(model, layer=job.layer, head_groups=job.head_groups)
    if ctx is not None:
        sp.apply_ulysses(model, ctx)
    alone = ctx is None or dist.get_world_size() == 1
    spread = SPREADS["none" if alone else job.shard](model, job)
    if job.offload:
        offload.enable(model, tokens=math.ceil(job.seq_len / (1 if ctx is None else ctx.size)))
    else:
        enable_checkpointing(model)
    return spread


def loss_of(model: torch.nn.Module, batch: torch.Tensor, job: Job, ctx: sp.SequenceParallel | None) -> torch.Tensor:
    """The loss of one sequence of `batch` [groups, seq_len]: of this rank's group."""
    with torch.autocast(job.device, torch.bfloat16, enabled=job.dtype == "bfloat16"):
        if ctx is None:
            ids = batch.to(job.device)
            return model(input_ids=ids, labels=ids, use_cache=False).loss
        ids = batch[ctx.data_parallel_rank, None]
        shard = {name: value.to(job.device) for name, value in sp.shard({"input_ids": ids, "labels": ids}, ctx).items()}
        return sp.reduce_loss(model(**shard, use_cache=False).loss, ctx)


@torch.no_grad()
def loss_again(model: torch.nn.Module, batch: torch.Tensor, job: Job, ctx: sp.SequenceParallel | None) -> float:
    """What is left of a step's loss, under the model as it is now."""
    return loss_of(model, batch, job, ctx).item()


def over_ranks(loss: torch.Tensor, stop: bool, ctx: sp.SequenceParallel | None) -> tuple[float, bool]:
    """The mean of the groups' losses, and whether any rank is to stop."""
    if ctx is None:
        return loss.item(), stop
    sums = torch.stack([loss.float(), torch.full_like(loss, stop, dtype=torch.float32)])
    dist.all_reduce(sums)  # losses are alike on every rank of a group
    mean, stops = (sums / dist.get_world_size()).tolist()
    return mean, stops > 0


def largest(value: float, ctx: sp.SequenceParallel | None) -> float:
    """Of all ranks' values."""
    values = [value]
    if ctx is not None:
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return max(values)


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
