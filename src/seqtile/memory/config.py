"""A model's shape from its configuration: without building the model, without Hugging Face."""

import json
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from seqtile.memory.shape import KNOWN, Shape

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


def shape_of(config: Any) -> Shape:
    """The shape of a model: a Hugging Face config, a dict of one, the path of a config.json (or of the directory it is
    in), or a name in `KNOWN`. A model type that is not known is taken for a Llama, see `Shape.assumed`.

    Raises ValueError for a name that is not known, for a config that lacks a width, and for what is certainly no Llama.
    """
    if isinstance(config, Shape):
        return config
    named = ""
    if isinstance(config, str | Path):
        by_lower_case = {name.lower(): shape for name, shape in KNOWN.items()}
        if (known := by_lower_case.get(str(config).lower().removesuffix("-instruct"))) is not None:
            return known
        named, config = f"{config}: ", _read(config)
    elif hasattr(config, "to_dict"):
        config = config.to_dict()
    fields = config.get("text_config") or config if isinstance(config, Mapping) else None
    if not isinstance(fields, Mapping):
        raise ValueError(f"{named}expected a model's config, a dict of one, a path or a name, got {config!r}")
    try:
        shape = _shape_of_fields(fields)
    except ValueError as error:
        raise ValueError(f"{named}{error}") from error
    inside = config.get("model_type") if fields is not config else None
    return replace(shape, inside=inside, quantised=bool(config.get("quantization_config")))


def _read(path: str | Path) -> Any:
    file = Path(path)
    try:
        file = file / "config.json" if file.is_dir() else file
        return json.loads(file.read_text())
    except OSError as error:
        close = get_close_matches(str(path), KNOWN, n=1, cutoff=0.5)
        raise ValueError(
            f"model {str(path)!r}: expected a directory with a config.json, such a file, or one of {', '.join(KNOWN)} "
            f"({error.strerror}); {f'did you mean {close[0]}?' if close else 'download its config.json'}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error


def _shape_of_fields(fields: Mapping[str, Any]) -> Shape:
    model_type = fields.get("model_type", "(none)")
    if not isinstance(model_type, str):
        raise ValueError(f"config's model_type: expected a str, got {model_type!r}")
    fields = DEFAULTS.get(model_type, {}) | {name: value for name, value in fields.items() if value is not None}

    def width(*names: str, default: int | None = None) -> int:
        value = next((fields[name] for name in names if name in fields), default)
        if value is None:
            raise ValueError(f"this config, of model type {model_type}, has no {names[0]}")
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
        raise ValueError(
            f"model type {model_type} has experts or latent attention; of such, {' and '.join(_MIXTURES)} are planned"
        )
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
        positions=width("max_position_embeddings") if "max_position_embeddings" in fields else None,
    )
