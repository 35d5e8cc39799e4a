"""The gated MLP with all that an architecture or an adapter may add: activations, biases, fused weights, LoRA,
frozen parameters, and gradients that go to `main_grad`."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from seqtile import LowRank, gated_mlp
from support.assertions import assert_as_exact, relative_error
from support.choice import every_value
from support.measure import FlopCount
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


@pytest.mark.in_interpreter("one end-to-end case of each op and dtype", only=every_value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "fused", "parts"), VARIANTS, ids=str)
def test_output_and_gradients(
    activation: str, fused: bool, parts: tuple[str, ...], dtype: torch.dtype, device: str
) -> None:
    p = make(fused, parts, device, dtype)
    x, d_y = (torch.randn(190, D, device=device).to(dtype) for _ in range(2))
    same, truth = (run(untiled, x, p, d_y, kind, activation=activation) for kind in (dtype, torch.float64))
    for chunk_tokens in (63, 190):
        ours = run(tiled, x, p, d_y, dtype, activation=activation, chunk_tokens=chunk_tokens)
        for name, true in truth.items():
            assert_as_exact(ours[name], same[name], true)


@pytest.mark.parametrize("fused", [False, True])
def test_plain_lora(fused: bool, device: str) -> None:
    """A frozen base: adapters get gradients, the base none, and no product is spent on it."""
    p = make(fused, ("lora",), device)
    for name, value in p.items():
        value.requires_grad_(not name.endswith("weight"))
    x, d_y = torch.randn(190, D, device=device), torch.randn(190, D, device=device)
    same, truth = (run(untiled, x, p, d_y, kind, activation="silu") for kind in (torch.float32, torch.float64))
    ours = run(tiled, x, p, d_y, torch.float32, activation="silu", chunk_tokens=63)
    for name, true in truth.items():
        assert (ours[name] is None) == (true is None)
        if true is not None:
            assert_as_exact(ours[name], same[name], true)
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


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_arrive_in_one_order_at_every_length(fused: bool, device: str) -> None:
    """ZeRO-1 and -2 reduce gradients as they arrive: ranks with and without chunks must agree on the order."""
    orders = []
    for chunk_tokens in (16, 63, 190):
        p = make(fused, ("bias", "lora"), device)
        arrived: list[str] = []
        for name, value in p.items():
            value.register_post_accumulate_grad_hook(lambda _, name=name, arrived=arrived: arrived.append(name))
        tiled(torch.randn(190, D, device=device, requires_grad=True), p, "silu", chunk_tokens).sum().backward()
        orders.append(arrived)
    assert len(orders[0]) == len(p) and orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk_tokens", [16, 1000])
def test_main_grad(chunk_tokens: int, micro_batches: int, device: str) -> None:
    """Chunks and micro-batches add up in float32 in `main_grad`; `.grad` stays empty, and would be less exact."""
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

    if not interpreted():  # whose bfloat16 is truncated
        assert error({name: value.main_grad for name, value in p.items()}) < error(usual)


def test_main_grad_that_does_not_fit(device: str) -> None:
    p = make(False, (), device)
    before = {name: value.detach().clone() for name, value in p.items()}
    for wrong in (torch.zeros(M, D, dtype=torch.bfloat16), torch.zeros(M)):
        p["up_weight"].main_grad = wrong
        with pytest.raises(ValueError, match=r"main_grad is .*expected torch.float32 .*allocate it so"):
            tiled(torch.randn(190, D, device=device), p, "silu", 63)
    assert all(value.equal(before[name]) for name, value in p.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_bias": torch.randn(M + 1)}, r"gate_bias has shape \[131\]"),
        ({"down_bias": torch.randn(M)}, r"down_bias has shape \[130\], expected one number a row of down_weight"),
        ({"up_lora": LowRank(torch.randn(R, D), torch.randn(M, R + 1), 1.0)}, r"up_lora.b has shape \[130, 5\]"),
        ({"up_lora": LowRank(torch.randn(R, M), torch.randn(M, R), 1.0)}, r"up_lora.a has shape \[4, 130\]"),
        ({"up_lora": LowRank(torch.zeros(R, D, dtype=torch.int8), torch.randn(M, R), 1.0)}, "up_lora.a is torch.int8"),
        ({"up_weight": None}, r"down_weight has shape"),
        ({"up_weight": None, "up_bias": torch.randn(M)}, "gate_weight holds up too"),
        ({"up_weight": None, "gate_weight": torch.randn(M + 1, D)}, r"expected \[2M, D\]"),
        ({"activation": "gelu"}, "activation is 'gelu', expected one of silu, gelu_tanh"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(changes: dict, message: str) -> None:
    weights = {name: value for name, value in make(False, (), "cpu").items()}
    with pytest.raises(ValueError, match=f"gated_mlp: .*{message}"):
        gated_mlp(torch.randn(63, D), **(weights | changes))


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (LowRank(torch.randn(R, D), torch.randn(M, R), torch.tensor(2.0)), r"up_lora.scale is tensor\(2.\), expected"),
        (LowRank(torch.randn(R, D), None, 2.0), "up_lora.b is a NoneType, expected a tensor"),
        (LowRank(None, torch.randn(M, R), 2.0), "up_lora.a is a NoneType, expected a tensor"),
    ],
    ids=["scale", "b", "a"],
)
def test_bad_adapters(adapter: LowRank, message: str) -> None:
    with pytest.raises(TypeError, match=f"gated_mlp: {message}"):
        gated_mlp(torch.randn(63, D), **make(False, (), "cpu"), up_lora=adapter)


def test_an_adapter_of_another_type() -> None:
    x, weight = torch.randn(5, 4), torch.randn(4, 4)
    with pytest.raises(TypeError, match=r"gate_lora is a tuple, expected seqtile\.LowRank\(a, b, scale\) or None"):
        gated_mlp(x, weight, weight, weight, gate_lora=(torch.randn(2, 4), torch.randn(4, 2)))
