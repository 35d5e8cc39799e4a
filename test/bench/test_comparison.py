"""Comparisons are fair: results must be right first, contestants take turns, and every contestant is listed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from benchmark.comparison import Comparison, expected_seconds, small_error
from benchmark.shapes import SMALL, Case, Shape, small
from benchmark.subject import Absent, Forward, Outcome, Subject

CASE = Case("tiny", 300)
SHAPE = Shape(16, 24, 6, 4, 2, 8, 50)


@dataclass
class Work:
    x: torch.Tensor
    weight: torch.Tensor
    upstream: torch.Tensor
    turns: list[str]

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.weight


def operands(turns: list[str], shape: Shape, tokens: int, dtype: torch.dtype) -> Work:
    x, weight, upstream = (torch.randn(*size, dtype=dtype) for size in ((tokens, 8), (8, 8), (tokens, 8)))
    return Work(x.requires_grad_(), weight.requires_grad_(), upstream, turns)


def contestant(name: str, change: Callable[[torch.Tensor], torch.Tensor] = lambda y: y) -> Callable[[Work], Forward]:
    def ready(work: Work) -> Forward:
        def compute() -> torch.Tensor:
            if len(work.x) == CASE.tokens:
                work.turns.append(name)
            return change(work.x @ work.weight)

        return Forward(compute)

    return ready


def raising(error: Exception, at_size: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(y: torch.Tensor) -> torch.Tensor:
        if at_size and len(y) != CASE.tokens:
            return y
        raise error

    return change


def absent(work: Work) -> Forward:
    raise Absent("it is on holiday")


CHANGES = {"huggingface": lambda y: y, "b": lambda y: y * 1, "c": lambda y: y + 0}


def comparison(*, without: tuple[str, ...] = (), turns: list[str] | None = None, **others: Callable) -> Comparison:
    """A comparison with three right contestants and some others; ten FLOP per token."""
    contestants = {name: contestant(name, change) for name, change in CHANGES.items()} | others
    of_work = partial(operands, [] if turns is None else turns)
    return Comparison(
        Subject("products", of_work, contestants, lambda _, tokens: 10.0 * tokens), CASE, "small", without
    )


def statuses(found: dict[str, Outcome]) -> dict[str, str]:
    return {name: entry.status for name, entry in found.items()}


def test_every_contestant_is_named() -> None:
    """Losers have no figure, and the others continue, in turns. The next case gets time in proportion to its FLOP: a
    warm-up and three rounds, above 128K tokens one round."""
    last = lambda y: y.where(torch.arange(len(y))[:, None] < len(y) - 1, torch.nan)  # noqa: E731
    turns: list[str] = []
    held = comparison(
        turns=turns,
        absent=absent,
        not_there=lambda work: __import__("there_is_no_such_package"),
        twice=contestant("twice", lambda y: 2 * y),
        nan=contestant("nan", last),
        full=contestant("full", raising(torch.OutOfMemoryError("no room"), at_size=True)),
        broken=contestant("broken", raising(KeyError("lost"))),
    )
    found = held.run()
    status = {"absent": "absent", "not_there": "absent", "twice": "wrong", "nan": "wrong"}
    assert statuses(found) == status | {"full": "out of memory", "broken": "failed"} | dict.fromkeys(
        CHANGES, "measured"
    )
    assert found["absent"].why == "it is on holiday" and "there_is_no_such_package" in found["not_there"].why
    assert "no room" in found["full"].why and "KeyError" in found["broken"].why
    assert abs(found["twice"].error - 1) < 1e-6 and found["nan"].error != found["nan"].error
    for name, entry in found.items():
        assert (len(entry.forward) == len(entry.backward) > 0) == (name in CHANGES)
        assert all(seconds > 0 for seconds in entry.forward + entry.backward)
    assert found["huggingface"].peak_bytes == 300 * 8 * 4 + 300 * 8 * 4 + 8 * 8 * 4  # the output, two gradients
    assert turns[-6:] == ["huggingface", "b", "c", "b", "c", "huggingface"]  # two rounds, after the warm-up

    a_pass = sum(sum(entry.forward + entry.backward) / 2 for entry in found.values())
    assert held.pace == pytest.approx(a_pass / 3000, rel=1e-6)
    for size, tokens, passes in (("full", 3000, 40), ("full", 300_000, 2000), ("quick", 60_000, 400)):
        expected = expected_seconds(held.subject, Case("tiny", tokens), size, held.pace)
        assert expected == pytest.approx(passes * a_pass), (size, tokens)


def test_a_wrong_row_at_full_size() -> None:
    """A contestant that is right on the small input and wrong on the full one is wrong."""
    late = lambda y: y if len(y) != CASE.tokens else torch.cat([y[:-1], 2 * y[-1:]])  # noqa: E731
    rows = lambda work, y: [y[-1:]]  # noqa: E731
    right_rows = lambda work: [(work.x @ work.weight).detach()[-1:]]  # noqa: E731
    contestants = {"huggingface": contestant("huggingface"), "late": contestant("late", late)}
    subject = Subject("products", partial(operands, []), contestants, lambda shape, tokens: 1.0, rows, right_rows)
    assert statuses(Comparison(subject, CASE, "small").run()) == {"huggingface": "measured", "late": "wrong"}
    assert small_error(subject, "late", small(SHAPE)) < 1e-5 and SMALL != CASE.tokens


def test_a_device_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the contestant that lost the device. Nothing is measured afterwards, and cases that did not start have
    failed."""
    monkeypatch.setattr("benchmark.comparison.is_lost", lambda: True)
    d = contestant("d", raising(KeyError("lost"), at_size=True))
    for without, killer, status in (((), "d", "lost"), (("d",), None, "measured")):
        held = comparison(without=without, d=d)
        assert statuses(held.run()) == dict.fromkeys(CHANGES, status) | {"d": "failed"} and held.killer == killer
