from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqtile import tiled
from seqtile.ops.tiled import tiled_part
from support.assertions import assert_each_as_exact, relative_error
from support.choice import every_value
from support.measure import FlopCount, eager_memory, saved_and_peak

D, M = 96, 150


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(D, M), nn.LayerNorm(M), nn.Linear(M, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.dropout(F.gelu(self.norm(self.into(x)))))


def apply(module: nn.Module, x: torch.Tensor, chunk_tokens: int = 20) -> torch.Tensor:
    return tiled(module, x, params=module.parameters(), chunk_tokens=chunk_tokens)


def gradients(y: torch.Tensor, d_y: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [y.detach(), *torch.autograd.grad(y, leaves, d_y.to(y.dtype))]


@pytest.mark.on_gpu("no kernel of ours is launched", only=every_value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["plain", "ckpt", "reentrant"])
@pytest.mark.parametrize("shape", [(63, D), (3, 41, D), (2, 3, 11, D)], ids=str)
def test_module(shape: tuple[int, ...], checkpointed: bool | None, dtype: torch.dtype, device: str) -> None:
    module = Mlp().to(device, dtype)
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    d_y = torch.randn(shape, device=device).to(dtype)
    same = gradients(module(x), d_y, x, *module.parameters())
    y = apply(module, x) if checkpointed is None else checkpoint(apply, module, x, use_reentrant=checkpointed)
    y.backward(d_y)  # a reentrant checkpoint supports only .grad
    ours = [y, x.grad, *(parameter.grad for parameter in module.parameters())]
    assert all(mine.dtype == dtype for mine in ours)
    assert_right(module, x, d_y, ours, same)


def assert_right(module: Mlp, x: torch.Tensor, d_y: torch.Tensor, ours: list, same: list) -> None:
    """By the tolerance law: outputs and the gradients of x and of the parameters."""
    truth_module, truth_x = Mlp().to(x.device, torch.float64), x.detach().double().requires_grad_()
    truth_module.load_state_dict(module.state_dict())
    truth = gradients(truth_module(truth_x), d_y, truth_x, *truth_module.parameters())
    names = ["y", "x", *dict(module.named_parameters())]
    assert_each_as_exact(*(dict(zip(names, found, strict=True)) for found in (ours, same, truth)))


def several(a: torch.Tensor, b: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two outputs with gradients, of different widths, and one of integers."""
    return (a @ table) * b, a.detach().argmax(-1, keepdim=True), (a * b).sum(-1, keepdim=True)


@pytest.mark.parametrize("trainable", [(True, True, True), (False, True, False), (False, False, True)])
def test_several_inputs_and_outputs_and_a_shared_tensor(trainable: tuple[bool, ...], device: str) -> None:
    a, b, table = (torch.randn(*shape, device=device) for shape in ((2, 95, D), (2, 95, D), (D, D)))
    leaves = []
    for tensor, wanted in zip((a, b, table), trainable, strict=True):
        tensor.requires_grad_(wanted)
        leaves += [tensor] * wanted

    def run(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        assert not outputs[1].requires_grad and outputs[1].dtype == torch.int64
        loss = outputs[0].sin().sum() + outputs[2].square().sum()
        return [*outputs, *torch.autograd.grad(loss, leaves)]

    ours = run(tiled(several, a, b, shared=[table * 1.0], chunk_tokens=20))
    for mine, expected in zip(ours, run(several(a, b, table * 1.0)), strict=True):
        assert relative_error(mine, expected) <= 1e-5


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_is_replayed(checkpointed: bool, device: str) -> None:
    """The backward drops what the forward dropped, and restores the generator's state after the forward."""
    module = Mlp(dropout=0.5).to(device)
    x, d_y = torch.randn(95, D, device=device, requires_grad=True), torch.randn(95, D, device=device)
    torch.manual_seed(3)
    expected = torch.cat([module(piece) for piece in x.split(20)])
    expected = gradients(expected, d_y, x, *module.parameters())
    state = torch.get_rng_state()
    torch.manual_seed(3)
    y = checkpoint(apply, module, x, use_reentrant=False) if checkpointed else apply(module, x)
    torch.rand(7)  # draws in between change nothing
    ours = gradients(y, d_y, x, *module.parameters())
    for mine, true in zip(ours, expected, strict=True):
        assert relative_error(mine, true) <= 1e-5
    torch.manual_seed(3)
    apply(module, x).backward(d_y)
    assert device != "cpu" or torch.get_rng_state().equal(state)


def test_autocast_is_replayed(device: str) -> None:
    module = Mlp().to(device)
    x, d_y = torch.randn(95, D, device=device, requires_grad=True), torch.randn(95, D, device=device).bfloat16()
    with torch.autocast(device, torch.bfloat16):
        same, y = module(x), apply(module, x)
    assert y.dtype == torch.bfloat16
    same, ours = (gradients(out, d_y, x, *module.parameters()) for out in (same, y))
    assert_right(module, x, d_y, ours, same)


def test_gradients_of_parameters_do_not_lose_digits_over_chunks(device: str) -> None:
    """Autograd rounds each chunk's gradient, but sums them in float32: 200 chunks are little worse than one."""
    module = nn.Linear(D, M, bias=False).to(device, torch.bfloat16)
    x, d_y = (torch.randn(2000, width, device=device).bfloat16() for width in (D, M))
    truth = d_y.double().T @ x.double()
    errors = {}
    for chunk_tokens in (2000, 10):
        (gradient,) = torch.autograd.grad(apply(module, x, chunk_tokens), module.weight, d_y)
        errors[chunk_tokens] = relative_error(gradient, truth)
    assert errors[10] <= 1.6 * errors[2000]


def test_products() -> None:
    """One more forward without checkpointing. With it the recomputation stops before the function and adds none, except
    for the last layer, which the untiled recomputation leaves out."""
    module, x, d_y = Mlp(), torch.randn(100, D, requires_grad=True), torch.randn(100, D)
    unit = 2 * 100 * D * M
    for forward, units in (
        (module, 6),
        (lambda x: apply(module, x), 8),
        (lambda x: checkpoint(module, x, use_reentrant=False), 7),
        (lambda x: checkpoint(lambda x: apply(module, x), x, use_reentrant=False), 8),
    ):
        with FlopCount() as flops:
            forward(x).backward(d_y)
        assert flops.total == units * unit and not flops.unknown


@eager_memory
def test_memory() -> None:
    """No tensor inside the function has the length of the sequence; only the input is saved."""
    module = Mlp()
    inputs = (torch.randn(tokens, D, requires_grad=True) for tokens in (1000, 4000))
    (saved, peak), (saved_longer, peak_longer) = (saved_and_peak(partial(apply, module), x) for x in inputs)
    assert saved == saved_longer and saved < 20_000  # the state of the random generator
    assert (peak_longer - peak) / 3000 == 3 * 4 * D  # y, its gradient, and that of x


def test_a_leaf_that_is_not_listed_is_not_ignored(device: str) -> None:
    module, x = Mlp().to(device), torch.randn(95, D, device=device, requires_grad=True)
    parameters = list(module.parameters())
    with pytest.raises(ValueError, match=r"fn uses a tensor \[96, 150\] that requires a gradient .*list it in params"):
        tiled(module, x, params=[p for p in parameters if p.shape != (D, M)], chunk_tokens=20)
    with torch.no_grad():
        assert tiled(module, x, chunk_tokens=20).shape == x.shape
    for parameter in parameters:
        parameter.requires_grad_(False)
    assert tiled(module, x, chunk_tokens=20).requires_grad


def test_one_chunk_is_the_function_itself(device: str) -> None:
    calls = []
    x = torch.randn(2, 20, D, device=device)
    assert tiled(lambda t: calls.append(t) or t, x, chunk_tokens=40) is x and calls[0] is x
    tiled(lambda t: calls.append(t) or t, x, chunk_tokens=39)
    assert [call.shape[1] for call in calls] == [20, 19, 1], "two rows a position: 39 tokens are 19 positions"


@pytest.mark.parametrize("changed", [0, 1], ids=["used", "unused"])
def test_parameters_that_change_before_the_backward(changed: int) -> None:
    """A used parameter must not change; others may, as with an optimizer that steps inside the backward."""
    params = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    x = torch.randn(1, 12, 8, requires_grad=True)
    y = tiled_part(lambda x: torch.tanh(x @ params[0]), x, params=params, chunk_tokens=4, used_alone=True)
    with torch.no_grad():
        params[changed].add_(1)
    if changed == 0:
        with pytest.raises(RuntimeError, match="was changed in place between its forward and its backward"):
            y.sum().backward()
        return
    y.sum().backward()
    assert params[0].grad.isfinite().all() and params[1].grad is None


def test_a_compiled_step_runs_the_function_as_it_is_in_the_backward_too() -> None:
    """The compiler traces neither what the forward runs in chunks nor what the backward runs again."""
    x, seen = torch.randn(1, 12, 8, requires_grad=True), []

    def step() -> None:
        tiled(lambda t: seen.append(torch.compiler.is_compiling()) or t.sin(), x, chunk_tokens=5).sum().backward()

    torch._dynamo.reset()
    torch.compile(step, backend="eager")()
    assert seen == [False] * 6
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_another_dimension(device: str) -> None:
    x = torch.randn(95, 3, D, device=device, requires_grad=True)
    ours = gradients(tiled(torch.sin, x, dim=0, chunk_tokens=30), x.detach(), x)
    for mine, true in zip(ours, gradients(x.sin(), x.detach(), x), strict=True):
        torch.testing.assert_close(mine, true)


def sharded() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(0))
    parameter.ds_id = 0  # ZeRO-3's mark
    return parameter


X = torch.zeros(95, D)


@pytest.mark.parametrize(
    ("fn", "inputs", "options", "error", "message"),
    [
        (torch.sin, (), {}, ValueError, "no input to cut"),
        (torch.sin, ([1.0],), {}, TypeError, "input 0 is a list"),
        (torch.add, (X, X[:90]), {}, ValueError, "input 1 is 90 long along dimension -2, input 0 is 95"),
        (torch.sin, (X[:, 0],), {}, ValueError, r"input 0 has shape \[95\], expected tokens along dimension -2"),
        (torch.sin, (X,), {"params": [X * torch.ones(1, requires_grad=True)]}, ValueError, "computed from others"),
        (torch.sin, (X,), {"params": X}, TypeError, "params is a Tensor, expected a list of tensors"),
        (torch.sin, (X,), {"shared": 3}, TypeError, "shared is a int, expected a list of tensors"),
        (torch.sin, (X,), {"params": [sharded()]}, ValueError, "parameter 0 is sharded .* by ZeRO-3.*use ZeRO-2"),
        (lambda x: x.sum(0, keepdim=True), (X,), {}, ValueError, r"output 0 of fn is \[1, 96\] for a chunk of 20"),
        (lambda x: (x, None), (X,), {}, TypeError, "output 1 of fn is a NoneType"),
        (torch.sin, (X,), {"chunk_tokens": 0}, ValueError, "chunk_tokens"),
        (torch.sin, (X.to_sparse(),), {}, TypeError, "input 0 is sparse_coo, expected a dense tensor"),
        (torch.sin, (X,), {"params": [X.to_sparse().requires_grad_()]}, TypeError, "parameter 0 is sparse_coo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(fn, inputs: tuple, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiled(fn, *inputs, **{"chunk_tokens": 20} | options)
