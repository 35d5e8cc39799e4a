"""A pool of ranks: what its cases return, and how it reports a rank that fails, ends or hangs."""

import os
import re

import pytest
import torch
import torch.distributed as dist

from support.pool import Pool, RankError

pytestmark = pytest.mark.dist


def total(value: int) -> tuple[int, int]:
    """Returns the process id, and the sum over ranks."""
    x = torch.tensor(value + dist.get_rank())
    dist.all_reduce(x)
    return os.getpid(), int(x)


def goes_wrong_on_one_rank(how: str) -> None:
    if dist.get_rank() == 1:
        raise KeyError("of rank 1") if how == "raises" else SystemExit(os._exit(7))
    dist.barrier()


def waits_for_ever() -> None:
    """Waits on each rank for what the other does not send."""
    dist.recv(torch.zeros(1), 1 - dist.get_rank())


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_ranks_stay_until_a_case_leaves_traces_or_fails(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.pool.GRACE", 0.5)
    (first, x), (second, y) = pool.run(total, 3)
    assert (x, y) == (7, 7) and first != second
    assert pool.run(total, 4, leaves_traces=True) == [(first, 9), (second, 9)]
    processes = {first, second}
    waits = "rank 0: it still waits.*in goes_wrong_on_one_rank.*"
    for how, said in (("raises", f"{waits}rank 1: .*KeyError: 'of rank 1'"), ("ends", "rank 1: .* exit code 7")):
        with pytest.raises(RankError) as raised:
            pool.run(goes_wrong_on_one_rank, how)
        assert re.search(said, str(raised.value), re.DOTALL), raised.value
        new = {process for process, _ in pool.run(total, 0)}
        assert not new & processes
        processes |= new


def test_a_case_that_hangs_is_named_with_its_stack() -> None:
    with Pool(2, case_limit=2) as pool:
        with pytest.raises(RankError) as raised:
            pool.run(waits_for_ever)
        assert str(raised.value).count("in waits_for_ever") == 2 and "it ended with exit code 1" in str(raised.value)
        assert len(pool.run(total, 0)) == 2, "the pool starts anew"


def started_alone() -> int:
    dist.init_process_group("gloo")
    return total(1)[1]


def test_each_case_may_start_a_group_of_its_own() -> None:
    with Pool(2, "own") as pool:
        assert pool.run(started_alone) == pool.run(started_alone) == [3, 3]
