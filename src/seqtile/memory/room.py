"""The memory of a GPU that a training step may fill: less than all, since plans may be too low."""

from seqtile.memory.setup import expect, is_size

MARGIN = 0.2
"""The share of a GPU's memory that is kept free: beside measured peaks plans are up to a fifth too low."""


def room(gpu_memory_gib: float, margin: float = MARGIN) -> float:
    """Returns the GiB that a step may fill of a GPU of this size. Raises ValueError for an impossible size or share."""
    expect("gpu_memory_gib", is_size(gpu_memory_gib), "more than 0 GiB", gpu_memory_gib)
    share = margin == 0 or (is_size(margin) and margin < 1)
    expect("margin", share, "a share, at least 0 and less than 1", margin)
    return gpu_memory_gib - gpu_memory_gib * margin
