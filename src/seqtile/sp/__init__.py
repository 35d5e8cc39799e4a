"""Sequence parallelism: shards one long sequence over many GPUs (Ulysses), for any number of heads."""

from seqtile.sp.apply import apply_ulysses, restore
from seqtile.sp.cut import DataShardingCollator, ShardedDataLoader, count_items, reduce_loss, shard
from seqtile.sp.groups import SequenceParallel, initialize
from seqtile.sp.trainer import SequenceParallelTrainerMixin

__all__ = [
    "DataShardingCollator",
    "SequenceParallel",
    "SequenceParallelTrainerMixin",
    "ShardedDataLoader",
    "apply_ulysses",
    "count_items",
    "initialize",
    "reduce_loss",
    "restore",
    "shard",
]
