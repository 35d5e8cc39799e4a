"""Activation checkpointing with saved inputs in host memory, copied while the GPU computes."""

from seqtile.offload.checkpointing import checkpoint, disable, enable
from seqtile.offload.store import HostMemoryFull

__all__ = ["HostMemoryFull", "checkpoint", "disable", "enable"]
