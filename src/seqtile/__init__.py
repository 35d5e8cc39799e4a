"""seqtile: the loss and the MLP of Hugging Face models, in memory that does not grow with sequence length."""

from seqtile import modules
from seqtile.models import (
    apply_seqtile,
    apply_seqtile_to_cohere,
    apply_seqtile_to_gemma2,
    apply_seqtile_to_gemma3_text,
    apply_seqtile_to_glm4,
    apply_seqtile_to_granite,
    apply_seqtile_to_llama,
    apply_seqtile_to_mistral,
    apply_seqtile_to_olmo2,
    apply_seqtile_to_phi3,
    apply_seqtile_to_qwen2,
    apply_seqtile_to_qwen3,
    apply_seqtile_to_smollm3,
    restore,
    status,
)
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
    "apply_seqtile_to_cohere",
    "apply_seqtile_to_gemma2",
    "apply_seqtile_to_gemma3_text",
    "apply_seqtile_to_glm4",
    "apply_seqtile_to_granite",
    "apply_seqtile_to_llama",
    "apply_seqtile_to_mistral",
    "apply_seqtile_to_olmo2",
    "apply_seqtile_to_phi3",
    "apply_seqtile_to_qwen2",
    "apply_seqtile_to_qwen3",
    "apply_seqtile_to_smollm3",
    "gated_mlp",
    "linear_cross_entropy",
    "linear_log_probs",
    "modules",
    "restore",
    "status",
    "tiled",
]
