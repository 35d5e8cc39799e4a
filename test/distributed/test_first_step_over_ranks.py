"""The first training step compares itself with the untiled model under every reducer, and leaves no trace."""

import pytest

from distributed.first_step import CASES, TOGETHER
from launch import ranks


@pytest.mark.dist
@pytest.mark.parametrize("family", CASES)
def test_compared_and_trained_the_same(family: str) -> None:
    printed = ranks(2, "distributed.first_step:main", family)
    expected = [f"{name} {case.outcome}" for name, case in CASES[family].items()]
    expected += [f"{name} together" for name in TOGETHER[family]]
    lines = [f"rank {rank}: {line}" for line in expected for rank in (0, 1)]
    assert [line for line in lines if line not in printed] == []
