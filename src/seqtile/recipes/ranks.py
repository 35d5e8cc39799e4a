"""Whether a job runs in one process or on ranks that torchrun started."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from seqtile import sp
from seqtile.recipes.job import Job


def on_ranks() -> bool:
    return dist.is_torchelastic_launched()


def speaks() -> bool:
    """Whether this process is the one that prints, of those on this machine."""
    return not on_ranks() or dist.get_node_local_rank() == 0


def on_this_machine(job: Job) -> Job:
    """`job` with a device. Raises ValueError for what cannot work, or not on this machine."""
    job.check()
    if job.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no GPU; use --device cpu")
    if job.sequence_parallel != 1 and not on_ranks():
        raise ValueError(
            f"--sequence-parallel is {job.sequence_parallel}, but this is one process; start one on each GPU: "
            f"torchrun --nproc-per-node {max(2, job.sequence_parallel)} -m seqtile.cli finetune ..."
        )
    if job.compare and on_ranks():
        raise ValueError("--compare is for one process: leave it out, or torchrun")
    here = replace(job, device=job.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    here.check()
    return here


@contextmanager
def groups_of(job: Job) -> Iterator[sp.SequenceParallel | None]:
    """The ranks that share a sequence with this one; None in one process.

    Raises ValueError if they cannot be so many.
    """
    if not on_ranks():
        yield None
        return
    if job.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group(_backend(job))
    try:
        ctx = sp.initialize(job.sequence_parallel)
    except ValueError as error:
        raise ValueError(f"--sequence-parallel: {error}") from error
    yield ctx
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def group_of_one(job: Job, config: PreTrainedConfig) -> Iterator[sp.SequenceParallel | None]:
    """This process as a group, where Hugging Face would build a mask of length x length, for windows shorter than the
    sequence or capped scores: sequence parallelism attends by blocks. None elsewhere."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    windowed = window is not None and window < job.seq_len and "sliding_attention" in kinds
    if not windowed and getattr(config, "attn_logit_softcapping", None) is None:
        yield None
        return
    dist.init_process_group(_backend(job), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield sp.initialize(1)
    finally:
        dist.destroy_process_group()


def _backend(job: Job) -> str:
    return "nccl" if job.device == "cuda" else "gloo"


def leave() -> None:
    """Ends a rank that is done. Threads of gloo abort the interpreter's own exit now and then."""
    if on_ranks():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
