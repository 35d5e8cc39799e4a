"""Checkpoints in host memory, tested without a GPU."""

import torch
from torch import nn

from seqtile.offload.checkpointing import Checkpoints, install
from seqtile.offload.store import Copies, Pool, Store
from support.tiny import checkpointing

CPU = torch.device("cpu")


def offloaded(model: nn.Module, keep_last: int = 1, limit: int | None = None, **options: bool) -> Pool:
    """Calls `offload.enable` with a store that needs no GPU: plain memory stands for pinned host memory."""
    checkpointing(model, False)
    pool = Pool(limit)
    install(Checkpoints(Store(pool, Copies(CPU)), small=0, **options), model, keep_last)
    return pool
