"""Stores tensors in host memory while something else is computed.

`put` starts to copy a tensor out. `take` returns it and starts to copy back the region that was put before it, because
a backward takes regions in the reverse order of the forward. With three layers, the last of which keeps its input:

    computes       | forward 1 | forward 2 | forward 3 | backward 3 | backward 2 | backward 1 |
    copies out     |  input 1  |  input 2  |           |            |            |            |
    copies back    |           |           |           |  input 2   |  input 1   |            |

Tensors are stored in blocks of a `Pool`, which have exactly the requested sizes and are reused. torch's own pinned
allocator rounds a block up to a power of two: the input of a layer for 655,360 tokens of Llama-8B, 5.4 GB, would take
8.6 GB. With `pinned_max_round_threshold_mb`, which disables the rounding, torch 2.13 may return a freed block that is
too small. Here each block is its own mapping of whole pages, registered with the driver once.
"""

import os
import sys
import weakref
from contextlib import ExitStack, suppress
from threading import RLock
from typing import Any

import torch

from seqtile.offload.host_memory import available, mapped

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs


class HostMemoryFull(RuntimeError):
    """Raised if host memory is full: the machine's, its control group's, or the given limit."""


class Pool:
    """Lends blocks of host memory and takes them back.

    Args:
        limit: bytes in all; None for all that the machine has.
        device: the GPU that the blocks are registered with, for all GPUs; None for blocks that are not pinned.

    A forked process, such as a DataLoader's worker, has none of the blocks: its copy of the pool lends and frees none.
    """

    def __init__(self, limit: int | None = None, device: torch.device | None = None):
        self.limit, self.device = limit, device
        self.total = 0
        """Bytes of all blocks, lent and free."""
        self.closed = False
        self.copied: dict[int, Any] = {}
        """The last copy from or to each block that was given back, by the id of the block: an event, or None."""
        self._process = os.getpid()
        self._free: list[torch.Tensor] = []
        self._lock = RLock()  # reentrant: garbage collection may run the code that returns a block

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that the blocks belong to."""
        return os.getpid() != self._process

    def take(self, size: int) -> torch.Tensor:
        """Returns a block of at least `size` bytes, uint8. Raises HostMemoryFull.

        Prefers the smallest free block that is large enough. Otherwise frees a block that is too small and allocates a
        new one, so that growing sequences do not leave unused blocks behind; if memory is still short, frees more.
        """
        if self.inherited:
            raise RuntimeError("the blocks of this pool are of the process that forked this one; make a Pool here")
        with self._lock:
            large = [i for i, block in enumerate(self._free) if len(block) >= size]
            if large:
                return self._free.pop(min(large, key=lambda i: len(self._free[i])))
            enough = self._room() + sum(map(len, self._free)) >= size
            while enough and self._free:
                self._return(self._free.pop(0))  # its last copy is the oldest, and has probably ended
                if self._room() >= size:
                    break
            return self._new(size)

    def give(self, block: torch.Tensor, copied: Any = None) -> None:
        """Takes a block back. `copied`: the last copy from or to it, which need not have ended."""
        with self._lock:
            self.copied[id(block)] = copied
            if self.closed:
                self._return(block)
            else:
                self._free.append(block)

    def reserve(self, count: int, size: int) -> None:
        """Allocates `count` free blocks of `size` bytes, or as many as fit."""
        with self._lock, suppress(HostMemoryFull):
            for _ in range(count):
                self._free.append(self._new(size))

    def close(self) -> None:
        """Releases the free blocks now, and the others when they are returned."""
        if self.inherited:  # and another thread may have held the lock when this process was forked
            return
        with self._lock, ExitStack() as returned:  # releases all of them, even if the driver refuses one
            self.closed = True
            for block in self._free:
                returned.callback(self._return, block)
            self._free = []

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit the driver is gone, and the system frees everything
            self.close()

    def _room(self) -> int:
        room = available()
        return room if self.limit is None else min(room, self.limit - self.total)

    def _new(self, size: int) -> torch.Tensor:
        mebibytes = f"{size / 2**20:,.0f} MiB more"
        try:
            memory = mapped(size) if self._room() >= size else None
            if memory is not None:
                block = torch.frombuffer(memory, dtype=torch.uint8)
                self.register(block.data_ptr(), size)  # minutes for a TiB; other processes do so at the same time
                self.total += size
                return block
        except (OSError, RuntimeError) as error:
            raise HostMemoryFull(f"{mebibytes} cannot be had: {error}") from error
        what = "the machine's memory" if self.limit is None else f"the limit of {self.limit / 2**20:,.0f} MiB"
        raise HostMemoryFull(f"{mebibytes} would exceed {what}")

    def _return(self, block: torch.Tensor) -> None:
        """Unregisters a block after its last copy, and waits for nothing else that the GPU does."""
        self.total -= len(block)
        copied = self.copied.pop(id(block), None)
        if copied is not None:
            copied.synchronize()
        self.unregister(block.data_ptr())

    def register(self, address: int, size: int) -> None:
        """Pins a new block. Raises RuntimeError if the driver refuses."""
        if self.device is None:
            return
        try:
            with torch.cuda.device(self.device):  # the driver pins for the current device
                torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)))
        except RuntimeError:
            with suppress(RuntimeError):  # clears the driver's last error, which the next launch would report
                torch.empty(1, device=self.device).fill_(0)
            raise

    def unregister(self, address: int) -> None:
        """Unpins a block, which no copy may read or write any more."""
        if self.device is not None:
            with torch.cuda.device(self.device):
                torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


class Copies:
    """Copies between host memory and a device on a separate stream, concurrently with the device's computation. (CPU
    streams do nothing, so on a CPU copies finish before they return.)

    Both directions use one stream, so the same device can reuse a returned block while it is still read or written.
    """

    def __init__(self, device: torch.device):
        self.device, self.streams = device, torch.get_device_module(device)
        self.stream = self.streams.Stream(device)

    def out(self, tensor: torch.Tensor, block: torch.Tensor) -> Any:
        """Starts to copy `tensor` into `block` of the same shape and dtype. Returns the argument for `wait`."""
        return self._copy(tensor, block)

    def back(self, block: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Starts to copy `block` into a new tensor. Returns the tensor and the argument for `wait`."""
        tensor = torch.empty(block.shape, dtype=block.dtype, device=self.device)  # allocated on the computing stream
        return tensor, self._copy(block, tensor)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        self.stream.wait_stream(self.streams.current_stream(self.device))  # which wrote the source or read the target
        with self.streams.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, copied: Any) -> None:
        """Makes later work on the device wait for the copy. The host does not wait."""
        self.streams.current_stream(self.device).wait_event(copied)

    def abandon(self, tensor: torch.Tensor) -> None:
        """Releases a tensor that may still be copied: its memory is reused only after the copy."""
        if tensor.is_cuda:
            tensor.record_stream(self.stream)


