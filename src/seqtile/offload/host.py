"""Blocks of host memory of exactly the sizes asked for, kept for reuse, and how much more there may be.

torch's own pinned allocator rounds a block up to a power of two: the input of a layer of 655,360 tokens of Llama-8B,
5.4 GB, would take 8.6. Here a block is a mapping of its own, whole pages, registered with the driver once.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        register, unregister: called with the address and the bytes of a new block and of one that is returned.
    """

    def __init__(
        self,
        limit: int | None = None,
        register: Callable[[int, int], None] = lambda address, size: None,
        unregister: Callable[[int], None] = lambda address: None,
    ):
        self.limit, self.register, self.unregister = limit, register, unregister
        self.total = 0
        """Bytes of all blocks, handed out and free."""
        self.closed = False
        self._free: list[torch.Tensor] = []
        self._lock = RLock()  # reentrant: what gives a block back may run when garbage is collected

    def take(self, size: int) -> torch.Tensor:
        """A block of at least so many bytes, uint8. Raises HostMemoryFull.

        The smallest free one that is large enough; or a new one, in the place of a free one that is too small, so that
        sequences that grow do not leave a trail of blocks. Where that is not room enough, in the place of more.
        """
        with self._lock:
            fitting = [block for block in self._free if len(block) >= size]
            if fitting:
                block = min(fitting, key=len)
                self._free = [other for other in self._free if other is not block]
                return block
            if self._room() + sum(map(len, self._free)) < size:
                raise self._full(size)
            if self._free:
                self._return(self._free.pop())
            while self._free and self._room() < size:
                self._return(self._free.pop())
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
        with self._lock:
            self.closed = True
            failed = None
            while self._free:
                try:
                    self._return(self._free.pop())
                except RuntimeError as error:  # of the driver; the others are returned all the same
                    failed = error
            if failed is not None:
                raise failed

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the driver is gone, and the system takes everything back
            self.close()

    def _new(self, size: int) -> torch.Tensor:
        with one_at_a_time():  # of the processes of this machine: they would all find the same memory available
            if self._room() < size:
                raise self._full(size)
            try:
                options = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
                memory = mmap.mmap(-1, size, **options)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    memory.madvise(mmap.MADV_HUGEPAGE)
                block = torch.frombuffer(memory, dtype=torch.uint8)
                self.register(block.data_ptr(), size)
            except (OSError, RuntimeError) as error:
                raise HostMemoryFull(f"{size / 2**20:,.0f} MiB more cannot be had: {error}") from error
        self.total += size
        return block

    def _full(self, size: int) -> HostMemoryFull:
        what = "the machine's memory" if self.limit is None else f"the limit of {self.limit / 2**20:,.0f} MiB"
        return HostMemoryFull(f"{size / 2**20:,.0f} MiB more would exceed {what}")

    def _room(self) -> int:
        room = available()
        return room if self.limit is None else min(room, self.limit - self.total)

    def _return(self, block: torch.Tensor) -> None:
        self.total -= len(block)
        self.unregister(block.data_ptr())


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Only one process of a user on this machine is inside."""
    if fcntl is None:
        yield
        return
    with (Path(tempfile.gettempdir()) / f"seqtile-host-memory-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets the next one in


def available(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that this process can still take: of the machine, and of its control groups (v2 and v1), its
    own and those that this is in."""
    rooms = []
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            rooms.append(int(line.split()[1]) * 1024)
    paths = {"": "/", "memory": "/"}  # of controllers; v2 has one without a name
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        paths |= {name: path for name in controllers.split(",") if name in paths}
    for root, path, names in (
        (groups, paths[""], ("memory.max", "memory.current", "inactive_file")),
        (groups / "memory", paths["memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):
        own = root / path.strip("/")
        for group in (own, *own.parents[: len(own.parts) - len(root.parts)]):
            rooms += _room_of(group, *names)
    return max(0, min(rooms) - KEPT_FREE) if rooms else 2**62


def _room_of(group: Path, limit: str, used: str, reclaimable: str) -> list[int]:
    """What a control group has left, if it has a limit."""
    most, now = "".join(_lines(group / limit)), "".join(_lines(group / used))
    if not (most.isdigit() and now.isdigit()):  # no limit, or no such file
        return []
    statistics = dict(pair for line in _lines(group / "memory.stat") if len(pair := line.split()) == 2)
    return [int(most) - int(now) + int(statistics.get(reclaimable, 0))]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # not there, or gone meanwhile
        return []
