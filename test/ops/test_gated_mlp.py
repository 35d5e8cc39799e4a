import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from seqtile import gated_mlp
from support.assertions import assert_as_exact
from support.measure import FlopCount, LiveBytes, eager_memory

D, M = 48, 130
NAMES = ("y", "d_x", "d_gate_weight", "d_up_weight", "d_down_weight")


def make(tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.Tensor]:
    """x, gate_weight, up_weight, down_weight, all requiring gradients."""
    shapes = [(tokens, D), (M, D), (M, D), (D, M)]
    scales = [1.0, D**-0.5, D**-0.5, M**-0.5]
    return [
        (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def plain(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def run(function, operands: list[torch.Tensor], d_y: torch.Tensor, dtype: torch.dtype | None = None, **options):
    """y and the gradients of `operands`, in `dtype`."""
    leaves = [operand.detach().to(dtype or operand.dtype).requires_grad_(operand.requires_grad) for operand in operands]
    y = function(*leaves, **options)
    y.backward(d_y.to(y.dtype))
    return [y, *(leaf.grad for leaf in leaves)]


def assert_right(operands: list[torch.Tensor], d_y: torch.Tensor, ours: list[torch.Tensor], dtype: torch.dtype) -> None:
    same, truth = run(plain, operands, d_y, dtype), run(plain, operands, d_y, torch.float64)
    for name, mine, theirs, true in zip(NAMES, ours, same, truth, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert_as_exact(mine, theirs, true)


@pytest.mark.in_interpreter("one end-to-end case of each op and dtype", only=("63-16-dtype0", "190-63-*"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(63, 63), (63, 16), (190, 63), (5, 1), (1024, 4)])
def test_output_and_gradients(tokens: int, chunk_tokens: int, dtype: torch.dtype, device: str) -> None:
    operands, d_y = make(tokens, dtype, device), torch.randn(tokens, D, device=device).to(dtype)
    ours = run(gated_mlp, operands, d_y, chunk_tokens=chunk_tokens)
    assert all(mine.dtype == dtype for mine in ours)
    assert_right(operands, d_y, ours, dtype)


@pytest.mark.parametrize(
    "trainable", [(True, False, False, False), (False, True, True, True), (False, False, True, False)]
)
def test_frozen_operands(trainable: tuple[bool, ...], device: str) -> None:
    operands, d_y = make(190, device=device), torch.randn(190, D, device=device)
    for operand, wanted in zip(operands, trainable, strict=True):
        operand.requires_grad_(wanted)
    ours = run(gated_mlp, operands, d_y, chunk_tokens=63)
    assert_right(operands, d_y, ours, torch.float32)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant: bool, device: str) -> None:
    operands, d_y = make(190, device=device), torch.randn(190, D, device=device)

    def checkpointed(*leaves: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda *args: gated_mlp(*args, chunk_tokens=63), *leaves, use_reentrant=reentrant)

    assert_right(operands, d_y, run(checkpointed, operands, d_y), torch.float32)


def test_nested_checkpoints_and_saved_on_cpu(device: str) -> None:
    operands, d_y = make(190, device=device), torch.randn(190, D, device=device)

    def inner(*leaves: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda *args: gated_mlp(*args, chunk_tokens=63), *leaves, use_reentrant=False)

    def nested(*leaves: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(inner, *leaves, use_reentrant=False)

    assert_right(operands, d_y, run(nested, operands, d_y), torch.float32)


def test_retained_graph_accumulates_the_same_again(device: str) -> None:
    x, *weights = make(190, device=device)
    y = gated_mlp(x, *weights, chunk_tokens=63)
    d_y = torch.randn_like(y)
    y.backward(d_y, retain_graph=True)
    once = [tensor.grad.clone() for tensor in (x, *weights)]
    y.backward(d_y)
    for tensor, first in zip((x, *weights), once, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * first)


def test_a_weight_changed_before_the_backward_raises(device: str) -> None:
    x, gate, up, down = make(190, device=device)
    y = gated_mlp(x, gate, up, down, chunk_tokens=63)
    with torch.no_grad():
        up.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_arrive_in_the_order_of_the_untiled_mlp(checkpointed: bool, device: str) -> None:
    """ZeRO-1 and -2 reduce gradients as they arrive: a rank with chunks and one without must agree on the order."""
    orders = []
    for chunk_tokens in (16, 63, 190):
        arrived = []
        x, *weights = make(190, device=device)
        for i, weight in enumerate(weights):
            weight.register_post_accumulate_grad_hook(lambda _, i=i, arrived=arrived: arrived.append(i))

        def mlp(*operands: torch.Tensor, chunk_tokens: int = chunk_tokens) -> torch.Tensor:
            return gated_mlp(*operands, chunk_tokens=chunk_tokens)

        y = checkpoint(mlp, x, *weights, use_reentrant=False) if checkpointed else mlp(x, *weights)
        y.sum().backward()
        orders.append(arrived)
    assert orders == [[2, 1, 0]] * 3


def test_second_derivatives_raise(device: str) -> None:
    x, *weights = make(190, device=device)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(gated_mlp(x, *weights, chunk_tokens=63).sum(), x, create_graph=True)


def test_expanded_upstream_gradient(device: str) -> None:
    """What sum() and mean() send back has stride 0."""
    operands = make(190, device=device)
    ours = run(gated_mlp, operands, torch.ones(1, 1, device=device).expand(190, D), chunk_tokens=63)
    assert_right(operands, torch.ones(190, D, device=device), ours, torch.float32)


def test_weights_reach_autograd_once(device: str) -> None:
    x, *weights = make(190, device=device)
    calls = [0, 0, 0]
    for i, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, i=i: calls.__setitem__(i, calls[i] + 1))
    gated_mlp(x, *weights, chunk_tokens=16).sum().backward()
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_flops(checkpointed: bool) -> None:
    """11 u tiled, with and without checkpointing; 9 u for a sequence no longer than a chunk."""
    operands, d_y = make(190), torch.randn(190, D)
    unit = 2 * 190 * D * M

    def forward(*leaves: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
        if not checkpointed:
            return gated_mlp(*leaves, chunk_tokens=chunk_tokens)
        return checkpoint(lambda *args: gated_mlp(*args, chunk_tokens=chunk_tokens), *leaves, use_reentrant=False)

    with FlopCount() as flops:
        run(forward, operands, d_y, chunk_tokens=63)
    assert flops.total == 11 * unit and not flops.unknown
    with FlopCount() as flops:
        run(forward, operands, d_y, chunk_tokens=190)
    assert flops.total == (11 if checkpointed else 9) * unit and not flops.unknown


def saved_and_peak_bytes(tokens: int) -> tuple[int, int]:
    operands = make(tokens)
    with LiveBytes() as memory:
        y = gated_mlp(*operands, chunk_tokens=63)
        saved = memory.live - y.nbytes
        y.backward(torch.ones_like(y))
    return saved, memory.peak


@eager_memory
def test_memory() -> None:
    """Nothing is saved beside x; the peak grows by y, d_y and d_x alone, never by a [T, M] tensor."""
    saved, peak = saved_and_peak_bytes(1000)
    saved_longer, peak_longer = saved_and_peak_bytes(4000)
    assert saved == saved_longer == 0
    assert (peak_longer - peak) / 3000 == 3 * 4 * D


def test_no_gradient_needed(device: str) -> None:
    x, *weights = make(190, device=device)
    expected = plain(x, *weights)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = gated_mlp(x, *weights, chunk_tokens=63)
        assert not y.requires_grad
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_autocast(device: str) -> None:
    operands, d_y = make(190, device=device), torch.randn(190, D, device=device)
    with torch.autocast(device, torch.bfloat16):
        leaves = [operand.detach().requires_grad_() for operand in operands]
        y = gated_mlp(*leaves, chunk_tokens=63)
    assert y.dtype == torch.bfloat16
    y.backward(d_y.bfloat16())
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    ours = [y, *(leaf.grad.bfloat16() for leaf in leaves)]
    assert_right(operands, d_y.bfloat16().float(), ours, torch.bfloat16)


def test_leading_dimensions(device: str) -> None:
    x, *weights = make(180, device=device)
    flat = gated_mlp(x, *weights, chunk_tokens=50)
    shaped = gated_mlp(x.view(3, 4, 15, D), *weights, chunk_tokens=50)
    assert shaped.shape == (3, 4, 15, D)
    torch.testing.assert_close(shaped.view(-1, D), flat, rtol=0, atol=0)
    strided = gated_mlp(x.view(12, 15, D).transpose(0, 1), *weights, chunk_tokens=50)
    torch.testing.assert_close(strided.transpose(0, 1).reshape(-1, D), flat)


def test_compiled_equals_eager(device: str) -> None:
    operands, d_y = make(190, device=device), torch.randn(190, D, device=device)
    compiled = torch.compile(
        lambda x, *weights: gated_mlp(x * 1.0, *weights, chunk_tokens=63) * 1.0, backend="aot_eager"
    )
    assert_right(operands, d_y, run(compiled, operands, d_y), torch.float32)


def test_compiling_breaks_the_graph_once_and_by_name() -> None:
    def step(x: torch.Tensor, *weights: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
        return gated_mlp(x * 1.0, *weights, chunk_tokens=chunk_tokens) * 1.0

    tiled = torch._dynamo.explain(step)(*make(190), chunk_tokens=63)
    assert tiled.graph_break_count == 1 and "seqtile.gated_mlp" in tiled.break_reasons[0].reason
    assert torch._dynamo.explain(step)(*make(190), chunk_tokens=190).graph_break_count == 0


def bad(**changes: object) -> dict:
    names = ("x", "gate_weight", "up_weight", "down_weight")
    return dict(zip(names, make(63), strict=True)) | changes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (bad(x=torch.randn(0, D)), ValueError, "at least one token"),
        (
            bad(x=torch.randn(63, D + 1)),
            ValueError,
            r"gate_weight has shape \[130, 48\], expected \[M, D\] with D = 49",
        ),
        (bad(up_weight=torch.randn(M + 1, D)), ValueError, "up_weight has shape"),
        (bad(down_weight=torch.randn(M, D)), ValueError, r"down_weight has shape \[130, 48\], expected \[D, M\]"),
        (bad(x=torch.randn(63, D, dtype=torch.bfloat16)), TypeError, "cast one of them"),
        (bad(x=torch.zeros(63, D, dtype=torch.int64)), TypeError, "x is torch.int64"),
        (bad(up_weight=torch.randn(M, D, device="meta")), ValueError, "up_weight is on meta"),
        (bad(activation="relu"), ValueError, "activation is 'relu'"),
        (bad(chunk_tokens=0), ValueError, "chunk_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gated_mlp(**arguments)
