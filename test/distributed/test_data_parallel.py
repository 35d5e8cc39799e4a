"""The same training under every data parallelism, on two real processes with sequences of unequal lengths, some shorter
than a chunk; its table in docs/compatibility.md."""

from pathlib import Path

import pytest

from distributed.cases import Case, cases, pool_of, table
from distributed.worker import run
from seqtile.arch import ARCHS
from support.pool import Pool
from support.tiny import interpreted

FULL = pytest.mark.full("of a matrix, of which every day has each parallelism, with few of the rest")
CASES = [
    pytest.param(pool_of(case.strategy), case, marks=() if every_day else FULL, id=str(case))
    for case, every_day in cases()
]


@pytest.mark.dist
@pytest.mark.in_interpreter(
    "two of the matrix, with Liger", only=[str(c) for c, daily in cases() if daily and c.liger != "none"]
)
@pytest.mark.parametrize(("pool", "case"), CASES, indirect=["pool"])
def test_same_training_as_untiled(pool: Pool, case: Case) -> None:
    if interpreted() != (case.liger != "none"):
        pytest.skip("Liger's kernels run on a CPU in Triton's interpreter, and there nothing else is to be tested")
    if interpreted():
        pytest.importorskip("liger_kernel")
    pool.run(run, case)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    assert table() in page, f"docs/compatibility.md is out of date; its table should be\n{table()}"
    routed = " and ".join(name for name, arch in ARCHS.items() if arch.routed)
    assert f"in {routed}, the experts" in " ".join(page.split())
