"""The table of architectures that can be planned. One entry each; a field is added only when a real one needs it.

What is tiled of a model is found in its code, see models/find.py; what is planned of it without its code is here, and
the tests, which run over the table, say whether an entry is true. CONTRIBUTING.md has the steps. Reading it
imports neither torch nor transformers.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arch:
    """An architecture: where its code differs from Llama's."""

    model_type: str
    """`config.model_type`."""
    softcap: str | None = None
    """The config's name for the soft cap of its logits."""
    layer: bool = False
    """True if its layers have Llama's shape, norm, attention, norm, MLP one after the other; tiled, they are fused."""
    capped_scores: bool = False
    """True if attention has a soft cap, too."""
    some_windows: bool = False
    """True if a window in the config is that of some layers only."""
    norm: str = "rms"
    """The kind of its norms: "rms", whose weight multiplies in the model's dtype, "rms_float32", whose weight
    multiplies in float32, or "layer", a LayerNorm in float32."""
    norm_before: bool = True
    """True if a norm is before attention and before the MLP."""
    norm_after: bool = False
    """True if a norm is after attention and after the MLP, before what they return is added."""
    head_norm: str | None = None
    """The weights of the norms of queries and keys: "shared" by all heads, or each head's "own"."""
    parallel: bool = False
    """True if attention and MLP are side by side, behind one norm."""
    merged: tuple[str, ...] = ()
    """The parts that one projection makes at once: "qkv", "gate_up"."""
    attention_bias: str = "qkvo"
    """The projections that have a bias where the config's attention_bias is true."""
    mlp_width: str = "intermediate_size"
    """The config's name for the width of its MLPs, or of its experts."""
    routed: bool = False
    """True if it is a mixture of experts, whose causal LM may add a loss that balances them."""
    float32_routing: bool = False
    """True if the outputs of experts are weighted in float32."""
    embedding_scale: str | None = None
    """The config's name for what its model multiplies embeddings by, where the embedding itself does not."""
    liger: bool = True
    """True if Liger has a patch for it, with its norms."""
    defaults: dict[str, object] = field(default_factory=dict, hash=False)
    """Values of its config, or of its code, where a config.json says nothing; those that `seqtile.memory` reads."""


TIED = {"tie_word_embeddings": True}
GEMMA = {"softcap": "final_logit_softcapping", "norm": "rms_float32", "norm_after": True, "some_windows": True}
NO_WINDOW = {"use_sliding_window": False}
GEMMA_SIZES = TIED | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
GLM4_SIZES = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}
MIXTRAL_SIZES = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE_SIZES = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_key_value_heads": 4}
QWEN3_MOE_SIZES |= NO_WINDOW
_TABLE = (
    Arch("cohere", norm="layer", parallel=True, liger=False, defaults=TIED),
    Arch(
        "gemma2",
        **GEMMA,
        capped_scores=True,
        defaults=GEMMA_SIZES | {"vocab_size": 256000, "final_logit_softcapping": 30.0},
    ),
    Arch("gemma3_text", **GEMMA, head_norm="shared", defaults=GEMMA_SIZES | {"vocab_size": 262208}),
    Arch("glm4", norm_after=True, merged=("gate_up",), attention_bias="qkv", defaults=GLM4_SIZES),
    Arch("granite", layer=True, embedding_scale="embedding_multiplier"),
    Arch("llama", layer=True),
    Arch("mistral", layer=True, attention_bias="", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    Arch("mixtral", routed=True, attention_bias="", float32_routing=True, defaults=MIXTRAL_SIZES),
    Arch("olmo2", norm="rms_float32", norm_before=False, norm_after=True, head_norm="own"),
    Arch("phi3", merged=("qkv", "gate_up"), attention_bias=""),
    Arch("qwen2", layer=True, attention_bias="qkv", defaults=NO_WINDOW | {"attention_bias": True}),
    Arch("qwen3", layer=True, head_norm="shared", defaults=NO_WINDOW | {"head_dim": 128}),
    Arch("qwen3_moe", routed=True, head_norm="shared", mlp_width="moe_intermediate_size", defaults=QWEN3_MOE_SIZES),
    Arch("smollm3", layer=True, defaults=TIED | NO_WINDOW | {"num_key_value_heads": 4}),
)
ARCHS = {arch.model_type: arch for arch in _TABLE}
