"""metrics.logsumexp and metrics.mean_entropy are differentiable: a z-loss or an entropy bonus written by hand."""

import pytest
import torch

from seqtile import linear_cross_entropy
from support.assertions import assert_as_exact
from support.head_reference import IGNORE, D, V, entropies_of, logits_of, losses_of, make, reduced
from support.measure import LiveBytes, eager_memory

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def total(loss: torch.Tensor, logsumexp: torch.Tensor, mean_entropy: torch.Tensor, parts: str) -> torch.Tensor:
    """A loss with the terms that `parts` names."""
    made_of = {"loss": loss.sum(), "z": 0.01 * logsumexp.square().sum() / 133, "entropy": -0.3 * mean_entropy}
    return sum(value for name, value in made_of.items() if name in parts)


def ours(operands: Operands, parts: str, **options: object) -> torch.Tensor:
    loss, metrics = linear_cross_entropy(*operands, return_metrics=True, chunk_tokens=40, **options)
    return total(loss, metrics.logsumexp, metrics.mean_entropy, parts)


def reference(operands: Operands, parts: str, dtype: torch.dtype, upstream: float = 1.0, **options) -> list:
    """The gradients of hidden and weight, from torch and the logits in `dtype`."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in operands[:2])
    target, labelled = operands[2], operands[2] != IGNORE
    logits = logits_of(hidden @ weight.T)
    losses = losses_of(logits, target, class_weight=options.get("class_weight"))
    loss = reduced(losses, target, **options)
    value = total(loss, logits.logsumexp(1) * labelled, entropies_of(logits)[labelled].mean(), parts)
    return list(torch.autograd.grad(value * upstream, (hidden, weight)))


def compare(operands: Operands, parts: str, upstream: float = 1.0, **options: object) -> None:
    """By the tolerance law."""
    dtype = operands[0].dtype
    same, truth = (reference(operands, parts, d, upstream, **options) for d in (dtype, torch.float64))
    gradients = torch.autograd.grad(ours(operands, parts, **options) * upstream, operands[:2])
    for gradient, theirs, true in zip(gradients, same, truth, strict=True):
        assert gradient.dtype == dtype
        assert_as_exact(gradient, theirs, true)


@pytest.mark.in_interpreter("one end-to-end case of each op and dtype", only=("1.0-*",))
@pytest.mark.parametrize(
    ("upstream", "dtype", "parts", "reduction"),
    [
        (1.0, torch.float32, "loss z entropy", "mean"),
        (1.0, torch.bfloat16, "loss z", "sum"),
        (1.0, torch.float16, "loss entropy", "none"),
        (0.0, torch.float32, "loss z entropy", "mean"),
        (1 / 32, torch.float16, "z", "mean"),
        (-3.0, torch.float32, "entropy", "sum"),
        (65536.0, torch.float16, "loss z entropy", "mean"),
    ],
)
def test_gradients(upstream: float, dtype: torch.dtype, parts: str, reduction: str, device: str) -> None:
    """Including a GradScaler's factor; test_head_options.py tests every option with every other."""
    compare(make(100, dtype, device), parts, upstream, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_z_loss_by_hand_beside_class_weights_beyond_float16(reduction: str, device: str) -> None:
    """Weights of a billion with a z-loss as large, and with a z-loss alone, which must stay in float16's range."""
    operands = make(190, torch.float16, device)
    class_weight = torch.rand(V, device=device) * 1e9
    for parts, upstream in (("loss z", 64e-9 if reduction == "none" else 64.0), ("z", 2.0**14)):
        compare(operands, parts, upstream, reduction=reduction, class_weight=class_weight)


def test_what_has_gradients(device: str) -> None:
    operands = make(63, torch.float32, device)
    for reduction in ("mean", "none"):
        _, metrics = linear_cross_entropy(*operands, reduction=reduction, return_metrics=True)
        required = {name for name, value in metrics._asdict().items() if value.requires_grad}
        assert required == {"mean_entropy", "logsumexp"}
    with torch.no_grad():
        _, metrics = linear_cross_entropy(*operands, return_metrics=True)
    assert not any(value.requires_grad for value in metrics)


def test_no_token_labelled(device: str) -> None:
    hidden, weight, target = make(63, torch.float32, device)
    gradients = torch.autograd.grad(ours((hidden, weight, target.fill_(IGNORE)), "loss z entropy"), (hidden, weight))
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_again_and_again(reduction: str, device: str) -> None:
    """A separate backward for the loss and each metric, in any order, gives the gradients of one backward of their
    sum."""
    hidden, weight, target = make(190, torch.float32, device)
    expected = torch.autograd.grad(ours((hidden, weight, target), "loss z entropy", reduction=reduction), weight)
    for order in (("loss", "z", "entropy"), ("entropy", "loss", "z")):
        weight.grad = None
        loss, metrics = linear_cross_entropy(
            hidden, weight, target, return_metrics=True, reduction=reduction, chunk_tokens=63
        )
        for part in order:
            total(loss, metrics.logsumexp, metrics.mean_entropy, part).backward(retain_graph=True)
        torch.testing.assert_close(weight.grad, *expected)


@pytest.mark.full("2 s each; with a metric everything of the loss is there too", but=("loss z",))
@eager_memory
@pytest.mark.parametrize("parts", ["loss", "loss z"])
def test_memory(parts: str) -> None:
    """One live d_hidden and d_weight, not separate ones for the loss and its metrics."""
    chunk_tokens, vocab = 1000, 15_000
    hidden, weight = (torch.randn(rows, D, requires_grad=True) for rows in (2 * chunk_tokens, vocab))
    target = torch.randint(0, vocab, (2 * chunk_tokens,))
    with LiveBytes() as memory:
        loss, metrics = linear_cross_entropy(
            hidden, weight, target, return_metrics=True, chunk_tokens=chunk_tokens, ignore_index=None
        )
        total(loss, metrics.logsumexp, metrics.mean_entropy, parts).backward()
    assert memory.peak <= 4 * (1.05 * chunk_tokens * vocab + hidden.numel() + weight.numel())
