"""Side effects that a tiled function must not have, because it runs once per chunk and again in the backward: refused
and undone."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqtile import tiled
from support.assertions import relative_error
from support.choice import every_value

pytestmark = pytest.mark.on_gpu("refused before any kernel runs", only=every_value)

D = 24
Function = Callable[[torch.Tensor], torch.Tensor]


class Counting(nn.Module):
    """Keeps state in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(D, D), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(D, D))


class Caller:
    """Holds a module, but is none."""

    def __init__(self, module: nn.Module):
        self.module = module

    def of_chunk(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def in_list(module: nn.Module) -> Function:
    modules = {"all": [module]}
    return lambda x: sum(each(x) for each in modules["all"])


HOLDERS = {
    "the module": lambda module: module,
    "its forward, bound": lambda module: module.forward,
    "its forward, partial": lambda module: partial(type(module).forward, module),
    "a closure": lambda module: lambda x: module(x) * 2,
    "a closure's list": in_list,
    "a default": lambda module: lambda x, of=module: of(x),
    "a method": lambda module: Caller(module).of_chunk,
    "compiled": lambda module: torch.compile(lambda x: module(x) * 2, backend="aot_eager"),
}
KEEPING = {Deep: "layers.1.num_batches_tracked", spectral: "weight_u", Counting: "calls"}  # and the name of its state


def state_of(module: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*module.buffers(), *([module.calls] if isinstance(module, Counting) else []))]


