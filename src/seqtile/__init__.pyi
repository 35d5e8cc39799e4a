"""The public names of `seqtile` for type checkers and editors: its names are imported when they are first used.

`test/test_public_face.py` holds it against the package: a new architecture needs its function here.
"""

from torch import nn

from seqtile import memory, models, modules, offload, sp
from seqtile.models import apply_seqtile, restore, status
from seqtile.ops.gated_mlp import gated_mlp
from seqtile.ops.linear import LowRank
from seqtile.ops.linear_cross_entropy import LossMetrics, linear_cross_entropy
from seqtile.ops.linear_log_probs import linear_log_probs
from seqtile.ops.tiled import tiled

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
    "apply_seqtile_to_mixtral",
    "apply_seqtile_to_olmo2",
    "apply_seqtile_to_phi3",
    "apply_seqtile_to_qwen2",
    "apply_seqtile_to_qwen3",
    "apply_seqtile_to_qwen3_moe",
    "apply_seqtile_to_smollm3",
    "gated_mlp",
    "linear_cross_entropy",
    "linear_log_probs",
    "memory",
    "models",
    "modules",
    "offload",
    "restore",
    "sp",
    "status",
    "tiled",
]

__version__: str

def apply_seqtile_to_cohere(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Cohere models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_gemma2(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Gemma2 models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_gemma3_text(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Gemma3 models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_glm4(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Glm4 models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_granite(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Granite models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_llama(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Llama models: the loss and the MLP in memory that does not grow with length.

    Args:
        model: the model to tile, alone, also in PEFT's wrapper; None tiles Hugging Face's classes, for every
            LlamaForCausalLM built from then on.
        mlp: tile the MLPs.
        loss: tile lm_head and loss: in training, with labels, no logits are computed and none are returned.
        layer: tile whole layers: everything of a layer but attention itself, and the norm behind the last layer. A
            layer then keeps its input, queries, keys, values and what attention returned. Of Liger's norms the weights
            are read; neither they nor its RoPE are called.
        head_groups: with `layer`, compute attention for so many groups of kv heads one after the other, so that
            queries, keys and values exist for one group at a time, and are not kept; "auto" makes as many groups as
            divide the kv heads, up to 8. An attention that keeps other large tensors is refused, or, given a number,
            computed once more. It must treat every head alike (no slopes or biases by head), since it is not told which
            heads it is given.
        chunk_tokens: tokens of a chunk; None for max(2048, hidden size), for the experts of a mixture more.

    Applying twice changes nothing. Apply after Liger, whose RMSNorm and RoPE stay. `seqtile.restore` undoes it,
    `seqtile.status` tells what is tiled.

    Plain nn.Linear layers and plain LoRA over them are read directly. What cannot be (experts, quantised layers, other
    adapters, dropout, unusual activations, hooks) is called as it is, chunk by chunk, which costs one product more of
    the loss; `seqtile.status` tells which.

    Raises ValueError, and changes nothing, for what it cannot honour, such as another loss function.
    """

def apply_seqtile_to_mistral(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Mistral models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_mixtral(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Mixtral models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_olmo2(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Olmo2 models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_phi3(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Phi3 models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_qwen2(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Qwen2 models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_qwen3(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Qwen3 models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_qwen3_moe(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles Qwen3Moe models. Arguments and errors are those of `apply_seqtile_to_llama`."""

def apply_seqtile_to_smollm3(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles SmolLM3 models. Arguments and errors are those of `apply_seqtile_to_llama`."""
