"""Tensors that wait in host memory while something else is computed.

`put` begins to copy a tensor out, `take` returns it, and taking one begins to copy back the region put before it, since
a backward takes in the reverse order of the forward. With three layers, the last of which keeps its input:

    computes       | forward 1 | forward 2 | forward 3 | backward 3 | backward 2 | backward 1 |
    copies out     |  input 1  |  input 2  |           |            |            |            |
    copies back    |           |           |           |  input 2   |  input 1   |            |
"""

import weakref
from threading import RLock
from typing import Any

import torch

from seqtile.offload.pinned import Pool


class Copies:
    """Copies between host memory and a device, beside what it computes: on a stream of their own. (A CPU's streams do
    nothing, so its copies are finished when they return.)

    Both directions use one stream, so a block that is given back while it is still read or written is safe to reuse.
    """

    def __init__(self, device: torch.device):
        self.device, self.streams = device, torch.get_device_module(device)
        self.stream = self.streams.Stream(device)

    def out(self, tensor: torch.Tensor, block: torch.Tensor) -> Any:
        """Begins to copy `tensor` into `block`, which has its shape and dtype. Returns what `wait` takes."""
        return self._copy(tensor, block)

    def back(self, block: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begins to copy `block` into a new tensor. Returns that, and what `wait` takes."""
        tensor = torch.empty(block.shape, dtype=block.dtype, device=self.device)  # of the computing stream's memory
        return tensor, self._copy(block, tensor)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        self.stream.wait_stream(self.streams.current_stream(self.device))  # it wrote the source, or read the target
        with self.streams.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, copied: Any) -> None:
        """Puts what is computed from now on after the copy. The host does not wait."""
        self.streams.current_stream(self.device).wait_event(copied)

    def abandon(self, tensor: torch.Tensor) -> None:
        """Lets go of a tensor that may still be copied: others get its memory after the copy."""
        if tensor.is_cuda:
            tensor.record_stream(self.stream)


class Saved:
    """A tensor of a checkpointed region: in the store, or kept where it is, which are those without `memory`.

    Its block is given back when nothing refers to it any more, which is when autograd frees the graph, also after an
    exception.
    """

    memory: torch.Tensor | None = None
    """Its block of the pool."""
    arriving: tuple[torch.Tensor, Any] | None = None
    """Its copy back on the device and what to wait for, until it is taken."""
    here: weakref.ref[torch.Tensor] | None = None
    """The copy that was taken, while that is alive."""
    changed = taken = False
    """Changed in place before it was out; taken at least once."""

    def __init__(self, source: torch.Tensor, store: "Store", before: int):
        self.source: torch.Tensor | None = source
        """The tensor itself, until it is out."""
        self.version, self.store, self.before = source._version, store, before
        """`before`: the number of the tensor whose region is brought back when this one is taken."""

    def __del__(self) -> None:
        if self.memory is not None:
            for tensor in (self.source, self.arriving and self.arriving[0]):
                if tensor is not None:
                    self.store.copies.abandon(tensor)
            self.store.pool.give(self.memory)


class Store:
    """Keeps tensors in `pool`, copied by `copies`; at most one that is on its way out is kept on the device as well.

    Tensors are numbered, from 1, in the order in which they are put. What is put between two calls of `begin_region`
    is a region: it is copied back together. `before` is the number of the last tensor put before a region.
    """

    def __init__(self, pool: Pool, copies: Copies):
        self.pool, self.copies = pool, copies
        self.count = self.before = 0
        self._saved: weakref.WeakValueDictionary[int, Saved] = weakref.WeakValueDictionary()
        """By number."""
        self._same: weakref.WeakValueDictionary[tuple, Saved] = weakref.WeakValueDictionary()
        """By storage and how the tensor looks at it."""
        self._lock = RLock()

    def begin_region(self) -> None:
        self.before = self.count

    def put(self, tensor: torch.Tensor) -> Saved:
        """Begins to copy `tensor` out, which must not be changed in place before it is. A tensor that is here already
        is not copied again. Raises HostMemoryFull."""
        with self._lock:
            storage = tensor.untyped_storage()
            key = (id(storage), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
            same = self._same.get(key)
            if same is not None and same.storage() is storage:  # an id is used again once its storage is freed
                return same
            self.settle()
            saved = Saved(tensor.detach().contiguous(), self, self.before)
            saved.memory, saved.storage = self.pool.take(tensor.nbytes), weakref.ref(storage)
            saved.block = saved.memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            saved.out = self.copies.out(saved.source, saved.block)
            self.count += 1
            self._saved[self.count] = self._same[key] = saved
            return saved

    def keep(self, tensor: torch.Tensor, prefetches: bool) -> Saved:
        """Leaves a tensor where it is. `prefetches`: taking it begins to copy back what was put last before it."""
        return Saved(tensor, self, self.count if prefetches else 0)

    def settle(self) -> None:
        """Lets go of the tensor that was put last, once what is computed from now on comes after its copy."""
        last = self._saved.get(self.count)
        if last is not None and last.source is not None:
            last.changed = last.source._version != last.version
            self.copies.wait(last.out)
            last.source = None

    def prefetch(self, number: int) -> None:
        """Begins to copy back the tensor of that number, and the others of its region that were put before it."""
        last = self._saved.get(number)
        if last is not None:
            for saved in map(self._saved.get, range(number, last.before, -1)):
                if saved is not None and not saved.taken and saved.source is None and saved.arriving is None:
                    saved.arriving = self.copies.back(saved.block)

    def take(self, saved: Saved) -> torch.Tensor:
        """Returns the tensor, and begins to copy back the region put before. RuntimeError if it was changed in place
        while it was still on the device."""
        saved.taken = True
        if saved.changed or (saved.source is not None and saved.source._version != saved.version):
            raise RuntimeError(  # as autograd has it
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                "input of a checkpointed region, after the region's forward"
            )
        tensor = saved.source if saved.here is None else saved.here()
        if tensor is None:
            tensor, copied = saved.arriving or self.copies.back(saved.block)
            saved.arriving, saved.here = None, weakref.ref(tensor)
            self.copies.wait(copied)
        self.prefetch(saved.before)
        return tensor