@pytest.mark.full("10 s of a compiler", but=("Deep-*", "Counting-*", "spectral-[!c]*"))
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("make", KEEPING, ids=lambda make: make.__name__)
def test_state_is_refused_and_put_back(make: Callable[[], nn.Module], holder: str, device: str) -> None:
    if make is spectral and "its forward" in holder:
        pytest.skip("a hook that is not called changes nothing")
    torch._dynamo.reset()
    module = make().to(device)
    if make is Counting:
        module.calls = module.calls.to(device)
    x = torch.randn(95, D, device=device)
    before, fn = state_of(module), HOLDERS[holder](module)
    for differentiate in (True, False):
        with pytest.raises(ValueError, match=rf"fn changes .*{KEEPING[make]}.* in place.*eval mode"), torch.no_grad():
            with torch.set_grad_enabled(differentiate):
                tiled(fn, x, params=module.parameters(), chunk_tokens=20)
        for now, then in zip(state_of(module), before, strict=True):
            assert now.equal(then)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_module_in_eval_mode_keeps_no_state(checkpointed: bool, device: str) -> None:
    """Modules refused in training are right in evaluation, and so is a function that changes its own new tensors."""
    module = nn.Sequential(Deep(), spectral()).to(device).eval()
    x = torch.randn(95, D, device=device, requires_grad=True)
    scale = torch.ones(D, device=device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return module(x).mul_(scale).add_(1)

    def run(x: torch.Tensor) -> torch.Tensor:
        return tiled(fn, x, params=module.parameters(), chunk_tokens=20)

    def gradients(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y.square().sum(), (x, *module.parameters()))

    ours = gradients(checkpoint(run, x, use_reentrant=False) if checkpointed else run(x))
    for mine, true in zip(ours, gradients(fn(x)), strict=True):
        assert relative_error(mine, true) <= 1e-5


def doubled(x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
    return x.mul_(2) * 1.0


def doubled_shared(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    table.mul_(2)
    return x * table


MODES = {"trained": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("fn", "name"), [(doubled, "input 0"), (doubled_shared, "shared tensor 0")])
def test_change_of_an_input_is_refused_and_put_back(
    fn: Callable, name: str, trained: bool, mode: str, device: str
) -> None:
    """Run again in the backward, a function that doubles its input would make weight gradients twice too large."""
    weight = torch.randn(D, D, device=device, requires_grad=True)
    x, table = torch.randn(95, D, device=device), torch.randn(D, device=device)
    if trained:
        x.requires_grad_(True)
    tensors = [x * 1.0 if trained else x, table]
    before = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(ValueError, match=rf"fn changes {name} in place"), MODES[mode]():
        tiled(lambda x, table: fn(x, table) @ weight, tensors[0], shared=[table], params=[weight], chunk_tokens=20)
    for now, then in zip(tensors, before, strict=True):
        assert now.equal(then)


def test_input_made_in_inference_mode(device: str) -> None:
    with torch.inference_mode():
        x = torch.randn(95, D, device=device)
        assert tiled(torch.sin, x, chunk_tokens=20).equal(x.sin())
        with pytest.raises(ValueError, match="fn changes input 0 in place"):
            tiled(doubled, x, chunk_tokens=20)


def test_change_by_a_later_chunk_or_in_the_backward(device: str) -> None:
    x, calls = torch.randn(95, D, device=device), []
    weight = torch.randn(D, device=device, requires_grad=True)
    counter = torch.zeros(3, device=device)

    def fn(x: torch.Tensor, at: int) -> torch.Tensor:
        calls.append(x)
        if len(calls) == at:
            counter.add_(1)
        return x * weight

    with pytest.raises(ValueError, match="fn changes counter in place"):
        tiled(partial(fn, at=3), x, params=[weight], chunk_tokens=20)
    assert len(calls) == 3 and not counter.any()
    calls.clear()
    y = tiled(partial(fn, at=7), x, params=[weight], chunk_tokens=20)
    with pytest.raises(RuntimeError, match="fn changes counter in place"):
        y.sum().backward()
    assert weight.grad is None and not counter.any()


def test_what_is_too_large_is_not_put_back(device: str) -> None:
    x, table = torch.randn(95, D, device=device), torch.zeros(21, D, device=device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        table.add_(1)
        return x

    with pytest.raises(ValueError, match=r"fn changes table in place.*table could not be put back"):
        tiled(fn, x, chunk_tokens=20)
    assert (table == 1).all()


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_leaf_that_only_a_later_chunk_uses(trained: str, device: str) -> None:
    """Its gradient would be lost."""
    x, weight, other = (torch.randn(*shape, device=device) for shape in ((95, D), (D,), (D,)))
    other.requires_grad_(True)
    leaf = {"x": x, "weight": weight}[trained].requires_grad_(True)
    calls = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x * weight * (other if len(calls) % 5 == 3 else 1)

    y = tiled(fn, x, params=[weight], chunk_tokens=20)
    with pytest.raises(RuntimeError, match=r"fn uses a tensor \[24\] that requires a gradient .*list it in params"):
        y.sum().backward()
    assert leaf.grad is None and other.grad is None
    calls.clear()
    tiled(fn, x, params=[weight, other], chunk_tokens=20).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(other.grad, (x * weight).detach()[40:60].sum(0))


def noise(kind: str) -> tuple[Callable[[tuple[int, ...]], torch.Tensor], Callable[[], object]]:
    """Numbers from a generator, and that generator's state."""
    if kind == "torch":
        generator = torch.Generator()
        return lambda shape: torch.rand(shape, generator=generator), lambda: generator.get_state().tolist()
    if kind == "python":
        generator = random.Random()
        return lambda shape: torch.full(shape, generator.random()), generator.getstate
    if kind == "python's global":
        return lambda shape: torch.full(shape, random.random()), random.getstate
    numpy = pytest.importorskip("numpy")  # a closure variable of the functions below, while Python's random is a global
    if kind == "numpy":
        generator = numpy.random.default_rng()
        return lambda shape: torch.from_numpy(generator.random(shape)), lambda: str(generator.bit_generator.state)
    return lambda shape: torch.from_numpy(numpy.random.rand(*shape)), lambda: str(numpy.random.get_state())


@pytest.mark.parametrize("kind", ["torch", "python", "python's global", "numpy", "numpy's global"])
def test_generator_of_ones_own_is_refused_and_put_back(kind: str) -> None:
    """The backward would draw other numbers than the forward."""
    draw, state = noise(kind)
    x, before = torch.randn(95, D), state()
    with pytest.raises(ValueError, match=f"fn draws random numbers from .*{'global' if 'global' in kind else ''}"):
        tiled(lambda x: x * draw(x.shape), x, chunk_tokens=20)
    assert state() == before


def test_generator_of_a_module(device: str) -> None:
    module = nn.Linear(D, D).to(device)
    module.generator = torch.Generator(device)
    x = torch.randn(95, D, device=device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return module(x) + torch.rand(x.shape, generator=module.generator, device=x.device)

    with pytest.raises(ValueError, match=r"draws random numbers from module\.generator"):
        tiled(fn, x, params=module.parameters(), chunk_tokens=20)
    assert tiled(module, x, params=module.parameters(), chunk_tokens=20).shape == x.shape


def test_sparse_gradients_are_added(device: str) -> None:
    dense, sparse = nn.Embedding(7, D).to(device), nn.Embedding(7, D, sparse=True).to(device)
    sparse.load_state_dict(dense.state_dict())
    ids, d_y = torch.randint(0, 7, (95, 1), device=device), torch.randn(95, D, device=device)
    for module in (dense, sparse):
        tiled(lambda ids, of=module: of(ids[:, 0]), ids, params=module.parameters(), chunk_tokens=20).backward(d_y)
    torch.testing.assert_close(sparse.weight.grad, dense.weight.grad)


class Bare:
    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def made_with_an_empty_cell() -> Function:
    if random.random() > 2:
        later = 1

    def unfinished(x: torch.Tensor) -> torch.Tensor:
        return later if x is None else x * 2

    return unfinished


CALLABLES = {
    "an operator": lambda: torch.ops.aten.sin.default,
    "a builtin": lambda: torch.sin,
    "an object without attributes": Bare,
    "an empty cell": made_with_an_empty_cell,
    "traced": lambda: torch.fx.symbolic_trace(nn.Linear(D, D)),
    "scripted": lambda: torch.jit.script(nn.Linear(D, D)),
    "a bound builtin": lambda: torch.randn(1, D).add,
    "what it makes and changes": lambda: lambda x: x * torch.tensor([2.0] * D).mul_(2),
    "memory that torch did not make": lambda: lambda x: x * torch.frombuffer(bytearray(4 * D), dtype=x.dtype).add_(2),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", CALLABLES)
def test_callables_of_any_kind(name: str) -> None:
    fn = CALLABLES[name]()
    x = torch.randn(95, D)
    params = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    torch.testing.assert_close(tiled(fn, x, params=params, chunk_tokens=20), fn(x))
