"""`tiled(..., check=True)`: the errors that it finds, and that it restores everything."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import seqtile
from seqtile import tiled
from support.choice import every_value

pytestmark = pytest.mark.on_gpu("refused before any kernel runs", only=every_value)

D = 24


class Kept(nn.Module):
    """Changes a buffer in a way that no version counts."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "data":
            self.mean.data += x.detach().reshape(-1, D).mean(0)
        else:
            self.mean = self.mean + x.detach().reshape(-1, D).mean(0)
        return x - self.mean


class Hidden:
    """Draws from a generator that cannot be found."""

    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = random.Random()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.generator.random()


class Normed(nn.Module):
    """Computes statistics over the tokens, and running ones without a version (torch 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("var", torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x.mT, self.mean, self.var, training=True).mT


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def numbered(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[-2], device=x.device)[:, None]


MIXES, CHANGES, DRAWS = "it mixes tokens", "it changes", "it draws random numbers from"
FOUND: dict[str, tuple[Callable[[], Callable], str]] = {
    "softmax over tokens": (lambda: lambda x: x.softmax(-2), MIXES),
    "shift": (lambda: lambda x: torch.roll(x, 1, -2), MIXES),
    "convolution": (lambda: lambda x: nn.functional.avg_pool1d(x.mT, 3, 1, 1).mT, MIXES),
    "positions": (lambda: numbered, MIXES),
    "integers": (lambda: lambda x: x.argmax(-2, keepdim=True).expand(x.shape), MIXES),
    "one of several outputs": (lambda: lambda x: (x, x.cumsum(-2)), MIXES),
    "through .data": (lambda: Kept("data"), rf"{CHANGES} Kept\.mean"),
    "another tensor": (lambda: Kept("replaced"), rf"{CHANGES} Kept\.mean"),
    "statistics": (Normed, rf"{CHANGES} .*Normed\.mean.*{MIXES}"),
    "scripted": (lambda: torch.jit.script(Normed()), rf"{CHANGES} .*\.mean.*{MIXES}"),
    "spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(D, D)), rf"{CHANGES} .*Linear\.weight_u"),
    "its input": (lambda: doubled, f"{CHANGES} input 0"),
    "dropout": (lambda: nn.Dropout(0.5), f"{DRAWS} torch's default generator"),
    "python's numbers": (lambda: lambda x: x * random.random(), f"{DRAWS} random's global generator"),
    "hidden numbers": (Hidden, "it computes something else when it runs again"),
}


def state_of(fn: Callable) -> list[object]:
    buffers = list(fn.buffers()) if isinstance(fn, nn.Module) else []
    return [torch.get_rng_state().tolist(), random.getstate(), *((id(each), each.tolist()) for each in buffers)]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("chunk_tokens", [10, 1000], ids=["tiled", "fits"])
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, chunk_tokens: int, device: str) -> None:
    make, message = FOUND[name]
    fn = make().to(device) if isinstance(make(), nn.Module) else make()
    x = torch.randn(2, 95, D, device=device)
    before, copy = state_of(fn), x.clone()
    params = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    with pytest.raises(ValueError, match=f"fn is not the same chunk by chunk: .*{message}"):
        tiled(fn, x, params=params, chunk_tokens=chunk_tokens, check=True)
    assert state_of(fn) == before and x.equal(copy)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.RMSNorm(D), nn.Linear(D, 100), nn.utils.spectral_norm(nn.Linear(100, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(nn.functional.gelu(self.into(self.norm(x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(95, D), (3, 41, D), (1, D), (2, 5, 7, D)], ids=str)
def test_nothing_found(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Rounding that depends on the number of tokens is not mixing; the check changes no result."""
    block = Block().to(device)
    block(torch.randn(1, D, device=device))  # the spectral norm of random vectors may be near zero
    block = block.to(dtype).eval()
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    before, found = state_of(block), []
    for check in (True, False):
        y = tiled(block, x, params=block.parameters(), chunk_tokens=20, check=check)
        found.append((y, *torch.autograd.grad(y.sum(), (x, *block.parameters()))))
    for mine, theirs in zip(*found, strict=True):
        assert mine.equal(theirs)
    assert state_of(block) == before


def test_several_inputs_another_dimension_and_autocast(device: str) -> None:
    x, ids = torch.randn(95, 3, D, device=device), torch.randint(0, 7, (95, 3, 1), device=device)
    table = torch.randn(7, D, device=device, requires_grad=True)

    def fn(x: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x @ x.new_ones(D, D) + table[ids[..., 0]]

    with torch.autocast(device, torch.bfloat16):
        y = tiled(fn, x, ids, shared=[table], dim=0, chunk_tokens=30, check=True)
    assert y.requires_grad and y.shape == x.shape


def test_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="check=True compares values, and tensors on the meta device have none"):
        tiled(torch.sin, torch.empty(95, D, device="meta"), check=True)


def test_examples_of_the_page() -> None:
    text = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    examples = re.findall(r"^(seqtile\.tiled\(.*, check=True\))  # (it .*)$", text, re.MULTILINE)
    assert len(examples) == 3
    names = {"torch": torch, "seqtile": seqtile, "module": nn.Linear(D, D), "x": torch.randn(2, 95, D)}
    for code, message in examples:
        with pytest.raises(ValueError, match=re.escape(message)):
            exec(code, names)
