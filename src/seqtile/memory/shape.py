"""What of a model's configuration its memory depends on, read without building the model and without Hugging Face."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Norms:
    """Which norms a decoder layer has, and how Hugging Face's code computes them."""

    kind: str = "rms"
    before: bool = True
    """Before attention and MLP."""
    after: bool = False
    """After attention and MLP."""
    of_heads: bool = False
    """Of queries and keys."""
    whole: bool = False
    """Those have a weight for every head, not one for all."""
    parallel: bool = False
    """One norm is before both attention and MLP, which are side by side."""


NORMS = {
    "cohere": Norms("layer", parallel=True),
    "gemma2": Norms("gemma", after=True),
    "gemma3_text": Norms("gemma", after=True, of_heads=True),
    "glm4": Norms(after=True),
    "olmo2": Norms("olmo", before=False, after=True, of_heads=True, whole=True),
    "qwen3": Norms(of_heads=True),
    "qwen3_moe": Norms(of_heads=True),
}
"""Of the model types whose layers are not Llama's."""
LIKE_LLAMA = ("granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "smollm3")
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "cohere": {"tie_word_embeddings": True},
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000}
    | {"tie_word_embeddings": True, "final_logit_softcapping": 30.0},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
    | {"tie_word_embeddings": True},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {"attention_bias": True},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 768},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}
"""What Hugging Face's classes take where config.json says nothing."""
_UNBIASED = ("mistral", "mixtral", "phi3")  # whatever config.json says
_MIXTURES = ("mixtral", "qwen3_moe")
_OTHER_KINDS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_intermediate_size", "kv_lora_rank")


@dataclass(frozen=True)
class Shape:
    """The widths of a causal LM, in elements."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    model_type: str = "llama"
    tied: bool = False
    """Whether embedding and head are one."""
    attention_biases: int = 0
    """Elements, of a layer."""
    mlp_biases: int = 0
    softcap: bool = False
    """Whether logits have a soft cap."""
    experts: int = 0
    """Of a layer; 0 if it is no mixture."""
    experts_per_token: int = 1

    @property
    def assumed(self) -> bool:
        """Whether its layers are taken for Llama's because its type is not known."""
        return self.model_type not in (*NORMS, *LIKE_LLAMA)

    @property
    def norms(self) -> Norms:
        return NORMS.get(self.model_type, Norms())

    @property
    def fused_qkv(self) -> bool:
        """Whether one projection makes queries, keys and values."""
        return self.model_type == "phi3"

    @property
    def scales_embedding(self) -> bool:
        """Whether embeddings are multiplied before the first layer."""
        return self.model_type == "granite"

    @property
    def fused_gate_up(self) -> bool:
        return self.model_type in ("glm4", "phi3")

    @property
    def q(self) -> int:
        """The width of the queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """The width of the keys, which is that of the values."""
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Of the projections of a layer."""
        return 2 * self.hidden * (self.q + self.kv) + self.attention_biases

    @property
    def mlp_parameters(self) -> int:
        """Of a layer, of all its experts."""
        matrices = 3 * self.hidden * self.mlp * max(self.experts, 1)
        return matrices + self.hidden * self.experts + self.mlp_biases

    @property
    def layer_parameters(self) -> int:
        norms = self.norms
        count = 1 if norms.parallel else 2 * (norms.before + norms.after)
        of_heads = (self.q + self.kv if norms.whole else 2 * self.head_dim) if norms.of_heads else 0
        return self.attention_parameters + self.mlp_parameters + count * self.hidden + of_heads

    @property
    def head_parameters(self) -> int:
        """Of the matrix that makes logits."""
        return self.vocab * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Of everything but the layers."""
        return self.head_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA of this rank over every projection of attention and MLP."""
        d, m = self.hidden, self.mlp
        a_layer = 2 * (d + self.q) + 2 * (d + self.kv) + 3 * (d + m) * max(self.experts, 1)
        return self.layers * rank * a_layer


