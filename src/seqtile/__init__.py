"""seqtile: the loss and the MLP of Hugging Face models, in memory that does not grow with sequence length."""

from seqtile import models, modules, offload, sp
from seqtile.models import apply_seqtile, restore, status
from seqtile.ops.gated_mlp import gated_mlp
from seqtile.ops.linear_cross_entropy import LossMetrics, linear_cross_entropy
from seqtile.ops.linear_log_probs import linear_log_probs
from seqtile.ops.projection import LowRank
from seqtile.ops.tiled import tiled

__version__ = "0.1.0"

__all__ = [
    "LossMetrics",
    "LowRank",
    "apply_seqtile",
    "gated_mlp",
    "linear_cross_entropy",
    "linear_log_probs",
    "modules",
    "offload",
    "restore",
    "sp",
    "status",
    "tiled",
    *models.ENTRIES,
]

globals().update(models.ENTRIES)  # apply_seqtile_to_llama and so on: one for each entry of the table in models/arch.py
