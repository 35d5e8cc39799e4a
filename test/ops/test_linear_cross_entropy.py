"""The loss and its gradients for any upstream gradient, and the arguments that it refuses."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from seqtile import linear_cross_entropy
from support.assertions import assert_all_as_exact, assert_as_exact, relative_error
from support.choice import every_pair
from support.head_reference import (
    IGNORE,
    D,
    V,
    cross_entropy_reference,
    logits_of,
    make,
    values_and_gradients,
)

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def references(*operands: torch.Tensor, dtype: torch.dtype, **options: object) -> list[list[torch.Tensor]]:
    """Torch's loss and gradients in a dtype, and in float64."""
    return [
        values_and_gradients(cross_entropy_reference, *operands, dtype=d, **options) for d in (dtype, torch.float64)
    ]


def compare(operands: Operands, dtype: torch.dtype, chunk_tokens: int | None = 63, **options: object) -> None:
    """Loss and gradients by the tolerance law."""
    given = {"dtype": dtype, "chunk_tokens": chunk_tokens} | options
    ours = values_and_gradients(linear_cross_entropy, *operands, **given)
    assert [value.dtype for value in ours] == [torch.float32, *(dtype for _ in ours[1:])]
    for value, same, true in zip(ours, *references(*operands, dtype=dtype, **options), strict=True):
        assert value.shape == true.shape
        assert_as_exact(value, same, true)


@pytest.mark.full("of 60 cases, beside those that test_head_options.py draws", but=every_pair)
@pytest.mark.in_interpreter(
    "one end-to-end case of each op and dtype",
    only=("63-16-dtype0-*sum*", "90-40-dtype0-*none*", "90-40-dtype1-*num*", "90-40-dtype2-{}"),
)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"num_items": 37}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(63, 1000), (63, 16), (90, 40), (5, 1), (1024, 4)])
def test_loss_and_gradients(tokens: int, chunk_tokens: int, dtype: torch.dtype, options: dict, device: str) -> None:
    compare(make(tokens, dtype, device), dtype, chunk_tokens, **options)


@pytest.mark.parametrize("vocab", [49152, 128256])
def test_real_vocabularies(vocab: int, device: str) -> None:
    hidden, weight, target = make(9, device=device, vocab=vocab)
    target.clamp_(min=0)  # all labelled: a CPU's product of other rows has another error
    compare((hidden, weight, target), torch.float32, None)


