"""The memory of a run: as planned, the peak of the process, and errors where there was too little."""

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from seqtile.fitting import planned_attention
from seqtile.memory import TILES, Setup

if TYPE_CHECKING:
    from trl import SFTTrainer

    from seqtile.recipes.options import FinetuneOptions, TrainingOptions

MIB = 2**20


def planned_setup(asked: "FinetuneOptions", trainer: "SFTTrainer", memory: dict[str, float]) -> Setup:
    """Returns the run as `memory.plan` takes it, tiled as asked. `memory` are sizes of the GPU and the host."""
    own, training, lora = asked.own, asked.training, {}
    if asked.model.use_peft:
        lora = {"lora_rank": asked.model.lora_r, "load_in_4bit": asked.model.load_in_4bit}
    weights = str(trainer.model.dtype).removeprefix("torch.")
    plugin = trainer.accelerator.state.deepspeed_plugin
    sp_group = getattr(trainer, "sequence_parallel", None)
    if sp_group is not None and sp_group.nodes.number > 1:
        memory = memory | {"gpus_per_node": sp_group.nodes.per_node}
    return Setup(
        rows=rows_of(training, trainer),
        attention=planned_attention(trainer.model),
        dtype="bfloat16" if training.bf16 else "float16" if training.fp16 else weights,
        autocast=(training.bf16 or training.fp16) and weights == "float32",
        gpus=training.world_size,
        sequence_parallel=own.sequence_parallel,
        batches="whole",
        zero_stage=plugin.zero_stage if plugin else 3 if trainer.is_fsdp_enabled else 0,
        optimizer="adamw_8bit" if "8bit" in training.optim else "sgd" if training.optim == "sgd" else "adamw",
        accumulate=training.gradient_accumulation_steps > 1,
        liger=bool(training.use_liger_kernel),
        tiles=() if own.untiled else TILES if own.layer else ("loss", "mlp"),
        head_groups=own.groups,
        offload=("activations",) if own.offload else (),
        **memory,
        **lora,
    )


def rows_of(training: "TrainingOptions", trainer: "SFTTrainer") -> str:
    """Returns what the rows of a batch are: packed, padded or plain."""
    return "packed" if trainer.padding_free else "padded" if _has_padding(training, trainer) else "plain"


def _has_padding(training: "TrainingOptions", trainer: "SFTTrainer") -> bool:
    """Returns whether batches are padded, as far as is known: several rows at a time, and one is short."""
    rows = trainer.train_dataset
    if training.per_device_train_batch_size == 1:
        return False
    is_known = hasattr(rows, "__len__") and "input_ids" in rows.column_names
    return not is_known or any(len(ids) < training.max_length for ids in rows.with_format("numpy")["input_ids"])


def return_freed_memory() -> None:
    """Makes glibc give every freed tensor back to the system at once, so that the resident set is what is in use.

    By default it keeps blocks of up to 32 MiB, a tensor of 8,192 tokens here, and fragments: twice the memory in use.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        m_mmap_threshold = -3  # malloc.h
        mallopt(m_mmap_threshold, MIB)


def peak_mib(device: str) -> float:
    """Returns the peak memory of this process: allocated on the GPU, or the resident set on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    if sys.platform == "linux":  # not ru_maxrss: a new process begins with its parent's
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory was short: of a GPU, or of the host, which torch tells by a message."""
    on_host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return on_host or isinstance(error, torch.OutOfMemoryError | MemoryError)


@contextmanager
def memory_errors(who: str, remedy: str) -> Iterator[None]:
    """Raises MemoryError, which says `who` needs it and a remedy, where memory was short inside."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"{who} more memory than there is; {remedy}") from error
