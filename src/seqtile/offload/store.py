"""Tensors that wait in host memory while something else is computed.

`put` begins a tensor's way out, `take` has it back, and having one back begins the way back of the region put before:
a backward takes in the reverse order. The store knows no device, see `copies`.
"""

import weakref
from collections.abc import Callable
from threading import RLock

import torch

from seqtile.offload.copies import Copies
from seqtile.offload.host import Pool


class Held:
    """What stands for a tensor while it is in the store. Its block is given back when nothing refers to it any more,
    which is when autograd frees the graph, also after an exception."""

    def __init__(self, tensor: torch.Tensor, store: "Store", before: "Held | None"):
        self.store = store
        self.region, self.taken = store.region, False
        self.before = None if before is None else weakref.ref(before)
        size = tensor.numel() * tensor.element_size()
        self.memory = store.pool.take(size)
        self.block = self.memory[:size].view(tensor.dtype).view(tensor.shape)
        self.source: torch.Tensor | None = tensor
        """The tensor itself, until it is out."""
        self.version, self.changed = tensor._version, False
        self.here: Callable[[], torch.Tensor | None] = lambda: None
        """What it was brought back as, while that is alive."""
        self.arriving: tuple[torch.Tensor, object] | None = None
        self.out = store.copies.out(tensor, self.block)

    def release(self) -> None:
        """Lets go of the tensor, once what is computed from now on comes after its copy."""
        if self.source is not None:
            self.changed = self.source._version != self.version
            self.store.copies.wait(self.out)
            self.source = None

    def __del__(self) -> None:
        if hasattr(self, "out"):
            for tensor in (self.source, self.arriving and self.arriving[0]):
                if tensor is not None:
                    self.store.copies.abandon(tensor)
        if hasattr(self, "memory"):
            self.store.pool.give(self.memory)


class Store:
    """Keeps tensors in `pool`, copied by `copies`; at most one that is on its way out is kept on the device as well."""

    def __init__(self, pool: Pool, copies: Copies):
        self.pool, self.copies = pool, copies
        self.region = 0
        """Of what is put now: what is put together is brought back together."""
        self.last: Callable[[], Held | None] = lambda: None
        """What was put last, while it is held."""
        self._same: dict[tuple, tuple[weakref.ref, weakref.ref[Held]]] = {}
        """Of tensors that are still alive elsewhere: their storage and what stands for them here."""
        self._lock = RLock()

    def put(self, tensor: torch.Tensor) -> Held:
        """Begins to copy `tensor` out, which must not be changed in place before it is. A tensor that is here already
        is not copied again. Raises HostMemoryFull."""
        with self._lock:
            self._same = {key: (alive, held) for key, (alive, held) in self._same.items() if alive() and held()}
            storage = tensor.untyped_storage()
            key = (id(storage), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
            if key in self._same and (same := self._same[key][1]()) is not None:
                return same
            self.settle()
            held = Held(tensor.detach().contiguous(), self, self.last())
            self.last = weakref.ref(held)
            self._same[key] = (weakref.ref(storage), self.last)
            return held

    def settle(self) -> None:
        """Lets go of the tensor that was put last."""
        if (last := self.last()) is not None:
            last.release()

    def prefetch(self, held: Held | None) -> None:
        """Begins to bring back a tensor, and the others of its region that were put before it."""
        region = None if held is None else held.region
        while held is not None and held.region == region:
            if not held.taken and held.source is None and held.arriving is None:
                held.arriving = self.copies.back(held.block)
            held = None if held.before is None else held.before()

    def take(self, held: Held) -> torch.Tensor:
        """The tensor. The region put before comes back meanwhile. RuntimeError if it was changed in place while it was
        on its way out."""
        held.taken = True
        check_unchanged(held.changed or (held.source is not None and held.source._version != held.version))
        if held.source is not None:
            tensor = held.source
        elif (tensor := held.here()) is None:
            tensor, copied = held.arriving or self.copies.back(held.block)
            held.arriving, held.here = None, weakref.ref(tensor)
            self.copies.wait(copied)
        before = held
        while before is not None and before.region == held.region:
            before = None if before.before is None else before.before()
        self.prefetch(before)
        return tensor


def check_unchanged(changed: bool) -> None:
    """What autograd checks of a tensor that it saves by itself."""
    if changed:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the input "
            "of a checkpointed region, after the region's forward"
        )
