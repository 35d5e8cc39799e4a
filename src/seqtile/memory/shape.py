"""The shape of a model, read from its configuration alone: its widths, its parameters and its windows."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from seqtile.arch import ARCHS, Arch
from seqtile.memory.setup import expect, is_count

ASSUMED = replace(ARCHS["llama"], layer=False, liger=False)
"""The table entry for unknown model types: a Llama that neither seqtile nor Liger supports."""
OTHER_KINDS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_intermediate_size", "kv_lora_rank")
"""Config fields that indicate experts or latent attention."""


class NoFormula(ValueError):
    """Raised for a model whose memory no formula here predicts."""


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
    """True if embedding and head share one matrix."""
    attention_biases: int = 0
    """Elements per layer."""
    mlp_biases: int = 0
    softcap: bool = False
    """True if logits have a soft cap."""
    experts: int = 0
    """Experts per layer; 0 if the model is no mixture of experts."""
    experts_per_token: int = 1
    windows: tuple[int | None, ...] = (None,)
    """The window of each kind of attention layer, in tokens; None: it has none."""
    positions: int | None = None
    """The longest sequence that the model is configured for, in tokens."""
    inside: str | None = None
    """The type of the multimodal model that contains this text model; None if there is none."""
    quantised: bool = False

    @property
    def arch(self) -> Arch:
        return ARCHS.get(self.model_type, ASSUMED)

    @property
    def assumed(self) -> bool:
        """True if the model type is unknown and its layers are assumed to be Llama's."""
        return self.model_type not in ARCHS

    @property
    def tiles_whole(self) -> bool:
        """True if seqtile tiles its layers as a whole."""
        return self.arch.layer and self.inside is None

    @property
    def notes(self) -> list[str]:
        """Sentences about parts of the configuration that the plan does not include."""
        notes = {
            f"only the text model of {self.inside} is planned": self.inside is not None,
            f"model type {self.model_type} is not known; planned as a Llama, which may be far off": self.assumed,
            "its quantization_config is not read: weights are counted in full without load_in_4bit": self.quantised,
        }
        return [note for note, applies in notes.items() if applies]

    @property
    def q(self) -> int:
        """The width of the queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """The width of the keys, equal to that of the values."""
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention projections."""
        return 2 * self.hidden * (self.q + self.kv) + self.attention_biases

    @property
    def mlp_parameters(self) -> int:
        """Parameters of a layer's MLP, or of all its experts and their router."""
        return self.hidden * (3 * self.mlp * max(self.experts, 1) + self.experts) + self.mlp_biases

    @property
    def layer_parameters(self) -> int:
        arch = self.arch
        norms = 1 if arch.parallel else 2 * (arch.norm_before + arch.norm_after)
        head_norms = {None: 0, "shared": 2 * self.head_dim, "own": self.q + self.kv}[arch.head_norm]
        return self.attention_parameters + self.mlp_parameters + norms * self.hidden + head_norms

    @property
    def head_parameters(self) -> int:
        """Parameters of the head's matrix."""
        return self.vocab * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Parameters outside of the layers."""
        return self.head_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Returns the parameters of LoRA adapters of this rank on every projection of attention and MLP."""
        d, m = self.hidden, self.mlp
        a_layer = 2 * (d + self.q) + 2 * (d + self.kv) + 3 * (d + m) * max(self.experts, 1)
        return self.layers * rank * a_layer


GEMMA_2: dict[str, Any] = {"softcap": True, "windows": (4096, None)}
KNOWN = {
    "meta-llama/Llama-3.1-8B": Shape(4096, 14336, 32, 32, 8, 128, 128256, positions=131072),
    "meta-llama/Llama-3.1-70B": Shape(8192, 28672, 80, 64, 8, 128, 128256, positions=131072),
    "Qwen/Qwen3-0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151936, "qwen3", tied=True, positions=40960),
    "Qwen/Qwen3-4B": Shape(2560, 9728, 36, 32, 8, 128, 151936, "qwen3", tied=True, positions=40960),
    "Qwen/Qwen3-8B": Shape(4096, 12288, 36, 32, 8, 128, 151936, "qwen3", positions=40960),
    "Qwen/Qwen3-32B": Shape(5120, 25600, 64, 64, 8, 128, 151936, "qwen3", positions=40960),
    "mistralai/Mistral-7B-v0.3": Shape(4096, 14336, 32, 32, 8, 128, 32768, "mistral", positions=32768),
    "google/gemma-2-9b": Shape(3584, 14336, 42, 16, 8, 256, 256000, "gemma2", tied=True, **GEMMA_2, positions=8192),
    "HuggingFaceTB/SmolLM2-135M": Shape(576, 1536, 30, 9, 3, 64, 49152, tied=True, positions=8192),
}
"""Shapes by their names on the Hub, from their config.json."""


