"""Which tensors linear_cross_entropy and linear_log_probs take besides [T, D] and int64, and which they refuse."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from seqtile import linear_cross_entropy, linear_log_probs
from support.assertions import relative_error
from support.choice import every_pair
from support.measure import eager_memory

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
    """As torch's cross_entropy takes them, but for the place of the classes."""
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
        if expected.isfinite().all():  # a mean of no token is not
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


@eager_memory
@pytest.mark.parametrize("options", [{}, {"ignore_index": None}, {"reduction": "none"}], ids=str)
def test_on_meta(options: dict) -> None:
    """Shapes alone, as torch's own functions give them."""
    with torch.device("meta"):
        hidden, weight, target = make(3, 21, device="meta")
        loss, metrics = linear_cross_entropy(hidden, weight, target, return_metrics=True, chunk_tokens=16, **options)
        assert loss.is_meta and loss.shape == (target.shape if options.get("reduction") == "none" else ())
        assert metrics.logsumexp.is_meta and metrics.logsumexp.shape == target.shape
        (loss.sum() + metrics.logsumexp.sum()).backward()
    assert hidden.grad.is_meta and hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape


@each_op
@pytest.mark.parametrize(
    ("name", "method", "layout"),
    [
        ("hidden", "to_sparse", "sparse_coo"),
        ("weight", "to_sparse_csr", "sparse_csr"),
        ("target", "to_sparse", "sparse_coo"),
        ("bias", "to_sparse", "sparse_coo"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_are_refused(name: str, method: str, layout: str, op: Callable) -> None:
    arguments = dict(zip(("hidden", "weight", "target"), make(63), strict=True)) | {"bias": torch.randn(V)}
    arguments[name] = getattr(arguments[name].detach(), method)()
    message = f"{op.__name__}: {name} is {layout}, expected a dense tensor; use .to_dense()"
    with pytest.raises(TypeError, match=re.escape(message)):
        op(**arguments)


def test_a_sparse_class_weight_is_refused() -> None:
    with pytest.raises(TypeError, match=r"class_weight is sparse_coo, expected a dense tensor"):
        linear_cross_entropy(*make(9), class_weight=torch.rand(V).to_sparse())


@each_op
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(layout: torch.layout, op: Callable) -> None:
    _, weight, target = make(9)
    hidden = torch.nested.nested_tensor([torch.randn(4, D), torch.randn(5, D)], layout=layout)
    with pytest.raises(TypeError, match=r"hidden is a nested tensor, expected a dense one.*torch.cat"):
        op(hidden, weight, target)


@each_op
def test_a_weight_without_values_is_refused(op: Callable) -> None:
    hidden, weight, target = make(9)
    with pytest.raises(ValueError, match=r"weight is on meta, hidden on cpu.*has no values.*load"):
        op(hidden, weight.to("meta"), target)


def vmapped(op: Callable, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> object:
    return torch.vmap(lambda h, t: op(h, weight, t).sum())(hidden, target)


def differentiated(op: Callable, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> object:
    return torch.func.grad(lambda h: op(h, weight, target).sum())(hidden)


def jacobian(op: Callable, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> object:
    return torch.func.jacfwd(lambda w: op(hidden, w, target).sum())(weight)


@each_op
@pytest.mark.parametrize("transform", [vmapped, differentiated, jacobian])
def test_torch_func_is_refused(transform: Callable, op: Callable) -> None:
    with pytest.raises(ValueError, match=f"{op.__name__} cannot be transformed by torch.vmap or torch.func; loop"):
        transform(op, *make(3, 5))


@each_op
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target": torch.zeros(7)}, TypeError, "target is torch.float32, expected torch.int64 or a smaller integer"),
        ({"target": torch.zeros(7, dtype=torch.bool)}, TypeError, "target is torch.bool, expected torch.int64"),
        ({"target": torch.zeros(7, dtype=torch.uint64)}, TypeError, "target is torch.uint64, expected torch.int64"),
        ({"hidden": torch.tensor(1.0)}, ValueError, r"hidden has shape \[\], expected \[..., D\]"),
        ({"target": torch.tensor(1)}, ValueError, r"target has shape \[\], expected hidden's shape without D = \[7\]"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict, error: type[Exception], message: str, op: Callable) -> None:
    hidden, weight, target = make(7)
    with pytest.raises(error, match=message):
        op(**({"hidden": hidden, "weight": weight, "target": target} | changes))
