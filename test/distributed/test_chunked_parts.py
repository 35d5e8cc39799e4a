"""Parts that are called chunk by chunk, under every gradient reducer, on two processes with sequences of unequal
lengths; their table in docs/compatibility.md."""

from itertools import product
from pathlib import Path

import pytest

from distributed import chunked
from distributed.cases import pool_of
from support.pool import Pool

CELLS = [
    pytest.param(pool_of(strategy), part, reducer, checkpoints, id=f"{part}-{reducer}-{checkpoints}")
    for (reducer, strategy), part, checkpoints in product(chunked.REDUCERS.items(), chunked.PARTS, chunked.CHECKPOINTS)
]
EVERY_DAY = (
    "mixture-DDP-none",
    "mixture, whole layers-ZeRO-2-non-reentrant",
    "LoRA with dropout, of the head too-ZeRO-3-reentrant",
    "LoRA with dropout, whole layers-FSDP2-none",
    "LoRA of experts-FSDP2, bfloat16-none",
    "4-bit LoRA with dropout-FSDP2, sp-none",
)


@pytest.mark.dist
@pytest.mark.full("of a matrix of 189, 3 s each", but=EVERY_DAY)
@pytest.mark.parametrize(("pool", "part", "reducer", "checkpoints"), CELLS, indirect=["pool"])
def test_trained_as_untiled(pool: Pool, part: str, reducer: str, checkpoints: str) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    pool.run(chunked.compare, part, reducer, checkpoints)


OF_FSDP2 = [
    (part, way)
    for part in ("mixture, whole layers", "LoRA with dropout, whole layers")
    for way in ("parts", "parts, kept", "parts, offloaded")
]


OF_FSDP2 += [("mixture", "experts in bfloat16"), ("mixture, whole layers", "experts in bfloat16")]
DAILY_OF_FSDP2 = (
    "mixture, whole layers-parts-none-*",
    "LoRA with dropout, whole layers-parts, kept-non-reentrant-*",
    "mixture, whole layers-experts in bfloat16-reentrant-*",
)


@pytest.mark.dist
@pytest.mark.full("3 s each", but=DAILY_OF_FSDP2)
@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize("checkpoints", chunked.CHECKPOINTS)
@pytest.mark.parametrize(("part", "way"), OF_FSDP2)
def test_what_fsdp2_shards_inside_of_a_part(pool: Pool, part: str, way: str, checkpoints: str) -> None:
    pool.run(chunked.compare, part, way, checkpoints)


STEPS = [(pool_of(name), name) for name in ("zero3", "zero3, none ahead", "fsdp2", "parts", "parts, kept")]


@pytest.mark.dist
@pytest.mark.full("4 s each", but=("*-zero3-True-False", "*ahead-False-None", "*-parts-True-None"))
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(("pool", "strategy"), STEPS, indirect=["pool"])
def test_steps_of_3_and_7_chunks(pool: Pool, strategy: str, layer: bool, reentrant: bool | None) -> None:
    pool.run(chunked.few_steps, strategy, layer, reentrant)


@pytest.mark.dist
@pytest.mark.parametrize("pool", [2], indirect=True)
def test_experts_without_tokens_under_ddp(pool: Pool) -> None:
    pool.run(chunked.without_tokens)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    assert chunked.table() in page, f"docs/compatibility.md is out of date; its table should be\n{chunked.table()}"
