"""A comparison: the same work by several contestants on the same operands, right first, then memory, then time.

All contestants of a case run in one process, by turns: a round is one step of each. So what changes while the machine
runs, clocks and temperature, meets all of them alike, and their ratios hold.
"""

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from benchmark.device import DEVICE, DTYPE, Watch, free_memory, is_lost, peak_bytes, synchronize
from benchmark.errors import relative_error
from benchmark.shapes import LONG, SHAPES, SMALL, Case, Shape, short_chunks, small
from benchmark.subject import Absent, Forward, Operands, Outcome, Subject
from torch import nn

ROUNDS = {"smoke": 1, "small": 2, "cpu": 3, "first": 5, "quick": 3, "full": 9}
SECONDS = 4.0  # of timing for a case, where more rounds than the fewest fit in
WRONG = {
    torch.bfloat16: 0.03,
    torch.float32: 1e-4,
}


def step(operands: Operands, ready: Forward) -> tuple[Watch, torch.Tensor]:
    """Forward and backward from gradients of None on; three marks."""
    clear(operands)
    watch = Watch()
    with ready.around():
        keep_busy()
        watch.mark()
        out = ready.compute()
        watch.mark()
        out.backward(operands.upstream)
        watch.mark()
    return watch, out.detach()


def keep_busy() -> None:
    """Gives a GPU about a millisecond of work that is not timed: meanwhile the host begins to launch what is, so that a
    short step's time is not that of launching its first kernels."""
    if DEVICE == "cuda":
        torch.cuda._sleep(2_000_000)  # clock cycles


def clear(operands: Operands) -> None:
    for leaf in operands.leaves:
        leaf.grad = None


def output_and_gradients(subject: Subject, contestant: str, operands: Operands) -> list[torch.Tensor]:
    """The output and the gradients of all leaves."""
    _, out = step(operands, subject.contestants[contestant](operands))
    return [out, *(leaf.grad for leaf in operands.leaves)]


def in_float64(operands: Any) -> Any:
    """The same values."""
    exact = {}
    for field in fields(operands):
        value = getattr(operands, field.name)
        if isinstance(value, nn.Module):
            exact[field.name] = deepcopy(value).double()
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            exact[field.name] = value.detach().double().requires_grad_(value.requires_grad)
    return replace(operands, **exact)


@cache
def truth(subject: Subject, shape: Shape) -> tuple[Any, list[torch.Tensor]]:
    """Small operands of this kind, and what is right for them."""
    operands = subject.operands(shape, SMALL, DTYPE)
    return operands, output_and_gradients(subject, subject.reference, in_float64(operands))


@cache
def small_error(subject: Subject, contestant: str, shape: Shape) -> float:
    """The largest relative error of output and gradients in the dtype that is measured, on a small input."""
    operands, right = truth(subject, shape)
    with short_chunks():
        return worst_error(output_and_gradients(subject, contestant, operands), right)


def worst_error(ours: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(ours, right, strict=True))


def allowed(of_reference: float) -> float:
    """The relative error beyond which a contestant is wrong: off by more than rounding can be."""
    return max(WRONG[DTYPE], 3 * of_reference)


def fewest_rounds(case: Case, size: str) -> int:
    return 1 if case.tokens > LONG.get(size, max(LONG.values())) else 3


def expected_seconds(subject: Subject, case: Case, size: str, pace: float) -> float:
    """Of a comparison, from the pace of another: its warm-up and its rounds."""
    return pace * subject.flops(SHAPES[case.shape], case.tokens) * (1 + fewest_rounds(case, size))


