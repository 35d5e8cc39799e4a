"""Measures work and memory without a clock: counts FLOP and live bytes at every operation of the dispatcher."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
"""Matmuls, with the argument index of the first matrix."""


class FlopCount(TorchDispatchMode):
    """Counts the FLOP of matmuls, including in-place and out= forms, and all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.operations += 1
        if (first := PRODUCTS.get(func.overloadpacket.__name__)) is not None:
            self.total += 2 * args[first].numel() * args[first + 1].shape[-1]
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Records the peak bytes of live storages that operations inside create, except on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._seen and tensor.device.type != "meta":
                self._seen[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key: int) -> None:
        self.live -= self._seen.pop(key)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors in a tree. A tensor without a storage (sp/token_shard.py) is replaced by the rows that it
    holds."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [vars(tensor).get("rows", tensor) for tensor in leaves]
