"""The same training under every data parallelism, on two real processes with sequences of unequal lengths, some shorter
than a chunk; the table of what is trained in docs/compatibility.md."""

from pathlib import Path

import pytest

from distributed.cases import TREES, cases, table
from launch import ranks
from seqtile.arch import ARCHS
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


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    assert table() in page, f"docs/compatibility.md is out of date; its table should be\n{table()}"
    routed = " and ".join(name for name, arch in ARCHS.items() if arch.routed)
    assert f"in {routed}, the experts" in " ".join(page.split())
