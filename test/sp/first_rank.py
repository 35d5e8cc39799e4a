"""What is the same for all ranks, computed by one of them."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def by_first_rank(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What `function` returns on rank 0, the only one that calls it."""
    found = [function(*arguments, **options) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]
