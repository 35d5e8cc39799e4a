"""Shapes, named by model, and the lengths at which each is measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

from seqtile import rules
from seqtile.memory.shape import KNOWN, Shape

SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 16, 1000),
    "tiny_gemma": Shape(64, 128, 2, 4, 2, 16, 1000, "gemma2", tied=True, softcap=True),
    "smollm2_135m": KNOWN["HuggingFaceTB/SmolLM2-135M"],
    "llama3_8b": KNOWN["meta-llama/Llama-3.1-8B"],
    "qwen3_8b": KNOWN["Qwen/Qwen3-8B"],
    "qwen3_32b": KNOWN["Qwen/Qwen3-32B"],
    "mistral_7b": KNOWN["mistralai/Mistral-7B-v0.3"],
    "gemma2_9b": KNOWN["google/gemma-2-9b"],
}
K = 1024
UNHURRIED = ("smoke", "small")  # sizes that take the time they take: their figures say nothing
OTHERS = ("smollm2_135m", "qwen3_8b", "mistral_7b", "gemma2_9b", "qwen3_32b")
Lengths = dict[str, dict[str, tuple[int, ...]]]
LENGTHS: Lengths = {
    "small": {"tiny": (300, 5000), "tiny_gemma": (300,)},
    "cpu": {"smollm2_135m": (4 * K, 8 * K)},
    "first": {"llama3_8b": (4 * K, 16 * K, 32 * K, 128 * K)},
    "quick": {"llama3_8b": (8 * K, 32 * K, 128 * K, 512 * K)} | dict.fromkeys(OTHERS, (8 * K,)),
    "full": {"llama3_8b": tuple(n * K for n in (4, 8, 32, 128, 256, 512, 1024))}
    | dict.fromkeys(OTHERS, (8 * K, 64 * K)),
}
"""Of a size: tokens by shape. `cpu` is what a CPU measures if it is asked for no other size; `smoke` is one case of
`small`, see `cases`; `first` are the first minutes on a GPU."""
FEWER = {"first": ("huggingface", "liger", "torch", "seqtile", "seqtile_layer", "seqtile_head_groups")}
"""Of a size: the contestants, where these are not all."""
LONG = {"first": 32 * K, "quick": 32 * K, "full": 128 * K}  # tokens: beyond them one round is enough
SOFTCAP = 30.0  # of gemma2's logits
SMALL = 3000  # tokens of the input on which errors are measured: two tiles, the second ragged


class Case(NamedTuple):
    shape: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.shape}-{self.tokens}"


def cases(size: str, lengths: Lengths = LENGTHS) -> list[Case]:
    if size == "smoke":  # the longest of the first shape
        name, of_shape = next(iter(lengths["small"].items()))
        return [Case(name, max(of_shape))]
    return [Case(name, tokens) for name, of_shape in lengths[size].items() for tokens in of_shape]


def small(shape: Shape) -> Shape:
    """The same kind of model, narrow."""
    return replace(shape, hidden=128, mlp=200, layers=2, heads=4, kv_heads=2, head_dim=32, vocab=1000)


@contextmanager
def short_chunks() -> Iterator[None]:
    """Inside, a chunk of a narrow model's MLPs is shorter than `SMALL` in a checkpoint too."""
    with patch.object(rules, "MLP_CHUNK_BYTES", 0):
        yield
