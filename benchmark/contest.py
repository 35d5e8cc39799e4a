"""A contest: the same work by several contestants on the same operands, right first, then memory, then time.

All contestants of a case run in one process, by turns: a round is one step of each. So what changes while the machine
runs, clocks and temperature, meets all of them alike, and their ratios hold.
"""

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from benchmark.device import DEVICE, DTYPE, Watch, free_memory, peak_bytes, synchronize
from benchmark.shapes import LENGTHS, LONG, SHAPES, SMALL, Case, Lengths, Shape, small
from torch import nn

from assertions import relative_error

ROUNDS = {"smoke": 2, "cpu": 3, "quick": 3, "full": 9}
SECONDS = 4.0  # of timing for a case, where its steps are short enough for more rounds than the fewest
FEWEST = 3
WRONG = {torch.bfloat16: 0.03, torch.float32: 1e-4}


class Absent(Exception):
    """Why a contestant cannot take part: not installed, or it does not know what the case asks for."""


def needs(package: str, gpu: bool = True) -> None:
    """Raises Absent if a contestant's package is not there, or cannot run here."""
    if find_spec(package) is None:
        raise Absent(f"{package} is not installed")
    if gpu and DEVICE == "cpu":
        raise Absent(f"{package} needs a GPU")


class Operands(Protocol):
    """What all contestants of a case work on: a dataclass of tensors, modules and plain values."""

    upstream: torch.Tensor
    """The gradient of what they compute."""

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """What gradients are wanted of."""


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
    """The fewest that a step of a shape and tokens takes in matrix products."""
    rows: Callable[[Any, torch.Tensor], Iterable[tuple[torch.Tensor, torch.Tensor]]] = lambda operands, out: ()
    """Of what was computed at full size, some rows and what they should be: offsets beyond 2**31 show there."""
    lengths: Lengths = field(default_factory=lambda: LENGTHS)
    reference: str = "huggingface"
    """The contestant that is right, in float64."""


@dataclass
class Entry:
    """What a contestant did in a case. `status`: measured, absent, wrong, failed, out of memory, no time left."""

    status: str = "measured"
    why: str = ""
    error: float | None = None
    """The largest relative error of output and gradients against float64, on a small input and on rows at full size."""
    peak_bytes: int | None = None
    """Above the operands."""
    forward: list[float] = field(default_factory=list)
    """Seconds, of each round."""
    backward: list[float] = field(default_factory=list)

    def lose(self, status: str, why: object = "") -> None:
        self.status, self.why = status, str(why).strip()[:400]
        self.forward, self.backward = [], []


def step(operands: Operands, ready: Forward) -> tuple[Watch, torch.Tensor]:
    """Forward and backward from gradients of None on; three marks."""
    for leaf in operands.leaves:
        leaf.grad = None
    watch = Watch()
    with ready.around():
        watch.mark()
        out = ready.compute()
        watch.mark()
        out.backward(operands.upstream)
        watch.mark()
    return watch, out.detach()


def computed(subject: Subject, contestant: str, operands: Operands) -> list[torch.Tensor]:
    """The output and the gradients of all leaves."""
    _, out = step(operands, subject.contestants[contestant](operands))
    return [out, *(leaf.grad for leaf in operands.leaves)]


def in_float64(operands: Any) -> Any:
    """The same values."""
    exact = {}
    for entry in fields(operands):
        value = getattr(operands, entry.name)
        if isinstance(value, nn.Module):
            exact[entry.name] = deepcopy(value).double()
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            exact[entry.name] = value.detach().double().requires_grad_(value.requires_grad)
    return replace(operands, **exact)


@cache
def truth(subject: Subject, shape: Shape) -> tuple[Any, list[torch.Tensor]]:
    """Small operands of this kind, and what is right for them."""
    operands = subject.operands(shape, SMALL, DTYPE)
    return operands, computed(subject, subject.reference, in_float64(operands))


