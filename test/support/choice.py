"""Which cases of a test run every day, and which wait for `make test-all` (`--full`). A mark beside the test says it:

    @pytest.mark.full("20 s of simulation")                         none of its cases runs every day
    @pytest.mark.full("5 s each", but=("llama-*", "*-bf16"))        but those with such an id; * is any text
    @pytest.mark.full("of 165 cases", but=every_pair)               but a few, as `every_pair` or `every_value` choose

`on_gpu(reason, only)` says it, instead of `full`, for `make test-gpu`: which of a test's cases run, all of them without
`only`. `in_interpreter(reason, only)` says it for Triton's interpreter, where a row of a kernel takes a millisecond:
there the tests in test/kernels run, and of the others those that have this mark; with `--full` all of their cases,
unless `only` is `()`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import pytest

Chosen = Collection[str] | Callable[[list[dict]], list[int]]


def every_pair(cases: list[dict[str, Any]]) -> list[int]:
    """As few of the cases as have every two values of two parameters together that are together in any case."""
    return covering([together(case, 2) for case in cases])


def every_value(cases: list[dict[str, Any]]) -> list[int]:
    """As few of the cases as have every value of every parameter."""
    return covering([together(case, 1) for case in cases])


def together(case: dict[str, Any], number: int) -> set[tuple]:
    """Of a case, parameter -> value: every so many of them."""
    return set(combinations([(name, repr(case[name])) for name in sorted(case)], min(number, len(case))))


def covering(cases: list[set]) -> list[int]:
    """Which of the cases to take, so that everything that any of them has is in one that is taken: always the one that
    has most that is new, the first of several."""
    missing, chosen = set().union(*cases), []
    while missing:
        chosen.append(max(range(len(cases)), key=lambda i: len(cases[i] & missing)))
        missing -= cases[chosen[-1]]
    return chosen


def left_out(items: Sequence[pytest.Item], on_gpu: bool = False, interpreted: bool = False) -> list[pytest.Item]:
    """The items that do not run every day. Raises UsageError for a pattern that no case of its test matches."""
    governed: dict[int, tuple[pytest.Mark, list[pytest.Item]]] = {}
    for item in items:
        if mark := chosen_by(item, on_gpu, interpreted):
            governed.setdefault(id(mark), (mark, []))[1].append(item)
    return [item for mark, cases in governed.values() for item in left_out_by(mark, cases)]


def without_kernels(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items that do not run in Triton's interpreter, not even with `--full`."""
    return [item for item in items if (mark := chosen_by(item, False, True)) and mark.kwargs["only"] == ()]


def left_out_by(mark: pytest.Mark, items: list[pytest.Item]) -> list[pytest.Item]:
    """Of all items that have a mark: those that it leaves out."""
    chosen: Chosen = mark.kwargs.get("only", mark.kwargs.get("but", ()))
    cases = [item for item in items if hasattr(item, "callspec")]
    if not chosen:
        return items
    if not callable(chosen):
        ids = [case.callspec.id for case in cases]
        if stale := [pattern for pattern in chosen if not any(fnmatchcase(name, pattern) for name in ids)]:
            raise pytest.UsageError(f"{items[0].nodeid}: its mark names cases that are not there: {', '.join(stale)}")
        return [case for case in cases if not any(fnmatchcase(case.callspec.id, pattern) for pattern in chosen)]
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for case in cases:
        tests[case.nodeid.partition("[")[0]].append(case)
    kept = {id(of[i]) for of in tests.values() for i in chosen([case.callspec.params for case in of])}
    return [case for case in cases if id(case) not in kept]


def chosen_by(item: pytest.Item, on_gpu: bool, interpreted: bool) -> pytest.Mark | None:
    """The mark that says which cases of an item's test run; None where all do."""
    if interpreted:
        in_kernels = item.nodeid.startswith("test/kernels/")
        return item.get_closest_marker("in_interpreter") or (None if in_kernels else NOT_INTERPRETED)
    mark = item.get_closest_marker("on_gpu") if on_gpu else None
    if mark is not None:
        return mark if "only" in mark.kwargs else None
    return item.get_closest_marker("full")


NOT_INTERPRETED = pytest.mark.in_interpreter("the eager twins meet the same cases", only=()).mark
