import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from seqtile import linear_cross_entropy
from support.assertions import assert_as_exact
from support.head_reference import (
    IGNORE,
    D,
    V,
    cross_entropy_reference,
    entropies_of,
    logits_of,
    make,
    values_and_gradients,
)
from support.measure import eager_memory


def reference(*operands: torch.Tensor, dtype: torch.dtype, **options) -> list[torch.Tensor]:
    return values_and_gradients(cross_entropy_reference, *operands, dtype=dtype, **options)


OPTIONS = [{}, {"reduction": "sum"}, {"num_items": 37}, {"reduction": "none"}]


@pytest.mark.in_interpreter(
    "one end-to-end case of each op and dtype",
    only=("63-16-dtype0-*sum*", "190-63-dtype0-*none*", "190-63-dtype1-*num*", "190-63-dtype2-{}"),
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(63, 1000), (63, 16), (190, 63), (5, 1), (1024, 4)])
def test_loss_and_gradients(tokens: int, chunk_tokens: int, dtype: torch.dtype, options: dict, device: str) -> None:
    hidden, weight, target = make(tokens, dtype, device)
    same = reference(hidden, weight, target, dtype=dtype, **options)
    truth = reference(hidden, weight, target, dtype=torch.float64, **options)
    loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=chunk_tokens, **options)
    assert loss.dtype == torch.float32 and loss.shape == (target.shape if options.get("reduction") == "none" else ())
    loss.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    for ours, theirs, true in zip((loss, hidden.grad, weight.grad), same, truth, strict=True):
        assert_as_exact(ours, theirs, true)


@pytest.mark.parametrize("vocab", [49152, 128256])
def test_real_vocabularies(vocab: int, device: str) -> None:
    hidden, weight, target = make(9, device=device, vocab=vocab)
    target.clamp_(min=0)  # all labelled: a CPU's product of other rows has another error
    same = reference(hidden, weight, target, dtype=torch.float32)
    truth = reference(hidden, weight, target, dtype=torch.float64)
    loss = linear_cross_entropy(hidden, weight, target)
    loss.backward()
    for ours, theirs, true in zip((loss, hidden.grad, weight.grad), same, truth, strict=True):
        assert_as_exact(ours, theirs, true)


