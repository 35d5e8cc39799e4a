"""The laws of a loss without logits: counted products, tracked bytes, errors against float64. None needs a clock.

A dispatch mode does not see into a custom op, so every law first asserts that it saw the products.
"""

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from seqtile import linear_cross_entropy, linear_divergence, linear_topk_divergence
from seqtile.ops.chunks import resolve_chunk_tokens
from support.assertions import relative_error
from support.head_reference import IGNORE, cross_entropy_reference, values_and_gradients
from support.measure import FlopCount, LiveBytes, eager_memory

K = 1024
pytestmark = eager_memory


def counted(*operands: torch.Tensor, **options: object) -> tuple[int, int, int]:
    """FLOP, and peak bytes of the forward and of forward and backward together."""
    with FlopCount() as flops, LiveBytes() as memory:
        loss = linear_cross_entropy(*operands, **options)
        forward = memory.peak
        loss.sum().backward()
    assert not flops.unknown
    return flops.total, forward, memory.peak


@pytest.mark.full("3 s each, a million tokens 6", but=("256-llama3_8b-mean--100", "256-qwen3_32b-none-None"))
@pytest.mark.parametrize(("reduction", "ignore_index"), [("mean", IGNORE), ("mean", None), ("none", None)])
@pytest.mark.parametrize(("size", "vocab"), [(4096, 128256), (5120, 151936)], ids=["llama3_8b", "qwen3_32b"])
@pytest.mark.parametrize("thousands", [256, 1024])
def test_memory_does_not_grow_with_length(
    thousands: int, size: int, vocab: int, reduction: str, ignore_index: int | None
) -> None:
    """Simulated at full size on fake tensors: beyond inputs, d_hidden, d_weight in float32 and its rounded copy, one
    chunk of logits and 5 %, the same at 8 thousand tokens and at a million."""
    chunk = resolve_chunk_tokens(None, size) * vocab * 2
    for tokens in (8 * K, thousands * K):
        with FakeTensorMode():
            hidden = torch.empty(tokens, size, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.empty(vocab, size, dtype=torch.bfloat16, requires_grad=True)
            target = torch.zeros(tokens, dtype=torch.int64)
            options = {"ignore_index": ignore_index, "reduction": reduction}
            flops, forward, peak = counted(hidden, weight, target, **options)
        assert flops == (4 if reduction == "none" else 3) * 2 * tokens * size * vocab
        d_hidden, d_weight = tokens * size * 2, vocab * size * 4
        assert forward - (0 if reduction == "none" else d_hidden + d_weight) <= 1.05 * chunk
        assert peak - d_hidden - d_weight <= max(1.05 * chunk, d_weight // 2 + 0.05 * chunk)


@pytest.mark.full("2 s each; the kernels' twins are tested by themselves", but=("dtype1-mean",))
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_the_eager_twin(dtype: torch.dtype, reduction: str) -> None:
    """The same law on real tensors, a third of them ignored: the eager kernel reuses its buffers, and upcasts in
    blocks."""
    size, vocab, chunk_tokens = 64, 24576, 3000
    chunk = chunk_tokens * vocab * dtype.itemsize
    weight = (torch.randn(vocab, size) * 0.1).to(dtype).requires_grad_()
    for tokens in (3_500, 7_000):
        hidden = torch.randn(tokens, size).to(dtype).requires_grad_()
        target = torch.randint(0, vocab, (tokens,))
        target[::3] = IGNORE
        options = {"reduction": reduction, "chunk_tokens": chunk_tokens}
        flops, forward, peak = counted(hidden, weight, target, **options)
        labelled = int((target != IGNORE).sum())
        assert flops == (4 if reduction == "none" else 3) * 2 * labelled * size * vocab
        gradients = (hidden.numel() * dtype.itemsize + weight.numel() * 4) if reduction == "mean" else 0
        assert forward - gradients <= 1.05 * chunk
        gradients = hidden.numel() * dtype.itemsize + weight.numel() * 4
        assert peak - gradients <= 1.05 * chunk


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_of_the_weight_gradient_does_not_grow_with_chunks(dtype: torch.dtype) -> None:
    """2 to 256 chunks: at most 1.05 times the error of one chunk, and 1.1 times that of untiled torch in this dtype."""
    tokens, size, vocab = 2048, 96, 500
    hidden = torch.randn(tokens, size).to(dtype)
    weight = (torch.randn(vocab, size) * 0.2).to(dtype)
    target = torch.randint(0, vocab, (tokens,))
    errors = {}
    *_, truth = values_and_gradients(cross_entropy_reference, hidden, weight, target, dtype=torch.float64)
    *_, untiled = values_and_gradients(cross_entropy_reference, hidden, weight, target, dtype=dtype)
    for chunks in (1, 2, 16, 256):
        *_, gradient = values_and_gradients(
            linear_cross_entropy, hidden, weight, target, dtype=dtype, chunk_tokens=tokens // chunks
        )
        errors[chunks] = relative_error(gradient, truth)
    assert 0 < max(errors.values()) <= 1.05 * errors[1], errors
    assert max(errors.values()) <= 1.1 * relative_error(untiled, truth), errors


def test_accumulating_in_the_weights_dtype_is_worse_and_available() -> None:
    """The purpose of `accumulate_dtype`: bfloat16 sums over 256 chunks lose precision that float32 keeps."""
    hidden, weight = torch.randn(1024, 64).bfloat16(), (torch.randn(500, 64) * 0.2).bfloat16()
    target = torch.randint(0, 500, (1024,))
    *_, truth = values_and_gradients(cross_entropy_reference, hidden, weight, target, dtype=torch.float64)
    errors = []
    for dtype in (torch.float32, None):
        *_, gradient = values_and_gradients(
            linear_cross_entropy, hidden, weight, target, dtype=torch.bfloat16, chunk_tokens=4, accumulate_dtype=dtype
        )
        errors.append(relative_error(gradient, truth))
    assert errors[1] > 2 * errors[0]
    with LiveBytes() as memory:
        weight.requires_grad_()
        linear_cross_entropy(hidden, weight, target, chunk_tokens=4, accumulate_dtype=None).backward()
    assert memory.peak < 4 * weight.numel()


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_ignored_tokens_are_not_multiplied(share: float) -> None:
    """25 % valid labels: at most 0.26 of the products, and of the chunks."""
    tokens, size, vocab = 4000, 64, 500
    hidden, weight = (torch.randn(rows, size, requires_grad=True) for rows in (tokens, vocab))
    target = torch.randint(0, vocab, (tokens,))
    target[torch.randperm(tokens)[round(share * tokens) :]] = IGNORE
    with FlopCount() as flops:
        linear_cross_entropy(hidden, weight, target, chunk_tokens=250).backward()
    assert flops.total == round(3 * 2 * share * tokens * size * vocab) and not flops.unknown
    assert flops.calls == 3 * round(16 * share)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("op", ["cross_entropy", "topk_divergence", "divergence", "divergence, trained teacher"])
def test_one_chunk_is_one_product(op: str, reduction: str) -> None:
    """In bfloat16, where a float32 sum on a CPU would be one product per block of 128 rows: the d_weight of one chunk
    is rounded once, by the product."""
    tokens, size, vocab = 190, 64, 1000
    trained = op == "divergence, trained teacher"
    student, teacher = (
        [(torch.randn(rows, size) * 0.3).bfloat16().requires_grad_(needs) for rows in (tokens, vocab)]
        for needs in (True, trained)
    )
    products = 3 if reduction == "mean" else 4
    with FlopCount() as flops:
        if op == "cross_entropy":
            loss = linear_cross_entropy(*student, torch.randint(0, vocab, (tokens,)), reduction=reduction)
        elif op == "topk_divergence":
            log_probs, ids = torch.randn(tokens, vocab).log_softmax(1).topk(7)
            loss = linear_topk_divergence(*student, ids, log_probs, reduction=reduction)
        else:
            products += products if trained else products - 2
            loss = linear_divergence(*student, *teacher, reduction=reduction)
        loss.sum().backward()
    assert flops.calls == products and not flops.unknown
    assert flops.total == products * 2 * tokens * size * vocab


@pytest.mark.parametrize("chunk_tokens", [63, None])
@pytest.mark.parametrize("op", [linear_cross_entropy, linear_divergence], ids=["cross_entropy", "divergence"])
def test_a_weight_that_is_given_back_after_the_forward(op: Callable, chunk_tokens: int | None) -> None:
    """As ZeRO-3 does: for a sum, the backward needs neither the weight nor its shape."""
    hidden, weight = torch.randn(190, 64, requires_grad=True), torch.randn(500, 64, requires_grad=True)
    rest = (torch.randint(0, 500, (190,)),)
    if op is linear_divergence:
        rest = torch.randn(190, 48), torch.randn(500, 48)
    expected = torch.autograd.grad(op(hidden, weight, *rest, chunk_tokens=chunk_tokens), (hidden, weight))
    loss = op(hidden, weight, *rest, chunk_tokens=chunk_tokens)
    weight.data = weight.data.new_empty(0)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("reduction", "chunk_tokens"), [("mean", 63), ("sum", None)])
def test_compiled_products(reduction: str, chunk_tokens: int | None) -> None:
    """A compiled graph of forward and backward also has three products per chunk."""
    hidden, weight = torch.randn(190, 64, requires_grad=True), torch.randn(500, 64, requires_grad=True)
    target, graphs = torch.randint(0, 500, (190,)), []

    def kept(graph: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def step(hidden: torch.Tensor) -> torch.Tensor:
        options = {"ignore_index": None, "reduction": reduction, "chunk_tokens": chunk_tokens}
        return linear_cross_entropy(hidden * 1.0, weight, target, **options) * 1.5

    backend = aot_autograd(fw_compiler=kept, bw_compiler=kept)
    torch.compile(step, backend=backend, fullgraph=True)(hidden).backward()
    calls = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum(name.startswith(("aten.mm.", "aten.addmm.")) for name in calls) == 3 * (1 if chunk_tokens is None else 4)


@pytest.mark.parametrize("metrics", [False, True])
def test_the_device_is_waited_for_once_a_call(metrics: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only nonzero, which counts the labelled tokens, has a result shape that depends on values; no operation reads a
    value. With ignore_index=None there is no nonzero either."""
    waits: list[str] = []

    class Waits(FlopCount):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if name == "index" else []
            if masks or name in ("nonzero", "_local_scalar_dense", "masked_select", "equal", "is_nonzero", "unique"):
                waits.append(name)
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(
        "seqtile.ops.head.cross_entropy.check_labels", lambda *_: None
    )  # checks values on a CPU, not on a GPU
    hidden, weight = torch.randn(190, 64, requires_grad=True), torch.randn(500, 64, requires_grad=True)
    target = torch.randint(0, 500, (190,))
    target[::3] = IGNORE
    for ignore_index, labels, expected in ((IGNORE, target, ["nonzero"]), (None, target.clamp(min=0), [])):
        with Waits() as flops:
            options = {"chunk_tokens": 20, "ignore_index": ignore_index}
            if metrics:
                loss, found = linear_cross_entropy(hidden, weight, labels, return_metrics=True, **options)
                (loss + found.logsumexp.square().sum() + found.mean_entropy).backward()
            else:
                linear_cross_entropy(hidden, weight, labels, **options).backward()
        assert flops.total > 0 and waits == expected
        waits.clear()


@pytest.mark.parametrize("outside", [500, -1, 2**40])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"num_items": 7}])
def test_labels_that_nobody_looks_at(outside: int, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a label outside the vocabulary makes the loss NaN; class weights are not read out of bounds."""
    monkeypatch.setattr("seqtile.ops.head.cross_entropy.check_labels", lambda *_: None)
    hidden, weight = torch.randn(50, 64, requires_grad=True), torch.randn(500, 64, requires_grad=True)
    target = torch.randint(0, 500, (50,))
    target[7] = outside
    loss = linear_cross_entropy(hidden, weight, target, class_weight=torch.rand(500), chunk_tokens=20, **options)
    loss.backward()
    assert loss.isnan() and hidden.grad[7].isnan().all() and weight.grad.isnan().any()
