"""Which cases `make test` runs, and why the others can wait for `make test-all`, which runs all of them (`--full`).

A test that is named nowhere here is run whole. Of the others, those cases are run that `keep` says:

EVERY_PAIR   as few as have every two values of two parameters together that are together in any case.
EVERY_VALUE  as few as have every value of every parameter.
a tuple      those whose id contains one of these texts.

A case that was asked for by its id is always run.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

EVERY_VALUE, EVERY_PAIR = 1, 2


class Cut(NamedTuple):
    """`tests`: beginnings of node ids."""

    tests: tuple[str, ...]
    keep: int | tuple[str, ...]
    why: str


CUTS: tuple[Cut, ...] = ()
INTERPRETED: tuple[Cut, ...] = ()


def everyday(items: Sequence, cuts: tuple[Cut, ...]) -> set[str]:
    """Ids of the items to run. Raises ValueError for a cut that says nothing."""
    cases: dict[tuple[Cut, str], list] = defaultdict(list)
    kept = set()
    for item in items:
        cut = next((cut for cut in cuts if item.nodeid.startswith(cut.tests)), None)
        if cut is None or not hasattr(item, "callspec"):
            kept.add(item.nodeid)
        else:
            cases[cut, item.nodeid.partition("[")[0]].append(item)
    for (cut, _), found in cases.items():
        if isinstance(cut.keep, int):
            kept |= {found[i].nodeid for i in covering([together(item.callspec.indices, cut.keep) for item in found])}
        else:
            kept |= {item.nodeid for item in found if any(text in item.callspec.id for text in cut.keep)}
    return kept


def together(case: dict[str, Any], number: int) -> set[tuple]:
    """Of a case, parameter -> value: every so many of them."""
    return set(combinations(sorted(case.items()), min(number, len(case))))


def covering(cases: list[set]) -> list[int]:
    """Which of the cases to take, so that everything that any of them has is in one that is taken: always the one that
    has most that is new, the first of several."""
    missing, chosen = set().union(*cases), []
    while missing:
        chosen.append(max(range(len(cases)), key=lambda i: len(cases[i] & missing)))
        missing -= cases[chosen[-1]]
    return chosen


def unused(items: Iterable, cuts: tuple[Cut, ...]) -> list[str]:
    """Tests that a cut names, in files of `items`, and that are not there."""
    ids = [item.nodeid for item in items]
    files = {name.partition("::")[0] for name in ids}
    named = (test for cut in cuts for test in cut.tests if test.partition("::")[0] in files)
    return [test for test in named if not any(name.startswith(test) for name in ids)]
