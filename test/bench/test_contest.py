"""Contests are fair: right first, by turns, every contestant named whatever became of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from benchmark.contest import Contest, expected_seconds, small_error
from benchmark.shapes import SMALL, Case, Shape, small
from benchmark.subject import Absent, Entry, Forward, Subject

CASE = Case("tiny", 300)
SHAPE = Shape(16, 24, 6, 4, 2, 8, 50)


@dataclass
class Work:
    x: torch.Tensor
    weight: torch.Tensor
    upstream: torch.Tensor
    turns: list[str] = field(default_factory=list)

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


def absent(work: Work) -> Forward:
    raise Absent("it is on holiday")


def full(y: torch.Tensor) -> torch.Tensor:
    if len(y) == CASE.tokens:
        raise torch.OutOfMemoryError("no room")
    return y


def broken(y: torch.Tensor) -> torch.Tensor:
    raise KeyError("lost")


CHANGES = {"huggingface": lambda y: y, "b": lambda y: y * 1, "c": lambda y: y + 0}


def contest(turns: list[str], **others: Callable[[Work], Forward]) -> dict[str, Entry]:
    contestants = {name: contestant(name, change) for name, change in CHANGES.items()} | others
    subject = Subject("products", partial(operands, turns), contestants, lambda shape, tokens: 1.0)
    return Contest(subject, CASE, "small").run()


def test_every_contestant_is_named() -> None:
    """Those that lose have no figure, and the others go on."""
    last = lambda y: y.where(torch.arange(len(y))[:, None] < len(y) - 1, torch.nan)  # noqa: E731
    found = contest(
        [],
        absent=absent,
        not_there=lambda work: __import__("there_is_no_such_package"),
        twice=contestant("twice", lambda y: 2 * y),
        nan=contestant("nan", last),
        full=contestant("full", full),
        broken=contestant("broken", broken),
    )
    status = {"absent": "absent", "not_there": "absent", "twice": "wrong", "nan": "wrong"}
    status |= {"full": "out of memory", "broken": "failed"} | dict.fromkeys(CHANGES, "measured")
    assert {name: entry.status for name, entry in found.items()} == status
    assert found["absent"].why == "it is on holiday" and "there_is_no_such_package" in found["not_there"].why
    assert "no room" in found["full"].why and "KeyError" in found["broken"].why
    assert abs(found["twice"].error - 1) < 1e-6 and found["nan"].error != found["nan"].error
    for name, entry in found.items():
        assert (len(entry.forward) == len(entry.backward) > 0) == (name in CHANGES)
        assert all(seconds > 0 for seconds in entry.forward + entry.backward)
    assert found["huggingface"].peak_bytes == 300 * 8 * 4 + 300 * 8 * 4 + 8 * 8 * 4  # the output, two gradients


def test_contestants_take_turns() -> None:
    turns: list[str] = []
    contest(turns)
    assert turns[-6:] == ["huggingface", "b", "c", "b", "c", "huggingface"]  # two rounds, after the warm-up


def test_what_the_next_case_will_take() -> None:
    """In proportion to the FLOPs: a warm-up and three rounds, beyond 128K tokens one."""
    contestants = {name: contestant(name, change) for name, change in CHANGES.items()}
    subject = Subject("products", partial(operands, []), contestants, lambda shape, tokens: 10.0 * tokens)
    held = Contest(subject, CASE, "small")
    entries = held.run().values()
    a_pass = sum(sum(entry.forward + entry.backward) / 2 for entry in entries)
    assert held.pace == pytest.approx(a_pass / 3000, rel=1e-6)
    assert expected_seconds(subject, Case("tiny", 3000), "full", held.pace) == pytest.approx(40 * a_pass)
    assert expected_seconds(subject, Case("tiny", 300_000), "full", held.pace) == pytest.approx(2000 * a_pass)
    assert expected_seconds(subject, Case("tiny", 60_000), "quick", held.pace) == pytest.approx(400 * a_pass)


def test_a_wrong_row_at_full_size() -> None:
    """What is right on the small input and wrong beyond it is wrong."""
    late = lambda y: y if len(y) != CASE.tokens else torch.cat([y[:-1], 2 * y[-1:]])  # noqa: E731
    rows = lambda work, y: [y[-1:]]  # noqa: E731
    right_rows = lambda work: [(work.x @ work.weight).detach()[-1:]]  # noqa: E731
    contestants = {"huggingface": contestant("huggingface"), "late": contestant("late", late)}
    subject = Subject("products", partial(operands, []), contestants, lambda shape, tokens: 1.0, rows, right_rows)
    found = Contest(subject, CASE, "small").run()
    assert {name: entry.status for name, entry in found.items()} == {"huggingface": "measured", "late": "wrong"}
    assert small_error(subject, "late", small(SHAPE)) < 1e-5 and SMALL != CASE.tokens


def test_a_device_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names who took it with it; nothing is measured after that. What is left out from the start has failed."""
    monkeypatch.setattr("benchmark.contest.is_lost", lambda: True)
    at_size = lambda y: broken(y) if len(y) == CASE.tokens else y  # noqa: E731
    contestants = {name: contestant(name, change) for name, change in CHANGES.items()} | {"d": contestant("d", at_size)}
    subject = Subject("products", partial(operands, []), contestants, lambda shape, tokens: 1.0)
    held = Contest(subject, CASE, "small")
    status = {name: entry.status for name, entry in held.run().items()}
    assert held.killer == "d" and status == dict.fromkeys(CHANGES, "lost") | {"d": "failed"}
    held = Contest(subject, CASE, "small", without=["d"])
    status = {name: entry.status for name, entry in held.run().items()}
    assert held.killer is None and status == dict.fromkeys(CHANGES, "measured") | {"d": "failed"}
