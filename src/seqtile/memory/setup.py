"""The setup of a training run and the shape of a model: everything that memory depends on except the length. A shape
is read from a model's configuration alone."""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from seqtile.arch import ARCHS, Arch

GIB = 2**30
MOST = 2**60  # of a count: the bytes of more would overflow a float
FLOAT = 4
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
OPTIMIZERS = {"adamw": 8, "adamw_8bit": 2, "sgd": 0}
"""Optimizer state in bytes per trained parameter. For half-precision weights, adamw also keeps a float32 copy."""
TILES = ("loss", "mlp", "layer")
OFFLOAD = ("activations", "optimizer", "weights")
SWITCHES = ("liger", "autocast", "load_in_4bit", "accumulate")


def expect(name: str, right: object, expected: str, got: object) -> None:
    """Raises a ValueError that states what was expected and what was given, unless `right` is true."""
    if not right:
        below = " below 2**60" if isinstance(got, int) and got >= MOST else ""
        raise ValueError(f"{name}: expected {expected}{below}, got {got!r:.60}")


def is_count(value: object, least: int = 1) -> bool:
    """Returns whether `value` is an int of at least `least` and less than `MOST`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < MOST


@dataclass(frozen=True)
class Setup:
    """A training setup, with activation checkpointing of every layer. Raises ValueError for impossible values."""

    gpus: int = 1
    """GPUs in total."""
    sequence_parallel: int = 1
    """GPUs that share a sequence."""
    batches: str = "cut"
    """The input of these GPUs: "cut", each gets its part of a batch, or "whole" batches, as in `sp.apply_ulysses`."""
    shared_tokens: int = 0
    """Tokens of a prefix, without labels, that all sequences of a batch share and `seqtile.share_prefixes` computes
    once."""
    accumulate: bool = False
    """True: a step takes several batches, and the gradients of earlier ones stay in memory."""
    zero_stage: int = 3
    """The stage of ZeRO. It shards over all GPUs: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 (as FSDP2)
    also weights."""
    optimizer: str = "adamw"
    """One of adamw, adamw_8bit and sgd. For half-precision weights adamw keeps a float32 copy: with weights and
    gradients 16 bytes per parameter, as for float32 weights under FSDP2's mixed precision. The others keep none;
    adamw_8bit keeps the state of embeddings in float32, as Trainer configures bitsandbytes."""
    dtype: str = "bfloat16"
    """The dtype of weights, gradients and activations."""
    autocast: bool = False
    """True: weights, their gradients and the residual stream are float32, under torch.autocast to `dtype`."""
    tiles: Collection[str] | str = ("loss", "mlp")
    """The parts computed chunk by chunk, some of loss, mlp and layer (all of a decoder layer except attention)."""
    head_groups: int | str | None = None
    """Groups of kv heads that attend one after the other in a tiled layer. None: all heads at once. "auto": the largest
    number up to 8 that divides the kv heads and leaves each GPU that shares a sequence a kv head in every group."""
    chunk_tokens: int | None = None
    """Tokens per chunk; None for the rule of `seqtile.ops.chunks`."""
    liger: bool = False
    """True: Liger's norms and RoPE, which save less, and its product of gate and up if the MLP is not tiled."""
    offload: Collection[str] | str = ()
    """What is kept in host memory: any of activations (`seqtile.offload`), optimizer (with gradients) and weights."""
    keep_last: int = 1
    """Last layers whose inputs stay on the GPU despite offloading."""
    lora_rank: int | None = None
    """The rank of PEFT's float32 LoRA adapters on every projection of attention and MLP; all else is frozen. None:
    every parameter is trained."""
    load_in_4bit: bool = False
    """True: bitsandbytes quantizes the projections of attention and MLP to 4 bits (NF4, double quantization), and each
    part dequantizes its own while it runs. They are frozen, so `lora_rank` is required."""
    gpu_memory_gib: float = 80
    """GiB of a GPU that a step may fill; `memory.room` leaves a fifth of a GPU's size free."""
    host_memory_gib: float = 1900
    """Memory of a node."""
    gpus_per_node: int = 8
    """GPUs of a node, which share its host memory."""

    def __post_init__(self) -> None:
        count = "a positive int"
        groups = self.head_groups in (None, "auto") or is_count(self.head_groups)
        for name, right, expected in (
            *((name, isinstance(getattr(self, name), bool), "True or False") for name in SWITCHES),
            *((name, is_count(getattr(self, name)), count) for name in ("gpus", "sequence_parallel", "gpus_per_node")),
            ("batches", self.batches in ("cut", "whole"), "cut or whole"),
            ("shared_tokens", is_count(self.shared_tokens, 0), "0 or more tokens"),
            ("chunk_tokens", self.chunk_tokens is None or is_count(self.chunk_tokens), count),
            ("lora_rank", self.lora_rank is None or is_count(self.lora_rank), count),
            ("dtype", self.dtype in tuple(DTYPES), f"one of {', '.join(DTYPES)}"),
            ("optimizer", self.optimizer in tuple(OPTIMIZERS), f"one of {', '.join(OPTIMIZERS)}"),
            ("tiles", _are_some(self.tiles, TILES), f"some of {', '.join(TILES)}"),
            ("offload", _are_some(self.offload, OFFLOAD), f"some of {', '.join(OFFLOAD)}"),
            ("head_groups", groups, f'{count}, "auto" or None'),
            ("gpu_memory_gib", is_size(self.gpu_memory_gib), "more than 0 GiB"),
            ("host_memory_gib", is_size(self.host_memory_gib), "more than 0 GiB"),
            ("zero_stage", self.zero_stage in range(4), "0, 1, 2 or 3"),
            ("keep_last", is_count(self.keep_last, 0), "0 or more layers"),
        ):
            expect(name, right, expected, getattr(self, name))
        for name in ("tiles", "offload"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        layer, divided = "layer" in self.tiles, self.gpus % self.sequence_parallel == 0
        expect("tiles", "mlp" in self.tiles or not layer, "mlp too, since it is tiled with the layer", self.tiles)
        expect("head_groups", layer or self.head_groups is None, "None, since tiles has no layer", self.head_groups)
        expect("sequence_parallel", divided, f"a divisor of the {self.gpus} GPUs", self.sequence_parallel)
        whole = self.batches == "whole" or self.sequence_parallel == 1 or not self.shared_tokens
        expect("batches", whole, "whole, since a part of a batch tells no GPU what it shares", self.batches)
        half = "bfloat16 or float16 under autocast, which computes in it"
        expect("dtype", not self.autocast or self.bytes < FLOAT, half, self.dtype)
        expect("autocast", not (self.autocast and self.load_in_4bit), "False with load_in_4bit", True)
        adapted = not (self.load_in_4bit and self.full)
        expect("load_in_4bit", adapted, "False, or a lora_rank besides, since what has 4 bits is not trained", True)
        if "optimizer" in self.offload and self.optimizer == "adamw_8bit":
            raise ValueError("offload of the optimizer: expected adamw or sgd, got adamw_8bit, which computes on a GPU")
        if "weights" in self.offload and self.load_in_4bit:
            raise ValueError("offload of weights: expected none with load_in_4bit, which decodes them on the GPU")
        if "weights" in self.offload and self.gpus > 1 and self.zero_stage < 3:
            raise ValueError(f"offload of weights needs zero_stage 3 on {self.gpus} GPUs, got {self.zero_stage}")

    @property
    def bytes(self) -> int:
        """Bytes per element of the tensors that matrix products read or write."""
        return DTYPES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of weights, their gradients and the residual stream."""
        return FLOAT if self.autocast else self.bytes

    @property
    def full(self) -> bool:
        """True if every parameter is trained, False if only adapters are."""
        return self.lora_rank is None

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer per trained parameter, including a float32 copy of its weight."""
        master = FLOAT if self.full and self.weight_bytes < FLOAT and self.optimizer == "adamw" else 0
        return OPTIMIZERS[self.optimizer] + master

    def cast(self, parameters: int) -> int:
        """Returns the bytes of autocast's copies of this many weights; 0 without autocast."""
        return parameters * self.bytes if self.autocast else 0

    def decoded(self, parameters: int) -> int:
        """Returns the bytes of this many 4-bit weights, or of weights under autocast, while a tiled part computes with
        them; 0 for other weights."""
        return parameters * self.bytes if self.load_in_4bit or self.autocast else 0

    def ranks(self, stage: int) -> int:
        """Returns the number of GPUs that share what ZeRO shards from `stage` on."""
        return self.gpus if self.zero_stage >= stage else 1


def setup_of(options: Mapping[str, Any]) -> Setup:
    """Returns the setup with these fields. Raises TypeError for an unknown field, and names the closest known one."""
    names = ("batch_size", *(field.name for field in fields(Setup)))
    for name in options:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"expected some of {', '.join(names)}"
            raise TypeError(f"{name} is no option of a plan; {remedy}")
    return Setup(**options)


def _are_some(value: object, known: Collection[str]) -> bool:
    parts = (value,) if isinstance(value, str) else value
    return isinstance(parts, tuple | list | set | frozenset) and all(part in known for part in parts)


def is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


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


KNOWN = {
    "meta-llama/Llama-3.1-8B": Shape(4096, 14336, 32, 32, 8, 128, 128256, positions=131072),
    "meta-llama/Llama-3.1-70B": Shape(8192, 28672, 80, 64, 8, 128, 128256, positions=131072),
    "Qwen/Qwen3-0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151936, "qwen3", tied=True, positions=40960),
    "Qwen/Qwen3-4B": Shape(2560, 9728, 36, 32, 8, 128, 151936, "qwen3", tied=True, positions=40960),
    "Qwen/Qwen3-8B": Shape(4096, 12288, 36, 32, 8, 128, 151936, "qwen3", positions=40960),
    "Qwen/Qwen3-32B": Shape(5120, 25600, 64, 64, 8, 128, 151936, "qwen3", positions=40960),
    "mistralai/Mistral-7B-v0.3": Shape(4096, 14336, 32, 32, 8, 128, 32768, "mistral", positions=32768),
    "google/gemma-2-9b": Shape(3584, 14336, 42, 16, 8, 256, 256000, "gemma2", tied=True, softcap=True, positions=8192),
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
    expected = f"expected a directory with a config.json, such a file, or one of {', '.join(KNOWN)}"
    try:
        file = file / "config.json" if file.is_dir() else file
        if file.exists() and not file.is_file():
            raise ValueError(f"model {str(path)!r}: {expected}, got a pipe or a device; pass a file")
        return json.loads(file.read_text())
    except OSError as error:
        close = get_close_matches(str(path), KNOWN, cutoff=0.5)
        close = [name for name in close if re.findall(r"\d+", name) == re.findall(r"\d+", str(path))]  # 14B is no 4B
        remedy = f"did you mean {close[0]}?" if close else "download its config.json"
        raise ValueError(f"model {str(path)!r}: {expected} ({error.strerror}); {remedy}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error


def _shape_of_fields(fields: Mapping[str, Any]) -> Shape:
    model_type = fields.get("model_type", "(none)")
    expect("config's model_type", isinstance(model_type, str), "a str", model_type)
    arch = ARCHS.get(model_type, ASSUMED)
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
        positions=width("max_position_embeddings") if "max_position_embeddings" in fields else None,
    )
