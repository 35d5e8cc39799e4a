"""Cutting a batch into the shards of a group's ranks.

Every rank of the group is given the same samples (sample by `ctx.data_parallel_rank` and `ctx.data_parallel_size`),
makes the same batch of them, and keeps its own part of the sequence. Labels are shifted before the cut, since the label
of a shard's last token lies in the next.
Source: Arctic Long Sequence Training, 4.2 and 4.3.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from seqtile.sp.context import SequenceParallel
from seqtile.sp.same_batch import BATCH_HASH, hash_of

IGNORED = -100
_FILL = {"labels": IGNORED, "shift_labels": IGNORED}  # what pads a tensor's sequence; 0 where it is not named


class DataShardingCollator:
    """Wraps a collator of Hugging Face's: its batch, of which this rank's part of every sequence is kept.

    Sequences are padded to a multiple of the group's size. Added are `shift_labels`, global `position_ids` if there are
    none, `num_items_in_batch`, the group's labelled tokens, so that a model's loss is this rank's exact share of the
    group's, and `batch_hash`, by which the model notices ranks that hold shards of different batches. `labels` stay,
    beside `shift_labels`. What has no sequence dimension is kept whole.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]], ctx: SequenceParallel):
        self.collator = collator
        self.rank, self.size = ctx.rank, ctx.size  # not the group, which cannot be sent to a loader's workers

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        return shard_of(self.collator(samples), self.rank, self.size)


def shard(batch: dict[str, Any], ctx: SequenceParallel) -> dict[str, Any]:
    """This rank's part of a whole batch, see `DataShardingCollator`. Raises ValueError for one without tokens, and for
    one that is a shard already."""
    return shard_of(batch, ctx.rank, ctx.size)


def shard_of(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    return part_of(completed(batch), rank, size)


def completed(batch: dict[str, Any]) -> dict[str, Any]:
    """The whole batch with what every shard of it needs."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"expected a dict of tensors as batch, got a {type(batch).__name__}")
    batch = dict(batch)
    tokens = tokens_of(batch)
    if tokens is None:
        raise ValueError(f"the batch has {', '.join(batch) or 'nothing'}, expected input_ids or inputs_embeds in it")
    if BATCH_HASH in batch:
        raise ValueError(
            "this batch is a shard already, expected a whole one: sp.shard, sp.DataShardingCollator (which Trainer's "
            "mixin puts in by itself) and sp.ShardedDataLoader each cut it; use one of them"
        )
    if "labels" in batch and "shift_labels" not in batch:
        batch["shift_labels"] = F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]
    if "shift_labels" in batch and "num_items_in_batch" not in batch:
        batch["num_items_in_batch"] = (batch["shift_labels"] != IGNORED).sum()
    if "position_ids" not in batch:
        batch["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
    spread = {name: value for name, value in batch.items() if _sequence_dim(name, value, *tokens.shape[:2]) is not None}
    integers = {name: value for name, value in spread.items() if not value.is_floating_point()}  # the same on any GPU
    return batch | {BATCH_HASH: hash_of(integers)}


def tokens_of(batch: dict[str, Any]) -> torch.Tensor | None:
    """[B, S] or [B, S, D]."""
    ids = batch.get("input_ids")
    return batch.get("inputs_embeds") if ids is None else ids


def part_of(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """What a rank keeps of a completed batch."""
    rows, length = tokens_of(batch).shape[:2]
    local = -(-length // size)
    cut = {}
    for name, value in batch.items():
        dim = _sequence_dim(name, value, rows, length)
        if dim is not None:
            value = _padded(name, value, dim, local * size - length).narrow(dim, rank * local, local)
            value = value.clone(memory_format=torch.contiguous_format)  # of its own, not a view of the whole
        cut[name] = value
    return cut


def _sequence_dim(name: str, value: Any, batch: int, length: int) -> int | None:
    """The dimension along which a value has the sequence; None if it has none."""
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return None
    if name == "position_ids":
        return value.ndim - 1  # [B, S], or [3, B, S] for multimodal rotary embeddings
    return 1 if tuple(value.shape[:2]) in ((batch, length), (1, length)) else None


def _padded(name: str, value: torch.Tensor, dim: int, missing: int) -> torch.Tensor:
    """`value` with `missing` more tokens: of a document of their own in `position_ids`, which ends none of the batch's,
    and so seen by no token of it."""
    if missing == 0:
        return value
    shape = list(value.shape)
    shape[dim] = missing
    if name == "position_ids":
        tail = torch.arange(missing, device=value.device, dtype=value.dtype).expand(shape)
    else:
        tail = value.new_full(shape, _FILL.get(name, 0))
    return torch.cat([value, tail], dim)
