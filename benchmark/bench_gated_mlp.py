"""The gated MLP, forward and backward, side by side."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from benchmark.contestants import DEVICE, DTYPE, SIZES, available, run

from assertions import relative_error
from seqtile import gated_mlp


def huggingface(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def liger(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    return F.linear(LigerSiLUMulFunction.apply(F.linear(x, gate), F.linear(x, up)), down)


CONTESTANTS: dict[str, Callable] = {"huggingface": huggingface, "liger": liger, "seqtile": gated_mlp}


def inputs(tokens: int, hidden: int, width: int) -> list[torch.Tensor]:
    shapes = [(tokens, hidden), (width, hidden), (width, hidden), (hidden, width)]
    scales = [1.0, hidden**-0.5, hidden**-0.5, width**-0.5]
    return [
        (torch.randn(shape, device=DEVICE, dtype=DTYPE) * scale).requires_grad_()
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def gradients(mlp: Callable, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    y = mlp(*operands)
    return [y.detach(), *torch.autograd.grad(y, operands, torch.ones_like(y))]


def error(mlp: Callable) -> float:
    """Largest relative error of output and gradients against float64; a wrong contestant is not timed."""
    operands = inputs(5000, 96, 130)
    truth = gradients(huggingface, [operand.detach().double().requires_grad_() for operand in operands])
    worst = max(relative_error(a, b) for a, b in zip(gradients(mlp, operands), truth, strict=True))
    assert worst < 0.03, f"wrong: relative error {worst:.1e}"
    return worst


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_gated_mlp(benchmark, contestant: str, shape: str, tokens: int) -> None:
    if reason := available(contestant):
        pytest.skip(reason)
    size = next(shapes[shape] for shapes in SIZES.values() if shape in shapes)
    mlp = CONTESTANTS[contestant]
    operands = inputs(tokens, size.hidden, size.mlp)
    run(benchmark, contestant, shape, tokens, lambda: gradients(mlp, operands), lambda: error(mlp))
