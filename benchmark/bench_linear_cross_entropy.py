"""The loss of a language-model head, forward and backward, side by side.

Beside the libraries stand two measures: `products`, the three matrix products of every tile with nothing between them,
which no loss that keeps no logits can undercut, and `seqtile_25`, seqtile with a quarter of the tokens labelled.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from benchmark.contestants import DEVICE, DTYPE, available, run, shape_of

from assertions import relative_error
from seqtile import linear_cross_entropy
from seqtile.ops.tiles import resolve_chunk_tokens, tiles


def huggingface(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def torch_linear(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.linear_cross_entropy(hidden, weight, target, options=torch.nn.LinearCrossEntropyOptions())


def liger(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, target)


def cce(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return cut_cross_entropy(hidden, weight, target)


def quack(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(hidden, weight, target)


def quarter(target: torch.Tensor) -> torch.Tensor:
    """Every fourth token labelled."""
    return target.where(torch.arange(len(target), device=target.device) % 4 == 0, -100)


def seqtile_25(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, quarter(target))


def gradients(loss: Callable, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    value = loss(hidden, weight, target)
    return [value.detach(), *torch.autograd.grad(value, (hidden, weight))]


@torch.no_grad()
def products(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    chunk_tokens = resolve_chunk_tokens(None, hidden.shape[1])
    buffer = hidden.new_empty(min(chunk_tokens, len(hidden)), len(weight))
    for tile in tiles(len(hidden), chunk_tokens):
        logits = torch.mm(hidden[tile], weight.t(), out=buffer[: tile.stop - tile.start])
        torch.mm(logits, weight, out=d_hidden[tile])
        torch.mm(logits.t(), hidden[tile], out=d_weight)
    return [d_hidden, d_weight]


LOSSES = {
    "huggingface": huggingface,
    "torch": torch_linear,
    "liger": liger,
    "cce": cce,
    "quack": quack,
    "seqtile": linear_cross_entropy,
    "seqtile_25": seqtile_25,
}
CONTESTANTS: dict[str, Callable] = {name: partial(gradients, loss) for name, loss in LOSSES.items()}
CONTESTANTS["products"] = products


def inputs(tokens: int, hidden_size: int, vocab: int) -> list[torch.Tensor]:
    hidden = torch.randn(tokens, hidden_size, device=DEVICE, dtype=DTYPE).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, device=DEVICE, dtype=DTYPE) * hidden_size**-0.5).requires_grad_()
    return [hidden, weight, torch.randint(0, vocab, (tokens,), device=DEVICE)]


def error(contestant: str) -> float:
    """Largest relative error of loss and gradients against float64; a wrong contestant is not timed."""
    if contestant == "products":
        return 0.0  # it computes no loss
    hidden, weight, target = inputs(3000, 128, 1000)
    ours = CONTESTANTS[contestant](hidden, weight, target)
    labels = quarter(target) if contestant == "seqtile_25" else target
    truth = gradients(lambda h, w, t: F.cross_entropy(h @ w.T, t), hidden.double(), weight.double(), labels)
    worst = max(relative_error(a, b) for a, b in zip(ours, truth, strict=True))
    assert worst < 0.03, f"wrong: relative error {worst:.1e}"
    return worst


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_linear_cross_entropy(benchmark, contestant: str, shape: str, tokens: int) -> None:
    if reason := available(contestant):
        pytest.skip(reason)
    size = shape_of(shape)
    operands = inputs(tokens, size.hidden, size.vocab)
    run(benchmark, contestant, shape, tokens, lambda: CONTESTANTS[contestant](*operands), lambda: error(contestant))
