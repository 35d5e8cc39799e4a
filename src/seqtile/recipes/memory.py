"""The memory of a process that trains: its peak, and freed tensors given back."""

import ctypes
import re
import sys
from pathlib import Path

import torch

MIB = 2**20


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
