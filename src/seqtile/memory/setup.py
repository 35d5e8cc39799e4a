"""The setup of a training run: everything that its memory depends on but the model's shape and the length."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

GIB = 2**30
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
OPTIMIZERS = {"adamw": 8, "adamw_8bit": 2, "sgd": 0}
"""Bytes of state for each trained parameter; of adamw besides float32 weights, where those trained are in a half."""
TILES = ("loss", "mlp", "layer")
OFFLOAD = ("activations", "optimizer", "weights")


def expect(name: str, right: object, expected: str, got: object) -> None:
    """Raises a ValueError that says what was expected and what it got, unless that is right."""
    if not right:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


def is_count(value: object, least: int = 1) -> bool:
    """Tells whether this is an int, of at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Setup:
    """A training setup, activation checkpointing of every layer included. Raises ValueError for what cannot be."""

    gpus: int = 1
    sequence_parallel: int = 1
    """GPUs that share a sequence."""
    zero_stage: int = 3
    """The stage of ZeRO, which shards over all GPUs: 1 the optimizer's state, 2 gradients too, 3 weights too (FSDP2);
    0 nothing."""
    optimizer: str = "adamw"
    """adamw (in half precision with a float32 copy of the weights: 16 bytes a parameter with weights and gradients, as
    float32 weights under FSDP2's mixed precision have), adamw_8bit or sgd (without that copy)."""
    dtype: str = "bfloat16"
    """The dtype of weights, gradients and activations."""
    tiles: Collection[str] | str = ("loss", "mlp")
    """The parts computed chunk by chunk: loss, mlp, layer, which is all of a decoder layer but attention."""
    head_groups: int | str | None = None
    """Groups of kv heads that attend one after the other in a tiled layer; "auto" for as many as divide them, up to 8,
    and leave each GPU that shares a sequence a kv head in every group; None: all heads at once."""
    chunk_tokens: int | None = None
    """Tokens of a chunk; None for the rule of `seqtile.ops.chunks`."""
    liger: bool = False
    """Liger's norms, RoPE and, where the MLP is not tiled, its product of gate and up: they keep less."""
    offload: Collection[str] | str = ()
    """The things in host memory: activations (`seqtile.offload`), optimizer (with the gradients), weights."""
    keep_last: int = 1
    """Layers whose inputs stay on the GPU all the same."""
    lora_rank: int | None = None
    """The rank of adapters in float32, as PEFT makes them, over every projection of attention and MLP, all else frozen;
    None trains every parameter."""
    gpu_memory_gib: float = 80
    host_memory_gib: float = 1900
    """Memory of a node."""
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        count = "a positive int"
        groups = self.head_groups in (None, "auto") or is_count(self.head_groups)
        for name, right, expected in (
            ("liger", isinstance(self.liger, bool), "True or False"),
            ("gpus", is_count(self.gpus), count),
            ("sequence_parallel", is_count(self.sequence_parallel), count),
            ("gpus_per_node", is_count(self.gpus_per_node), count),
            ("chunk_tokens", self.chunk_tokens is None or is_count(self.chunk_tokens), count),
            ("lora_rank", self.lora_rank is None or is_count(self.lora_rank), count),
            ("dtype", self.dtype in tuple(DTYPES), f"one of {', '.join(DTYPES)}"),
            ("optimizer", self.optimizer in tuple(OPTIMIZERS), f"one of {', '.join(OPTIMIZERS)}"),
            ("tiles", _are_some(self.tiles, TILES), f"some of {', '.join(TILES)}"),
            ("offload", _are_some(self.offload, OFFLOAD), f"some of {', '.join(OFFLOAD)}"),
            ("head_groups", groups, f'{count}, "auto" or None'),
            ("gpu_memory_gib", _is_size(self.gpu_memory_gib), "more than 0 GiB"),
            ("host_memory_gib", _is_size(self.host_memory_gib), "more than 0 GiB"),
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
        if "optimizer" in self.offload and self.optimizer == "adamw_8bit":
            raise ValueError("offload of the optimizer: expected adamw or sgd, got adamw_8bit, which computes on a GPU")
        if "weights" in self.offload and self.gpus > 1 and self.zero_stage < 3:
            raise ValueError(f"offload of weights needs zero_stage 3 on {self.gpus} GPUs, got {self.zero_stage}")

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    @property
    def full(self) -> bool:
        """True if every parameter is trained, False if adapters are."""
        return self.lora_rank is None

    def ranks(self, stage: int) -> int:
        """Returns over how many GPUs something is sharded that is sharded from this ZeRO stage on."""
        return self.gpus if self.zero_stage >= stage else 1


def setup_of(options: Mapping[str, Any]) -> Setup:
    """Returns the setup of these fields. TypeError, with the closest name there is, for what is no field of Setup."""
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


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