class Saved:
    """A saved tensor of a checkpointed region: in the store, or (without `memory`) kept on the device.

    The block returns to the pool when the last reference disappears: when autograd frees the graph, also after an
    exception.
    """

    storage: weakref.ref[torch.UntypedStorage]
    """The storage of the original tensor."""
    memory: torch.Tensor | None = None
    """The tensor's block of the pool, uint8."""
    block: torch.Tensor
    """The block, viewed in the tensor's shape and dtype."""
    copies: Copies
    """The copies of the tensor's device."""
    copied: Any = None
    """The last copy, into the block or back, as the argument of `Copies.wait`."""
    arriving: torch.Tensor | None = None
    """The tensor that is copied back to the device, until it is taken."""
    here: weakref.ref[torch.Tensor] | None = None
    """The tensor that was taken, while it is alive."""
    changed = taken = False
    """Whether the tensor changed in place before it was copied out; whether it was taken at least once."""

    def __init__(self, source: torch.Tensor, store: "Store", before: int):
        self.source: torch.Tensor | None = source
        """The tensor itself, until it is copied out."""
        self.version, self.store, self.before = source._version, store, before
        """`before`: the number of the last tensor of the region that is copied back when this one is taken."""

    def __del__(self) -> None:
        if self.memory is not None and not self.store.pool.inherited:
            for tensor in (self.source, self.arriving):
                if tensor is not None:
                    self.copies.abandon(tensor)
            self.store.pool.give(self.memory, self.copied)


