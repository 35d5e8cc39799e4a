"""The first training step compares itself with the untiled model under every reducer, and leaves no trace."""

import pytest

from distributed.first_step import CASES, TOGETHER, compared, held, stopped
from support.pool import Pool

pytestmark = pytest.mark.dist


def on_two_ranks(names: tuple[str, ...]) -> pytest.MarkDecorator:
    params = [pytest.param((2, name.split()[0] if "zero" in name else "torch"), name, id=name) for name in names]
    return pytest.mark.parametrize(("pool", "name"), params, indirect=["pool"])


@on_two_ranks(tuple(CASES))
def test_compared_and_trained_the_same(pool: Pool, name: str) -> None:
    pool.run(compared, name)


@on_two_ranks(TOGETHER)
def test_one_rank_stops_all(pool: Pool, name: str) -> None:
    pool.run(stopped, name)


@on_two_ranks(("zero3",))
def test_one_layer_is_held_at_a_time(pool: Pool, name: str) -> None:
    pool.run(held)
