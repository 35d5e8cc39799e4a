"""The gated MLP with all that an architecture or an adapter may add: activations, biases, fused weights, LoRA, frozen
parameters, and gradients in `main_grad`."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from seqtile import LowRank, gated_mlp
from support.assertions import assert_as_exact, relative_error
from support.choice import every_value
from support.measure import FlopCount, eager_memory, saved_and_peak
from support.tiny import interpreted

D, M, R, SCALE = 48, 130, 4, 0.5
ACTIVATION = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
VARIANTS = list(itertools.product(ACTIVATION, (False, True), ((), ("bias",), ("lora",), ("bias", "lora"))))


def make(
    fused: bool, parts: tuple[str, ...], device: str, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Every parameter by name, all requiring gradients."""
    into = {"gate": (2 * M, D)} if fused else {"gate": (M, D), "up": (M, D)}
    parameters = {}
    for name, (rows, columns) in (into | {"down": (D, M)}).items():
        parameters[f"{name}_weight"] = torch.randn(rows, columns, device=device) * columns**-0.5
        if "bias" in parts:
            parameters[f"{name}_bias"] = torch.randn(rows, device=device)
        if "lora" in parts:
            parameters[f"{name}_a"] = torch.randn(R, columns, device=device) * columns**-0.5
            parameters[f"{name}_b"] = torch.randn(rows, R, device=device)
    return {name: value.to(dtype).requires_grad_() for name, value in parameters.items()}


def tiled(x: torch.Tensor, p: dict[str, torch.Tensor], activation: str, chunk_tokens: int) -> torch.Tensor:
    adapters = {f"{n}_lora": LowRank(p[f"{n}_a"], p[f"{n}_b"], SCALE) for n in ("gate", "up", "down") if f"{n}_a" in p}
    biases = {name: value for name, value in p.items() if name.endswith("bias")}
    weights = (p["gate_weight"], p.get("up_weight"), p["down_weight"])
    return gated_mlp(x, *weights, **biases, **adapters, activation=activation, chunk_tokens=chunk_tokens)


def untiled(x: torch.Tensor, p: dict[str, torch.Tensor], activation: str) -> torch.Tensor:
    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, p[f"{name}_weight"], p.get(f"{name}_bias"))
        return y + F.linear(F.linear(x, p[f"{name}_a"]), p[f"{name}_b"]) * SCALE if f"{name}_a" in p else y

    gate, up = (linear("gate", x), linear("up", x)) if "up_weight" in p else linear("gate", x).chunk(2, dim=-1)
    return linear("down", ACTIVATION[activation](gate) * up)


def run(
    function, x: torch.Tensor, p: dict, d_y: torch.Tensor, dtype: torch.dtype, **options
) -> dict[str, torch.Tensor]:
    """y, d_x and the gradients of the parameters that require one, in `dtype`."""
    leaf = x.detach().to(dtype).requires_grad_()
    copies = {name: value.detach().to(dtype).requires_grad_(value.requires_grad) for name, value in p.items()}
    y = function(leaf, copies, **options)
    y.backward(d_y.to(dtype))
    return {"y": y, "x": leaf.grad} | {name: copy.grad for name, copy in copies.items()}


def compare(
    p: dict[str, torch.Tensor], tokens: int, dtype: torch.dtype, chunks: tuple[int, ...], activation: str = "silu"
) -> None:
    """By the tolerance law, for chunks of each length; what is frozen has no gradient."""
    x, d_y = torch.randn(2, tokens, D, device=p["gate_weight"].device).to(dtype)
    same, truth = (run(untiled, x, p, d_y, kind, activation=activation) for kind in (dtype, torch.float64))
    for chunk_tokens in chunks:
        ours = run(tiled, x, p, d_y, dtype, activation=activation, chunk_tokens=chunk_tokens)
        for name, true in truth.items():
            assert (ours[name] is None) == (true is None)
            if true is not None:
                assert ours[name].dtype == dtype
                assert_as_exact(ours[name], same[name], true)


@pytest.mark.in_interpreter("one end-to-end case of each op and dtype", only=every_value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "fused", "parts"), VARIANTS, ids=str)
def test_output_and_gradients(
    activation: str, fused: bool, parts: tuple[str, ...], dtype: torch.dtype, device: str
) -> None:
    p = make(fused, parts, device, dtype)
    compare(p, 90, dtype, (40, 90), activation)


@pytest.mark.in_interpreter("one end-to-end case of each op and dtype", only=("63-16-dtype0", "90-40-*"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(63, 63), (63, 16), (90, 40), (5, 1), (1024, 4)])
def test_lengths(tokens: int, chunk_tokens: int, dtype: torch.dtype, device: str) -> None:
    compare(make(False, (), device, dtype), tokens, dtype, (chunk_tokens,))