def shape_of(config: Any) -> Shape:
    """Returns the shape of a model without building it.

    `config` is a Hugging Face config, a dict of one, the path of a config.json (or of its directory), or a name in
    `KNOWN`. An unknown model type is assumed to be a Llama, see `Shape.assumed`.

    Raises ValueError for an unknown name, a config that lacks a width, and a model that certainly is no Llama.
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
        raise type(error)(f"{named}{error}") from error  # keeps the type NoFormula too
    inside = config.get("model_type") if fields is not config else None
    return replace(shape, inside=inside, quantised=bool(config.get("quantization_config")))


def _read(path: str | Path) -> Any:
    file = Path(path)
    expected = f"expected a directory with a config.json, such a file, or a name known offline: {', '.join(KNOWN)}"
    try:
        file = file / "config.json" if file.is_dir() else file
        if file.exists() and not file.is_file():
            raise ValueError(f"model {str(path)!r}: {expected}, got a pipe or a device; pass a file")
        return json.loads(file.read_text())
    except OSError as error:
        close = get_close_matches(str(path), KNOWN, cutoff=0.5)
        close = [name for name in close if re.findall(r"\d+", name) == re.findall(r"\d+", str(path))]  # 14B is no 4B
        remedy = f"did you mean {close[0]}?" if close else "for any other model, download its config.json and pass that"
        raise ValueError(f"model {str(path)!r}: {expected} ({error.strerror}); {remedy}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error


def _shape_of_fields(fields: Mapping[str, Any]) -> Shape:
    model_type = fields.get("model_type", "(none)")
    expect("config's model_type", isinstance(model_type, str), "a str", model_type)
    arch = ARCHS.get(model_type, ASSUMED)
    window = fields.get("sliding_window", arch.defaults.get("sliding_window"))  # null: there is none
    fields = arch.defaults | {name: value for name, value in fields.items() if value is not None}

    def width(name: str, default: int | None = None) -> int:
        value = fields.get(name, default)
        if value is None:
            raise ValueError(f"this config, of model type {model_type}, has no {name}")
        expect(f"config's {name}", is_count(value), "a positive int", value)
        return value

    def flag(name: str) -> bool:
        value = fields.get(name, False)
        expect(f"config's {name}", isinstance(value, bool), "true or false", value)
        return value

    biased = arch.attention_bias != "" and flag("attention_bias")
    if not arch.routed and any(fields.get(name) for name in OTHER_KINDS):
        planned = " and ".join(name for name, other in ARCHS.items() if other.routed)
        raise NoFormula(f"model type {model_type} has experts or latent attention; of such, {planned} are planned")
    if arch.routed and (fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1):
        raise NoFormula("layers of two kinds, with experts and without, are not planned")
    hidden, heads = width("hidden_size"), width("num_attention_heads")
    head_dim = width("head_dim", max(1, hidden // heads))
    kv_heads = width("num_key_value_heads", heads)
    expect("config's num_key_value_heads", heads % kv_heads == 0, f"a divisor of the {heads} heads", kv_heads)
    mlp = width(arch.mlp_width)
    outputs = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim, "o": hidden}
    widths = (hidden, mlp, width("num_hidden_layers"), heads, kv_heads, head_dim, width("vocab_size"))
    return Shape(
        *widths,
        model_type,
        tied=flag("tie_word_embeddings"),
        attention_biases=sum(outputs[projection] for projection in arch.attention_bias) if biased else 0,
        mlp_biases=2 * mlp + hidden if flag("mlp_bias") else 0,
        softcap=any(other.softcap in fields for other in ARCHS.values()),
        experts=width("num_local_experts", fields.get("num_experts")) if arch.routed else 0,
        experts_per_token=width("num_experts_per_tok") if arch.routed else 1,
        windows=_windows(arch, fields, window),
        positions=width("max_position_embeddings") if "max_position_embeddings" in fields else None,
    )


def _windows(arch: Arch, fields: Mapping[str, Any], window: int | None) -> tuple[int | None, ...]:
    """Returns the window of each kind of attention layer that Hugging Face makes a mask for, for a config whose layers
    have this window, or some do."""
    expect("config's sliding_window", window is None or is_count(window), "a positive int or null", window)
    types = str(fields.get("layer_types") or "sliding")
    if window is None or fields.get("use_sliding_window") is False or "sliding" not in types:
        return (None,)
    return (window, None) if arch.some_windows or "full" in types else (window,)
