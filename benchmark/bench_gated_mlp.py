"""The gated MLP of a decoder layer under activation checkpointing, forward and backward, side by side."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from benchmark.contestants import DEVICE, DTYPE, available, run, shape_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from assertions import relative_error
from seqtile import gated_mlp


class Mlp(nn.Module):
    """As Hugging Face's."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype):
        super().__init__()
        options = {"bias": False, "device": DEVICE, "dtype": dtype}
        self.gate_proj, self.up_proj = (nn.Linear(hidden, width, **options) for _ in range(2))
        self.down_proj = nn.Linear(width, hidden, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def huggingface(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    return mlp(x)


def liger(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    return mlp.down_proj(LigerSiLUMulFunction.apply(mlp.gate_proj(x), mlp.up_proj(x)))


def liger_tiled(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops import apply_tiled_mlp

    return apply_tiled_mlp(liger, mlp, x, compute_params=list(mlp.parameters()))


def deepspeed_tiled(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    return TiledMLP.apply(huggingface, mlp, x, math.ceil(x.shape[-2] / x.shape[-1]), list(mlp.parameters()))


def seqtile(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    return gated_mlp(x, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)


CONTESTANTS: dict[str, Callable] = {
    "huggingface": huggingface,
    "liger": liger,
    "liger_tiled": liger_tiled,
    "deepspeed_tiled": deepspeed_tiled,
    "seqtile": seqtile,
}


def gradients(contestant: Callable, mlp: Mlp, x: torch.Tensor) -> list[torch.Tensor]:
    """y, d_x and the gradients of the weights, of a checkpointed region."""
    for tensor in (x, *mlp.parameters()):
        tensor.grad = None
    y = checkpoint(contestant, mlp, x, use_reentrant=False)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(parameter.grad for parameter in mlp.parameters())]


def error(contestant: Callable) -> float:
    """Largest relative error of output and gradients against float64; a wrong contestant is not timed."""
    mlp, x = Mlp(96, 130, DTYPE), torch.randn(1, 5000, 96, device=DEVICE, dtype=DTYPE, requires_grad=True)
    ours = gradients(contestant, mlp, x)
    exact = Mlp(96, 130, torch.float64)
    exact.load_state_dict(mlp.state_dict())
    truth = gradients(huggingface, exact, x.detach().double().requires_grad_())
    worst = max(relative_error(a, b) for a, b in zip(ours, truth, strict=True))
    assert worst < 0.03, f"wrong: relative error {worst:.1e}"
    return worst


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_gated_mlp(benchmark, contestant: str, shape: str, tokens: int) -> None:
    if reason := available(contestant):
        pytest.skip(reason)
    size = shape_of(shape)
    mlp = Mlp(size.hidden, size.mlp, DTYPE)
    x = torch.randn(1, tokens, size.hidden, device=DEVICE, dtype=DTYPE, requires_grad=True)
    function = CONTESTANTS[contestant]
    run(benchmark, contestant, shape, tokens, lambda: gradients(function, mlp, x), lambda: error(function))
