"""The memory model: what a training step will need, and how long a sequence may be, before it runs.

No torch and no transformers in this room: it answers at once.
"""

from seqtile.memory.config import shape_of
from seqtile.memory.plan import Longest, Plan, ladder, longest, plan
from seqtile.memory.setup import OFFLOAD, OPTIMIZERS, TILES, Setup
from seqtile.memory.shape import KNOWN, Shape

__all__ = [
    "KNOWN",
    "OFFLOAD",
    "OPTIMIZERS",
    "TILES",
    "Longest",
    "Plan",
    "Setup",
    "Shape",
    "ladder",
    "longest",
    "plan",
    "shape_of",
]
