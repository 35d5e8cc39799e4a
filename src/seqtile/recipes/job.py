"""What a fine-tuning job is asked to do, checked before anything is loaded or slow to import."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from seqtile.recipes.source import source

SHARDS = ("fsdp2", "zero3")
DTYPES = ("float32", "bfloat16")  # of the computation; weights, gradients and optimizer state are float32


@dataclass(frozen=True)
class Job:
    """One job of `seqtile finetune`; see its --help for the fields."""

    model: str
    data: tuple[Path, ...]
    """Empty: Python's standard library."""
    seq_len: int
    steps: int
    compare: bool
    device: str | None
    """None until `ranks.on_this_machine` has chosen one."""
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
        """Raises ValueError for what cannot work anywhere, or not with the files that are here."""
        if self.seq_len < 2:
            raise ValueError(f"--seq-len is {self.seq_len}, expected at least 2: a token and the one that follows it")
        if self.steps < 1:
            raise ValueError(f"--steps is {self.steps}, expected at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if not 0 < self.learning_rate <= 1:
            raise ValueError(
                f"--learning-rate is {self.learning_rate}, expected more than 0 and at most 1: AdamW moves a weight by "
                "about that much at a step"
            )
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"--device is {self.device!r}, expected cpu or cuda")
        if self.offload and self.device == "cpu":
            raise ValueError("--offload moves what checkpointing keeps off a GPU, but --device is cpu; leave it out")
        if isinstance(self.head_groups, str) and self.head_groups != "auto":
            raise ValueError(f"--head-groups is {self.head_groups!r}, expected a number or auto")
        if self.head_groups is not None and not self.layer:
            raise ValueError("--head-groups is for layers tiled as a whole; pass --layer too")
        if self.shard not in SHARDS:
            raise ValueError(f"--shard is {self.shard!r}, expected one of {', '.join(SHARDS)}")
        for path in self.data:
            if not path.exists():
                raise ValueError(f"--data: {path} does not exist; pass text files or directories of them")
        source(self.model)


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


def check_space(model: Path, size: int) -> None:
    """Raises ValueError unless a model of `size` bytes has room beside `model`, which it will take the place of."""
    if model.is_file():
        raise ValueError(f"--output: {model} is a file, but the model's directory goes there; choose another directory")
    directory = model.resolve().parent
    free = shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free
    if free < size:
        raise ValueError(
            f"--output: saving the model needs {gigabytes(size)} in {directory}, but {gigabytes(free)} are free there; "
            "make room, or choose another directory"
        )


def gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"
