"""Blocks of host memory of exactly the sizes asked for, kept for reuse, and how much more there may be.

torch's own pinned allocator rounds a block up to a power of two: the input of a layer of 655,360 tokens of Llama-8B,
5.4 GB, would take 8.6. Here a block is a mapping of its own, whole pages, registered with the driver once.
"""

import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import torch

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

    def take(self, size: int) -> torch.Tensor:
        """A block of at least so many bytes, uint8. Raises HostMemoryFull.

        The smallest free one that is large enough; or a new one, for which free ones that are too small are returned.
        """
        fitting = [block for block in self._free if len(block) >= size]
        if fitting:
            block = min(fitting, key=len)
            self._free = [other for other in self._free if other is not block]
            return block
        self._make_room(size)
        return self._new(size)

    def give(self, block: torch.Tensor) -> None:
        if self.closed:
            self._return(block)
        else:
            self._free.append(block)

    def reserve(self, count: int, size: int) -> None:
        """Makes so many blocks ready, or as many as there is room for."""
        for _ in range(count):
            if self._room() >= size:
                self._free.append(self._new(size))

    def close(self) -> None:
        """Returns what is free, and what is handed out as soon as it is given back."""
        self.closed = True
        while self._free:
            self._return(self._free.pop())

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the driver is gone, and the system takes everything back
            self.close()

    def _new(self, size: int) -> torch.Tensor:
        block = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self.register(block.data_ptr(), size)
        self.total += size
        return block

    def _make_room(self, size: int) -> None:
        while self._free and self._room() < size:
            self._return(self._free.pop())
        if self._room() < size:
            raise HostMemoryFull(
                f"{size / 2**20:,.0f} MiB more would exceed "
                + (f"the limit of {self.limit / 2**20:,.0f} MiB" if self.limit is not None else "the machine's memory")
            )

    def _room(self) -> int:
        room = available()
        return room if self.limit is None else min(room, self.limit - self.total)

    def _return(self, block: torch.Tensor) -> None:
        self.unregister(block.data_ptr())
        self.total -= len(block)


def available(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that this process can still take: of the machine, and of its control group (v2 or v1)."""
    rooms = []
    for line in (proc / "meminfo").read_text().splitlines() if (proc / "meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            rooms.append(int(line.split()[1]) * 1024)
    for limit, used, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        if (groups / limit).exists() and (text := (groups / limit).read_text().strip()) != "max":
            statistics = (groups / limit).with_name("memory.stat").read_text().split()
            cached = dict(zip(statistics[::2], statistics[1::2], strict=True)).get(reclaimable, 0)
            rooms.append(int(text) - int((groups / used).read_text()) + int(cached))
    return max(0, min(rooms) - KEPT_FREE) if rooms else 2**62