@pytest.mark.parametrize("upstream", [0.0, 1 / 32, -3.0, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_upstream_gradient(upstream: float, dtype: torch.dtype, device: str) -> None:
    compare(make(190, dtype, device), dtype, upstream=upstream)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_weights_beyond_float16(reduction: str, device: str) -> None:
    """Weights of a million: their products with probabilities overflow float16, the gradient of their mean does not."""
    class_weight = (torch.rand(V, device=device) + 0.5) * 1e6
    upstream = torch.randn(190, device=device) / 190 / 1e6 if reduction == "none" else 1.0
    operands = make(190, torch.float16, device)
    compare(operands, torch.float16, reduction=reduction, class_weight=class_weight, upstream=upstream)


@pytest.mark.parametrize(("scale", "factor"), [(1, 1.0), (1, 65536.0 / 190), (256, 2.0**18)])
def test_upstream_of_every_token_beyond_float16(scale: int, factor: float, device: str) -> None:
    """A GradScaler's factor on a different gradient for every token: no intermediate value overflows, and gradients
    that fit float16 are right although those of the logits do not fit."""
    hidden, weight, target = make(190, torch.float16, device)
    hidden, weight = ((x.detach() / scale).requires_grad_() for x in (hidden, weight))
    upstream = torch.randn(190, device=device)
    losses = linear_cross_entropy(hidden, weight, target, chunk_tokens=63, reduction="none")
    ours = torch.autograd.grad((losses * upstream * factor).sum(), (hidden, weight))
    same, truth = references(hidden, weight, target, dtype=torch.float16, reduction="none", upstream=upstream)
    for gradient, theirs, true in zip(ours, same[1:], truth[1:], strict=True):
        assert_as_exact(gradient.double() / factor, theirs, true)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_main_grad(reduction: str, device: str) -> None:
    """Two micro-batches are summed, unrounded, in the weight's own float32 buffer; .grad gets nothing."""
    batches = [make(190, torch.bfloat16, device), make(77, torch.bfloat16, device)]
    weight, bias = batches[0][1], torch.randn(V, device=device).bfloat16().requires_grad_()
    options = {"bias": bias, "reduction": reduction}
    found = [references(hidden, weight, target, dtype=torch.bfloat16, **options) for hidden, _, target in batches]
    for parameter in (weight, bias):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    for hidden, _, target in batches:
        linear_cross_entropy(hidden, weight, target, chunk_tokens=63, **options).sum().backward()
        assert hidden.grad is not None
    for i, parameter in enumerate((weight, bias), start=2):
        assert parameter.grad is None
        assert_as_exact(parameter.main_grad, *(found[0][kind][i] + found[1][kind][i] for kind in (0, 1)))


STRIDED = {
    "every second": lambda hidden, target: (hidden[::2], target[::2]),
    "column": lambda hidden, target: (hidden.view(63, 2, D)[:, 1], target.view(63, 2)[:, 1]),
    "expanded": lambda hidden, target: (hidden[:63], target[:1].expand(63)),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("strided", STRIDED)
def test_strided_inputs(strided: str, reduction: str, device: str) -> None:
    """Also a bias and class weights that are columns of a larger tensor."""
    hidden, weight, target = make(126, device=device)
    bias, class_weight = torch.rand(V, 2, device=device).unbind(1)
    views = (*STRIDED[strided](hidden, target), bias, class_weight)
    ours, whole = (
        linear_cross_entropy(h, weight, t, bias=b, class_weight=c, reduction=reduction, chunk_tokens=16)
        for h, t, b, c in (views, [view.contiguous() for view in views])
    )
    torch.testing.assert_close(ours, whole, rtol=0, atol=0)


NONE_COUNTED = [
    ({"reduction": "sum"}, 0.0),
    ({"num_items": 5}, 0.0),
    ({}, math.nan),
    ({"num_items": torch.tensor(0)}, math.nan),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("options", "value"), NONE_COUNTED, ids=str)
def test_no_token_labelled(options: dict, value: float, dtype: torch.dtype, device: str) -> None:
    """A batch whose labels are all masked, with its count of 0 as a tensor or not: the gradients are zeros."""
    hidden, weight, target = make(63, dtype, device)
    loss = linear_cross_entropy(hidden, weight, target.fill_(IGNORE), chunk_tokens=16, **options)
    loss.backward()
    torch.testing.assert_close(loss.item(), value, equal_nan=True)
    assert hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


def test_gradients_are_scaled_once_in_float32(device: str) -> None:
    """1/n lies midway between two bfloat16 numbers: a scale rounded to bfloat16 would be 0.2 % off everywhere."""
    n = 130_562
    assert abs(torch.tensor(1 / n).bfloat16().item() * n - 1) > 1e-3
    hidden, weight, target = make(1000, torch.bfloat16, device)
    weight = weight.detach().float().requires_grad_()  # its gradient is then float32, which shows any rounded scale
    gradients = []
    for options in ({"reduction": "sum"}, {"num_items": n}):
        with torch.autocast(device, torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=63, **options)
        gradients.append(torch.autograd.grad(loss, (hidden, weight)))
    (hidden_sum, weight_sum), (hidden_scaled, weight_scaled) = gradients
    assert hidden_scaled.equal((hidden_sum.float() * (1 / n)).bfloat16())
    torch.testing.assert_close(weight_scaled, weight_sum / n, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
def test_accumulating_without_float32_under_autocast(weight_dtype: torch.dtype, device: str) -> None:
    """accumulate_dtype=None with products in another dtype than the weight."""
    hidden, weight, target = make(190, device=device)
    weight = weight.detach().to(weight_dtype).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=63, accumulate_dtype=None)
    loss.backward()
    same, truth = references(hidden.bfloat16(), weight.bfloat16(), target, dtype=torch.bfloat16)
    assert weight.grad.dtype == weight_dtype
    assert_as_exact(weight.grad.bfloat16(), same[2], truth[2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
def test_num_items_as_a_tensor(dtype: torch.dtype, device: str) -> None:
    hidden, weight, target = make(63, device=device)
    number = linear_cross_entropy(hidden, weight, target, num_items=41)
    for where in ("cpu", device):
        for num_items in (torch.tensor(41, dtype=dtype, device=where), torch.tensor([41], dtype=dtype, device=where)):
            tensor = linear_cross_entropy(hidden, weight, target, num_items=num_items)
            assert tensor.dtype == torch.float32 and tensor.device == hidden.device
            torch.testing.assert_close(tensor, number)


def test_an_infinite_upstream_stays_in_its_row(device: str) -> None:
    """As in torch: one token's overflow affects only its own row of d_hidden, and d_weight."""
    hidden, weight, target = make(190, device=device)
    target.clamp_(min=0)
    upstream = torch.randn(190, device=device)
    upstream[7] = torch.inf
    losses = linear_cross_entropy(hidden, weight, target, reduction="none", chunk_tokens=63)
    (d_hidden,) = torch.autograd.grad((losses * upstream).sum(), hidden)
    _, (_, truth, _) = references(hidden, weight, target, dtype=torch.float32, reduction="none", upstream=upstream)
    rows = torch.arange(190, device=device) != 7
    assert not d_hidden[7].isfinite().any()
    torch.testing.assert_close(d_hidden[rows].double(), truth[rows], rtol=1e-4, atol=1e-5)


def test_numbers_of_numpy(device: str) -> None:
    hidden, weight, target = make(63, device=device)
    options = {"num_items": 41, "ignore_index": IGNORE, "chunk_tokens": 16, "z_loss": 0.5, "softcap": 4.0}
    theirs = {name: (np.int64 if isinstance(value, int) else np.float32)(value) for name, value in options.items()}
    expected = linear_cross_entropy(hidden, weight, target, **options)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, target, **theirs), expected, rtol=0, atol=0)


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
    assert_all_as_exact((hidden.grad, weight.grad, scale.grad), same, truth)


def test_metrics(device: str) -> None:
    """Values of the other metrics, and all gradients, are in test_head_options.py."""
    hidden, weight, target = make(190, device=device)
    target[1:40] = (hidden[1:40] @ weight.T).argmax(1)  # some predictions are right
    for reduction in ("mean", "none"):
        options = {"chunk_tokens": 63, "softcap": 5.0, "reduction": reduction}
        loss, metrics = linear_cross_entropy(hidden, weight, target, return_metrics=True, **options)
        alone = linear_cross_entropy(hidden, weight, target, **options)
        torch.testing.assert_close(loss, alone, rtol=0, atol=0)
        labelled, predicted = target != IGNORE, logits_of(hidden.double() @ weight.double().T, softcap=5.0).argmax(1)
        assert metrics.predicted_tokens.equal(predicted.where(labelled, -1))
        accuracy = (predicted == target)[labelled].double().mean()
        assert 0 < accuracy < 1
        torch.testing.assert_close(metrics.token_accuracy.double(), accuracy, rtol=1e-6, atol=0)
        gradients = torch.autograd.grad(loss.sum(), (hidden, weight))
        for ours, expected in zip(gradients, torch.autograd.grad(alone.sum(), (hidden, weight)), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.full("10 s of compiler each, of the same graph", but=("dynamic",))
@pytest.mark.parametrize("how", ["inductor", "dynamic"])
def test_compiles_in_one_graph(how: str, device: str) -> None:
    """With the default backend, and with sizes and numbers that change between calls."""
    hidden, weight, target = make(190, device=device)
    target.clamp_(min=0)

    def step(hidden, weight, target, z_loss):
        return linear_cross_entropy(hidden * 1.0, weight, target, ignore_index=None, chunk_tokens=100, z_loss=z_loss)

    how = {"backend": "inductor"} if how == "inductor" else {"backend": "aot_eager", "dynamic": True}
    compiled = torch.compile(step, fullgraph=True, **how)
    for tokens, z_loss in ((190, 0.1), (150, 0.2)):
        ours, eager = (f(hidden[:tokens], weight, target[:tokens], z_loss) for f in (compiled, step))
        torch.testing.assert_close(ours, eager)
        gradients = (torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, eager))
        torch.testing.assert_close(*gradients)


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
        (bad(softcap=0.0), ValueError, "softcap is 0.0, expected more than 0"),
        (bad(logit_scale=math.inf), ValueError, "logit_scale is inf, expected finite"),
        (bad(logit_scale=torch.tensor(2.0)), TypeError, "logit_scale is tensor"),
        (bad(accumulate_dtype=torch.bfloat16), ValueError, "accumulate_dtype is torch.bfloat16"),
        (bad(num_items=-1.5), ValueError, "num_items is -1.5"),
        (bad(num_items=math.nan), ValueError, "num_items is nan"),
        (bad(num_items=3, reduction="none"), ValueError, 'num_items divides the sum.*not with "none"'),
        (bad(num_items=0), ValueError, "num_items is 0"),
        (bad(target=[1] * 63), TypeError, "target is a list, expected a tensor"),
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
    """A DTensor's product is distributed, which is not the product that the loss needs."""
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


def test_few_rows_of_many_words(device: str) -> None:
    """As exact as with many rows: for confident tokens, whose gradients nearly cancel over the vocabulary."""
    vocab, width = 49_152, 96
    weight = torch.randn(vocab, width, device=device) + 3
    for rows in (1, 3, 11):
        hidden, target = torch.randn(rows, width, device=device) / 40, torch.randint(vocab, (rows,), device=device)
        found = []
        for dtype in (torch.float32, torch.float64):
            leaf = hidden.detach().to(dtype).requires_grad_()
            if dtype == torch.float32:
                linear_cross_entropy(leaf, weight, target).backward()
            else:
                F.cross_entropy(leaf @ weight.to(dtype).T, target).backward()
            found.append(leaf.grad)
        assert relative_error(*found) <= 5e-6, rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_memory_that_nobody_wrote(dtype: torch.dtype, device: str) -> None:
    """For an odd vocabulary, whose rows of logits are padded; here torch fills new memory with NaN."""
    hidden, weight = (torch.randn(n, 48, device=device).to(dtype).requires_grad_() for n in (101, 211))
    target = torch.randint(211, (101,), device=device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        linear_cross_entropy(hidden, weight, target, chunk_tokens=50).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
