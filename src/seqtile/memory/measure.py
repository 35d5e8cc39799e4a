"""Work and memory without a clock: FLOP and live bytes, counted at every operation that reaches the dispatcher."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "dot")


class FlopCount(TorchDispatchMode):
    """FLOP of matrix products, in-place and out= forms included, and how many products there were."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.calls = 0
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "_grouped_mm"):
            self._add(args[0], args[1])
        elif name in ("addmm", "addmm_", "baddbmm", "baddbmm_"):
            self._add(args[1], args[2])
        elif name in _PRODUCTS or "matmul" in name or name == "linear":
            self.unknown.add(name)
        return func(*args, **(kwargs or {}))

    def _add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.total += 2 * left.numel() * right.shape[-1]
        self.calls += 1


class LiveBytes(TorchDispatchMode):
    """Peak bytes of the storages that operations create inside, while they are alive; none of the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in known and key not in self._seen and tensor.device.type != "meta":
                self._seen[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                weakref.finalize(storage, self._free, key)
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key: int) -> None:
        self.live -= self._seen.pop(key)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
