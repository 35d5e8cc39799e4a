"""What a fine-tuning job is asked to do, checked before anything is loaded."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

SHARDS = ("fsdp2", "zero3")
DTYPES = ("float32", "bfloat16")  # of the computation; weights, gradients and optimizer state are float32


@dataclass(frozen=True)
class Job:
    """One job of `seqtile finetune`; see its --help for the fields."""

    model: str
    data: tuple[Path, ...]
    seq_len: int
    steps: int
    compare: bool
    device: str
    dtype: str
    learning_rate: float
    seed: int
    output: Path
    sequence_parallel: int = 1
    shard: str = "fsdp2"
    offload: bool = False
    layer: bool = False
    head_groups: int | str | None = None

    def check(self) -> None:
        """Raises ValueError for what cannot work."""
        if self.seq_len < 2:
            raise ValueError(f"--seq-len is {self.seq_len}, expected at least 2: a token and the one that follows it")
        if self.steps < 1:
            raise ValueError(f"--steps is {self.steps}, expected at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if not self.learning_rate > 0:
            raise ValueError(f"--learning-rate is {self.learning_rate}, expected a positive number")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"--device is {self.device!r}, expected cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device is cuda, but torch sees no GPU; use --device cpu")
        if self.offload and self.device == "cpu":
            raise ValueError("--offload moves what checkpointing keeps off a GPU, but --device is cpu; leave it out")
        if isinstance(self.head_groups, str) and self.head_groups != "auto":
            raise ValueError(f"--head-groups is {self.head_groups!r}, expected a number or auto")
        if self.head_groups is not None and not self.layer:
            raise ValueError("--head-groups is for layers tiled as a whole; pass --layer too")
        if self.shard not in SHARDS:
            raise ValueError(f"--shard is {self.shard!r}, expected one of {', '.join(SHARDS)}")
        if self.sequence_parallel != 1 and not dist.is_torchelastic_launched():
            raise ValueError(
                f"--sequence-parallel is {self.sequence_parallel}, but this is one process; start one on each GPU: "
                f"torchrun --nproc-per-node {max(2, self.sequence_parallel)} -m seqtile.cli finetune ..."
            )
        if self.compare and dist.is_torchelastic_launched():
            raise ValueError("--compare is for one process: leave it out, or torchrun")
        for path in self.data:
            if not path.exists():
                raise ValueError(f"--data: {path} does not exist; pass text files or directories of them")


def check_writable(directory: Path) -> None:
    """Raises ValueError unless files can be written to `directory`, which is made if it is not there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"--output: {directory} cannot be written to ({os.strerror(error.errno or 0)}); choose another directory"
        ) from error
