"""One sequence over several real processes, against one process that has it whole."""

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

import pytest

from distributed.cases import pool_of
from sp import loading, misuse, mixed_precision, post_training, recurrences, steps, trainer, worker
from sp.cases import REDUCERS, attention_cases, layer_cases, on_ranks, reducer_cases
from support.choice import every_value
from support.pool import Pool, RankError

pytestmark = pytest.mark.dist
OF_TWO, OF_FOUR = (pytest.mark.parametrize("pool", [count], indirect=True) for count in (2, 4))
FULL = pytest.mark.full("of a product, of which every day has each value with each number of ranks")


def each_on_ranks(cases: list[tuple], counts: tuple[int, ...] = (1, 2, 4)) -> Callable:
    """Cases that start with their name and kind of sequence, each on each number of ranks."""
    found = []
    for count in counts:
        every_day = on_ranks(count, cases)
        for i, case in enumerate(cases):
            marks = () if case in every_day else FULL
            found.append(pytest.param(count, i, case, marks=marks, id=f"{count}-{case[0]}-{case[1]}"))
    return pytest.mark.parametrize(("pool", "i", "case"), found, indirect=["pool"])


@each_on_ranks(attention_cases())
def test_attention(pool: Pool, i: int, case: tuple) -> None:
    """Loss and gradients for every kind of heads and of sequence; the number of all-to-alls."""
    pool.run(worker.attention, i, *case)


DAILY_CHUNKS = ("2-three 3/3-packed, window", "2-phi3-packed")


@pytest.mark.full("attention is as in the cases above", but=DAILY_CHUNKS)
@each_on_ranks([case for case in attention_cases() if case[2] in ("gemma2", "gemma3_text", "phi3")])
def test_layers_in_chunks(pool: Pool, i: int, case: tuple) -> None:
    """Layers that run in chunks around their attention."""
    pool.run(partial(worker.attention, layer=True), i, *case)


@each_on_ranks(layer_cases())
def test_whole_layers(pool: Pool, i: int, case: tuple) -> None:
    pool.run(worker.whole_layer, i, *case)


def reducers() -> Iterator:
    for family in REDUCERS:
        for name, strategy, options, every_day in reducer_cases(family):
            marks = () if every_day else pytest.mark.full("4 s each; every day one reducer of each model")
            identity = "-".join([name, strategy, *(f"{key} {value}" for key, value in options.items())])
            yield pytest.param(pool_of(strategy, 4), (name, strategy, options), marks=marks, id=identity)


@pytest.mark.parametrize(("pool", "case"), list(reducers()), indirect=["pool"])
def test_reducers(pool: Pool, case: tuple) -> None:
    """Two groups of two ranks that accumulate batches with unequal numbers of labels, under every gradient reducer."""
    pool.run(steps.reducers, *case)


@pytest.mark.full("each way of tiling with each of checkpointing", but=("4-*", "10-*", "12-*"))
@OF_TWO
@pytest.mark.parametrize(("i", "case"), list(enumerate(mixed_precision.CASES)))
def test_mixed_precision(pool: Pool, i: int, case: tuple) -> None:
    """FSDP2 that casts parameters and, by default, the arguments of every layer."""
    pool.run(mixed_precision.mixed_precision, i, *case)


def families() -> Iterator:
    """Each family in turn with all kinds of sequences, each way of checkpointing, and each number of ranks."""
    for count, *values in product((1, 2, 4), recurrences.FAMILIES, recurrences.SEQUENCES, recurrences.CHECKPOINTING):
        case = recurrences.Case(*values)
        marks = () if recurrences.every_day(count, case) else FULL
        yield pytest.param(count, case, marks=marks, id=f"{count}-{case.family}-{case.kind}-{case.reentrant}")


@pytest.mark.parametrize(("pool", "case"), list(families()), indirect=["pool"])
def test_families(pool: Pool, case: recurrences.Case) -> None:
    """Recurrences, convolutions, sinks and latent attention: loss, gradients, all-to-alls, and bytes sent by the first
    layer."""
    pool.run(recurrences.compared, case)


@pytest.mark.full("1 s each", but=("qwen3_5-*", "deepseek_v3-*"))
@OF_TWO
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "gpt_oss", "deepseek_v3"])
def test_families_with_whole_layers(pool: Pool, family: str) -> None:
    pool.run(recurrences.compared, recurrences.Case(family, "packed", False), None, {"layer": True})


