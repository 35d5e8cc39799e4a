"""Parts that are called chunk by chunk, under every gradient reducer, on two processes with sequences of unequal
lengths; their table in docs/compatibility.md."""

from itertools import product
from pathlib import Path

import pytest

from distributed import chunked
from support.choice import every_value
from support.pool import Pool

CELLS = [
    pytest.param((2, chunked.family(reducer)), part, reducer, checkpoints, id=f"{part}-{reducer}-{checkpoints}")
    for reducer, part, checkpoints in product(chunked.REDUCERS, chunked.PARTS, chunked.CHECKPOINTS)
]


@pytest.mark.dist
@pytest.mark.full("of a matrix of 189, 3 s each", but=every_value)
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


@pytest.mark.dist
@pytest.mark.full("3 s each", but=every_value)
@pytest.mark.parametrize("pool", [(2, "torch")], indirect=True)
@pytest.mark.parametrize("checkpoints", chunked.CHECKPOINTS)
@pytest.mark.parametrize(("part", "way"), OF_FSDP2)
def test_what_fsdp2_shards_inside_of_a_part(pool: Pool, part: str, way: str, checkpoints: str) -> None:
    pool.run(chunked.compare, part, way, checkpoints)


STEPS = [
    ("zero3", "zero3"),
    ("zero3", "zero3, none ahead"),
    ("torch", "fsdp2"),
    ("torch", "parts"),
    ("torch", "parts, kept"),
]
STEPS = [((2, kind), strategy) for kind, strategy in STEPS]


@pytest.mark.dist
@pytest.mark.full("4 s each", but=("*-fsdp2-True-False", "*-parts-False-None"))
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(("pool", "strategy"), STEPS, indirect=["pool"])
def test_ten_steps_of_3_and_7_chunks(pool: Pool, strategy: str, layer: bool, reentrant: bool | None) -> None:
    pool.run(chunked.ten_steps, strategy, layer, reentrant)


@pytest.mark.dist
@pytest.mark.parametrize("pool", [(2, "torch")], indirect=True)
def test_experts_without_tokens_under_ddp(pool: Pool) -> None:
    pool.run(chunked.without_tokens)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    assert chunked.table() in page, f"docs/compatibility.md is out of date; its table should be\n{chunked.table()}"
