"""The loss of a language-model head, forward and backward, side by side."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from benchmark.contestants import DEVICE, DTYPE, SIZES, available, run

from assertions import relative_error
from seqtile import linear_cross_entropy


def huggingface(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def torch_linear(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.linear_cross_entropy(hidden, weight, target, options=torch.nn.LinearCrossEntropyOptions())


def liger(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, target)


CONTESTANTS: dict[str, Callable] = {
    "huggingface": huggingface,
    "torch": torch_linear,
    "liger": liger,
    "seqtile": linear_cross_entropy,
}


def inputs(tokens: int, hidden_size: int, vocab: int) -> list[torch.Tensor]:
    hidden = torch.randn(tokens, hidden_size, device=DEVICE, dtype=DTYPE).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, device=DEVICE, dtype=DTYPE) * hidden_size**-0.5).requires_grad_()
    return [hidden, weight, torch.randint(0, vocab, (tokens,), device=DEVICE)]


def gradients(loss: Callable, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    hidden, weight, target = operands
    value = loss(hidden, weight, target)
    return [value.detach(), *torch.autograd.grad(value, (hidden, weight))]


def error(loss: Callable) -> float:
    """Largest relative error of loss and gradients against float64; a wrong contestant is not timed."""
    operands = inputs(3000, 128, 1000)
    ours = gradients(loss, operands)
    truth = gradients(
        lambda h, w, t: F.cross_entropy(h @ w.T, t), [operands[0].double(), operands[1].double(), operands[2]]
    )
    worst = max(relative_error(a, b) for a, b in zip(ours, truth, strict=True))
    assert worst < 0.03, f"wrong: relative error {worst:.1e}"
    return worst


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_linear_cross_entropy(benchmark, contestant: str, shape: str, tokens: int) -> None:
    if reason := available(contestant):
        pytest.skip(reason)
    size = next(shapes[shape] for shapes in SIZES.values() if shape in shapes)
    loss = CONTESTANTS[contestant]
    operands = inputs(tokens, size.hidden, size.vocab)
    run(benchmark, contestant, shape, tokens, lambda: gradients(loss, operands), lambda: error(loss))
