"""The same training under every data parallelism, on two real processes with sequences of unequal lengths, some shorter
than a tile; README's table of what is trained."""

import itertools
from pathlib import Path

import pytest

from distributed.cases import (
    ADAPTERS,
    CHECKPOINTING,
    LAYER,
    LIGER,
    STRATEGIES,
    TREES,
    cases,
    excluded,
    layers,
    matrix,
    table,
)
from launch import ranks
from seqtile.models.arch import ARCHS
from tiny import interpreted


@pytest.mark.dist
@pytest.mark.parametrize("tree", TREES)
def test_same_training_as_untiled(tree: str, full: bool) -> None:
    if interpreted() != tree.endswith("liger"):
        pytest.skip("Liger's kernels run on a CPU in Triton's interpreter, and there nothing else is to be tested")
    if interpreted():
        pytest.importorskip("liger_kernel")
    printed = ranks(2, "distributed.worker:main", tree, "full" if full else "")
    run = [case for case in cases(full) if case.tree == tree]
    missing = [case for case in run for rank in (0, 1) if f"rank {rank}: {case} equal" not in printed]
    assert run and not missing


@pytest.mark.parametrize(
    ("a", "b"),
    list(itertools.combinations([tuple(ARCHS), STRATEGIES, ADAPTERS, CHECKPOINTING, LIGER], 2)),
)
def test_every_two_meet(a: tuple[str, ...], b: tuple[str, ...]) -> None:
    """An architecture with a parallelism, a parallelism with an adapter, an adapter with an order of Liger ..."""
    apart = [(x, y) for x in a for y in b if not any(x in case and y in case for case in matrix())]
    assert [pair for pair in apart if not excluded(*pair)] == []


def test_layers_meet_every_parallelism() -> None:
    assert {(case.strategy, case.layer) for case in layers()} == set(itertools.product(STRATEGIES, LAYER))
    assert {case.arch for case in layers()} == {name for name, arch in ARCHS.items() if arch.layer}


def test_readme_has_the_table() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert table() in readme, f"README's table is out of date; it should be\n{table()}"
