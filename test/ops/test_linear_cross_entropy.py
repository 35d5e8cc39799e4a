import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from assertions import assert_as_exact
from measure import FlopCount, LiveBytes, eager_memory
from seqtile import linear_cross_entropy

D, V = 64, 1000
IGNORE = -100


def make(
    tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu", vocab: int = V
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(tokens, D, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, D, device=device) * 0.3).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device=device)
    target[torch.rand(tokens, device=device) < 0.3] = IGNORE
    target[0] = 1
    return hidden, weight, target


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    dtype: torch.dtype,
    reduction: str = "mean",
    num_items: int | None = None,
    upstream: float = 1.0,
) -> list[torch.Tensor]:
    """Loss, d_hidden and d_weight of torch in `dtype`, the softmax in float32 at least."""
    hidden, weight = (tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight))
    logits = hidden @ weight.T
    logits = logits if dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum" if num_items else reduction)
    loss = loss / num_items if num_items else loss
    (loss * upstream).backward()
    return [loss, hidden.grad, weight.grad]


OPTIONS = [{}, {"reduction": "sum"}, {"num_items": 37}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(63, 1000), (63, 16), (190, 63), (5, 1), (1024, 4)])
def test_loss_and_gradients(tokens: int, chunk_tokens: int, dtype: torch.dtype, options: dict, device: str) -> None:
    hidden, weight, target = make(tokens, dtype, device)
    same = reference(hidden, weight, target, dtype, **options)
    truth = reference(hidden, weight, target, torch.float64, **options)
    loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=chunk_tokens, **options)
    assert loss.dtype == torch.float32 and loss.shape == ()
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    for ours, theirs, true in zip((loss, hidden.grad, weight.grad), same, truth, strict=True):
        assert_as_exact(ours, theirs, true)


@pytest.mark.parametrize("vocab", [49152, 128256])
def test_real_vocabularies(vocab: int, device: str) -> None:
    hidden, weight, target = make(9, device=device, vocab=vocab)
    same = reference(hidden, weight, target, torch.float32)
    truth = reference(hidden, weight, target, torch.float64)
    loss = linear_cross_entropy(hidden, weight, target)
    loss.backward()
    for ours, theirs, true in zip((loss, hidden.grad, weight.grad), same, truth, strict=True):
        assert_as_exact(ours, theirs, true)


@pytest.mark.parametrize("upstream", [0.0, 1 / 32, -3.0, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_upstream_gradient(upstream: float, dtype: torch.dtype, device: str) -> None:
    hidden, weight, target = make(190, dtype, device)
    same = reference(hidden, weight, target, dtype, upstream=upstream)
    truth = reference(hidden, weight, target, torch.float64, upstream=upstream)
    (linear_cross_entropy(hidden, weight, target, chunk_tokens=63) * upstream).backward()
    for ours, theirs, true in zip((hidden.grad, weight.grad), same[1:], truth[1:], strict=True):
        assert_as_exact(ours, theirs, true)


def test_gradients_are_scaled_once_in_float32(device: str) -> None:
    """1/n lies midway between two bfloat16 numbers: a scale rounded to bfloat16 would be 0.2 % off everywhere."""
    n = 130_562
    assert abs(torch.tensor(1 / n).bfloat16().item() * n - 1) > 1e-3
    hidden, weight, target = make(1000, torch.bfloat16, device)
    weight = weight.detach().float().requires_grad_()  # its gradient is then float32, so that nothing hides a scale
    gradients = []
    for options in ({"reduction": "sum"}, {"num_items": n}):
        with torch.autocast(device, torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=63, **options)
        gradients.append(torch.autograd.grad(loss, (hidden, weight)))
    (hidden_sum, weight_sum), (hidden_scaled, weight_scaled) = gradients
    assert hidden_scaled.equal((hidden_sum.float() * (1 / n)).bfloat16())
    torch.testing.assert_close(weight_scaled, weight_sum / n, rtol=1e-6, atol=0)


@pytest.mark.parametrize("strided", ["every second", "column", "expanded"])
def test_strided_inputs(strided: str, device: str) -> None:
    hidden, weight, target = make(126, device=device)
    if strided == "every second":
        views = hidden[::2], target[::2]
    elif strided == "column":
        views = hidden.view(63, 2, D)[:, 1], target.view(63, 2)[:, 1]
    else:
        views = hidden[:63], target[:1].expand(63)
    loss = linear_cross_entropy(views[0], weight, views[1], chunk_tokens=16)
    expected = linear_cross_entropy(views[0].contiguous(), weight, views[1].contiguous(), chunk_tokens=16)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)


def test_batched_shape_equals_flat(device: str) -> None:
    hidden, weight, target = make(189, device=device)
    flat = linear_cross_entropy(hidden, weight, target, chunk_tokens=50)
    batched = linear_cross_entropy(hidden.view(3, 63, D), weight, target.view(3, 63), chunk_tokens=50)
    torch.testing.assert_close(batched, flat, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_operand_costs_no_product(frozen: str) -> None:
    hidden, weight, target = make(63)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    with FlopCount() as flops:
        loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=16)
        loss.backward()
    assert flops.total == 2 * (2 * 63 * D * V) and not flops.unknown
    same = reference(hidden, weight, target, torch.float32)
    truth = reference(hidden, weight, target, torch.float64)
    index = 2 if frozen == "hidden" else 1
    assert_as_exact((weight if frozen == "hidden" else hidden).grad, same[index], truth[index])


def test_three_products_and_one_without_gradients() -> None:
    hidden, weight, target = make(190)
    unit = 2 * 190 * D * V
    with FlopCount() as flops:
        linear_cross_entropy(hidden, weight, target, chunk_tokens=63).backward()
    assert flops.total == 3 * unit and not flops.unknown
    with FlopCount() as flops, torch.no_grad():
        linear_cross_entropy(hidden, weight, target, chunk_tokens=63)
    assert flops.total == unit


def peak_bytes(tokens: int) -> int:
    hidden, weight, target = make(tokens)
    with LiveBytes() as memory:
        linear_cross_entropy(hidden, weight, target, chunk_tokens=63).backward()
    return memory.peak


@eager_memory
def test_memory_grows_with_the_gradient_of_hidden_alone() -> None:
    growth = (peak_bytes(4000) - peak_bytes(1000)) / 3000
    d_hidden, bookkeeping = 4 * D, 8 + 8 + 1  # a few integers a token: shifted targets, masks
    assert d_hidden <= growth <= d_hidden + bookkeeping, f"{growth} bytes a token"


def test_all_ignored(device: str) -> None:
    hidden, weight, _ = make(63, device=device)
    target = torch.full((63,), IGNORE, device=device)
    for options, value in (({"reduction": "sum"}, 0.0), ({"num_items": 5}, 0.0), ({}, math.nan)):
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=16, **options)
        loss.backward()
        assert loss.item() == value or (math.isnan(value) and loss.isnan())
        assert hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


