"""Blocks of host memory of exactly the sizes asked for, kept for reuse, and how much more there may be.

torch's own pinned allocator rounds a block up to a power of two: the input of a layer of 655,360 tokens of Llama-8B,
5.4 GB, would take 8.6. Here a block is a mapping of its own, whole pages, registered with the driver once.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from threading import RLock

import torch

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

KEPT_FREE = 2**30  # bytes of the machine's memory that are never taken


class HostMemoryFull(RuntimeError):
    """No block can be had: the machine's memory, its control group's or the limit given is reached."""


class Pool:
    """Hands blocks out and takes them back.

    Args:
        limit: bytes in all; None for what the machine has.
        device: the GPU with whose driver the blocks are registered; None for blocks that are not pinned.
    """

    def __init__(self, limit: int | None = None, device: torch.device | None = None):
        self.limit, self.device = limit, device
        self.total = 0
        """Bytes of all blocks, handed out and free."""
        self.closed = False
        self._free: list[torch.Tensor] = []
        self._lock = RLock()  # reentrant: what gives a block back may run when garbage is collected

    def take(self, size: int) -> torch.Tensor:
        """Returns a block of at least so many bytes, uint8. Raises HostMemoryFull.

        The smallest free one that is large enough; or a new one, in the place of a free one that is too small, so that
        sequences that grow do not leave a trail of blocks. Where that is not room enough, in the place of more.
        """
        with self._lock:
            block = min((block for block in self._free if len(block) >= size), key=len, default=None)
            if block is not None:
                self._free = [other for other in self._free if other is not block]
                return block
            enough = self._room() + sum(map(len, self._free)) >= size
            while enough and self._free:
                self._return(self._free.pop())
                if self._room() >= size:
                    break
            return self._new(size)

    def give(self, block: torch.Tensor) -> None:
        with self._lock:
            if self.closed:
                self._return(block)
            else:
                self._free.append(block)

    def reserve(self, count: int, size: int) -> None:
        """Makes so many blocks ready, or as many as there is room for."""
        with self._lock:
            for _ in range(count):
                if self._room() >= size:
                    self._free.append(self._new(size))

    def close(self) -> None:
        """Returns what is free, and what is handed out as soon as it is given back."""
        with self._lock, ExitStack() as returned:  # all of them, also where the driver refuses one
            self.closed = True
            for block in self._free:
                returned.callback(self._return, block)
            self._free = []

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the driver is gone, and the system takes everything back
            self.close()

    def _room(self) -> int:
        room = available()
        return room if self.limit is None else min(room, self.limit - self.total)

    def _new(self, size: int) -> torch.Tensor:
        mebibytes = f"{size / 2**20:,.0f} MiB more"
        with one_at_a_time():  # of the processes of this machine: they would all find the same memory available
            if self._room() < size:
                what = "the machine's memory" if self.limit is None else f"the limit of {self.limit / 2**20:,.0f} MiB"
                raise HostMemoryFull(f"{mebibytes} would exceed {what}")
            try:
                options = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
                memory = mmap.mmap(-1, size, **options)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    memory.madvise(mmap.MADV_HUGEPAGE)
                block = torch.frombuffer(memory, dtype=torch.uint8)
                self.register(block.data_ptr(), size)
            except (OSError, RuntimeError) as error:
                raise HostMemoryFull(f"{mebibytes} cannot be had: {error}") from error
        self.total += size
        return block

    def _return(self, block: torch.Tensor) -> None:
        self.total -= len(block)
        self.unregister(block.data_ptr())

    def register(self, address: int, size: int) -> None:
        """Has the driver pin a new block. RuntimeError if it refuses."""
        if self.device is None:
            return
        try:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, 0)))
        except RuntimeError:
            with suppress(RuntimeError):  # the driver's last error, which the next launch would report as its own
                torch.empty(1, device=self.device).fill_(0)
            raise

    def unregister(self, address: int) -> None:
        """Has the driver forget a block, once nothing copies from or to it."""
        if self.device is not None:
            torch.cuda.synchronize(self.device)
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Lets only one process of a user on this machine be inside."""
    if fcntl is None:
        yield
        return
    with (Path(tempfile.gettempdir()) / f"seqtile-host-memory-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets the next one in


def available(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes of host memory that this process can still take: of the machine, and of its control groups (v2
    and v1), its own and those that this is in."""
    rooms = [int(line.split()[1]) * 1024 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")]
    for line in _lines(proc / "self" / "cgroup") or ["0::/", "0:memory:/"]:
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        if not controllers:
            root, limit, used, reclaimable = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            reclaimable = "total_inactive_file"
        else:
            continue
        for group in accumulate(Path(path).parts[1:], Path.joinpath, initial=root):  # from the root to our own
            with suppress(OSError, ValueError):  # no such file, or no limit
                left = int((group / limit).read_text()) - int((group / used).read_text())
                statistics = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
                rooms.append(left + int(statistics.get(reclaimable, 0)))
    return max(0, min(rooms) - KEPT_FREE) if rooms else 2**62


def _lines(file: Path) -> list[str]:
    with suppress(OSError):  # not there, or gone meanwhile
        return file.read_text().splitlines()
    return []
