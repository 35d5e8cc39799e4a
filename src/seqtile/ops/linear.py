"""Linear layers inside a tiled function: the matmuls of a chunk, and what each adds to weight gradients.

Parameters are passed as tuples of parts, such as `Projection`. A part is a NamedTuple whose first `TENSORS` fields are
tensors or None, and whose other fields are numbers. The gradient sums are the same parts with a `WeightGrad` for each
tensor, see `NodeParams`.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from seqtile.ops.weight_grads import main_grad_of, weight_grads


class LowRank(NamedTuple):
    """A LoRA adapter without dropout: adds scale * (x a') b' to a projection."""

    a: torch.Tensor
    """[r, in]"""
    b: torch.Tensor
    """[out, r]"""
    scale: float
    """The factor of the adapter's output, such as alpha / r."""


class QuantizedWeight:
    """A frozen weight that is stored in fewer bits; `dequantize` returns it as an [out, in] tensor. For pytrees of
    parameters it is a leaf."""

    def __init__(self, shape: torch.Size, dequantize: Callable[[], torch.Tensor]):
        self.shape, self.dequantize = shape, dequantize


class Projection(NamedTuple):
    """A linear layer with at most one adapter: y = x weight' + bias + scale * (x a') b'."""

    weight: torch.Tensor | None
    """[out, in]; None if the weight is quantized."""
    bias: torch.Tensor | None
    """[out]"""
    a: torch.Tensor | None = None
    """[r, in]"""
    b: torch.Tensor | None = None
    """[out, r]"""
    scale: float = 1.0
    quantized: QuantizedWeight | None = None
    """The weight, if it is quantized."""
    TENSORS = 4

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, adapter: LowRank | None) -> "Projection":
        return cls(weight, bias, *(adapter or ()))

    @property
    def shape(self) -> torch.Size:
        """[out, in]"""
        return self.weight.shape if self.quantized is None else self.quantized.shape

    def dequantized(self) -> "Projection":
        """Returns the projection with a plain weight [out, in]. A quantized weight is copied: drop the result once it
        has been used."""
        if self.quantized is None:
            return self
        return self._replace(weight=self.quantized.dequantize(), quantized=None)

    def slice_out(self, rows: slice) -> "Projection":
        """Returns the projection to some of the outputs. Of gradient sums, see `NodeParams`, those of these outputs, in
        the same buffers."""
        weight, bias, b = [None if part is None else part[rows] for part in (self.weight, self.bias, self.b)]
        return Projection(weight, bias, self.a, b, self.scale)

    def slice_in(self, columns: slice) -> "Projection":
        """Returns the projection from some of the inputs, without the bias."""
        a = None if self.a is None else self.a[:, columns]
        return Projection(self.weight[:, columns], None, a, self.b, self.scale)

    def to(self, dtype: torch.dtype) -> "Projection":
        """Returns the operands of the products in `dtype`, copied if their dtype differs."""
        tensors = self.dequantized()[:4]
        return Projection(*[None if tensor is None else tensor.to(dtype) for tensor in tensors], self.scale)

    def differentiable(self, x: torch.Tensor) -> torch.Tensor:
        """Computes y [..., out] of x [..., in] with operations that autograd records."""
        y = F.linear(x, self.dequantized().weight.to(x.dtype) if self.quantized else self.weight, self.bias)
        if self.a is None:
            return y
        return y + F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * self.scale

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes y [C, out] of x [C, in] to `out`. 2 C in out FLOP; an adapter adds 2 C r (in + out)."""
        if self.bias is None:
            torch.mm(x, self.weight.T, out=out)
        else:
            torch.addmm(self.bias, x, self.weight.T, out=out)
        if self.a is not None:
            out.addmm_(torch.mm(x, self.a.T), self.b.T, alpha=self.scale)
        return out

    def backward(self, d_y: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """Computes d_x [C, in] of d_y [C, out], and writes it to `out` or, with `add`, adds it there."""
        if add:
            out.addmm_(d_y, self.weight)
        else:
            torch.mm(d_y, self.weight, out=out)
        if self.a is not None:
            out.addmm_(torch.mm(d_y, self.b), self.a, alpha=self.scale)
        return out

    def add_gradients(self, sums: "Projection", d_y: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the gradients of a chunk (d_y [C, out], x [C, in]) to `sums`, see `NodeParams`."""
        if sums.weight is not None:
            sums.weight.add(d_y, x)
        if sums.bias is not None:
            sums.bias.add(d_y)
        if sums.a is not None:
            sums.a.add(torch.mm(d_y, self.b).mul_(self.scale), x)
        if sums.b is not None:
            sums.b.add(d_y, torch.mm(x, self.a.T).mul_(self.scale))


def tensors_of(parts: Iterable[Any]) -> list[Any]:
    """Returns all parts' tensors (or their replacements) in order; None where a part has none."""
    return [tensor for part in parts if part is not None for tensor in part[: part.TENSORS]]


def with_tensors(parts: Iterable[Any], tensors: Iterable[Any]) -> list[Any]:
    """Returns the parts with other tensors, given in the order of `tensors_of`. Numbers stay."""
    given = iter(tensors)
    return [part and type(part)(*islice(given, part.TENSORS), *part[part.TENSORS :]) for part in parts]


def views_of(parts: Iterable[Any]) -> list[torch.Tensor | None]:
    """Returns a view of each tensor of `tensors_of`, so that gradients arrive in the reverse of this order, as untiled.
    ZeRO-1 and -2 fill their buckets as gradients arrive, so ranks with and without chunks must
    agree."""
    return [None if tensor is None else tensor.view_as(tensor) for tensor in tensors_of(parts)]


def main_grads_of(parts: Iterable[Any]) -> list[torch.Tensor | None]:
    """Returns the `main_grad` of every tensor, see `main_grad_of`."""
    return [None if tensor is None else main_grad_of(tensor) for tensor in tensors_of(parts)]


class NodeParams(NamedTuple):
    """The parameters of a node: the parts without tensors, which the node saves, and every tensor's `main_grad`."""

    parts: list[Any]
    main_grads: list[torch.Tensor | None]

    @classmethod
    def of(cls, parts: Sequence[Any]) -> "NodeParams":
        return cls(with_tensors(parts, repeat(None)), main_grads_of(parts))

    def restored(self, saved: Sequence[torch.Tensor | None], needs: Sequence[bool]) -> tuple[list[Any], list[Any]]:
        """Returns the parts with the saved tensors, and with the sums of their gradients (`weight_grads`) instead.
        `saved` and `needs` are in the order of `tensors_of`."""
        sums = weight_grads(saved, needs, self.main_grads)
        return with_tensors(self.parts, saved), with_tensors(self.parts, sums)
