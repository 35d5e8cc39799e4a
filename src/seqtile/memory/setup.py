"""The setup of a training run: everything that memory depends on except the model and the length."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from seqtile.attention.nodes import Nodes

GIB = 2**30
MOST = 2**60  # of a count: the bytes of more would overflow a float
FLOAT = 4
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
OPTIMIZERS = {"adamw": 8, "adamw_8bit": 2, "sgd": 0}
"""Optimizer state in bytes per trained parameter. For half-precision weights, adamw also keeps a float32 copy."""
TILES = ("loss", "mlp", "layer")
OFFLOAD = ("activations", "optimizer", "weights")
ATTENTIONS = ("varlen", "flash", "sdpa", "eager")
ROWS = ("plain", "packed", "padded")
SWITCHES = ("liger", "autocast", "load_in_4bit", "accumulate", "flat", "hsdp")


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
    flat: bool = False
    """True: GPUs that share a sequence count as one node, `sp.initialize(per_node=sequence_parallel)`: more crosses the
    network, and attention holds fewer keys."""
    batches: str = "cut"
    """The input of these GPUs: "cut", each gets its part of a batch, or "whole" batches, as in `sp.apply_ulysses`."""
    shared_tokens: int = 0
    """Tokens of a prefix, without labels, that all sequences of a batch share and `seqtile.share_prefixes` computes
    once."""
    rows: str = "plain"
    """What a sequence of a batch holds: "plain", one document of full length; "packed", several that `position_ids`
    tell apart; "padded", fewer tokens than the batch is long, which an `attention_mask` marks."""
    attention: str = "flash"
    """The model's attention. "flash", FlashAttention-2, and "varlen", that of `apply_seqtile(model,
    attention="varlen")`, need no mask and keep a log-sum-exp in float32; so does "sdpa", but for packed, padded and
    windowed sequences Hugging Face makes masks for it, of which it makes biases. "eager" makes masks, and scores."""
    accumulate: bool = False
    """True: a step takes several batches, and the gradients of earlier ones stay in memory."""
    zero_stage: int = 3
    """The stage of ZeRO. It shards over all GPUs: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 (as FSDP2)
    also weights."""
    hsdp: bool = False
    """True: FSDP2 shards over the GPUs of a node, and every node has all of it (HSDP)."""
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
            ("rows", self.rows in ROWS, f"one of {', '.join(ROWS)}"),
            ("attention", self.attention in ATTENTIONS, f"one of {', '.join(ATTENTIONS)}"),
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
        several = self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node == 0
        for right, needed, got in (
            (self.zero_stage == 3, "zero_stage 3, as FSDP2 shards", self.zero_stage),
            (not self.load_in_4bit, "load_in_4bit to be False", True),
            (not {"optimizer", "weights"} & {*self.offload}, "no optimizer or weights in offload", self.offload),
            (several, f"two or more whole nodes of {self.gpus_per_node} GPUs", self.gpus),
        ):
            expect("hsdp", right or not self.hsdp, needed, got)
        half = "bfloat16 or float16 under autocast, which computes in it"
        expect("dtype", not self.autocast or self.bytes < FLOAT, half, self.dtype)
        expect("autocast", not (self.autocast and self.load_in_4bit), "False with load_in_4bit", True)
        adapted = not (self.load_in_4bit and self.full)
        expect("load_in_4bit", adapted, "False, or lora_rank too, since what has 4 bits is not trained", True)
        if "optimizer" in self.offload and self.optimizer == "adamw_8bit":
            raise ValueError("offload of the optimizer: expected adamw or sgd, got adamw_8bit, which computes on a GPU")
        if "weights" in self.offload and self.load_in_4bit:
            raise ValueError("offload of weights: expected none with load_in_4bit, which decodes them on the GPU")
        if "weights" in self.offload and self.gpus > 1 and self.zero_stage < 3:
            raise ValueError(f"offload of weights needs zero_stage 3 on {self.gpus} GPUs, got {self.zero_stage}")

    @property
    def nodes(self) -> Nodes:
        """The nodes of the GPUs that share a sequence; one, as in `sp.initialize`, if they are unequal."""
        size, per_node = self.sequence_parallel, self.gpus_per_node
        return Nodes(size, per_node if size % per_node == 0 else size)

    def sharers(self, q_heads: int, kv_heads: int) -> int:
        """Returns how many GPUs heads are dealt to: those that share a sequence, or those of a node."""
        return self.sequence_parallel if self.flat else self.nodes.sharers(q_heads, kv_heads)

    @property
    def bytes(self) -> int:
        """Bytes per element of the tensors that matmuls read or write."""
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
        sharing = min(self.gpus, self.gpus_per_node) if self.hsdp else self.gpus
        return sharing if self.zero_stage >= stage else 1


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