@pytest.mark.parametrize("upstream", [0.0, 1 / 32, -3.0, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_upstream_gradient(upstream: float, dtype: torch.dtype, device: str) -> None:
    hidden, weight, target = make(190, dtype, device)
    same = reference(hidden, weight, target, dtype=dtype, upstream=upstream)
    truth = reference(hidden, weight, target, dtype=torch.float64, upstream=upstream)
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


def test_strided_vectors(device: str) -> None:
    """Bias and class weights that are columns of something."""
    hidden, weight, target = make(63, device=device)
    table = torch.rand(V, 2, device=device)
    for reduction in ("mean", "none"):
        options = {"reduction": reduction, "chunk_tokens": 16}
        columns = linear_cross_entropy(hidden, weight, target, bias=table[:, 0], class_weight=table[:, 1], **options)
        bias, class_weight = table.t().contiguous()
        whole = linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=class_weight, **options)
        torch.testing.assert_close(columns, whole, rtol=0, atol=0)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
def test_accumulating_without_float32_under_autocast(weight_dtype: torch.dtype, device: str) -> None:
    """accumulate_dtype=None where the products are in another dtype than the weight."""
    hidden, weight, target = make(190, device=device)
    weight = weight.detach().to(weight_dtype).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=63, accumulate_dtype=None)
    loss.backward()
    same, truth = (
        reference(hidden.detach().bfloat16(), weight.detach().bfloat16(), target, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert weight.grad.dtype == weight_dtype
    assert_as_exact(weight.grad.bfloat16(), same[2], truth[2])


def test_batched_shape_equals_flat(device: str) -> None:
    hidden, weight, target = make(189, device=device)
    flat = linear_cross_entropy(hidden, weight, target, chunk_tokens=50)
    batched = linear_cross_entropy(hidden.view(3, 63, D), weight, target.view(3, 63), chunk_tokens=50)
    torch.testing.assert_close(batched, flat, rtol=0, atol=0)


def test_all_ignored(device: str) -> None:
    hidden, weight, _ = make(63, device=device)
    target = torch.full((63,), IGNORE, device=device)
    for options, value in (({"reduction": "sum"}, 0.0), ({"num_items": 5}, 0.0), ({}, math.nan)):
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=16, **options)
        loss.backward()
        assert loss.item() == value or (math.isnan(value) and loss.isnan())
        assert hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
def test_num_items_as_a_tensor(dtype: torch.dtype, device: str) -> None:
    hidden, weight, target = make(63, device=device)
    number = linear_cross_entropy(hidden, weight, target, num_items=41)
    for where in ("cpu", device):
        for num_items in (torch.tensor(41, dtype=dtype, device=where), torch.tensor([41], dtype=dtype, device=where)):
            tensor = linear_cross_entropy(hidden, weight, target, num_items=num_items)
            assert tensor.dtype == torch.float32 and tensor.device == hidden.device
            torch.testing.assert_close(tensor, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_token_labelled_and_none_counted(dtype: torch.dtype, device: str) -> None:
    """A batch whose labels are all masked, and its count of 0 as a tensor: the loss is NaN, the gradients are zeros."""
    hidden, weight, _ = make(63, dtype, device)
    target = torch.full((63,), IGNORE, device=device)
    loss = linear_cross_entropy(hidden, weight, target, num_items=torch.tensor(0, device=device), chunk_tokens=16)
    loss.backward()
    assert loss.isnan() and hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


def test_an_infinite_upstream_stays_in_its_row(device: str) -> None:
    """As in torch: one token's overflow spoils its own row of d_hidden, and d_weight, nothing else."""
    hidden, weight, target = make(190, device=device)
    target.clamp_(min=0)
    upstream = torch.randn(190, device=device)
    upstream[7] = torch.inf
    losses = linear_cross_entropy(hidden, weight, target, reduction="none", chunk_tokens=63)
    (d_hidden,) = torch.autograd.grad((losses * upstream).sum(), hidden)
    truth = reference(hidden, weight, target, dtype=torch.float64, reduction="none", upstream=upstream)[1]
    rows = torch.arange(190, device=device) != 7
    assert not d_hidden[7].isfinite().any()
    torch.testing.assert_close(d_hidden[rows].double(), truth[rows], rtol=1e-4, atol=1e-5)


def test_numbers_of_numpy(device: str) -> None:
    hidden, weight, target = make(63, device=device)
    options = {"num_items": 41, "ignore_index": IGNORE, "chunk_tokens": 16, "z_loss": 0.5, "softcap": 4.0}
    theirs = {name: (np.int64 if isinstance(value, int) else np.float32)(value) for name, value in options.items()}
    expected = linear_cross_entropy(hidden, weight, target, **options)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, target, **theirs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(dtype: torch.dtype, device: str) -> None:
    hidden, weight, target = make(190, device=device)
    same = reference(hidden, weight, target, dtype=dtype)
    truth = reference(hidden, weight, target, dtype=torch.float64)
    with torch.autocast(device, dtype):
        loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=63)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert_as_exact(loss, same[0], truth[0])
    assert_as_exact(hidden.grad.to(dtype), same[1], truth[1])
    assert_as_exact(weight.grad.to(dtype), same[2], truth[2])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("hooks", [False, True])
def test_backward_again_and_again(hooks: bool, reduction: str, device: str) -> None:
    """With `retain_graph`, also under saved-tensor hooks, and with another upstream gradient."""
    hidden, weight, target = make(190, device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) if hooks else nullcontext():
        loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=63, reduction=reduction)
    loss.sum().backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    (only,) = torch.autograd.grad(loss.sum(), weight, retain_graph=True)
    torch.testing.assert_close(only, first[1], rtol=0, atol=0)
    (loss.sum() * -3).backward()
    for gradient, once in zip((hidden.grad, weight.grad), first, strict=True):
        torch.testing.assert_close(gradient, -2 * once)


@pytest.mark.parametrize("chunk_tokens", [20, None])
def test_weight_changed_before_a_backward(chunk_tokens: int | None, device: str) -> None:
    """Of several chunks the first backward has its gradients already; what recomputes or multiplies raises, as
    torch."""
    hidden, weight, target = make(63, device=device)
    loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=chunk_tokens)
    with torch.no_grad():
        weight.mul_(2)
    if chunk_tokens is not None:
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loss_changed_in_place_inside_a_larger_graph(device: str) -> None:
    hidden, weight, target = make(190, device=device)
    scale = torch.tensor(0.7, device=device, requires_grad=True)
    loss = linear_cross_entropy(hidden * scale, weight, target, chunk_tokens=63, reduction="sum")
    loss *= 3
    (loss + (hidden.square().sum() * scale)).backward()
    same, truth = [], []
    for grads, dtype in ((same, torch.float32), (truth, torch.float64)):
        h, w, s = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight, scale))
        total = cross_entropy_reference(h * s, w, target, reduction="sum") * 3 + h.square().sum() * s
        grads += torch.autograd.grad(total, (h, w, s))
    for ours, theirs, true in zip((hidden.grad, weight.grad, scale.grad), same, truth, strict=True):
        assert_as_exact(ours, theirs, true)


