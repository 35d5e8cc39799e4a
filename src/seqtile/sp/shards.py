"""Cuts tensors of a whole batch into equal parts, one for each rank, wherever the batch's documents end."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqtile.attention.heads import Rows
from seqtile.attention.layout import indices
from seqtile.attention.nodes import Nodes
from seqtile.sp.same_batch import hash_of

IGNORED = -100
_MARK = 16  # bits of a shard's hash


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


def marked(batch_hash: Tensor, nodes: Nodes) -> Tensor:
    """Returns a batch's hash with the number of ranks on each node, for which the batch is cut."""
    return batch_hash << _MARK | nodes.per_node


def per_node_in(batch_hash: int) -> int:
    """Returns the number of ranks on each node that a hash is marked with."""
    return batch_hash & (1 << _MARK) - 1


def shards_of(
    batch: Mapping[str, Any], rows: int, length: int, ranks: Sequence[int], nodes: Nodes
) -> list[dict[str, Any]]:
    """Returns the parts that `ranks` have of a batch of [rows, length] tokens: copies, not views of the whole. Values
    without a sequence dimension stay whole."""
    padded = -(-length // nodes.size) * nodes.size
    dims = {name: dim for name, x in batch.items() if (dim := sequence_dim(name, x, rows, length)) is not None}
    return [
        {**batch, **{name: _part(name, batch[name], dim, nodes.tokens_of(rank, padded)) for name, dim in dims.items()}}
        for rank in ranks
    ]


def in_order(parts: Tensor, nodes: Nodes) -> Tensor:
    """Returns the values [B, length] of whole sequences from each rank's [ranks, B, S]."""
    whole = torch.cat(list(parts), 1)
    return torch.cat([whole[:, slice(*place)] for _, place in nodes.runs(whole.shape[1])], 1)


def places_of(length: int, nodes: Nodes) -> Tensor:
    """Returns the place of each of `length` tokens on the ranks, see `Nodes.runs`."""
    padded = -(-length // nodes.size) * nodes.size
    return indices([place for _, place in nodes.runs(padded)])[:length]


def _part(name: str, value: Tensor, dim: int, tokens: Rows) -> Tensor:
    """Returns a copy of these tokens of a value, with padding for those behind its last."""
    length, parts = value.shape[dim], []
    for start, stop in tokens:
        part = value.narrow(dim, min(start, length), max(0, min(stop, length) - start))
        padding = range(max(0, start - length), max(0, stop - length))
        parts.append(_padded(name, part, padding) if padding else part)
    if len(parts) > 1:
        return torch.cat(parts, dim)
    is_view = tokens[0][1] <= length
    return parts[0].clone(memory_format=torch.contiguous_format) if is_view else parts[0]


def _padded(name: str, value: Tensor, padding: range) -> Tensor:
    """Returns `value` [..., tokens, ...] with the padding tokens `padding` (their indices in the batch's padding)
    appended. In `position_ids` they form their own document, so no other token attends to them."""
    if name == "position_ids":
        tail = torch.arange(padding.start, padding.stop, device=value.device, dtype=value.dtype)
        return torch.cat([value, tail.expand(*value.shape[:-1], -1)], -1)
    fill = IGNORED if name in ("labels", "shift_labels") else 0
    return F.pad(value, [0, 0] * (value.ndim - 2) + [0, len(padding)], value=fill)
