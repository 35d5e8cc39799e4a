"""Whole batches, which are cut inside the model: by several real processes, against one."""

from collections.abc import Callable

import pytest

from sp import steps, whole
from sp.cases import attention_cases
from sp.test_sequence_parallel import OF_TWO, each_on_ranks, reducers
from support.pool import Pool

pytestmark = pytest.mark.dist


@each_on_ranks(attention_cases())
def test_steps(pool: Pool, i: int, case: tuple) -> None:
    """Loss and gradients, of every kind of heads and of sequence; how many collectives there are."""
    pool.run(whole.of_kind, i, *case)


@OF_TWO
@pytest.mark.parametrize("options", [None, {}, {"layer": True}], ids=["untiled", "tiled", "layers"])
@pytest.mark.parametrize("loss", whole.LOSSES)
def test_losses_of_ones_own(pool: Pool, loss: Callable, options: dict | None) -> None:
    """As they were written for one process."""
    pool.run(whole.loss_of_ones_own, loss, options)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("case", [whole.classification, whole.short, whole.read])
def test_batches(pool: Pool, case: Callable[[], None]) -> None:
    pool.run(case)


@pytest.mark.parametrize(("pool", "case"), list(reducers()), indirect=["pool"])
def test_reducers(pool: Pool, case: tuple) -> None:
    """Two groups of two ranks, accumulating over batches of unequal labels, under every reducer of gradients."""
    pool.run(steps.reducers, *case, "whole")