def test_gradients_accumulate(device: str) -> None:
    """Two micro-batches into one .grad."""
    first, second = make(190, device=device), make(77, device=device)
    weight = first[1]
    for hidden, _, target in (first, second):
        linear_cross_entropy(hidden, weight, target, chunk_tokens=63, reduction="sum").backward()
    same, truth = (
        sum(reference(h, weight, t, dtype=dtype, reduction="sum")[2] for h, _, t in (first, second))
        for dtype in (torch.float32, torch.float64)
    )
    assert_as_exact(weight.grad, same, truth)


def test_tied_embeddings(device: str) -> None:
    """One weight as embedding and as head."""
    _, weight, target = make(190, device=device)
    ids = torch.randint(0, V, (190,), device=device)
    linear_cross_entropy(weight[ids], weight, target, chunk_tokens=63).backward()
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaf = weight.detach().to(dtype).requires_grad_()
        gradients += torch.autograd.grad(cross_entropy_reference(leaf[ids], leaf, target), leaf)
    assert_as_exact(weight.grad, *gradients)


@pytest.mark.parametrize("scaler", [65536.0, 1.0])
def test_upstream_of_every_token(scaler: float, device: str) -> None:
    """float16, a GradScaler's factor on a different gradient for every token: nothing overflows on the way."""
    hidden, weight, target = make(190, torch.float16, device)
    upstream = torch.randn(190, device=device) / 190 * scaler
    truth = reference(hidden, weight, target, dtype=torch.float64, reduction="none", upstream=upstream)
    unscaled = reference(hidden, weight, target, dtype=torch.float16, reduction="none", upstream=upstream / scaler)
    losses = linear_cross_entropy(hidden, weight, target, chunk_tokens=63, reduction="none")
    ours = torch.autograd.grad((losses * upstream).sum(), (hidden, weight))
    for gradient, theirs, true in zip(ours, unscaled[1:], truth[1:], strict=True):
        assert_as_exact(gradient / scaler, theirs, true / scaler)


def test_upstream_beyond_float16(device: str) -> None:
    """Gradients that fit float16, through logits whose own gradients do not."""
    hidden, weight, target = make(190, torch.float16, device)
    hidden, weight = ((x.detach() / 256).requires_grad_() for x in (hidden, weight))
    upstream, factor = torch.randn(190, device=device), 2.0**18
    same, truth = (
        reference(hidden, weight, target, dtype=dtype, reduction="none", upstream=upstream)
        for dtype in (torch.float16, torch.float64)
    )
    losses = linear_cross_entropy(hidden, weight, target, chunk_tokens=63, reduction="none")
    ours = torch.autograd.grad((losses * upstream * factor).sum(), (hidden, weight))
    for gradient, theirs, true in zip(ours, same[1:], truth[1:], strict=True):
        assert_as_exact(gradient.double() / factor, theirs, true)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_weights_beyond_float16(reduction: str, device: str) -> None:
    """Weights of a million: their products with probabilities fit no float16, the gradient of their mean does."""
    hidden, weight, target = make(190, torch.float16, device)
    class_weight = torch.rand(V, device=device) + 0.5
    upstream = torch.randn(190, device=device) / 190 / 1e6 if reduction == "none" else 1.0
    options = {"reduction": reduction, "class_weight": class_weight * 1e6, "upstream": upstream}
    same, truth = (
        reference(hidden, weight, target, dtype=dtype, **options) for dtype in (torch.float16, torch.float64)
    )
    ours = values_and_gradients(
        linear_cross_entropy, hidden, weight, target, dtype=torch.float16, chunk_tokens=63, **options
    )
    for value, theirs, true in zip(ours, same, truth, strict=True):
        assert_as_exact(value, theirs, true)


