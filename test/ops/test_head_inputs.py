"""Inputs other than [T, D] and int64 that linear_cross_entropy and linear_log_probs accept or refuse."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from seqtile import linear_cross_entropy, linear_log_probs
from support.assertions import relative_error
from support.choice import every_pair

D, V = 16, 100
OPS = (linear_cross_entropy, linear_log_probs)
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def make(*shape: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(*shape, D, device=device, requires_grad=True)
    weight = torch.randn(V, D, device=device).mul_(0.3).requires_grad_()
    return hidden, weight, torch.randint(0, V, shape, device=device)


@pytest.mark.on_gpu("converted and reshaped before any kernel runs", only=every_pair)
@each_op
@pytest.mark.parametrize("ignore_index", [None, 3, -100])
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32], ids=str
)
def test_targets_of_any_integer_dtype(dtype: torch.dtype, ignore_index: int | None, op: Callable, device: str) -> None:
    hidden, weight, target = make(63, device=device)
    target[::4] = ignore_index if ignore_index is not None and (dtype.is_signed or ignore_index > 0) else 1
    options = {"ignore_index": ignore_index, "chunk_tokens": 16}
    expected = op(hidden, weight, target, **options)
    ours = op(hidden, weight, target.to(dtype), **options)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.on_gpu("converted and reshaped before any kernel runs", only=every_pair)
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(), (3, 4, 5), (2, 1, 3, 4)], ids=str)
def test_losses_of_any_leading_dimensions(shape: tuple[int, ...], reduction: str, ignored: bool, device: str) -> None:
    """As torch's cross_entropy accepts them, except for the class dimension."""
    hidden, weight, target = make(*shape, device=device)
    if ignored:
        target.view(-1)[::3] = -100
    loss, metrics = linear_cross_entropy(
        hidden, weight, target, reduction=reduction, return_metrics=True, chunk_tokens=7
    )
    logits = hidden @ weight.T
    theirs = F.cross_entropy(logits.view(-1, V), target.view(-1), reduction=reduction)
    theirs = theirs.view(shape) if reduction == "none" else theirs
    labelled = target != -100
    assert metrics.predicted_tokens.equal(logits.argmax(-1).where(labelled, -1))
    log_sum_exp = logits.logsumexp(-1) * labelled
    for ours, expected in ((loss, theirs), (metrics.logsumexp, log_sum_exp)):
        torch.testing.assert_close(ours, expected, equal_nan=True)
        if expected.isfinite().all():  # a mean over no token is not
            gradients, expected_gradients = (
                torch.autograd.grad(value.square().sum(), (hidden, weight), retain_graph=True)
                for value in (ours, expected)
            )
            for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
                assert relative_error(gradient, expected_gradient) <= 1e-5


@pytest.mark.parametrize("shape", [(), (3, 4, 5)], ids=str)
def test_log_probs_of_any_leading_dimensions(shape: tuple[int, ...], device: str) -> None:
    hidden, weight, target = make(*shape, device=device)
    ours = linear_log_probs(hidden, weight, target, chunk_tokens=7)
    expected = (hidden @ weight.T).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(ours, expected)
    gradients = torch.autograd.grad(ours.sum(), (hidden, weight))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), (hidden, weight)))


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(3, D), torch.randn(4, D)], layout=layout)


X, W, LABELS = torch.randn(7, D), torch.randn(V, D), torch.randint(0, V, (7,))
DENSE = "expected a dense tensor; use .to_dense()"
NESTED = "hidden is a nested tensor, expected a dense one.*torch.cat"
REFUSED = [
    ({"target": LABELS.float()}, TypeError, "target is torch.float32, expected torch.int64 or a smaller integer"),
    ({"target": LABELS.bool()}, TypeError, "target is torch.bool, expected torch.int64"),
    ({"target": LABELS.to(torch.uint64)}, TypeError, "target is torch.uint64, expected torch.int64"),
    ({"target": torch.tensor(1)}, ValueError, r"target has shape \[\], expected hidden's shape without D = \[7\]"),
    ({"target": LABELS.to_sparse()}, TypeError, f"target is sparse_coo, {DENSE}"),
    ({"hidden": torch.tensor(1.0)}, ValueError, r"hidden has shape \[\], expected \[..., D\]"),
    ({"hidden": X.to_sparse()}, TypeError, f"hidden is sparse_coo, {DENSE}"),
    ({"hidden": lambda: nested(torch.strided)}, TypeError, NESTED),
    ({"hidden": lambda: nested(torch.jagged)}, TypeError, NESTED),
    ({"weight": W.to("meta")}, ValueError, "weight is on meta, hidden on cpu.*has no values.*load"),
    ({"weight": lambda: W.to_sparse_csr()}, TypeError, f"weight is sparse_csr, {DENSE}"),
    ({"bias": W[:, 0].to_sparse()}, TypeError, f"bias is sparse_coo, {DENSE}"),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@each_op
@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_refused(changes: dict, error: type[Exception], message: str, op: Callable) -> None:
    changes = {name: value() if callable(value) else value for name, value in changes.items()}
    with pytest.raises(error, match=f"{op.__name__}: {message}"):
        op(**{"hidden": X, "weight": W, "target": LABELS} | changes)


def test_a_sparse_class_weight_is_refused() -> None:
    with pytest.raises(TypeError, match=r"class_weight is sparse_coo, expected a dense tensor"):
        linear_cross_entropy(X, W, LABELS, class_weight=torch.rand(V).to_sparse())


@each_op
def test_what_stood_behind_a_row_of_logits(op: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of logits are aligned to 16 elements, and a CPU's bfloat16 products may read the elements in between."""
    empty, buffers = torch.Tensor.new_empty, []

    def poisoned(self: torch.Tensor, *shape: int, **options: object) -> torch.Tensor:
        buffers.append(empty(self, *shape, **options))
        return buffers[-1].fill_(float("nan")) if buffers[-1].is_floating_point() else buffers[-1]

    hidden, weight, target = (tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in make(63))
    hidden = hidden.detach().requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", poisoned)
        op(hidden, weight.detach(), target, chunk_tokens=16).sum().backward()
    padded = [buffer for buffer in buffers if buffer.dim() == 2 and buffer.shape[1] == 112]
    assert padded and not any(buffer[:, V:].any() for buffer in padded)
    assert hidden.grad.isfinite().all()