class Store:
    """Keeps tensors in `pool`, copied by `copies`; those of other devices by copies of their own. At most one tensor
    that is being copied out also stays on its device.

    Tensors are numbered from 1 in the order in which they are put. All tensors put between two calls of `begin_region`
    form a region and are copied back together. `before` is the number of the last tensor put before a region.
    """

    def __init__(self, pool: Pool, copies: Copies):
        self.pool, self.copies = pool, copies
        self._copies = {copies.device: copies}
        self.count = self.before = 0
        self._saved: weakref.WeakValueDictionary[int, Saved] = weakref.WeakValueDictionary()
        """The saved tensors by number."""
        self._same: weakref.WeakValueDictionary[tuple, Saved] = weakref.WeakValueDictionary()
        """The saved tensors by storage, offset, dtype, shape, strides and version."""
        self._lock = RLock()  # a backward runs in one thread for each device

    def __deepcopy__(self, memo: dict[int, Any]) -> "Store":
        """Returns an empty store whose pool has the same limit. Closing either store does not affect the other."""
        return Store(Pool(self.pool.limit, self.pool.device), self.copies)

    def begin_region(self) -> None:
        self.before = self.count

    def put(self, tensor: torch.Tensor) -> Saved:
        """Starts to copy `tensor` out; the tensor must not change in place before the copy ends. A tensor that is
        stored already is not copied again. Raises HostMemoryFull."""
        with self._lock:
            storage = tensor.untyped_storage()
            key = (id(storage), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
            same = self._same.get(key)
            if same is not None and same.storage() is storage:  # ids are reused after a storage is freed
                return same
            self.settle()
            saved = Saved(tensor.detach().contiguous(), self, self.before)
            saved.memory, saved.storage = self.pool.take(tensor.nbytes), weakref.ref(storage)
            saved.block = saved.memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if tensor.device not in self._copies:
                self._copies[tensor.device] = Copies(tensor.device)
            saved.copies = self._copies[tensor.device]
            if (last := self.pool.copied.get(id(saved.memory))) is not None:  # maybe another device's
                saved.copies.stream.wait_event(last)
            saved.copied = saved.copies.out(saved.source, saved.block)
            self.count += 1
            self._saved[self.count] = self._same[key] = saved
            return saved

    def keep(self, tensor: torch.Tensor, prefetches: bool) -> Saved:
        """Leaves a tensor on the device. `prefetches`: taking it starts to copy back the last tensor that was put
        before it."""
        return Saved(tensor, self, self.count if prefetches else 0)

    def settle(self) -> None:
        """Makes the computing stream wait for the last copy out, and releases the copied tensor."""
        with self._lock:
            last = self._saved.get(self.count)
            if last is not None and last.source is not None:
                last.changed = last.source._version != last.version
                last.copies.wait(last.copied)
                last.source = None

    def prefetch(self, number: int) -> None:
        """Starts to copy back the tensor with this number and the earlier tensors of its region."""
        last = self._saved.get(number)
        if last is not None:
            for saved in map(self._saved.get, range(number, last.before, -1)):
                if saved is not None and not saved.taken and saved.source is None and saved.arriving is None:
                    saved.arriving, saved.copied = saved.copies.back(saved.block)

    def take(self, saved: Saved) -> torch.Tensor:
        """Returns the tensor, and starts to copy back the region put before it. Raises RuntimeError if the tensor
        changed in place while it was still on the device."""
        with self._lock:
            saved.taken = True
            if saved.changed or (saved.source is not None and saved.source._version != saved.version):
                raise RuntimeError(  # autograd's message
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    "the input of a checkpointed region, after the region's forward"
                )
            tensor = saved.source if saved.here is None else saved.here()
            if tensor is None:
                if saved.arriving is None:
                    saved.arriving, saved.copied = saved.copies.back(saved.block)
                tensor, saved.arriving = saved.arriving, None
                saved.here = weakref.ref(tensor)
                saved.copies.wait(saved.copied)
            self.prefetch(saved.before)
            return tensor
