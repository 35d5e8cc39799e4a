"""A pool of ranks: what its cases return, and how one that fails, ends or hangs is told."""

import os
import re

import pytest
import torch
import torch.distributed as dist

from support.pool import Pool, RankError


def total(value: int) -> tuple[int, int, int]:
    """Rank and process of each, and what all have added up."""
    x = torch.tensor(value + dist.get_rank())
    dist.all_reduce(x)
    return dist.get_rank(), os.getpid(), int(x)


def fails_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise KeyError("of rank 1")
    dist.barrier()


def ends_on_one_rank() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def waits_for_ever() -> None:
    """Each rank for what the other does not send."""
    dist.recv(torch.zeros(1), 1 - dist.get_rank())


@pytest.mark.dist
@pytest.mark.parametrize("pool", [2], indirect=True)
def test_ranks_stay(pool: Pool) -> None:
    (rank, first, x), (other, second, y) = pool.run(total, 3)
    assert (rank, other, x, y) == (0, 1, 7, 7) and first != second
    assert pool.run(total, 4) == [(0, first, 9), (1, second, 9)]


@pytest.mark.dist
@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("function", "said"),
    [(fails_on_one_rank, "rank 1: .*KeyError: 'of rank 1'"), (ends_on_one_rank, "rank 1: it ended with exit code 7")],
)
def test_a_failure_is_told_and_ends_the_ranks(pool: Pool, function: object, said: str) -> None:
    processes = [process for _, process, _ in pool.run(total, 0)]
    with pytest.raises(RankError) as raised:
        pool.run(function)
    assert re.search(said, str(raised.value), re.DOTALL)
    assert not {process for _, process, _ in pool.run(total, 0)} & set(processes)


@pytest.mark.dist
def test_a_case_that_hangs_is_named_with_its_stack() -> None:
    pool = Pool(2, case_limit=5)
    with pytest.raises(RankError) as raised:
        pool.run(waits_for_ever)
    assert str(raised.value).count("in waits_for_ever") == 2 and "it ended with exit code 1" in str(raised.value)


@pytest.mark.dist
@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_case_that_leaves_traces_has_its_ranks_to_itself(pool: Pool) -> None:
    before = pool.run(total, 0, leaves_traces=True)
    assert {process for _, process, _ in before}.isdisjoint(process for _, process, _ in pool.run(total, 0))