class Comparison:
    """One case: its operands, the contestants that are still in it, and what they did.

    `without` are left out. `killer`, after `run`, is whose error the device did not survive: what was not measured by
    then is `lost`, and this process can measure nothing more. `say` gets a line of what is going on.
    """

    def __init__(
        self,
        subject: Subject,
        case: Case,
        size: str,
        without: Collection[str] = (),
        say: Callable[[str], None] = lambda line: None,
    ):
        self.subject, self.case, self.size, self.say = subject, case, size, say
        self.outcomes = {name: Outcome() for name in subject.contestants}
        self.ready: dict[str, Forward] = {}
        self.killer: str | None = None
        for name in without:
            self.outcomes[name].fail("failed", "the device did not survive it before")

    def run(self) -> dict[str, Outcome]:
        shape = SHAPES[self.case.shape]
        self.allowed = allowed(small_error(self.subject, self.subject.reference, small(shape)))
        for name in self._remaining():
            self._try(name, lambda name=name: self._check(name, small_error(self.subject, name, small(shape))))
        try:
            self.operands = self.subject.operands(shape, self.case.tokens, DTYPE)
            self.right_rows = self.subject.right_rows(self.operands)
        except torch.OutOfMemoryError as error:
            for name in self._remaining():
                self.outcomes[name].fail("out of memory", f"the operands alone: {error}")
        for name in self._remaining():
            self._try(name, lambda name=name: self._warm(name))
        self._time()
        self.ready.clear()
        self.operands = self.right_rows = None
        if self.killer is None:
            free_memory()
        return self.outcomes

    @property
    def pace(self) -> float:
        """Seconds that a step of each contestant that was measured takes, for a FLOP of the subject's."""
        timed = [outcome for outcome in self.outcomes.values() if outcome.forward]
        seconds = sum(statistics.median(outcome.forward) + statistics.median(outcome.backward) for outcome in timed)
        return seconds / self.subject.flops(SHAPES[self.case.shape], self.case.tokens)

    def _remaining(self) -> list[str]:
        return [name for name, outcome in self.outcomes.items() if outcome.status == "measured"]

    def _try(self, name: str, action: Callable[[], None]) -> None:
        """What a contestant dies of is its result."""
        outcome = self.outcomes[name]
        if self.killer is not None:
            outcome.fail("lost", f"{self.killer} took the device with it")
            return
        try:
            action()
        except (Absent, ImportError) as error:
            outcome.fail("absent", error)
        except torch.OutOfMemoryError as error:
            outcome.fail("out of memory", error)
        except Exception as error:
            outcome.fail("failed", f"{type(error).__name__}: {error}")
            traceback.print_exc()
            self.killer = name if is_lost() else None
        if outcome.status != "measured":
            self.say(f"{self.case} {name}: {outcome.status}")
            self.ready.pop(name, None)
            if self.killer is None:
                free_memory()

    def _check(self, name: str, error: float) -> None:
        """Wrong is what is off by more than rounding can be."""
        outcome = self.outcomes[name]
        outcome.error = error if outcome.error is None else max(outcome.error, error)
        if not error <= self.allowed:  # NaN too
            outcome.error = error
            outcome.fail("wrong", f"relative error {error:.1e}")

    def _warm(self, name: str) -> None:
        """A first step, in which kernels are compiled and tuned; what it computed at full size."""
        outcome = self.outcomes[name]
        self.ready[name] = self.subject.contestants[name](self.operands)
        outputs: list[torch.Tensor] = []
        clear(self.operands)
        peak = peak_bytes(lambda: outputs.append(step(self.operands, self.ready[name])[1]))
        outcome.peak_bytes = peak if DEVICE == "cpu" else 0  # a CPU counts tensors, which takes time; a GPU see `_turn`
        for ours, right in zip(self.subject.rows(self.operands, outputs[0]), self.right_rows, strict=True):
            self._check(name, relative_error(ours, right))
        self.say(f"{self.case} {name}: {peak / 2**30:.2f} GiB")

    def _time(self) -> None:
        """Rounds, each contestant's turn one later than in the round before."""
        started, rounds = time.time(), ROUNDS[self.size]
        few = min(fewest_rounds(self.case, self.size), rounds)
        gc.disable()
        for done in range(rounds):
            names = self._remaining()
            if not names or (done >= few and time.time() - started > SECONDS):
                break
            for name in names[done % len(names) :] + names[: done % len(names)]:
                self._try(name, lambda name=name: self._turn(name))
        gc.enable()

    def _turn(self, name: str) -> None:
        outcome = self.outcomes[name]
        watches: list[Watch] = []

        def turn() -> None:
            watches.append(step(self.operands, self.ready[name])[0])

        clear(self.operands)
        synchronize()
        if DEVICE == "cpu":
            turn()
        else:
            outcome.peak_bytes = max(outcome.peak_bytes, peak_bytes(turn))
        forward, backward = watches[0].seconds()
        outcome.forward.append(forward)
        outcome.backward.append(backward)