@cache
def small_error(subject: Subject, contestant: str, shape: Shape) -> float:
    """The largest relative error of output and gradients in the dtype that is measured, on a small input."""
    operands, right = truth(subject, shape)
    ours = computed(subject, contestant, operands)
    return max(relative_error(a, b) for a, b in zip(ours, right, strict=True))


class Contest:
    """One case: its operands, the contestants that are still in it, and what they did."""

    def __init__(self, subject: Subject, case: Case, size: str, deadline: float):
        self.subject, self.case, self.size, self.deadline = subject, case, size, deadline
        self.entries = {name: Entry() for name in subject.contestants}
        self.ready: dict[str, Forward] = {}

    def run(self) -> dict[str, Entry]:
        shape = SHAPES[self.case.shape]
        of_reference = small_error(self.subject, self.subject.reference, small(shape))
        self.allowed = max(WRONG[DTYPE], 3 * of_reference)
        for name in self.entries:
            self._tried(name, lambda name=name: self._check(name, small_error(self.subject, name, small(shape))))
        try:
            self.operands = self.subject.operands(shape, self.case.tokens, DTYPE)
        except torch.OutOfMemoryError as error:
            for name in self._left():
                self.entries[name].lose("out of memory", f"the operands alone: {error}")
        for name in self._left():
            self._tried(name, lambda name=name: self._weigh(name))
        self._time()
        self.ready.clear()
        self.operands = None
        free_memory()
        return self.entries

    def _left(self) -> list[str]:
        return [name for name, entry in self.entries.items() if entry.status == "measured"]

    def _tried(self, name: str, action: Callable[[], None]) -> None:
        """What a contestant dies of is its result."""
        entry = self.entries[name]
        if time.time() > self.deadline:
            entry.lose("no time left")
            return
        try:
            action()
        except (Absent, ImportError) as error:
            entry.lose("absent", error)
        except torch.OutOfMemoryError as error:
            entry.lose("out of memory", error)
        except Exception as error:
            entry.lose("failed", f"{type(error).__name__}: {error}")
            traceback.print_exc()
        if entry.status != "measured":
            self.ready.pop(name, None)
            free_memory()

    def _check(self, name: str, error: float) -> None:
        """Wrong is what is off by more than rounding can be."""
        entry = self.entries[name]
        entry.error = error if entry.error is None else max(entry.error, error)
        if not error <= self.allowed:  # NaN too
            entry.error = error
            entry.lose("wrong", f"relative error {error:.1e}")

    def _weigh(self, name: str) -> None:
        """The peak of a warm step, and what it computed at full size."""
        entry = self.entries[name]
        self.ready[name] = self.subject.contestants[name](self.operands)
        outputs: list[torch.Tensor] = []
        for _ in range(1 if self.case.tokens > LONG else 2):  # kernels are tuned in buffers of their own
            outputs.clear()
            entry.peak_bytes = peak_bytes(lambda: outputs.append(step(self.operands, self.ready[name])[1]))
        for ours, right in self.subject.rows(self.operands, outputs[0]):
            self._check(name, relative_error(ours, right))

    def _time(self) -> None:
        """Rounds, each contestant's turn one later than in the round before."""
        started, rounds = time.time(), ROUNDS[self.size]
        few = 1 if self.case.tokens > LONG else min(FEWEST, rounds)
        gc.disable()
        for done in range(rounds):
            names = self._left()
            if not names or (done >= few and time.time() - started > SECONDS):
                break
            for name in names[done % len(names) :] + names[: done % len(names)]:
                self._tried(name, lambda name=name: self._turn(name))
        gc.enable()

    def _turn(self, name: str) -> None:
        synchronize()
        watch, _ = step(self.operands, self.ready[name])
        forward, backward = watch.seconds()
        self.entries[name].forward.append(forward)
        self.entries[name].backward.append(backward)
