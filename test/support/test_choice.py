"""Which cases run in `make test`, by the marks of their tests."""

from collections.abc import Iterable
from itertools import product
from types import SimpleNamespace

import pytest

from support.choice import every_pair, every_value, left_out, without_kernels

full, on_gpu, in_interpreter = pytest.mark.full, pytest.mark.on_gpu, pytest.mark.in_interpreter


class Item:
    """A case of a test, with what the choice of cases reads."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator, **params: object):
        self.nodeid = nodeid
        self.marks = [mark.mark for mark in marks]
        if params:
            self.callspec = SimpleNamespace(params=params, id="-".join(map(str, params.values())))

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)


def cases(test: str, params: Iterable[dict], *marks: pytest.MarkDecorator) -> list[Item]:
    return [Item(f"test/{test}[{i}]", *marks, **of) for i, of in enumerate(params)]


def ids(items: list[Item]) -> list[str]:
    return [item.callspec.id if hasattr(item, "callspec") else item.nodeid for item in items]


def test_by_id() -> None:
    named = [{"name": name} for name in ("a1", "a2", "b1", "more")]
    assert ids(left_out(cases("x.py::test", named, full("slow", but=("a*", "more"))))) == ["b1"]
    assert ids(left_out(cases("x.py::test", named, full("slow")))) == ["a1", "a2", "b1", "more"]
    assert left_out(cases("x.py::test", named)) == []
    with pytest.raises(pytest.UsageError, match=r"x.py::test.*names cases that are not there: c\*"):
        left_out(cases("x.py::test", named, full("slow", but=("a*", "c*"))))


def test_a_mark_of_a_file() -> None:
    """A pattern may belong to one of its tests; a test without parameters stays."""
    mark = full("slow", but=("a", "z"))
    items = cases("x.py::one", [{"name": "a"}, {"name": "b"}], mark) + cases("x.py::two", [{"name": "z"}], mark)
    assert ids(left_out([*items, Item("test/x.py::three", mark)])) == ["b"]


def test_pairs_of_each_test() -> None:
    params = [{"x": x, "y": y, "z": z} for x, y, z in product(range(3), repeat=3)]
    items = cases("x.py::one", params, full("many", but=every_pair)) + cases("x.py::two", params)
    gone = left_out(items)
    kept = [item.callspec.params for item in items[:27] if item not in gone]
    assert set(gone) <= set(items[:27]) and 9 <= len(kept) <= 12
    for a, b in (("x", "y"), ("x", "z"), ("y", "z")):
        assert {(of[a], of[b]) for of in kept} == set(product(range(3), repeat=2))
    assert sorted(map(len, (every_value(params), every_pair(params)))) == [3, len(kept)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [({}, ["0", "1"]), ({"on_gpu": True}, ["1"]), ({"interpreted": True}, ["0"])],
    ids=["every day", "on a GPU", "interpreted"],
)
def test_elsewhere(where: dict, expected: list[str]) -> None:
    marks = full("slow"), on_gpu("one", only=("0",)), in_interpreter("one", only=("1",))
    assert ids(left_out(cases("ops/x.py::test", [{"x": 0}, {"x": 1}], *marks), **where)) == expected


def test_in_the_interpreter_kernels_alone() -> None:
    items = [Item("test/kernels/x.py::test", full("slow")), Item("test/ops/x.py::test")]
    assert ids(left_out(items, interpreted=True)) == ["test/ops/x.py::test"]
    items += cases("ops/x.py::marked", [{"x": 0}, {"x": 1}], in_interpreter("one", only=("1",)))
    items += [Item("test/kernels/x.py::compiled", in_interpreter("none", only=()))]
    assert ids(without_kernels(items)) == ["test/ops/x.py::test", "test/kernels/x.py::compiled"]
    everything = Item("test/ops/x.py::test", full("slow"), on_gpu("a kernel"))
    assert left_out([everything], on_gpu=True) == [] and left_out([everything]) == [everything]
