"""metrics.logsumexp and metrics.mean_entropy are differentiable: a z-loss or an entropy bonus written by hand."""

import pytest
import torch

from seqtile import linear_cross_entropy
from support.assertions import assert_all_as_exact
from support.head_reference import IGNORE, D, V, entropies_of, logits_of, losses_of, make, reduced, values_and_gradients
from support.measure import LiveBytes, eager_memory

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def total(loss: torch.Tensor, logsumexp: torch.Tensor, mean_entropy: torch.Tensor, parts: str) -> torch.Tensor:
    """A loss with the terms that `parts` names."""
    made_of = {"loss": loss.sum(), "z": 0.01 * logsumexp.square().sum() / 133, "entropy": -0.3 * mean_entropy}
    return sum(value for name, value in made_of.items() if name in parts)


def ours(*operands: torch.Tensor, parts: str, bias: None = None, **options: object) -> torch.Tensor:
    loss, metrics = linear_cross_entropy(*operands, return_metrics=True, chunk_tokens=40, **options)
    return total(loss, metrics.logsumexp, metrics.mean_entropy, parts)


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, parts: str, bias: None = None, **options
) -> torch.Tensor:
    labelled, logits = target != IGNORE, logits_of(hidden @ weight.T)
    loss = reduced(losses_of(logits, target, class_weight=options.get("class_weight")), target, **options)
    return total(loss, logits.logsumexp(1) * labelled, entropies_of(logits)[labelled].mean(), parts)


def compare(operands: Operands, parts: str, upstream: float = 1.0, **options: object) -> None:
    """Gradients of hidden and weight, by the tolerance law."""
    dtype, given = operands[0].dtype, {"parts": parts, "upstream": upstream} | options
    _, *gradients = values_and_gradients(ours, *operands, dtype=dtype, **given)
    (_, *same), (_, *truth) = (
        values_and_gradients(reference, *operands, dtype=d, **given) for d in (dtype, torch.float64)
    )
    assert all(gradient.dtype == dtype for gradient in gradients)
    assert_all_as_exact(gradients, same, truth)


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
    gradients = torch.autograd.grad(
        ours(hidden, weight, target.fill_(IGNORE), parts="loss z entropy"), (hidden, weight)
    )
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_again_and_again(reduction: str, device: str) -> None:
    """A separate backward for the loss and each metric, in any order, gives the gradients of one backward of their
    sum."""
    hidden, weight, target = make(190, torch.float32, device)
    expected = torch.autograd.grad(ours(hidden, weight, target, parts="loss z entropy", reduction=reduction), weight)
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
    chunk_tokens, vocab = 1500, 23_000
    hidden, weight = (torch.randn(rows, D, requires_grad=True) for rows in (2 * chunk_tokens, vocab))
    target = torch.randint(0, vocab, (2 * chunk_tokens,))
    with LiveBytes() as memory:
        loss, metrics = linear_cross_entropy(
            hidden, weight, target, return_metrics=True, chunk_tokens=chunk_tokens, ignore_index=None
        )
        total(loss, metrics.logsumexp, metrics.mean_entropy, parts).backward()
    assert memory.peak <= 4 * (1.05 * chunk_tokens * vocab + hidden.numel() + weight.numel())
