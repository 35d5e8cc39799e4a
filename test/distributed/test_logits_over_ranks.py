"""A user's own loss of a tiled model's logits equals the untiled one under every data parallelism."""

import pytest
import torch

from distributed import logits
from distributed.cases import pool_of
from support.assertions import relative_error
from support.pool import Pool

STRATEGIES = ("ddp", "ddp_unused", "fsdp2", "fsdp2_head", "fsdp2_group", "zero1", "zero2", "zero3")
SHARDED = ("fsdp2_group", "fsdp2_head", "zero3")  # heads that with an adapter, in chunks, would be gathered for each
CASES = [(each, of, adapter) for each in STRATEGIES for of in logits.OF for adapter in (False, each not in SHARDED)]
EVERY_DAY = ("ddp_unused-alone-True", "fsdp2_head-alone-False", "zero2-not trained on-False", "zero3-beside-False")


each_sharded = pytest.mark.parametrize(
    ("pool", "strategy"), [pytest.param(pool_of(each), each, id=each) for each in SHARDED], indirect=["pool"]
)


@pytest.mark.dist
@pytest.mark.full("3 s each of three losses and two kinds of training", but=EVERY_DAY)
@pytest.mark.parametrize(
    ("pool", "strategy", "of", "adapter"),
    [pytest.param(pool_of(case[0]), *case, id="-".join(map(str, case))) for case in dict.fromkeys(CASES)],
    indirect=["pool"],
)
def test_same_training(pool: Pool, strategy: str, of: str, adapter: bool) -> None:
    pool.run(logits.same_training, strategy, of, adapter)


@pytest.mark.usefixtures("one_rank", "one_thread")
@pytest.mark.parametrize(("strategy", "of"), [("fsdp2_group", "apart"), ("fsdp2_head", "beside")])
def test_a_head_with_an_adapter_that_fsdp2_shards(strategy: str, of: str) -> None:
    """It is in chunks, and the weights of its group are there in the backward."""
    logits.same_training(strategy, of, adapter=True)


@pytest.mark.usefixtures("one_rank", "one_thread")
def test_a_group_is_sharded_after_each_read() -> None:
    """Also where the other modules of its group run no more."""
    (theirs, expected), (ours, weights) = map(logits.reads_and_other_weights, (False, True))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    for name, weight in weights.items():
        assert relative_error(weight, expected[name]) <= 1e-5, name


@pytest.mark.dist
@pytest.mark.full("3 s each", but=("fsdp2_head",))
@each_sharded
def test_a_step_in_between(pool: Pool, strategy: str) -> None:
    pool.run(logits.steps_between, strategy)


@pytest.mark.dist
@pytest.mark.full("8 s each", but=("zero3",))
@each_sharded
def test_one_rank_alone(pool: Pool, strategy: str) -> None:
    pool.run(logits.read_on_one_rank, strategy, leaves_traces=True)


@pytest.mark.dist
@pytest.mark.full("2 s each", but=("zero3",))
@each_sharded
def test_logits_that_are_not_read_cost_no_collective(pool: Pool, strategy: str) -> None:
    pool.run(logits.gathers_of_a_step, strategy)
