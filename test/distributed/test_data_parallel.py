"""The same training under every data parallelism, on two real processes with sequences of unequal lengths."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.cases import ADAPTERS, CHECKPOINTING, TREES, Case, cases

ALL = [case for tree in TREES for case in cases(tree)]


@pytest.mark.dist
@pytest.mark.parametrize("tree", TREES)
def test_same_training_as_untiled(tree: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("worker.py")), tree]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    missing = [case for case in cases(tree) for rank in (0, 1) if f"rank {rank}: {case} equal" not in result.stdout]
    assert not missing


def test_every_two_meet() -> None:
    """An architecture with a parallelism, a parallelism with an adapter, an adapter with a kind of checkpointing ..."""
    for a, b in itertools.combinations(range(4), 2):
        met = {(case[a], case[b]) for case in ALL if case.strategy in itertools.chain(*TREES.values())}
        values = [{case[i] for case in ALL if case.strategy in itertools.chain(*TREES.values())} for i in (a, b)]
        apart = set(itertools.product(*values)) - met - {("zero3", "generic")}
        assert not apart, f"{Case._fields[a]} and {Case._fields[b]}: {apart}"
    assert {case.adapter for case in ALL} == set(ADAPTERS) and {case.checkpointing for case in ALL} == set(
        CHECKPOINTING
    )
