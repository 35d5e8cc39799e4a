"""Too little memory, told from other errors."""

from concurrent.futures.process import BrokenProcessPool

import torch


class RunOutOfMemory(MemoryError):
    """A run had too little memory, or its process was killed, which is what too little host memory looks like."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short: a killed process, torch's exception for a GPU, its message for the host."""
    if isinstance(error, BrokenProcessPool | torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
