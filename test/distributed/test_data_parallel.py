"""The same training under every data parallelism, on two real processes with sequences of unequal lengths."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("checkpointing", ["plain", "ckpt"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2_group", "fsdp2_head", "zero2", "zero3"])
def test_same_training_as_untiled(strategy: str, checkpointing: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("worker.py")), strategy, checkpointing]
    result = subprocess.run(command, capture_output=True, text=True, timeout=420)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert all(f"rank {rank}: 4 steps equal" in result.stdout for rank in (0, 1))