KNOWN = {
    "meta-llama/Llama-3.1-8B": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "meta-llama/Llama-3.1-70B": Shape(8192, 28672, 80, 64, 8, 128, 128256),
    "Qwen/Qwen3-8B": Shape(4096, 12288, 36, 32, 8, 128, 151936, "qwen3"),
    "Qwen/Qwen3-32B": Shape(5120, 25600, 64, 64, 8, 128, 151936, "qwen3"),
    "mistralai/Mistral-7B-v0.3": Shape(4096, 14336, 32, 32, 8, 128, 32768, "mistral"),
    "google/gemma-2-9b": Shape(3584, 14336, 42, 16, 8, 256, 256000, "gemma2", tied=True, softcap=True),
    "HuggingFaceTB/SmolLM2-135M": Shape(576, 1536, 30, 9, 3, 64, 49152, tied=True),
}
"""By their names on the hub, from their config.json."""


def shape_of(config: Any) -> Shape:
    """The shape of a model: a Hugging Face config, a dict of one, the path of a config.json (or of the directory it is
    in), or a name in `KNOWN`. A model type that is not known is taken for a Llama, see `Shape.assumed`.

    Raises ValueError for a name that is not known, for a config that lacks a width, and for what is certainly no Llama.
    """
    if isinstance(config, Shape):
        return config
    if isinstance(config, str | Path):
        by_lower_case = {name.lower(): shape for name, shape in KNOWN.items()}
        if (known := by_lower_case.get(str(config).lower().removesuffix("-instruct"))) is not None:
            return known
        config = _read(Path(config))
    elif hasattr(config, "to_dict"):
        config = config.to_dict()
    fields = config.get("text_config") or config if isinstance(config, Mapping) else None
    if not isinstance(fields, Mapping):
        raise ValueError(f"expected a model's config, a dict of one, a path or a name, got {config!r}")
    return _shape_of_fields(fields)


def _read(path: Path) -> Any:
    try:
        file = path / "config.json" if path.is_dir() else path
        return json.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"model {str(path)!r}: expected a directory with a config.json, such a file, or one of {', '.join(KNOWN)} "
            f"({error.strerror})"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error


def _shape_of_fields(fields: Mapping[str, Any]) -> Shape:
    model_type = fields.get("model_type", "llama")
    if not isinstance(model_type, str):
        raise ValueError(f"config's model_type: expected a str, got {model_type!r}")
    fields = DEFAULTS.get(model_type, {}) | {name: value for name, value in fields.items() if value is not None}

    def width(*names: str, default: int | None = None) -> int:
        value = next((fields[name] for name in names if name in fields), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config's {names[0]}: expected a positive int, got {value!r}")
        return value

    def flag(name: str, default: bool = False) -> bool:
        value = fields.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"config's {name}: expected true or false, got {value!r}")
        return value

    biased = model_type not in _UNBIASED and flag("attention_bias")
    mixture = model_type in _MIXTURES
    if not mixture and any(fields.get(name) for name in _OTHER_KINDS):
        raise ValueError(f"model type {model_type!r} is no Llama, and of mixtures {', '.join(_MIXTURES)} are planned")
    if mixture and (fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1):
        raise ValueError("layers of two kinds, with experts and without, are not planned")
    hidden, heads = width("hidden_size"), width("num_attention_heads")
    head_dim = width("head_dim", default=max(1, hidden // heads))
    kv_heads = width("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(f"config's num_key_value_heads: expected a divisor of the {heads} heads, got {kv_heads}")
    mlp = width(*(("moe_intermediate_size",) if model_type == "qwen3_moe" else ()), "intermediate_size")
    q_and_kv = (heads + 2 * kv_heads) * head_dim
    output_bias = 0 if model_type in ("qwen2", "glm4") else hidden
    return Shape(
        hidden,
        mlp,
        width("num_hidden_layers"),
        heads,
        kv_heads,
        head_dim,
        width("vocab_size"),
        model_type,
        tied=flag("tie_word_embeddings"),
        attention_biases=q_and_kv + output_bias if biased else 0,
        mlp_biases=2 * mlp + hidden if flag("mlp_bias") else 0,
        softcap="final_logit_softcapping" in fields,
        experts=width("num_local_experts", "num_experts") if mixture else 0,
        experts_per_token=width("num_experts_per_tok") if mixture else 1,
    )
