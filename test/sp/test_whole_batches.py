"""Whole batches that are cut inside the model: several real processes against one."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import pytest

from distributed.cases import pool_of
from seqtile.sp.images import _LISTED
from sp import images, mixed_precision, prefixes, recurrences, steps, trl_over_ranks, whole
from sp.cases import attention_cases
from sp.test_sequence_parallel import OF_TWO, each_on_ranks, reducers
from support.choice import every_value
from support.pool import Pool

pytestmark = pytest.mark.dist
EVERY_DAY = ("1-gqa*-plain", "2-gqa 4/2-pa*, window", "4-flex*-packed, window")


@pytest.mark.full("below the cut all is as in test_attention", but=EVERY_DAY)
@each_on_ranks(attention_cases())
def test_steps(pool: Pool, i: int, case: tuple) -> None:
    """Loss and gradients for every kind of heads and of sequence; the number of collectives."""
    pool.run(whole.of_kind, i, *case)


@pytest.mark.full("of a product, each value every day", but=every_value)
@OF_TWO
@pytest.mark.parametrize("options", [None, {}, {"layer": True}], ids=["untiled", "tiled", "layers"])
@pytest.mark.parametrize("loss", whole.LOSSES)
def test_losses_of_ones_own(pool: Pool, loss: Callable, options: dict | None) -> None:
    """Unchanged losses that were written for one process."""
    pool.run(whole.loss_of_ones_own, loss, options)


@pytest.mark.full(
    "4 s on four ranks, of which the fourth has no tokens", but=("short-4", "classification-2", "read-2", "sent*-2")
)
@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("case", [whole.classification, whole.short, whole.read, whole.sent_bytes, whole.live_bytes])
def test_batches(pool: Pool, case: Callable[[], None]) -> None:
    pool.run(case)


@pytest.mark.full("each way of tiling with each of checkpointing", but=("4-*",))
@OF_TWO
@pytest.mark.parametrize(("i", "case"), list(enumerate(mixed_precision.CASES)))
def test_mixed_precision(pool: Pool, i: int, case: tuple) -> None:
    """FSDP2 that casts parameters and, by default, the arguments of every layer."""
    pool.run(mixed_precision.mixed_precision, i, *case, "whole")


@pytest.mark.full("of a product, each value every day", but=every_value)
@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("kind", recurrences.SEQUENCES)
@pytest.mark.parametrize("family", recurrences.FAMILIES)
def test_families(pool: Pool, family: str, kind: str) -> None:
    """Recurrences, convolutions, sinks and latent attention."""
    pool.run(recurrences.compared, recurrences.Case(family, kind, None), None, {}, "whole")


@pytest.mark.full("4 s each", but=("llama-zero3",))
@pytest.mark.parametrize(("pool", "case"), list(reducers()), indirect=["pool"])
def test_reducers(pool: Pool, case: tuple) -> None:
    """Two groups of two ranks that accumulate batches with unequal numbers of labels, under every gradient reducer."""
    pool.run(steps.reducers, *case, "whole")


@pytest.fixture(scope="module")
def one_process() -> Callable:
    """The results of TRL's trainers in one process."""
    return cache(trl_over_ranks.trained)


def trainers() -> Iterator:
    """Each TRL trainer: plain, with an adapter whose base is the reference, and with seqtile's head and tiled MLPs."""
    for count, name, how in product((2, 4), trl_over_ranks.CASES, trl_over_ranks.KINDS):
        size = count if name == "kto" else 2  # its loss has a mean over a process's batch of two or more
        every_day = (count, how, name) in trl_over_ranks.EVERY_DAY
        marks = () if every_day else pytest.mark.full("1 to 3 s each")
        yield pytest.param(count, size, name, how, marks=marks, id=f"{name}-{how}-{count}")


@pytest.mark.parametrize(("pool", "size", "name", "how"), list(trainers()), indirect=["pool"])
@pytest.mark.usefixtures("one_thread")
def test_trl(pool: Pool, size: int, name: str, how: str, one_process: Callable) -> None:
    """Three updates of each trainer, with its reference model or teacher; also its logs."""
    pool.run(trl_over_ranks.over_ranks, one_process(name, how, None), size, name, how, leaves_traces=True)


