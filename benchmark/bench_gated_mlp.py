"""The gated MLP of a decoder layer under activation checkpointing, forward and backward, side by side."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from benchmark.device import DEVICE
from benchmark.shapes import Case, Shape
from benchmark.subject import Forward, Subject, activations, compiled, needs
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqtile import gated_mlp

ROWS = 64  # that are looked at in full size


class Mlp(nn.Module):
    """As Hugging Face's."""

    def __init__(self, shape: Shape, dtype: torch.dtype):
        super().__init__()
        options = {"bias": False, "device": DEVICE, "dtype": dtype}
        self.gate_proj, self.up_proj = (nn.Linear(shape.hidden, shape.mlp, **options) for _ in range(2))
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, **options)
        self.activation = "gelu_tanh" if shape.model_type == "gemma2" else "silu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh") if self.activation == "gelu_tanh" else F.silu(gate)
        return self.down_proj(gate * self.up_proj(x))


@dataclass
class Work:
    x: torch.Tensor  # [1, T, D]
    upstream: torch.Tensor
    mlp: Mlp

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.x, *self.mlp.parameters()


def operands(shape: Shape, tokens: int, dtype: torch.dtype) -> Work:
    return Work(*activations(shape, tokens, dtype), Mlp(shape, dtype))


def checkpointed(work: Work, forward: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    return Forward(lambda: checkpoint(forward, work.x, use_reentrant=False))


def liger_forward(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    product = LigerGELUMulFunction if mlp.activation == "gelu_tanh" else LigerSiLUMulFunction
    return mlp.down_proj(product.apply(mlp.gate_proj(x), mlp.up_proj(x)))


def liger_tiled_forward(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops import apply_tiled_mlp

    return apply_tiled_mlp(liger_forward, mlp, x, compute_params=list(mlp.parameters()))


def deepspeed_tiled_forward(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As many tiles as its documentation asks for (ALST, 3.1.1)."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    untiled = type(mlp).forward
    return TiledMLP.apply(untiled, mlp, x, math.ceil(x.shape[-2] / x.shape[-1]), list(mlp.parameters()))


def huggingface(work: Work) -> Forward:
    return checkpointed(work, work.mlp)


def huggingface_compiled(work: Work) -> Forward:
    return checkpointed(work, compiled(work.mlp))


def liger(work: Work) -> Forward:
    needs("liger_kernel")
    return checkpointed(work, partial(liger_forward, work.mlp))


def liger_tiled(work: Work) -> Forward:
    needs("liger_kernel")
    return checkpointed(work, partial(liger_tiled_forward, work.mlp))


def deepspeed_tiled(work: Work) -> Forward:
    needs("deepspeed", gpu=False)
    return checkpointed(work, partial(deepspeed_tiled_forward, work.mlp))


def seqtile(work: Work, chunk_tokens: int | None = None) -> Forward:
    mlp = work.mlp
    weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    options = {"activation": mlp.activation, "chunk_tokens": chunk_tokens}
    return checkpointed(work, lambda x: gated_mlp(x, *weights, **options))


CONTESTANTS: dict[str, Callable[[Work], Forward]] = {
    "huggingface": huggingface,
    "huggingface_compiled": huggingface_compiled,
    "liger": liger,
    "liger_tiled": liger_tiled,
    "deepspeed_tiled": deepspeed_tiled,
    "seqtile": seqtile,
}


def last_rows(work: Work, y: torch.Tensor) -> list[torch.Tensor]:
    """The last tokens' outputs and gradients, which other tokens have no part in."""
    return [y[:, -ROWS:], work.x.grad[:, -ROWS:]]


def right_rows(work: Work) -> list[torch.Tensor]:
    x, mlp = work.x.detach()[:, -ROWS:].double().requires_grad_(), deepcopy(work.mlp).double().requires_grad_(False)
    y = mlp(x)
    y.backward(work.upstream[:, -ROWS:].double())
    return [y.detach(), x.grad]


def flops(shape: Shape, tokens: int) -> float:
    """Three products in the forward; in the backward gate and up again, and two for each product of the forward."""
    return 11 * 2.0 * tokens * shape.hidden * shape.mlp


SUBJECT = Subject("gated_mlp", operands, CONTESTANTS, flops, last_rows, right_rows)


def test_gated_mlp(compare, case: Case, contestant: str) -> None:
    compare(SUBJECT, case, contestant)