@pytest.mark.parametrize("fused", [False, True])
def test_plain_lora(fused: bool, device: str) -> None:
    """A frozen base: adapters get gradients, the base gets none and costs no product."""
    p = make(fused, ("lora",), device)
    for name, value in p.items():
        value.requires_grad_(not name.endswith("weight"))
    compare(p, 190, torch.float32, (63,))
    x, d_y = torch.randn(2, 190, D, device=device)
    with FlopCount() as flops:
        run(tiled, x, p, d_y, torch.float32, activation="silu", chunk_tokens=63)
    unit, low = 2 * 190 * D * M, 2 * 190 * R * (D + M)
    assert unit * 8 < flops.total <= unit * 8 + 3 * 6 * low * (2 if fused else 1)


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_adapters_of_another_dtype(adapters: torch.dtype, device: str) -> None:
    """PEFT keeps the adapters of a bfloat16 model in float32; their gradients come back in their own dtype."""
    p = make(False, ("lora",), device, torch.bfloat16)
    p = {n: v.detach().to(adapters if n[-1] in "ab" else v.dtype).requires_grad_() for n, v in p.items()}
    x, d_y = (torch.randn(190, D, device=device).bfloat16() for _ in range(2))
    same, truth = (run(untiled, x, p, d_y, kind, activation="silu") for kind in (torch.bfloat16, torch.float64))
    y = tiled(x, p, "silu", 63)
    y.backward(d_y)
    assert_as_exact(y, same["y"], truth["y"])
    for name, value in p.items():
        assert value.grad.dtype == value.dtype
        assert_as_exact(value.grad.to(torch.bfloat16), same[name], truth[name])


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("fused", "parts"), [(False, ()), (False, ("bias", "lora")), (True, ("bias", "lora"))], ids=str
)
def test_gradients_arrive_once_and_in_one_order(
    fused: bool, parts: tuple[str, ...], checkpointed: bool, device: str
) -> None:
    """ZeRO-1 and -2 reduce gradients as they arrive: ranks with and without chunks must agree on the order."""
    orders = []
    for chunk_tokens in (16, 63, 190):
        p = make(fused, parts, device)
        arrived: list[str] = []
        for name, value in p.items():
            value.register_post_accumulate_grad_hook(lambda _, name=name, arrived=arrived: arrived.append(name))
        call, x = partial(tiled, p=p, activation="silu", chunk_tokens=chunk_tokens), torch.randn(190, D, device=device)
        x.requires_grad_()
        (checkpoint(call, x, use_reentrant=False) if checkpointed else call(x)).sum().backward()
        orders.append(arrived)
    assert len(orders[0]) == len(p) and orders[0] == orders[1] == orders[2]
    assert parts or orders[0] == ["down_weight", "up_weight", "gate_weight"]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk_tokens", [16, 1000])
def test_main_grad(chunk_tokens: int, micro_batches: int, device: str) -> None:
    """Chunks and micro-batches are summed in float32 in `main_grad`; `.grad`, which would be less exact, stays
    empty."""
    p = make(False, ("bias",), device, torch.bfloat16)
    batches = [[torch.randn(63, D, device=device).bfloat16() for _ in range(2)] for _ in range(micro_batches)]
    expected = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in p.items()}
    for x, d_y in batches:
        truth = run(untiled, x, p, d_y, torch.float64, activation="silu")
        expected = {name: total + truth[name].cpu() for name, total in expected.items()}
    for x, d_y in batches:
        tiled(x, p, "silu", chunk_tokens).backward(d_y)
    usual = {name: value.grad for name, value in p.items()}
    for value in p.values():
        value.grad, value.main_grad = None, torch.zeros_like(value, dtype=torch.float32)
    for x, d_y in batches:
        leaf = x.detach().requires_grad_()
        tiled(leaf, p, "silu", chunk_tokens).backward(d_y)
        assert leaf.grad is not None
    for name, value in p.items():
        assert value.grad is None
        assert_as_exact(value.main_grad.bfloat16(), usual[name], expected[name])

    def error(gradients: dict[str, torch.Tensor]) -> float:
        flat = (torch.cat([of[name].double().flatten().cpu() for name in p]) for of in (gradients, expected))
        return relative_error(*flat)

    if not interpreted():  # its bfloat16 is truncated
        assert error({name: value.main_grad for name, value in p.items()}) < error(usual)


def test_main_grad_that_does_not_fit(device: str) -> None:
    p = make(False, (), device)
    before = {name: value.detach().clone() for name, value in p.items()}
    for wrong in (torch.zeros(M, D, dtype=torch.bfloat16), torch.zeros(M)):
        p["up_weight"].main_grad = wrong
        with pytest.raises(ValueError, match=r"main_grad is .*expected torch.float32 .*allocate it"):
            tiled(torch.randn(190, D, device=device), p, "silu", 63)
    assert all(value.equal(before[name]) for name, value in p.items())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_flops(checkpointed: bool) -> None:
    """11 u tiled, with and without checkpointing; 9 u for a sequence no longer than a chunk."""
    p, (x, d_y) = make(False, (), "cpu"), torch.randn(2, 190, D)
    unit = 2 * 190 * D * M

    def forward(x: torch.Tensor, p: dict, chunk_tokens: int) -> torch.Tensor:
        call = partial(tiled, p=p, activation="silu", chunk_tokens=chunk_tokens)
        return checkpoint(call, x, use_reentrant=False) if checkpointed else call(x)

    for chunk_tokens, units in ((63, 11), (190, 11 if checkpointed else 9)):
        with FlopCount() as flops:
            run(forward, x, p, d_y, torch.float32, chunk_tokens=chunk_tokens)
        assert flops.total == units * unit and not flops.unknown


