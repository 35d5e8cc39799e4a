"""What a GPU would refuse, copy or wait for, of every operation that reaches the dispatcher."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2"}
HALF = (torch.float16, torch.bfloat16)


class CudaRules(TorchDispatchMode):
    """`broken`: products of dtypes that cuBLAS refuses, or of strides that are copied first, and how often. `waits`:
    operations for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in WAITS or (name in ("_to_copy", "copy_") and self._waits_for_copy(name, args, kwargs)):
            self.waits[name] += 1
        if name in ("mm", "addmm", "addmm_"):
            self._check_product(str(func), name, args, kwargs)
        if func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"]  # torch 2.11 cannot simulate it
        return func(*args, **kwargs)

    def _waits_for_copy(self, name: str, args: tuple, kwargs: dict) -> bool:
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        devices |= {kwargs["device"].type} if kwargs.get("device") is not None else set()
        asynchronous = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        return len(devices) > 1 and not asynchronous and args[0].numel() > 0

    def _check_product(self, said: str, name: str, args: tuple, kwargs: dict) -> None:
        left, right = (args[0], args[1]) if name == "mm" else (args[1], args[2])
        added, out = None if name == "mm" else args[0], kwargs.get("out")
        out_dtype = kwargs.get("out_dtype") or next((each for each in args if isinstance(each, torch.dtype)), None)
        if left.dtype != right.dtype:
            self.broken[f"{said}: {left.dtype} by {right.dtype}"] += 1
        if out_dtype not in (None, left.dtype) and not (out_dtype == torch.float32 and left.dtype in HALF):
            self.broken[f"{said}: {out_dtype} of {left.dtype}"] += 1
        for tensor in (added, out):
            if tensor is not None and tensor.dtype != (out_dtype or left.dtype):
                self.broken[f"{said}: into {tensor.dtype}, of {left.dtype}"] += 1
        for tensor in (left, right, out):
            if tensor is not None and not is_matrix(tensor):
                self.broken[f"{said}: {list(tensor.shape)} with strides {tensor.stride()} is copied"] += 1


def is_matrix(tensor: torch.Tensor) -> bool:
    """Whether cuBLAS takes a tensor as it lies: rows or columns without gaps, further apart than they are long."""
    rows, columns = tensor.shape
    by_row = tensor.stride(1) == 1 and tensor.stride(0) >= max(1, columns)
    by_column = tensor.stride(0) == 1 and tensor.stride(1) >= max(1, rows)
    return by_row or by_column
