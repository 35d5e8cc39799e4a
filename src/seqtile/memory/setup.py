"""How a model is trained: everything its memory depends on but its shape and the length."""

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


@dataclass(frozen=True)
class Setup:
    """A training setup, activation checkpointing of every layer included. Raises ValueError for what cannot be."""

    gpus: int = 1
    sequence_parallel: int = 1
    """GPUs that share a sequence."""
    zero_stage: int = 3
    """What is spread over all GPUs: 1 the optimizer's state, 2 gradients too, 3 weights too (FSDP2); 0 nothing."""
    optimizer: str = "adamw"
    """adamw (in half precision with a float32 copy of the weights: 16 bytes a parameter with weights and gradients, as
    float32 weights under FSDP2's mixed precision have), adamw_8bit or sgd (without that copy)."""
    dtype: str = "bfloat16"
    """Of weights, gradients and activations."""
    tiles: Collection[str] | str = ("loss", "mlp")
    """What is computed tile by tile: loss, mlp, layer, which is all of a decoder layer but attention."""
    head_groups: int | str | None = None
    """Groups of kv heads that attend one after the other in a tiled layer; "auto" for as many as divide them, up to 8,
    and leave each GPU that shares a sequence a kv head in every group; None: all heads at once."""
    chunk_tokens: int | None = None
    """Tokens a tile; None for the rule of `seqtile.ops.tiles`."""
    liger: bool = False
    """Liger's norms, RoPE and, where the MLP is not tiled, its product of gate and up: they keep less."""
    offload: Collection[str] | str = ()
    """What is in host memory: activations (`seqtile.offload`), optimizer (with the gradients), weights."""
    keep_last: int = 1
    """Layers whose inputs stay on the GPU all the same."""
    lora_rank: int | None = None
    """Of adapters in float32, as PEFT makes them, over every projection of attention and MLP, all else frozen; None
    trains every parameter."""
    gpu_memory_gib: float = 80
    host_memory_gib: float = 1900
    """Of a node."""
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.liger, bool):
            raise ValueError(f"liger: expected True or False, got {self.liger!r}")
        for name in ("gpus", "sequence_parallel", "gpus_per_node"):
            _positive(name, getattr(self, name))
        for name in ("chunk_tokens", "lora_rank"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name, known in (("tiles", TILES), ("offload", OFFLOAD)):
            value = getattr(self, name)
            parts = (value,) if isinstance(value, str) else value
            if not isinstance(parts, tuple | list | set | frozenset) or not all(part in known for part in parts):
                raise ValueError(f"{name}: expected some of {', '.join(known)}, got {value!r}")
            object.__setattr__(self, name, parts)
        if "layer" in self.tiles and "mlp" not in self.tiles:
            raise ValueError(f"tiles: expected mlp too, since it is tiled with the layer, got {self.tiles!r}")
        self._check_head_groups()
        for name in ("gpu_memory_gib", "host_memory_gib"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}: expected more than 0 GiB, got {value!r}")
        if self.zero_stage not in range(4):
            raise ValueError(f"zero_stage: expected 0, 1, 2 or 3, got {self.zero_stage!r}")
        if isinstance(self.keep_last, bool) or not isinstance(self.keep_last, int) or self.keep_last < 0:
            raise ValueError(f"keep_last: expected 0 or more layers, got {self.keep_last!r}")
        if self.gpus % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel: expected a divisor of the {self.gpus} GPUs, got {self.sequence_parallel}; "
                "a sequence is shared by equal groups of them"
            )

        if "optimizer" in self.offload and self.optimizer == "adamw_8bit":
            raise ValueError("offload of the optimizer: expected adamw or sgd, got adamw_8bit, which computes on a GPU")
        if "weights" in self.offload and self.gpus > 1 and self.zero_stage < 3:
            raise ValueError(f"offload of weights needs zero_stage 3 on {self.gpus} GPUs, got {self.zero_stage}")

    def _check_head_groups(self) -> None:
        groups = self.head_groups
        if groups is None:
            return
        if groups != "auto" and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
            raise ValueError(f'head_groups: expected a positive int, "auto" or None, got {groups!r}')
        if "layer" not in self.tiles:
            raise ValueError(f"head_groups: expected None, since tiles has no layer, got {groups!r}; add it there")

    @property
    def bytes(self) -> int:
        """Of an element."""
        return DTYPES[self.dtype]

    def ranks(self, stage: int) -> int:
        """Over how many GPUs something is spread that is spread from this ZeRO stage on."""
        return self.gpus if self.zero_stage >= stage else 1


def setup_of(options: Mapping[str, Any]) -> Setup:
    """TypeError, with the closest name there is, for one that is no field of Setup."""
    names = ("batch_size", *(field.name for field in fields(Setup)))
    for name in options:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"expected some of {', '.join(names)}"
            raise TypeError(f"{name} is no option of a plan; {remedy}")
    return Setup(**options)


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a positive int, got {value!r}")