def test_metrics(device: str) -> None:
    hidden, weight, target = make(190, device=device)
    target[1:40] = (hidden[1:40] @ weight.T).argmax(1)  # some predictions are right
    for reduction in ("mean", "none"):
        options = {"chunk_tokens": 63, "softcap": 5.0, "reduction": reduction}
        loss, metrics = linear_cross_entropy(hidden, weight, target, return_metrics=True, **options)
        alone = linear_cross_entropy(hidden, weight, target, **options)
        torch.testing.assert_close(loss, alone, rtol=0, atol=0)
        logits = logits_of(hidden.double() @ weight.double().T, softcap=5.0)
        labelled = target != IGNORE
        predicted = logits.argmax(1)
        assert metrics.predicted_tokens.equal(predicted.where(labelled, -1))
        accuracy = (predicted == target)[labelled].double().mean()
        assert 0 < accuracy < 1
        torch.testing.assert_close(metrics.token_accuracy.double(), accuracy, rtol=1e-6, atol=0)
        torch.testing.assert_close(metrics.logsumexp.double(), logits.logsumexp(1) * labelled, rtol=1e-6, atol=0)
        entropy = entropies_of(logits)[labelled].mean()
        torch.testing.assert_close(metrics.mean_entropy.double(), entropy, rtol=1e-5, atol=0)
        gradients = torch.autograd.grad(loss.sum(), (hidden, weight))
        for ours, expected in zip(gradients, torch.autograd.grad(alone.sum(), (hidden, weight)), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)


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


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("ignore_index", [None, IGNORE])
def test_compiled_equals_eager(ignore_index: int | None, reduction: str, device: str) -> None:
    """With ignore_index=None in one graph; with ignored tokens too."""
    hidden, weight, target = make(190, device=device)
    if ignore_index is None:
        target.clamp_(min=0)
    bias = torch.randn(V, device=device, requires_grad=True)
    leaves = (hidden, weight, bias)

    def step(hidden, weight, bias, target):
        options = {"label_smoothing": 0.1, "softcap": 5.0, "ignore_index": ignore_index, "reduction": reduction}
        loss = linear_cross_entropy(hidden * 1.0, weight, target, bias=bias, chunk_tokens=63, **options)
        return (loss * 1.5).square().sum()

    eager = step(*leaves, target)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=ignore_index is None)(*leaves, target)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(torch.autograd.grad(compiled, leaves), torch.autograd.grad(eager, leaves))


@pytest.mark.full("10 s of compiler each, of the same graph", but=("dynamic",))
@pytest.mark.parametrize("how", ["inductor", "dynamic"])
def test_compiles_in_one_graph(how: str, device: str) -> None:
    """By the default backend, and with sizes and numbers that change from call to call."""
    hidden, weight, target = make(190, device=device)
    target.clamp_(min=0)

    def step(hidden, weight, target, z_loss):
        return linear_cross_entropy(hidden * 1.0, weight, target, ignore_index=None, chunk_tokens=63, z_loss=z_loss)

    how = {"backend": "inductor"} if how == "inductor" else {"backend": "aot_eager", "dynamic": True}
    compiled = torch.compile(step, fullgraph=True, **how)
    for tokens, z_loss in ((190, 0.1), (150, 0.2)):
        ours, eager = (f(hidden[:tokens], weight, target[:tokens], z_loss) for f in (compiled, step))
        torch.testing.assert_close(ours, eager)
        gradients = (torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, eager))
        torch.testing.assert_close(*gradients)


def test_compiling_breaks_the_graph_once_and_by_name() -> None:
    explained = torch._dynamo.explain(lambda hidden, *rest: linear_cross_entropy(hidden * 1.0, *rest) * 1.0)(*make(63))
    assert explained.graph_break_count == 1
    assert "seqtile counts the labelled tokens" in explained.break_reasons[0].reason