def test_num_items_as_a_tensor(device: str) -> None:
    hidden, weight, target = make(63, device=device)
    number = linear_cross_entropy(hidden, weight, target, num_items=41)
    tensor = linear_cross_entropy(hidden, weight, target, num_items=torch.tensor(41))
    torch.testing.assert_close(tensor, number)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(dtype: torch.dtype, device: str) -> None:
    hidden, weight, target = make(190, device=device)
    same = reference(hidden, weight, target, dtype)
    truth = reference(hidden, weight, target, torch.float64)
    with torch.autocast(device, dtype):
        loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=63)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert_as_exact(loss, same[0], truth[0])
    assert_as_exact(hidden.grad.to(dtype), same[1], truth[1])
    assert_as_exact(weight.grad.to(dtype), same[2], truth[2])


@pytest.mark.parametrize("hooks", [False, True])
def test_a_second_backward_raises(hooks: bool, device: str) -> None:
    """Also under saved-tensor hooks, which turn torch's own check of versions off."""
    hidden, weight, target = make(63, device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) if hooks else nullcontext():
        loss = linear_cross_entropy(hidden, weight, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        loss.backward()


def test_second_derivatives_raise(device: str) -> None:
    hidden, weight, target = make(63, device=device)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, target), hidden, create_graph=True)


@eager_memory
def test_on_fake_tensors() -> None:
    """A memory simulation runs it: nothing looks at values."""
    with FakeTensorMode():
        hidden, weight, target = make(1000)
        linear_cross_entropy(hidden, weight, target, chunk_tokens=63).backward()
        assert hidden.grad.shape == hidden.shape


def test_compiled_equals_eager(device: str) -> None:
    hidden, weight, target = make(190, device=device)
    linear_cross_entropy(hidden, weight, target, chunk_tokens=63).backward()
    eager = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None

    @torch.compile(backend="aot_eager")
    def step(hidden, weight, target):
        return linear_cross_entropy(hidden * 1.0, weight, target, chunk_tokens=63) * 1.0

    step(hidden, weight, target).backward()
    torch.testing.assert_close((hidden.grad, weight.grad), eager)


def test_compiling_breaks_the_graph_once_and_by_name() -> None:
    explained = torch._dynamo.explain(lambda hidden, *rest: linear_cross_entropy(hidden * 1.0, *rest) * 1.0)(*make(63))
    assert explained.graph_break_count == 1
    assert "seqtile.linear_cross_entropy" in explained.break_reasons[0].reason


def bad(**changes: object) -> dict:
    hidden, weight, target = make(63)
    return {"hidden": hidden, "weight": weight, "target": target} | changes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (bad(target=torch.full((63,), V)), ValueError, "target holds 1000, expected 0 <= target < 1000"),
        (bad(target=torch.full((63,), -1)), ValueError, "target holds -1"),
        (bad(target=torch.zeros(62, dtype=torch.int64)), ValueError, r"target has shape \[62\], expected"),
        (bad(target=torch.zeros(63)), TypeError, "target is torch.float32, expected torch.int64"),
        (bad(target=torch.zeros(63, dtype=torch.int64, device="meta")), ValueError, "target is on meta"),
        (
            bad(hidden=torch.randn(63, D + 1)),
            ValueError,
            r"weight has shape \[1000, 64\], expected \[V, D\] with D = 65",
        ),
        (bad(hidden=torch.randn(63, D, dtype=torch.bfloat16)), TypeError, "cast one of them, or use torch.autocast"),
        (bad(hidden=torch.randn(63, D, dtype=torch.float64)), TypeError, "hidden is torch.float64, expected one of"),
        (bad(hidden=torch.randn(D)), ValueError, r"expected \[T, D\] or \[B, S, D\]"),
        (bad(hidden=torch.randn(0, D), target=torch.zeros(0, dtype=torch.int64)), ValueError, "an empty sequence"),
        (bad(weight=torch.randn(V, D, device="meta")), ValueError, "weight is on meta, hidden on cpu"),
        (bad(reduction="none"), ValueError, "reduction is 'none'"),
        (bad(num_items=0), ValueError, "num_items is 0"),
        (bad(num_items=torch.tensor(-3)), ValueError, "num_items is -3"),
        (bad(num_items=torch.tensor([3, 4])), ValueError, r"num_items has shape \[2\]"),
        (bad(num_items=True), TypeError, "num_items is True"),
        (bad(num_items=3, reduction="sum"), ValueError, "num_items divides the sum"),
        (bad(chunk_tokens=0), ValueError, "chunk_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments)