@eager_memory
def test_memory() -> None:
    """Only x is saved; the peak grows only by y, d_y and d_x, never by a [T, M] tensor."""
    inputs = (torch.randn(tokens, D, requires_grad=True) for tokens in (1000, 4000))
    call = partial(tiled, activation="silu", chunk_tokens=63)
    (saved, peak), (saved_longer, peak_longer) = (
        saved_and_peak(partial(call, p=make(False, (), "cpu")), x) for x in inputs
    )
    assert saved == saved_longer == 0
    assert (peak_longer - peak) / 3000 == 3 * 4 * D


def test_leading_dimensions(device: str) -> None:
    x, p = torch.randn(180, D, device=device), make(False, (), device)
    flat, shaped = (tiled(each, p, "silu", 50) for each in (x, x.view(3, 4, 15, D)))
    assert shaped.shape == (3, 4, 15, D)
    torch.testing.assert_close(shaped.view(-1, D), flat, rtol=0, atol=0)
    strided = tiled(x.view(12, 15, D).transpose(0, 1), p, "silu", 50)
    torch.testing.assert_close(strided.transpose(0, 1).reshape(-1, D), flat)


def test_a_sequence_of_one_chunk_breaks_no_graph() -> None:
    p = make(False, (), "cpu")
    explained = torch._dynamo.explain(lambda x: tiled(x * 1.0, p, "silu", 190) * 1.0)(torch.randn(190, D))
    assert explained.graph_break_count == 0


A, B = torch.randn(R, D), torch.randn(M, R)
BASE = {"x": torch.randn(63, D)} | make(False, (), "cpu")
REFUSED = [
    ({"x": torch.randn(0, D)}, ValueError, "at least one token"),
    ({"x": torch.randn(63, D + 1)}, ValueError, r"gate_weight has shape \[130, 48\], expected \[M, D\] with D = 49"),
    ({"x": torch.randn(63, D, dtype=torch.bfloat16)}, TypeError, "cast one of them"),
    ({"x": torch.zeros(63, D, dtype=torch.int64)}, TypeError, "x is torch.int64"),
    ({"x": torch.randn(63, D).to_sparse()}, TypeError, "x is sparse_coo, expected a dense tensor"),
    ({"gate_weight": torch.randn(M, D).to_sparse()}, TypeError, "gate_weight is sparse_coo, expected a dense tensor"),
    ({"up_weight": torch.randn(M + 1, D)}, ValueError, "up_weight has shape"),
    ({"up_weight": torch.randn(M, D, device="meta")}, ValueError, "up_weight is on meta"),
    ({"down_weight": torch.randn(M, D)}, ValueError, r"down_weight has shape \[130, 48\], expected \[D, M\]"),
    ({"chunk_tokens": 0}, ValueError, "chunk_tokens"),
    ({"gate_bias": torch.randn(M + 1)}, ValueError, r"gate_bias has shape \[131\]"),
    (
        {"down_bias": torch.randn(M)},
        ValueError,
        r"down_bias has shape \[130\], expected one number a row of down_weight",
    ),
    ({"up_lora": LowRank(A, torch.randn(M, R + 1), 1.0)}, ValueError, r"up_lora.b has shape \[130, 5\]"),
    ({"up_lora": LowRank(torch.randn(R, M), B, 1.0)}, ValueError, r"up_lora.a has shape \[4, 130\]"),
    ({"up_lora": LowRank(A.to(torch.int8), B, 1.0)}, ValueError, "up_lora.a is torch.int8"),
    ({"up_lora": LowRank(A, B, torch.tensor(2.0))}, TypeError, r"up_lora.scale is tensor\(2.\), expected"),
    ({"up_lora": LowRank(A, None, 2.0)}, TypeError, "up_lora.b is a NoneType, expected a tensor"),
    ({"up_lora": LowRank(None, B, 2.0)}, TypeError, "up_lora.a is a NoneType, expected a tensor"),
    ({"gate_lora": (1, 2)}, TypeError, r"gate_lora is a tuple, expected seqtile\.LowRank\(a, b, scale\) or None"),
    ({"up_weight": None}, ValueError, "down_weight has shape"),
    ({"up_weight": None, "up_bias": torch.randn(M)}, ValueError, "gate_weight holds up too"),
    ({"up_weight": None, "gate_weight": torch.randn(M + 1, D)}, ValueError, r"expected \[2M, D\]"),
    ({"activation": "gelu"}, ValueError, "activation is 'gelu', expected one of silu, gelu_tanh"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input(changes: dict, error: type[Exception], message: str) -> None:
    prefix = "" if "chunk_tokens" in changes else "gated_mlp: .*"
    with pytest.raises(error, match=prefix + message):
        gated_mlp(**BASE | changes)
