"""What linear_cross_entropy and linear_log_probs require of their arguments, checked before anything is computed."""

import math
from numbers import Integral, Real

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.ops.checks import check_dense, check_device, check_operands, check_shape

_LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
"""What a target may be: int64, and what becomes int64 exactly."""


def check_head(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int | None,
    accumulate_dtype: torch.dtype | None,
) -> None:
    """Raises TypeError or ValueError for tensors that do not fit each other."""
    operands = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    check_operands(op, "hidden", operands)
    if hidden.dim() == 0:
        raise ValueError(f"{op}: hidden has shape [], expected [..., D]")
    if hidden.numel() == 0:
        raise ValueError(f"{op}: hidden has shape {list(hidden.shape)}, an empty sequence; pass at least one token")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"{op}: weight has shape {list(weight.shape)}, expected [V, D] with D = {hidden.shape[-1]}")
    if bias is not None:
        check_shape(op, "bias", bias, (weight.shape[0],), "[V]")
    check_dense(op, "target", target)
    check_shape(op, "target", target, tuple(hidden.shape[:-1]), "hidden's shape without D")
    if target.dtype not in _LABELS:
        raise TypeError(f"{op}: target is {target.dtype}, expected torch.int64 or a smaller integer; use target.long()")
    check_device(op, "target", target, "hidden", hidden)
    if ignore_index is not None and (not isinstance(ignore_index, Integral) or isinstance(ignore_index, bool)):
        raise TypeError(f"{op}: ignore_index is {ignore_index!r}, expected an int, or None if nothing is ignored")
    if accumulate_dtype not in (None, torch.float32, weight.dtype):
        raise ValueError(
            f"{op}: accumulate_dtype is {accumulate_dtype}, expected torch.float32, or None for the weight's dtype"
        )


def check_class_weight(op: str, class_weight: torch.Tensor, hidden: torch.Tensor, vocab: int) -> None:
    check_dense(op, "class_weight", class_weight)
    if not class_weight.is_floating_point():
        raise TypeError(
            f"{op}: class_weight is {class_weight.dtype}, expected a floating-point tensor of one weight a token id"
        )
    check_shape(op, "class_weight", class_weight, (vocab,), "[V]")
    check_device(op, "class_weight", class_weight, "hidden", hidden)
    if class_weight.requires_grad:
        raise ValueError(f"{op}: class_weight requires a gradient, which it does not get; pass class_weight.detach()")


def check_reduction(op: str, reduction: str, num_items: int | float | torch.Tensor | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{op}: reduction is {reduction!r}, expected "mean", "sum" or "none"')
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f'{op}: num_items divides the sum, so it goes with reduction="mean", not with "{reduction}"')
    if isinstance(num_items, torch.Tensor):  # its value is not known without waiting for its device
        if num_items.numel() != 1:
            raise ValueError(f"{op}: num_items has shape {list(num_items.shape)}, expected one number of tokens")
    elif isinstance(num_items, bool) or not isinstance(num_items, Real):
        raise TypeError(f"{op}: num_items is {num_items!r}, expected a number of tokens or a tensor of one")
    elif not 0 < num_items < math.inf:
        raise ValueError(f"{op}: num_items is {num_items}, expected a positive number of tokens")


def check_number(op: str, name: str, value: float, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """`value` as a float, if it is finite, at most `high` and at least `low` (more than `low` if `above`)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{op}: {name} is {value!r}, expected a Python number")
    if not (-math.inf < value < math.inf and (low < value if above else low <= value) and value <= high):
        bound = f"{'more than' if above else 'at least'} {low:g}" if low > -math.inf else "finite"
        bound += f" and at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{op}: {name} is {value}, expected {bound}")
    return float(value)


def check_labels(op: str, target: torch.Tensor, vocab: int, ignore_index: int | None) -> None:
    """Raises ValueError for a label outside the vocabulary, on a CPU; on a GPU this would wait for the device."""
    if target.device.type != "cpu" or not values_known(target):
        return
    outside = (target < 0) | (target >= vocab)
    if ignore_index is not None:
        outside &= target != ignore_index
    if outside.any():
        remedy = "pass ignore_index" if ignore_index is None else f"or ignore_index ({ignore_index}); mask such tokens"
        raise ValueError(f"{op}: target holds {target[outside][0].item()}, expected 0 <= target < {vocab}; {remedy}")


def values_known(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds numbers: not in a simulation, nor while torch.compile traces."""
    return not torch.compiler.is_compiling() and not isinstance(tensor, FakeTensor)
