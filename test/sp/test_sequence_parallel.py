"""One sequence over several real processes, against one process that has it whole."""

import re
from pathlib import Path

import pytest

from launch import ended, ranks
from sp.cases import REDUCERS, attention_cases, layer_cases, on_ranks, reducer_cases
from sp.misuse import MIXED_UP
from sp.mixed_precision import CASES as MIXED
from sp.recurrences import BALANCED, FAMILIES, SEQUENCES, cases, measured
from sp.steps import NOT_SPREAD
from sp.trainer import MODELS

WORKER = "sp.worker:main"


@pytest.mark.dist
@pytest.mark.parametrize("count", [1, 2, 4])
def test_attention(count: int, full: bool) -> None:
    """Loss and gradients, of every kind of heads and of sequence; how many all-to-alls there are."""
    output = ranks(count, WORKER, "attention", "full" if full else "")
    products = (attention_cases(), layer_cases())
    expected = [case for product in products for case in (product if full else on_ranks(count, product))]
    cases = [f"rank {rank}: {case} {kind} equal" for rank in range(count) for case, kind, *_ in expected]
    assert [case for case in cases if case not in output] == []


@pytest.mark.dist
@pytest.mark.parametrize("family", REDUCERS)
def test_reducers(family: str, full: bool) -> None:
    """Two groups of two ranks, accumulating over batches of unequal labels, under every reducer of gradients."""
    output = ranks(4, WORKER, "reducers", family, "full" if full else "")
    expected = reducer_cases(family, full)
    cases = [f"rank {rank}: {model} {how} {options} equal" for rank in range(4) for model, how, options in expected]
    assert [case for case in cases if case not in output] == []


@pytest.mark.dist
def test_mixed_precision() -> None:
    """FSDP2 that casts parameters, and by its default the arguments of every layer."""
    output = ranks(2, WORKER, "mixed_precision")
    expected = [f"rank {rank}: {' '.join(map(str, case))} in bfloat16" for rank in range(2) for case in MIXED]
    assert [line for line in expected if line not in output] == []


@pytest.mark.dist
def test_post_training() -> None:
    """Losses of policy gradients, of preferences and of distillation over documents packed in one row."""
    output = ranks(2, WORKER, "post_training")
    expected = [f"rank {rank}: {loss} equal" for rank in range(2) for loss in ("grpo", "dpo", "distillation")]
    assert [line for line in expected if line not in output] == []


@pytest.mark.dist
@pytest.mark.parametrize("count", [1, 2, 4])
def test_families(count: int, full: bool) -> None:
    """Recurrences, convolutions, sinks and latent attention: loss, gradients, all-to-alls and what the first sends; in
    bfloat16, by kernels, the memory of a rank; the loss that balances experts."""
    output = ranks(count, WORKER, "families", "full" if full else "")
    expected = [f"{family} {kind} {reentrant} {{}}  equal" for family, kind, reentrant in cases(count, full)]
    if count == 2:
        expected += ["halves equal", "kernels called", *(f"{family} 0." for family in measured(full))]
    if count > 1:
        expected += [f"{arch} {tiled} {kind} balanced" for arch, _, tiled in BALANCED for kind in SEQUENCES]
    assert [case for case in expected for rank in range(count) if f"rank {rank}: {case}" not in output] == []


def test_the_pages_table() -> None:
    """docs/sequence-parallelism.md lists the families that are tested, and those that are refused."""
    page = (Path(__file__).parents[2] / "docs" / "sequence-parallelism.md").read_text()
    section = page.partition("## Recurrences")[2].partition("\n## ")[0]
    listed = [
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(listed) == sorted({model_type for model_type, _ in FAMILIES.values()})
    refused = re.findall(r"`(\w+)`", section.partition("Refused, by the class's name:")[2])
    assert refused and set(refused) <= {config.model_type for _, config, _ in NOT_SPREAD}


@pytest.mark.dist
def test_refusals() -> None:
    output = ranks(2, WORKER, "refusals")
    assert all(f"rank {rank}: refused what it must" in output for rank in range(2))


@pytest.mark.dist
def test_batches_that_are_not_the_shards_of_one() -> None:
    """Whole sequences, other samples, entries that were dropped: refused by every rank, and none waits."""
    output = ranks(2, WORKER, "batches")
    cases = [f"rank {rank}: {case} refused" for rank in range(2) for case in MIXED_UP]
    assert [case for case in cases if case not in output] == []


@pytest.mark.dist
def test_losses_that_are_not_reduced() -> None:
    output = ranks(2, WORKER, "losses")
    assert all(f"rank {rank}: losses noticed" in output for rank in range(2))


@pytest.mark.dist
def test_loader() -> None:
    """Ranks that draw different samples, two groups of two."""
    output = ranks(4, WORKER, "loader")
    assert all(f"rank {rank}: loaded" in output for rank in range(4))


@pytest.mark.dist
def test_a_rank_that_dies() -> None:
    """The others end with an error within the process group's time limit, and none waits for ever."""
    first, dead, last = ended(3, WORKER, "death", together=False)
    assert dead.code == 7, dead.err
    for rank in (first, last):
        assert rank.code != 0 and "RuntimeError" in rank.err, rank.err


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What Trainer does in one process."""
    file = str(tmp_path_factory.mktemp("trainer") / "one_process.pt")
    ranks(1, "sp.trainer:one_process", file)
    return file


@pytest.mark.dist
@pytest.mark.parametrize(("count", "size"), [(2, 2), (4, 2)])
def test_trainer(count: int, size: int, one_process: str) -> None:
    """Three epochs, accumulating over batches of uneven labels, with PEFT too; resumed in the middle of an epoch."""
    output = ranks(count, WORKER, "train", one_process, str(size))
    assert all(f"rank {rank}: trained {name}\n" in output for rank in range(count) for name in MODELS)


@pytest.mark.dist
def test_trainer_with_deepspeed(one_process: str) -> None:
    output = ranks(4, WORKER, "train_zero3", one_process, "2")
    assert all(f"rank {rank}: trained under ZeRO-3" in output for rank in range(4))
