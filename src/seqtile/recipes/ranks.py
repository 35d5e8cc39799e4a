"""Whether a job runs in one process or on ranks that torchrun started."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from seqtile import sp
from seqtile.recipes.job import Job


def on_ranks() -> bool:
    return dist.is_torchelastic_launched()


def speaks() -> bool:
    """Whether this process is the one that prints, of those on this machine."""
    return not on_ranks() or dist.get_node_local_rank() == 0


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
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    try:
        ctx = sp.initialize(job.sequence_parallel)
    except ValueError as error:
        raise ValueError(f"--sequence-parallel: {error}") from error
    yield ctx
    dist.barrier()
    dist.destroy_process_group()


def leave() -> None:
    """Ends a rank that is done. Threads of gloo abort the interpreter's own exit now and then."""
    if on_ranks():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
