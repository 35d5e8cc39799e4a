"""The public names of `seqtile` for type checkers and editors: each is imported when it is first used.

Each type of transformers with a causal language model has an `apply_seqtile_to_<model type>` with the arguments of
`apply_seqtile_to_llama`. This file names the best known; `__getattr__` stands for the others.
"""

from typing import Any

from torch import nn

from seqtile import integrations, memory, models, modules, offload, sp
from seqtile.declared import tokenwise
from seqtile.evaluation import evaluate
from seqtile.fitting import fit
from seqtile.kernels.dispatch import use_triton
from seqtile.models.apply import apply_seqtile, restore
from seqtile.models.status import status
from seqtile.ops.gated_mlp import gated_mlp
from seqtile.ops.head.cross_entropy import LossMetrics, linear_cross_entropy
from seqtile.ops.head.divergence import linear_divergence
from seqtile.ops.head.log_probs import TokenValues, linear_log_probs
from seqtile.ops.head.topk import linear_topk_divergence
from seqtile.ops.linear import LowRank
from seqtile.ops.tiled import tiled
from seqtile.sp.apply import share_prefixes

__all__ = [
    "LossMetrics",
    "LowRank",
    "TokenValues",
    "apply_seqtile",
    "apply_seqtile_to_cohere",
    "apply_seqtile_to_gemma2",
    "apply_seqtile_to_gemma3_text",
    "apply_seqtile_to_glm4",
    "apply_seqtile_to_gpt_oss",
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
    "evaluate",
    "fit",
    "gated_mlp",
    "integrations",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_topk_divergence",
    "memory",
    "models",
    "modules",
    "offload",
    "restore",
    "share_prefixes",
    "sp",
    "status",
    "tiled",
    "tokenwise",
    "use_triton",
]

__version__: str

def apply_seqtile_to_llama(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
    attention: str | None = None,
    check: bool | str = True,
) -> None:
    """Tiles llama models: the loss and the MLP in memory that does not grow with length.

    Args:
        model: the model to tile, alone, also in PEFT's wrapper; None tiles Hugging Face's classes, for every
            model of this type with a head that is built from then on.
        mlp: tile the MLPs.
        loss: tile lm_head and loss: given labels, no logits are computed unless they are read.
        layer: tile whole layers: everything in a layer except attention itself, and the norm behind the last layer. A
            layer then keeps its input, queries, keys, values and attention's output. Liger's norms and RoPE do not
            run; seqtile uses the norms' weights.
        head_groups: with `layer`, compute attention in this many head chunks (some kv heads with their query heads),
            one after the other. Queries, keys and values then exist for one at a time, and are not kept. "auto" takes
            the largest number up to 8 that divides the kv heads, and refuses attention that keeps large tensors; with
            a number, such an attention is computed once more. Attention must treat every head alike (no slopes or
            biases by head), since it is not told which heads it gets.
        chunk_tokens: tokens of a chunk; None for max(2048, hidden size), and for more in a mixture of experts, and in
            the MLPs and layers of a checkpointed small model.
        attention: "varlen" computes attention without masks of length x length, where rows are packed, padded or have
            windows, on any device: see `seqtile.attention`. None leaves attention as it is.
        check: the first training step compares the tiled model with the untiled one on 28 tokens of its own batch. It
            raises ValueError if the loss or a gradient differs by more than rounding. It compares the gradients of
            the embeddings' output and of every parameter of up to 4M numbers; "full": of every parameter. False: none.

    Applying again adds parts, and gives those that it names the new options; a part that it leaves out stays as it is.
    Apply after Liger, whose RMSNorm and RoPE stay without `layer`. `seqtile.restore` undoes it,
    `seqtile.status` tells what is tiled.

    Plain nn.Linear layers and plain LoRA over them are fused: computed from their weights. Everything else (experts,
    quantised layers, other adapters, dropout, unusual activations, hooks) runs chunk by chunk, which costs the loss
    one more product; `seqtile.status` tells which.

    Raises ValueError, and changes nothing, if it cannot do what is asked, such as under another loss function; for the
    classes also if their default config builds no model.
    """

apply_seqtile_to_cohere = apply_seqtile_to_llama
apply_seqtile_to_gemma2 = apply_seqtile_to_llama
apply_seqtile_to_gemma3_text = apply_seqtile_to_llama
apply_seqtile_to_glm4 = apply_seqtile_to_llama
apply_seqtile_to_gpt_oss = apply_seqtile_to_llama
apply_seqtile_to_granite = apply_seqtile_to_llama
apply_seqtile_to_mistral = apply_seqtile_to_llama
apply_seqtile_to_mixtral = apply_seqtile_to_llama
apply_seqtile_to_olmo2 = apply_seqtile_to_llama
apply_seqtile_to_phi3 = apply_seqtile_to_llama
apply_seqtile_to_qwen2 = apply_seqtile_to_llama
apply_seqtile_to_qwen3 = apply_seqtile_to_llama
apply_seqtile_to_qwen3_moe = apply_seqtile_to_llama
apply_seqtile_to_smollm3 = apply_seqtile_to_llama

def __getattr__(name: str) -> Any: ...
