"""Cuts tensors of a whole batch into equal runs of tokens, one for each rank, wherever the batch's documents end."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqtile.sp.same_batch import hash_of

IGNORED = -100


def sequence_dim(name: str, value: Any, batch: int, length: int) -> int | None:
    """Returns a value's sequence dimension; None if it has none."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return None
    if name == "position_ids":
        return value.ndim - 1  # [B, S], or [3, B, S] for multimodal rotary embeddings
    return 1 if tuple(value.shape[:2]) in ((batch, length), (1, length)) else None


def hash_of_tokens(batch: Mapping[str, Any], rows: int, length: int) -> Tensor:
    """Returns the hash of a batch's integers that belong to tokens, which are the same on any GPU."""
    dims = {name: sequence_dim(name, value, rows, length) for name, value in batch.items()}
    return hash_of({name: batch[name] for name in dims if dims[name] and not batch[name].is_floating_point()})


def shards_of(
    batch: Mapping[str, Any], rows: int, length: int, ranks: Sequence[int], size: int
) -> list[dict[str, Any]]:
    """Returns the parts that `ranks` have of a batch of [rows, length] tokens: copies, not views of the whole. Values
    without a sequence dimension stay whole."""
    local = -(-length // size)
    dims = {name: dim for name, x in batch.items() if (dim := sequence_dim(name, x, rows, length)) is not None}

    def part(rank: int) -> dict[str, Any]:
        start, stop = min(rank * local, length), min((rank + 1) * local, length)
        views = {name: batch[name].narrow(dim, start, stop - start) for name, dim in dims.items()}
        padding = range(max(0, rank * local - length), max(0, (rank + 1) * local - length))
        if padding:
            return {**batch, **{name: _padded(name, view, padding) for name, view in views.items()}}
        return {**batch, **{name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}}

    return [part(rank) for rank in ranks]


def _padded(name: str, value: Tensor, padding: range) -> Tensor:
    """Returns `value` [..., tokens, ...] with the padding tokens `padding` (their indices in the batch's padding)
    appended. In `position_ids` they form their own document, so no other token attends to them."""
    if name == "position_ids":
        tail = torch.arange(padding.start, padding.stop, device=value.device, dtype=value.dtype)
        return torch.cat([value, tail.expand(*value.shape[:-1], -1)], -1)
    fill = IGNORED if name in ("labels", "shift_labels") else 0
    return F.pad(value, [0, 0] * (value.ndim - 2) + [0, len(padding)], value=fill)
