"""Facts about torch's functions for Tensor subclasses without values of their own.

A `View` cuts or flattens tokens. Made for one tensor [..., K], it applies to any other with the same tokens, such as
hidden states and their logits.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

View = Callable[[torch.Tensor], torch.Tensor]


class CrossEntropy(NamedTuple):
    """The arguments of torch's cross_entropy behind logits and target."""

    weight: torch.Tensor | None = None
    size_average: None = None
    ignore_index: int = -100
    reduce: None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def is_deprecated(self) -> bool:
        """True if size_average or reduce are given, which torch has given up for `reduction`."""
        return not (self.size_average is self.reduce is None)


def view_of(name: str, shape: torch.Size, /, *args: Any, **kwargs: Any) -> Any:
    """Returns the View, or a tuple of Views, that the function `name` makes of a tensor of this shape, given further
    arguments; NotImplemented if it does not make a view of tokens."""
    return _VIEWS[name](shape, *args, **kwargs)


def input_first(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of a call of torch's with the first one by position, also where it was given by name."""
    name = next((name for name in ("input", "tensor") if not args and name in kwargs), None)
    return (args, kwargs) if name is None else ((kwargs[name],), {key: kwargs[key] for key in kwargs if key != name})


def _reshape(shape: torch.Size, /, *to: Any, **kwargs: Any) -> Any:
    if not to and len(kwargs) == 1 and kwargs.keys() <= {"shape", "size"}:
        to, kwargs = (*kwargs.values(),), {}
    sizes = tuple(to[0]) if len(to) == 1 and not isinstance(to[0], int | torch.dtype) else to
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes) or sizes[-1] != shape[-1]:
        return NotImplemented
    return lambda tensor: tensor.reshape(*sizes[:-1], tensor.shape[-1])


def _flatten(shape: torch.Size, /, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = end_dim % len(shape)
    return NotImplemented if last == len(shape) - 1 else lambda tensor: tensor.flatten(start_dim, last)


def _index(shape: torch.Size, /, index: Any) -> Any:
    entries = index if isinstance(index, tuple) else (index,)
    tensors = [entry for entry in entries if isinstance(entry, torch.Tensor)]
    plain = [entry for entry in entries if entry is None or entry is Ellipsis or type(entry) in (int, slice)]
    if len(tensors) + len(plain) < len(entries) or any(tensor.dtype == torch.uint8 for tensor in tensors):
        return NotImplemented
    entries = tuple(entry.clone() if isinstance(entry, torch.Tensor) else entry for entry in entries)
    named = [entry for entry in entries if entry is not Ellipsis]
    taken = sum(entry.dim() if getattr(entry, "dtype", 0) == torch.bool else entry is not None for entry in named)
    behind_ellipsis = len(named) < len(entries) and entries[-1] is not Ellipsis
    if taken >= len(shape) or behind_ellipsis:  # the last entry is that of the last dimension
        if taken > len(shape) or not isinstance(named[-1], slice) or named[-1] != slice(None):
            return NotImplemented
    return lambda tensor: tensor[entries]


def _split(shape: torch.Size, /, split_size: Any, dim: int = 0) -> Any:
    dim, pieces = dim % len(shape), []
    if dim == len(shape) - 1:
        return NotImplemented
    for piece in torch.empty(shape[dim], device="meta").split(split_size):
        start = pieces[-1][1] if pieces else 0
        pieces.append((start, start + len(piece)))
    return tuple(_index(shape, (*[slice(None)] * dim, slice(*piece))) for piece in pieces)


def _unbind(shape: torch.Size, /, dim: int = 0) -> Any:
    return NotImplemented if dim or len(shape) < 2 else tuple(_index(shape, i) for i in range(shape[0]))


_VIEWS: dict[str, Callable] = {"view": _reshape, "reshape": _reshape, "flatten": _flatten, "__getitem__": _index}
_VIEWS |= {"split": _split, "unbind": _unbind}
VIEWS = frozenset(_VIEWS)
"""The names that `view_of` knows."""

_PROPERTIES = "shape dtype device ndim layout requires_grad grad_fn is_leaf grad _base _version is_cuda is_cpu is_meta"
_PROPERTIES += " is_sparse is_quantized is_nested is_mps is_xpu retains_grad itemsize nbytes is_mkldnn _backward_hooks"
_PROPERTIES += " _post_accumulate_grad_hooks names"
_METHODS = "size dim numel stride nelement ndimension element_size is_floating_point is_complex is_contiguous __len__"
_METHODS += " register_hook retain_grad get_device storage_offset is_inference is_same_size __hash__ backward"
_METHODS += " requires_grad_"
ABOUT = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(torch.Tensor, name)}
ABOUT |= {getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)}
ABOUT |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference}
ABOUT |= {torch.autograd.grad, torch.autograd.backward}
ABOUT |= {torch.Tensor.grad.__set__, torch.Tensor.requires_grad.__set__}
"""The functions that ask of a tensor no values, but its shape, dtype, device and place in a graph."""
_IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}
_IN_PLACE.add("__setitem__")


def is_in_place(name: str, kwargs: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Returns whether a function of this name changes its first argument."""
    return name in _IN_PLACE or bool(kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))
