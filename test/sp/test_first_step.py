"""The first training step compares itself below the head, too, where ranks share sequences."""

import pytest

from sp import first_step
from sp.test_sequence_parallel import OF_TWO
from support.choice import every_value
from support.pool import Pool

pytestmark = pytest.mark.dist
EVERY_DAY = ("packed-layers-2", "padded, cut-mlps-2", "prefixes over ranks-mlps-2", "short-mlps-2", "qwen3_next-mlps-2")
EVERY_DAY += ("qwen2_5_vl images-layers-2", "positions-layers-2")
UNTILEABLE = ("mamba2", "falcon_h1", "zamba2")
"""Families whose layers are not tiled."""


@pytest.mark.full("1 s each", but=EVERY_DAY)
@OF_TWO
@pytest.mark.parametrize("options", [{}, {"layer": True}], ids=["mlps", "layers"])
@pytest.mark.parametrize("name", first_step.CASES)
def test_compared(pool: Pool, name: str, options: dict) -> None:
    if options and name in UNTILEABLE:
        pytest.skip("its layers are not tiled")
    pool.run(first_step.compared, name, options)


SHARING = ("packed", "packed, cut", "prefixes over ranks", "qwen2_5_vl images")
WRONG = [(name, rank) for name in SHARING for rank in (0, 1, None)]


@pytest.mark.full("1 s each", but=("packed-1-2", "packed, cut-None-2", "prefixes over ranks-0-2", "qwen2*-0-2"))
@OF_TWO
@pytest.mark.parametrize(("name", "only_on"), [*WRONG, ("prefixes", None)])
def test_a_wrong_part_stops_every_rank(pool: Pool, name: str, only_on: int | None) -> None:
    pool.run(first_step.refused, name, only_on)


@pytest.mark.full("of a product, each value every day", but=every_value)
@OF_TWO
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ["packed", "packed, cut"])
def test_one_rank_fails(pool: Pool, name: str, in_backward: bool) -> None:
    pool.run(first_step.fails, name, in_backward)
