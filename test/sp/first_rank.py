"""What ranks of a pool have in common: their groups, and what one of them computes for all."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch.distributed as dist

from seqtile import sp


def by_first_rank(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What `function` returns on rank 0, the only one that calls it."""
    found = [function(*arguments, **options) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


@cache
def context(size: int | None = None) -> sp.SequenceParallel:
    """Groups of `size` ranks, of all if not said: made once, since every one keeps its connections."""
    return sp.initialize(size or dist.get_world_size())