@pytest.mark.full("as test_trl")
@OF_TWO
def test_a_reward_model(pool: Pool) -> None:
    pool.run(trl_over_ranks.rewards_over_ranks, trl_over_ranks.rewards(None), leaves_traces=True)


@pytest.mark.full("of a product, each value every day", but=every_value)
@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("options", [None, {}, {"layer": True}], ids=["untiled", "tiled", "layers"])
@pytest.mark.parametrize("model_type", [*images.MODELS, *images.VIDEOS])
def test_images(pool: Pool, model_type: str, options: dict | None, frozen: bool) -> None:
    """Several images of unequal size, in rows with unequal numbers of images."""
    pool.run(images.compared, model_type, options, frozen)


@pytest.mark.full("of a product, each value every day", but=every_value)
@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("model_type", images.MODELS)
def test_images_are_dealt(pool: Pool, model_type: str) -> None:
    """Each rank encodes some of a batch's images."""
    pool.run(images.dealt, model_type)


def test_types_whose_images_are_dealt() -> None:
    """No type is listed whose images these tests do not deal."""
    assert set(_LISTED) == images.DEALT <= images.MODELS.keys()


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_balance_with_images(pool: Pool) -> None:
    """The router logits of a mixture of experts with images and text."""
    pool.run(images.balanced)


@OF_TWO
def test_steps_with_images_of_a_tiled_model(pool: Pool) -> None:
    """transformers hooks the vision tower in the first step; the second step is not compared again."""
    pool.run(images.compared, "internvl", {}, False)


IMAGE_REDUCERS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


@pytest.mark.full("4 s each")
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("pool", "strategy"),
    [pytest.param(pool_of(strategy, 4), strategy, id=strategy) for strategy in IMAGE_REDUCERS],
    indirect=["pool"],
)
def test_images_under_reducers(pool: Pool, strategy: str, frozen: bool) -> None:
    """Weights inside the text model, and the vision tower, projector and embeddings outside it."""
    pool.run(images.reduced, "qwen2_5_vl", strategy, frozen)


SINGLE = (images.seldom_read, images.not_dealt, whole.refused)
SINGLE += (whole.head_of_its_own, prefixes.other_batches, prefixes.shown_unequally)
SINGLE += (trl_over_ranks.unseen,)


@OF_TWO
@pytest.mark.parametrize("case", SINGLE)
def test_single_cases(pool: Pool, case: Callable[[], None]) -> None:
    pool.run(case)


@pytest.mark.full("of a product, each value every day", but=every_value)
@pytest.mark.parametrize("pool", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("sp_first", [False, True], ids=["shared first", "cut first"])
@pytest.mark.parametrize("implementation", [None, "eager", "flash_attention_3", "flex_attention"])
@pytest.mark.parametrize("options", [None, {}, {"layer": True}], ids=["untiled", "tiled", "layers"])
def test_shared_prefixes(pool: Pool, options: dict | None, implementation: str | None, sp_first: bool) -> None:
    """Rows that share prefixes: the one merged row is cut."""
    pool.run(prefixes.over_ranks, "llama", options, implementation, sp_first)


@pytest.mark.full("the mechanism is one", but=("4-qwen3_next", "2-mamba2"))
@pytest.mark.parametrize("family", recurrences.FAMILIES)
@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_shared_prefixes_of_families(pool: Pool, family: str) -> None:
    pool.run(prefixes.over_ranks, family, None, None, True)


@pytest.mark.full("4 s each", but=("llama-fsdp2-whole",))
@pytest.mark.parametrize("batches", ["alone", "whole"])
@pytest.mark.parametrize(("pool", "case"), list(reducers()), indirect=["pool"])
def test_shared_prefixes_under_reducers(pool: Pool, case: tuple, batches: str) -> None:
    """Under every gradient reducer, with and without ranks that share sequences."""
    pool.run(steps.reducers, *case, batches, 3)
