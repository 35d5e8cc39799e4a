"""Tiles of a quarter to four times the tokens that the rule of `seqtile.ops.tiles` gives, beside Hugging Face."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from benchmark.bench_gated_mlp import Mlp
from benchmark.bench_gated_mlp import gradients as gradients_of_mlp
from benchmark.bench_gated_mlp import huggingface as mlp_of_huggingface
from benchmark.bench_linear_cross_entropy import gradients as gradients_of_loss
from benchmark.bench_linear_cross_entropy import huggingface as loss_of_huggingface
from benchmark.bench_linear_cross_entropy import inputs
from benchmark.contestants import DEVICE, DTYPE, Shape, run, shape_of

from seqtile import gated_mlp, linear_cross_entropy
from seqtile.ops.tiles import resolve_chunk_tokens

FACTORS = {"x 1/4": 0.25, "x 1/2": 0.5, "x 1": 1, "x 2": 2, "x 4": 4}


def chunk_tokens(size: Shape, factor: float) -> int:
    return int(resolve_chunk_tokens(None, size.hidden) * factor)


def tiled_mlp(chunk_tokens: int, mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    return gated_mlp(x, *weights, chunk_tokens=chunk_tokens)


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))


def measure(benchmark, name: str, shape: str, tokens: int, steps: dict[str, Callable]) -> None:
    """A tile's time and memory; the error is the distance from the rule's tile, in the same dtype on the same input."""
    step, other = steps[name], steps["x 1/2" if name == "x 1" else "x 1"]
    run(benchmark, name, shape, tokens, step, lambda: worst(step(), other()))


@pytest.mark.parametrize("contestant", ["huggingface", *FACTORS])
def test_tile_of_mlp(benchmark, contestant: str, shape: str, tokens: int) -> None:
    size = shape_of(shape)
    mlp = Mlp(size.hidden, size.mlp, DTYPE)
    x = torch.randn(1, tokens, size.hidden, device=DEVICE, dtype=DTYPE, requires_grad=True)
    tiled = {name: partial(tiled_mlp, chunk_tokens(size, factor)) for name, factor in FACTORS.items()}
    functions = {"huggingface": mlp_of_huggingface} | tiled
    steps = {name: partial(gradients_of_mlp, function, mlp, x) for name, function in functions.items()}
    measure(benchmark, contestant, shape, tokens, steps)


@pytest.mark.parametrize("contestant", ["huggingface", *FACTORS])
def test_tile_of_loss(benchmark, contestant: str, shape: str, tokens: int) -> None:
    size = shape_of(shape)
    operands = inputs(tokens, size.hidden, size.vocab)
    tiled = {
        name: partial(linear_cross_entropy, chunk_tokens=chunk_tokens(size, factor)) for name, factor in FACTORS.items()
    }
    functions = {"huggingface": loss_of_huggingface} | tiled
    steps = {name: partial(gradients_of_loss, function, *operands) for name, function in functions.items()}
    measure(benchmark, contestant, shape, tokens, steps)
