"""What a benchmark file declares: its operands, its contestants, and how they are judged."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import torch
from benchmark.device import DEVICE
from benchmark.shapes import LENGTHS, Lengths, Shape

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


class Absent(Exception):
    """Why a contestant cannot take part: not installed, or it does not know what the case asks for."""


def needs(package: str, gpu: bool = True) -> None:
    """Raises Absent if a contestant's package is not there, or cannot run here."""
    if find_spec(package) is None:
        raise Absent(f"{package} is not installed")
    if gpu and DEVICE == "cpu":
        raise Absent(f"{package} needs a GPU")


def compiled(function: Compiled) -> Compiled:
    """By torch.compile, for the one shape that it will meet, whatever was compiled before; on a CPU not to code."""
    torch.compiler.reset()
    return torch.compile(function, backend="inductor" if DEVICE == "cuda" else "aot_eager", dynamic=False)


class Operands(Protocol):
    """What all contestants of a case work on: a dataclass of tensors, modules and plain values."""

    upstream: torch.Tensor
    """The gradient of what they compute."""

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """What gradients are wanted of."""


def activations(shape: Shape, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer gets, [1, T, D], and the gradient of what it returns."""
    x, upstream = (torch.randn(1, tokens, shape.hidden, device=DEVICE, dtype=dtype) for _ in range(2))
    return x.requires_grad_(), upstream


@dataclass
class Forward:
    """A contestant made ready: computes from the operands it was made for."""

    compute: Callable[[], torch.Tensor]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered before a step and left after it."""


@dataclass(frozen=True, eq=False)
class Subject:
    """What is compared. A contestant makes itself ready for operands, or raises Absent or ImportError."""

    name: str
    operands: Callable[[Shape, int, torch.dtype], Any]
    """Fresh random ones: of a shape, tokens, dtype."""
    contestants: dict[str, Callable[[Any], Forward]]
    flops: Callable[[Shape, int], float]
    """The fewest that a step of a shape and tokens takes in matmuls."""
    rows: Callable[[Any, torch.Tensor], list[torch.Tensor]] = lambda operands, out: []
    """Of what was computed at full size, with its output, some rows that can be computed alone: offsets beyond 2**31
    show there."""
    right_rows: Callable[[Any], list[torch.Tensor]] = lambda operands: []
    """What they should be."""
    lengths: Lengths = field(default_factory=lambda: LENGTHS)
    reference: str = "huggingface"
    """The contestant that is right, in float64."""


@dataclass
class Outcome:
    """What a contestant did in a case. `status`: measured, absent, wrong, failed, out of memory, no time left, lost."""

    status: str = "measured"
    why: str = ""
    error: float | None = None
    """The largest relative error of output and gradients against float64, on a small input and on rows at full size."""
    peak_bytes: int | None = None
    """Above the operands."""
    forward: list[float] = field(default_factory=list)
    """Seconds, of each round."""
    backward: list[float] = field(default_factory=list)

    def fail(self, status: str, why: object = "") -> None:
        self.status, self.why = status, str(why).strip()[:400]
        self.forward, self.backward = [], []
