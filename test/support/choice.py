"""Chooses the cases of a test that `make test` runs; all others wait for `make test-all` (`--full`). A mark on the test
says which:

    @pytest.mark.full("20 s of simulation")                         none
    @pytest.mark.full("5 s each", but=("llama-*", "*-bf16"))        those with such an id; * is any text
    @pytest.mark.full("of 165 cases", but=every_pair)               a few, chosen by `every_pair` or `every_value`

For `make test-gpu` the mark `on_gpu(reason, only)` replaces `full`: it names the cases that run, all without `only`.
For Triton's interpreter, where a row of a kernel takes a millisecond, `in_interpreter(reason, only)` does. There the
tests in test/kernels run, and other tests only with this mark; with `--full` all of their cases, unless `only` is `()`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import pytest

Chosen = Collection[str] | Callable[[list[dict]], list[int]]


def every_pair(cases: list[dict[str, Any]]) -> list[int]:
    """Returns the indices of a few cases that have every pair of values of two parameters that any case has."""
    return covering([together(case, 2) for case in cases])


def every_value(cases: list[dict[str, Any]]) -> list[int]:
    """Returns the indices of a few cases that have every value of every parameter."""
    return covering([together(case, 1) for case in cases])


def together(case: dict[str, Any], number: int) -> set[tuple]:
    """Returns all combinations of `number` parameters with their values in a case."""
    return set(combinations([(name, repr(case[name])) for name in sorted(case)], min(number, len(case))))


def covering(cases: list[set]) -> list[int]:
    """Returns the indices of cases that together cover all elements, chosen greedily: the case with the most missing
    elements, the first of equals."""
    missing, chosen = set().union(*cases), []
    while missing:
        chosen.append(max(range(len(cases)), key=lambda i: len(cases[i] & missing)))
        missing -= cases[chosen[-1]]
    return chosen


def left_out(items: Sequence[pytest.Item], on_gpu: bool = False, interpreted: bool = False) -> list[pytest.Item]:
    """Returns the items that do not run. Raises UsageError for a pattern that no case of its test matches."""
    governed: dict[int, tuple[pytest.Mark, list[pytest.Item]]] = {}
    for item in items:
        if mark := chosen_by(item, on_gpu, interpreted):
            governed.setdefault(id(mark), (mark, []))[1].append(item)
    return [item for mark, cases in governed.values() for item in left_out_by(mark, cases)]


def without_kernels(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the items that do not run in Triton's interpreter, not even with `--full`."""
    return [item for item in items if (mark := chosen_by(item, False, True)) and mark.kwargs["only"] == ()]


def left_out_by(mark: pytest.Mark, items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the items that their common mark leaves out."""
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
    """Returns the mark that says which cases of an item's test run; None if all run."""
    if interpreted:
        in_kernels = item.nodeid.startswith("test/kernels/")
        return item.get_closest_marker("in_interpreter") or (None if in_kernels else NOT_INTERPRETED)
    mark = item.get_closest_marker("on_gpu") if on_gpu else None
    if mark is not None:
        return mark if "only" in mark.kwargs else None
    return item.get_closest_marker("full")


NOT_INTERPRETED = pytest.mark.in_interpreter("the eager twins meet the same cases", only=()).mark
