"""The first training step compares itself with the untiled model under every reducer, without side effects."""

import pytest

from distributed.cases import pool_of
from distributed.first_step import CASES, EVERY_DAY, TOGETHER, WORLDS, compared, held, in_a_larger_world, stopped
from support.pool import Pool

pytestmark = pytest.mark.dist


def on_two_ranks(*names: str) -> pytest.MarkDecorator:
    params = [pytest.param(pool_of(name), name, id=name) for name in names]
    return pytest.mark.parametrize(("pool", "name"), params, indirect=["pool"])


@pytest.mark.full("3 s each; every day each reducer, and what is done besides under one", but=EVERY_DAY)
@on_two_ranks(*(name for name in CASES if name not in TOGETHER))
def test_compared_and_trained_the_same(pool: Pool, name: str) -> None:
    pool.run(compared, name)


@pytest.mark.full("10 s each", but=("fsdp2",))
@on_two_ranks(*TOGETHER)
def test_one_rank_stops_all(pool: Pool, name: str) -> None:
    """The other test does not compare these again."""
    pool.run(stopped, name)


@on_two_ranks("zero3")
def test_one_layer_is_held_at_a_time(pool: Pool, name: str) -> None:
    pool.run(held)


@pytest.mark.full("2 s each", but=("4-fsdp2 on two",))
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("pool", [4], indirect=True)
def test_ranks_that_share_a_model_are_part_of_the_world(pool: Pool, name: str) -> None:
    pool.run(in_a_larger_world, name)
