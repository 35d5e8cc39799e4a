"""Whether the ranks of a group hold the shards of one batch: noticed before any of them computes with the others'.

Where a batch is cut, a hash of all of it goes with every shard, and every forward compares the ranks' hashes.
"""

from collections.abc import Mapping

import torch

from seqtile.sp.context import SequenceParallel, gather

BATCH_HASH = "batch_hash"  # in a shard, the hash of the batch that it was cut from
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # odd, of no other meaning
_COMPARED = "[batch, tokens, has a mask, rows of position_ids, has a batch_hash, labelled tokens]"


def hash_of(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A number [] that differs where the integers in `tensors` do, computed where they are, without waiting for it."""
    return _hash(torch.stack([_hash(values) for _, values in sorted(tensors.items())]))


def _hash(values: torch.Tensor) -> torch.Tensor:
    """Of integers and their order. Sums and products wrap around."""
    mixed = values.flatten().to(torch.int64)
    mixed = (mixed + torch.arange(1, len(mixed) + 1, device=mixed.device) * _FACTORS[0]) * _FACTORS[1]
    mixed = (mixed ^ (mixed >> 32)) * _FACTORS[2]
    return (mixed ^ (mixed >> 29)).sum()


def check_same_batch(
    tokens: torch.Tensor,
    position_ids: torch.Tensor | None,
    masked: bool,
    items: torch.Tensor | int | None,
    batch_hash: torch.Tensor | None,
    ctx: SequenceParallel,
) -> int:
    """The largest of all ranks' position_ids. `tokens` are input_ids [B, S] or inputs_embeds [B, S, D]; `items` the
    group's labelled tokens.

    Raises ValueError on every rank if the ranks hold batches of different shapes or shards of different batches, if
    they have no position_ids, or if nothing tells that these are shards and all ranks hold the same tokens. One small
    collective and one wait for the device.
    """
    rows = 0 if position_ids is None else position_ids.shape[:-1].numel()
    sizes = [*tokens.shape[:2], int(masked), rows, int(batch_hash is not None)]
    last = 0 if position_ids is None else position_ids.max()
    own = _own_hash(tokens, position_ids, ctx) if batch_hash is None else batch_hash
    numbers = (sizes, 0 if items is None else items, last, own)  # some on the host, some on the device: waited for once
    mine = torch.cat([torch.as_tensor(x, dtype=torch.int64, device=tokens.device).view(-1) for x in numbers])
    ranks = torch.stack(gather(mine, ctx)).tolist()
    shapes, hashes = [rank[:-2] for rank in ranks], [rank[-1] for rank in ranks]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"the ranks of a group hold batches of different shapes, {_COMPARED} = {shapes}; expected shards of "
            "the same batch, as sp.DataShardingCollator cuts them if the ranks of a group draw the same samples"
        )
    if position_ids is None:
        raise ValueError(
            "no position_ids came with the tokens, so that nothing tells whether they are a shard or a whole sequence; "
            "cut batches by sp.shard, sp.DataShardingCollator or sp.ShardedDataLoader, or pass a shard's position_ids; "
            "for whole sequences on every rank sp.restore(model) first"
        )
    if batch_hash is not None and len(set(hashes)) > 1:
        raise ValueError(
            f"the ranks of a group hold shards of different batches, batch_hash = {hashes}; expected the same samples "
            "on all ranks of a group: let a sampler draw by ctx.data_parallel_rank of ctx.data_parallel_size, or take "
            "sp.ShardedDataLoader, whose ranks draw different ones"
        )
    if batch_hash is None and ctx.size > 1 and len(set(hashes)) == 1:
        raise ValueError(
            "every rank of the group holds the same tokens at the same positions, expected each rank's shard; cut "
            "batches by sp.shard, sp.DataShardingCollator or sp.ShardedDataLoader, or, for whole sequences on every "
            "rank, sp.restore(model) first"
        )
    return max(rank[-2] for rank in ranks)


def _own_hash(tokens: torch.Tensor, position_ids: torch.Tensor | None, ctx: SequenceParallel) -> torch.Tensor | int:
    """Of this rank's tokens, where they are to be compared; else its number. Embeddings are not compared."""
    if ctx.size == 1 or position_ids is None or tokens.is_floating_point():
        return ctx.rank
    return hash_of({"tokens": tokens, "position_ids": position_ids})