@pytest.mark.full("of 4 cases", but=every_value)
@OF_TWO
@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("attention", ["flash_attention_3", "flex_attention"])
def test_sinks(pool: Pool, attention: str, kind: str) -> None:
    pool.run(recurrences.with_sinks, attention, kind)


@pytest.mark.full("10 to 30 s each", but=("qwen3_5-*", "lfm2-*"))
@OF_TWO
@pytest.mark.parametrize("family", recurrences.MIXERS)
def test_memory_of_a_rank(pool: Pool, family: str) -> None:
    pool.run(recurrences.memory, family)


@pytest.mark.full("of 48 cases", but=every_value)
@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("batches", ["cut", "whole"])
@pytest.mark.parametrize("kind", recurrences.SEQUENCES)
@pytest.mark.parametrize(("arch", "shape", "tiled"), recurrences.BALANCED)
def test_balance(pool: Pool, arch: str, shape: dict, tiled: bool, kind: str, batches: str) -> None:
    """The loss that balances experts."""
    pool.run(recurrences.balance, arch, shape, tiled, kind, batches)


@OF_TWO
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_kernels(pool: Pool, family: str) -> None:
    pool.run(recurrences.kernels, family)


@OF_TWO
@pytest.mark.parametrize("name", misuse.MIXED_UP)
def test_batches_that_are_not_the_shards_of_one(pool: Pool, name: str) -> None:
    """Whole sequences, other samples, missing entries: refused by every rank, and none waits."""
    pool.run(misuse.mixed_up, name)


SINGLE = (worker.axes, post_training.preferences, recurrences.halves, steps.refusals, steps.another_attention)
SINGLE += (misuse.by_hand, misuse.hooked_on_one_rank, misuse.after_a_failure, misuse.reduced_twice)


@OF_TWO
@pytest.mark.parametrize("case", SINGLE)
def test_single_cases(pool: Pool, case: Callable[[], None]) -> None:
    pool.run(case)


@OF_TWO
def test_batches_that_are_cut_twice(pool: Pool) -> None:
    pool.run(misuse.cut_twice, leaves_traces=True)  # it leaves Accelerate's state


@OF_TWO
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_losses_that_are_not_reduced(pool: Pool, reentrant: bool | None) -> None:
    pool.run(misuse.losses, reentrant)


@OF_FOUR
@pytest.mark.parametrize("kind", ["sampler", "generator", "random state"])
def test_loader(pool: Pool, kind: str) -> None:
    """Ranks that draw different samples, in two groups of two."""
    pool.run(loading.epochs_of, kind)


@OF_FOUR
@pytest.mark.parametrize("case", [loading.lengths, loading.failing, loading.parcels])
def test_what_a_loader_says(pool: Pool, case: Callable[[], None]) -> None:
    pool.run(case)


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_a_rank_that_dies(pool: Pool) -> None:
    """The others end with an error within the process group's time limit; none waits forever."""
    with pytest.raises(RankError) as raised:
        pool.run(steps.death)
    first, dead, last = re.split(r"^rank [12]: ", str(raised.value), flags=re.MULTILINE)
    assert dead.startswith("it ended with exit code 7") and all("RuntimeError" in said for said in (first, last))


WITH_ADAPTER = pytest.mark.full("20 s; with an adapter all is done that is done without one")


@pytest.fixture(scope="module")
def one_process() -> Callable[[str], trainer.Run]:
    """Trainer's results in one process."""
    return cache(trainer.one_process)


@pytest.mark.parametrize(
    ("pool", "size"),
    [pytest.param(2, 2, marks=pytest.mark.full("two groups of two ranks do all that one does")), (4, 2)],
    indirect=["pool"],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=WITH_ADAPTER if name != "llama, adapter" else ()) for name in trainer.MODELS]
)
@pytest.mark.usefixtures("one_thread")
def test_trainer(pool: Pool, size: int, name: str, one_process: Callable) -> None:
    """Three epochs that accumulate batches with uneven labels, also with PEFT; resumed in the middle of an epoch."""
    pool.run(trainer.train, one_process(name), size, name, leaves_traces=True)


@pytest.mark.full("11 s; Trainer, and ZeRO-3, are among the other cases")
@pytest.mark.parametrize("pool", [(4, "zero3")], indirect=True)
def test_trainer_with_deepspeed(pool: Pool, one_process: Callable) -> None:
    pool.run(trainer.train_zero3, one_process("llama"), 2, leaves_traces=True)
