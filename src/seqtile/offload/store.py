"""Tensors that wait in host memory while something else is computed.

`put` begins a tensor's way out, `take` has it back, and having one back begins the way back of the one put before it:
a backward takes in the reverse order. The store knows no device, see `copies`.
"""

import weakref
from collections.abc import Callable

import torch

from seqtile.offload.copies import Copies
from seqtile.offload.host import Pool


class Held:
    """What stands for a tensor while it is in the store. Its block is given back when nothing refers to it any more,
    which is when autograd frees the graph, also after an exception."""

    def __init__(self, tensor: torch.Tensor, store: "Store", before: "Held | None"):
        self.store = store
        self.before = None if before is None else weakref.ref(before)
        size = tensor.numel() * tensor.element_size()
        self.memory = store.pool.take(size)
        self.block = self.memory[:size].view(tensor.dtype).view(tensor.shape)
        self.source: torch.Tensor | None = tensor
        """The tensor itself, until it is out."""
        self.arriving: tuple[torch.Tensor, object] | None = None
        self.out = store.copies.out(tensor, self.block)

    def release(self) -> None:
        """Lets go of the tensor, once what is computed from now on comes after its copy."""
        if self.source is not None:
            self.store.copies.wait(self.out)
            self.source = None

    def __del__(self) -> None:
        if hasattr(self, "out"):
            self.release()
            if self.arriving is not None:  # its memory is free for others after the copy into it
                self.store.copies.wait(self.arriving[1])
        if hasattr(self, "memory"):
            self.store.pool.give(self.memory)


class Store:
    """Keeps tensors in `pool`, copied by `copies`; at most one that is on its way out is kept on the device as well."""

    def __init__(self, pool: Pool, copies: Copies):
        self.pool, self.copies = pool, copies
        self._last: Callable[[], Held | None] = lambda: None
        self._same: dict[tuple, tuple[weakref.ref, weakref.ref[Held]]] = {}
        """Of tensors that are still alive elsewhere: their storage and what stands for them here."""

    def put(self, tensor: torch.Tensor) -> Held:
        """Begins to copy `tensor` out, which must not be changed in place before it is. A tensor that is here already
        is not copied again. Raises HostMemoryFull."""
        self._same = {key: (alive, held) for key, (alive, held) in self._same.items() if alive() and held()}
        storage = tensor.untyped_storage()
        key = (id(storage), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        if key in self._same:
            return self._same[key][1]()
        self.settle()
        held = Held(tensor.detach().contiguous(), self, self._last())
        self._last = weakref.ref(held)
        self._same[key] = (weakref.ref(storage), self._last)
        return held

    def settle(self) -> None:
        """Lets go of the tensor that was put last."""
        if (last := self._last()) is not None:
            last.release()

    def prefetch(self, held: Held) -> None:
        """Begins to bring a tensor back."""
        if held.source is None and held.arriving is None:
            held.arriving = self.copies.back(held.block)

    def take(self, held: Held) -> torch.Tensor:
        """The tensor. The one put before it comes back meanwhile."""
        self.prefetch(held)
        if held.source is not None:
            tensor = held.source
        else:
            tensor, copied = held.arriving
            held.arriving = None
            self.copies.wait(copied)
        if held.before is not None and (before := held.before()) is not None:
            self.prefetch(before)
        return tensor
