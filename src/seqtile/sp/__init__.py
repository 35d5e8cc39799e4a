"""Sequence parallelism: one long sequence over many GPUs (Ulysses), for any number of heads."""

from seqtile.sp.collator import DataShardingCollator, shard
from seqtile.sp.context import SequenceParallel, initialize
from seqtile.sp.loader import ShardedDataLoader
from seqtile.sp.loss import count_items, reduce_loss
from seqtile.sp.spread import apply_ulysses, restore
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