def bad(**changes: object) -> dict:
    hidden, weight, target = make(63)
    return {"hidden": hidden, "weight": weight, "target": target} | changes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (bad(target=torch.full((63,), V)), ValueError, "target holds 1000, expected 0 <= target < 1000"),
        (bad(target=torch.full((63,), -1)), ValueError, "target holds -1"),
        (bad(target=torch.zeros(62, dtype=torch.int64)), ValueError, r"target has shape \[62\], expected"),
        (bad(target=torch.zeros(63, dtype=torch.int64, device="meta")), ValueError, "target is on meta"),
        (
            bad(hidden=torch.randn(63, D + 1)),
            ValueError,
            r"weight has shape \[1000, 64\], expected \[V, D\] with D = 65",
        ),
        (bad(hidden=torch.randn(63, D, dtype=torch.bfloat16)), TypeError, "cast one of them, or use torch.autocast"),
        (bad(hidden=torch.randn(63, D, dtype=torch.float64)), TypeError, "hidden is torch.float64, expected one of"),
        (bad(hidden=torch.randn(0, D), target=torch.zeros(0, dtype=torch.int64)), ValueError, "an empty sequence"),
        (bad(weight=torch.randn(V, D, device="meta")), ValueError, "weight is on meta, hidden on cpu"),
        (bad(reduction="avg"), ValueError, "reduction is 'avg', expected"),
        (bad(ignore_index=1.5), TypeError, "ignore_index is 1.5"),
        (bad(target=torch.full((63,), -100), ignore_index=None), ValueError, "target holds -100.*pass ignore_index"),
        (bad(bias=torch.randn(V + 1)), ValueError, r"bias has shape \[1001\], expected \[V\] = \[1000\]"),
        (bad(bias=torch.randn(V).bfloat16()), TypeError, "bias is torch.bfloat16, hidden is torch.float32"),
        (bad(class_weight=torch.rand(V - 1)), ValueError, r"class_weight has shape \[999\], expected \[V\] = \[1000\]"),
        (bad(class_weight=[1.0] * V), TypeError, "class_weight is a list"),
        (bad(class_weight=torch.ones(V, dtype=torch.int64)), TypeError, "class_weight is torch.int64"),
        (bad(class_weight=torch.rand(V, device="meta")), ValueError, "class_weight is on meta"),
        (bad(class_weight=torch.rand(V, requires_grad=True)), ValueError, "pass class_weight.detach()"),
        (bad(label_smoothing=-0.1), ValueError, "label_smoothing is -0.1, expected at least 0 and at most 1"),
        (bad(label_smoothing=1.1), ValueError, "label_smoothing is 1.1"),
        (bad(label_smoothing="0.1"), TypeError, "label_smoothing is '0.1', expected a Python number"),
        (bad(z_loss=-1e-4), ValueError, "z_loss is -0.0001, expected at least 0"),
        (bad(z_loss=math.nan), ValueError, "z_loss is nan"),
        (bad(softcap=0.0), ValueError, "softcap is 0.0, expected more than 0"),
        (bad(logit_scale=math.inf), ValueError, "logit_scale is inf, expected finite"),
        (bad(logit_scale=torch.tensor(2.0)), TypeError, "logit_scale is tensor"),
        (bad(accumulate_dtype=torch.bfloat16), ValueError, "accumulate_dtype is torch.bfloat16"),
        (bad(num_items=-1.5), ValueError, "num_items is -1.5"),
        (bad(num_items=math.nan), ValueError, "num_items is nan"),
        (bad(num_items=3, reduction="none"), ValueError, 'num_items divides the sum.*not with "none"'),
        (bad(num_items=0), ValueError, "num_items is 0"),
        (bad(target=[1] * 63), TypeError, "target is a list, expected a tensor"),
        (bad(bias=[0.0] * V), TypeError, "bias is a list, expected a tensor"),
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


def test_a_sharded_weight_is_refused() -> None:
    """A DTensor is a shard with a plan: its product is not the one that is wanted."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        hidden, weight, target = make(63)
        sharded = distribute_tensor(weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(TypeError, match=r"weight is a DTensor, expected a plain tensor.*full_tensor\(\)"):
            linear_cross_entropy(hidden, sharded, target)
        whole = linear_cross_entropy(hidden, sharded.full_tensor(), target)
        torch.testing.assert_close(whole, linear_cross_entropy(hidden, weight, target), rtol=0, atol=0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_main_grad(reduction: str, device: str) -> None:
    """Two micro-batches add up, unrounded, in the weight's own float32 buffer; nothing goes to .grad."""
    batches = [make(190, torch.bfloat16, device), make(77, torch.bfloat16, device)]
    weight, bias = batches[0][1], torch.randn(V, device=device).bfloat16().requires_grad_()
    usual, truth = [], []
    for hidden, _, target in batches:
        same, exact = (
            reference(hidden, weight, target, bias=bias, dtype=dtype, reduction=reduction)[2:]
            for dtype in (torch.bfloat16, torch.float64)
        )
        usual, truth = [*usual, same], [*truth, exact]
    for parameter in (weight, bias):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    for hidden, _, target in batches:
        loss = linear_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=63, reduction=reduction)
        loss.sum().backward()
        assert hidden.grad is not None
    for i, parameter in enumerate((weight, bias)):
        assert parameter.grad is None
        assert_as_exact(parameter.main_grad, usual[0][i] + usual[1][i], truth[0][i] + truth[1][i])
