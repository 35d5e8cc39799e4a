"""QuACK's linear cross-entropy is seqtile's. It cannot be imported without a GPU: modules of its name stand in."""

import sys
from types import ModuleType

import torch
import torch.nn.functional as F

import seqtile


def untiled(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), target, ignore_index=ignore_index, reduction=reduction)


def tiled(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    chunk_size: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    **unused: object,
) -> torch.Tensor:
    options = {"ignore_index": ignore_index, "reduction": reduction, "chunk_tokens": chunk_size}
    return seqtile.linear_cross_entropy(x, weight, target, **options)


def install(mode: str) -> None:
    module = ModuleType("quack.linear_cross_entropy")
    module.chunked_linear_cross_entropy = module.scaled_exp_linear_cross_entropy = tiled
    module.linear_cross_entropy_func_ref = untiled
    module.scaled_exp_lce_supported = lambda *arguments: False
    sys.modules |= {"quack": ModuleType("quack"), module.__name__: module}


AT_MOST = {"d": 256, "V": 2000}
LEFT_OUT = [
    (r"use_scaled_exp.*True|True-|-True\]", "a second implementation; it would be the same function once more"),
]
