"""Checks an op's tensors before anything is computed."""

import math
from numbers import Real
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from seqtile.kernels import LossOptions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype in which autocast computes matmuls on x's device; None outside autocast."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def check_operands(op: str, operands: dict[str, torch.Tensor]) -> None:
    """Checks that all of `operands` (name -> tensor) are plain tensors and, outside autocast, have the device and the
    dtype of the first.

    Raises TypeError for a wrong type, layout or dtype, ValueError for a wrong device.
    """
    reference, first = next(iter(operands.items()))
    for name, tensor in operands.items():
        check_dense(op, name, tensor)
        if is_traceable_wrapper_subclass(tensor):
            raise TypeError(
                f"{op}: {name} is a {type(tensor).__name__}, expected a plain tensor: it may be a shard or an encoding "
                "of one; gather it first (DTensor.full_tensor()), or dequantise it"
            )
        if tensor.dtype not in DTYPES:
            expected = ", ".join(str(dtype) for dtype in DTYPES)
            raise TypeError(f"{op}: {name} is {tensor.dtype}, expected one of {expected}; cast it first")
        check_device(op, name, tensor, reference, first)
        if tensor.dtype != first.dtype and autocast_dtype(first) is None:
            raise TypeError(
                f"{op}: {name} is {tensor.dtype}, {reference} is {first.dtype}; cast one of them, or use torch.autocast"
            )


def check_dense(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError unless `tensor` is a strided tensor whose elements are in memory."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} is a {type(tensor).__name__}, expected a tensor")
    if tensor.is_nested:
        raise TypeError(f"{op}: {name} is a nested tensor, expected a dense one; torch.cat its parts")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{op}: {name} is {layout}, expected a dense tensor; use .to_dense()")


def check_device(op: str, name: str, tensor: torch.Tensor, reference: str, first: torch.Tensor) -> None:
    if tensor.device != first.device:
        on_meta = "meta" in (tensor.device.type, first.device.type)
        remedy = "what is on meta has no values: load it first" if on_meta else "move them to one device"
        raise ValueError(f"{op}: {name} is on {tensor.device}, {reference} on {first.device}; {remedy}")


def check_shape(op: str, name: str, tensor: Any, expected: tuple[int, ...], meaning: str) -> None:
    """Raises ValueError unless `tensor` has the `expected` shape. The error names that shape in letters, `meaning`."""
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}, expected {meaning} = {list(expected)}")


def check_beside(
    op: str, name: str, tensor: torch.Tensor, hidden: torch.Tensor, expected: tuple[int, ...], meaning: str
) -> None:
    """Raises TypeError or ValueError unless `tensor` is dense, on hidden's device, and of the `expected` shape."""
    check_dense(op, name, tensor)
    check_shape(op, name, tensor, expected, meaning)
    check_device(op, name, tensor, "hidden", hidden)


def check_first_derivative(op: str) -> None:
    """Raises RuntimeError in a backward that is itself differentiated (`create_graph=True`)."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{op} has no second derivative; call its backward without create_graph=True")


def check_no_transform(op: str) -> None:
    """Raises ValueError inside torch.vmap and torch.func's transforms, such as grad and jvp."""
    if torch._C._are_functorch_transforms_active():
        raise ValueError(
            f"{op} cannot be transformed by torch.vmap or torch.func; loop over the batch, and take gradients by "
            "torch.autograd"
        )


def check_loss_options(
    op: str,
    logit_scale: float,
    softcap: float | None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    prefix: str = "",
) -> LossOptions:
    """Returns the options of logits and loss if all are in range. In errors, `prefix` precedes the logit options'
    names."""
    return LossOptions(
        check_number(op, f"{prefix or 'logit_'}scale", logit_scale, -math.inf),
        0.0 if softcap is None else check_number(op, f"{prefix}softcap", softcap, 0, above=True),
        check_number(op, "temperature", temperature, 0, above=True),
        check_number(op, "label_smoothing", label_smoothing, 0, 1),
        check_number(op, "z_loss", z_loss, 0),
    )


def check_mask(op: str, mask: torch.Tensor | None, hidden: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless `mask` is bool and has the tokens' shape and device."""
    if mask is not None:
        check_beside(op, "mask", mask, hidden, tuple(hidden.shape[:-1]), "the tokens' shape")
        if mask.dtype != torch.bool:
            raise TypeError(f"{op}: mask is {mask.dtype}, expected torch.bool, True where a token counts")


def check_reduction(op: str, reduction: str, num_items: int | float | torch.Tensor | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{op}: reduction is {reduction!r}, expected "mean", "sum" or "none"')
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f'{op}: num_items divides the sum, so it goes with reduction="mean", not with "{reduction}"')
    if isinstance(num_items, torch.Tensor):  # reading its value would wait for the device
        if num_items.numel() != 1:
            raise ValueError(f"{op}: num_items has shape {list(num_items.shape)}, expected one number of tokens")
    elif isinstance(num_items, bool) or not isinstance(num_items, Real):
        raise TypeError(f"{op}: num_items is {num_items!r}, expected a number of tokens or a tensor of one")
    elif not 0 < num_items < math.inf:
        raise ValueError(f"{op}: num_items is {num_items}, expected a positive number of tokens")


def check_number(op: str, name: str, value: float, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """Returns `value` as a float if it is finite, at most `high`, and at least `low` (above `low` if `above`)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{op}: {name} is {value!r}, expected a Python number")
    if not (-math.inf < value < math.inf and (low < value if above else low <= value) and value <= high):
        bound = f"{'more than' if above else 'at least'} {low:g}" if low > -math.inf else "finite"
        bound += f" and at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{op}: {name} is {value}, expected {bound}")
    return float(value)


def values_known(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has values: False in a simulation and while torch.compile traces."""
    return not torch.compiler.is_compiling() and not isinstance(tensor, FakeTensor)
