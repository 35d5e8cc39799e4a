"""The machine's memory: how much of it is available, and new blocks of it."""

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import accumulate
from pathlib import Path

import torch
from filelock import FileLock

KEPT_FREE = 2**30  # bytes of the machine's memory to leave free
_STEP = 2**26  # bytes to take between two looks at what is available; 16 processes at once stay within KEPT_FREE
_CONTROL_GROUPS = {  # by controller (version 2 has no name): folder, limit, usage, reclaimable part of the usage
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class UnforkedMemory(mmap.mmap):
    """Memory that forked processes do not inherit. A forked process keeps its copy of this object forever: to free the
    object would unmap what the process has since put at that address."""

    process: int

    def __del__(  # its globals may be gone when a process ends
        self,
        getpid: Callable[[], int] = os.getpid,
        keep: Callable[[object], None] = ctypes.pythonapi.Py_IncRef,
        me: Callable[[object], object] = ctypes.py_object,
    ) -> None:
        if getpid() != self.process:
            keep(me(self))


def mapped(size: int) -> UnforkedMemory | None:
    """Returns `size` bytes of new memory, or None if the machine has too little.

    Memory that is mapped counts as available until it is written to, so other processes might take the same memory
    before the driver registers it. Therefore each page is written to here, in steps, as long as memory is available.
    Registering, which takes longer, then needs no lock. Processes that find too little while others take theirs wait
    for each other: one gives up what it has, and the next goes on with that.
    """
    options = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    memory = UnforkedMemory(-1, size, **options)
    memory.process = os.getpid()
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a fork would copy pages that are pinned, all at once
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    lock = host_memory_lock()
    with ExitStack() as alone:
        for start in range(0, size, _STEP):
            step = min(_STEP, size - start)
            if available() < step:
                alone.enter_context(lock)  # may be entered again
                if available() < step:
                    memory.close()
                    return None
            torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=step)[:: mmap.PAGESIZE].zero_()
    return memory


def host_memory_lock() -> FileLock:
    """Returns a lock that only one process of a user on this machine can hold."""
    return FileLock(Path(tempfile.gettempdir()) / f"seqtile-host-memory-{getattr(os, 'getuid', int)()}.lock")


def available(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes of host memory that this process can still take. Considers the machine and all control groups
    (v2 and v1) that contain the process."""
    rooms = [int(line.split()[1]) * 1024 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")]
    for line in _lines(proc / "self" / "cgroup") or ["0::/", "0:memory:/"]:
        _, controllers, path = line.split(":", 2)
        for controller in _CONTROL_GROUPS.keys() & set(controllers.split(",")):
            folder, limit, used, reclaimable = _CONTROL_GROUPS[controller]
            for group in accumulate(Path(path).parts[1:], Path.joinpath, initial=groups / folder):  # root to own
                with suppress(OSError, ValueError):  # no such file, or no limit
                    left = int((group / limit).read_text()) - int((group / used).read_text())
                    statistics = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
                    rooms.append(left + int(statistics.get(reclaimable, 0)))
    return max(0, min(rooms) - KEPT_FREE) if rooms else 2**62


def _lines(file: Path) -> list[str]:
    with suppress(OSError):  # missing, or removed meanwhile
        return file.read_text().splitlines()
    return []
