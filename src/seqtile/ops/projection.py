"""A linear layer inside a tiled function: products written where they are wanted, gradients added up over tiles."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from seqtile.ops.weight_grad import WeightGrad


class LowRank(NamedTuple):
    """A LoRA adapter without dropout: adds scale * (x a') b' to a projection."""

    a: torch.Tensor
    """[r, in]"""
    b: torch.Tensor
    """[out, r]"""
    scale: float


class Projection(NamedTuple):
    """y = x weight' + bias + scale * (x a') b'."""

    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None
    """[out]"""
    a: torch.Tensor | None
    """[r, in]"""
    b: torch.Tensor | None
    """[out, r]"""
    scale: float

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, adapter: LowRank | None) -> "Projection":
        return cls(weight, bias, *(adapter or (None, None, 1.0)))

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self[:4]

    def rows(self, rows: slice) -> "Projection":
        """What makes some of the outputs."""
        weight, bias, a, b = self.tensors
        return Projection(
            weight[rows], None if bias is None else bias[rows], a, None if b is None else b[rows], self.scale
        )

    def columns(self, columns: slice) -> "Projection":
        """What some of the inputs contribute; the bias is no part of that."""
        return Projection(
            self.weight[:, columns], None, None if self.a is None else self.a[:, columns], self.b, self.scale
        )

    def with_tensors(self, tensors: Sequence[torch.Tensor | None]) -> "Projection":
        return Projection(*tensors, self.scale)

    def to(self, dtype: torch.dtype) -> "Projection":
        """The operands of the products in `dtype`: copies where that changes something."""
        return self.with_tensors([None if tensor is None else tensor.to(dtype) for tensor in self.tensors])

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., out] of x [..., in], as autograd knows it."""
        y = F.linear(x, self.weight, self.bias)
        if self.a is None:
            return y
        return y + F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * self.scale

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes y [C, out] of x [C, in] into `out`. 2 C in out FLOP, with an adapter 2 C r (in + out) more."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)
        if self.a is not None:
            out.addmm_(torch.mm(x, self.a.t()), self.b.t(), alpha=self.scale)
        return out

    def backward(self, d_y: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """Writes d_x [C, in] of d_y [C, out] into `out`, or adds it there."""
        if add:
            out.addmm_(d_y, self.weight)
        else:
            torch.mm(d_y, self.weight, out=out)
        if self.a is not None:
            out.addmm_(torch.mm(d_y, self.b), self.a, alpha=self.scale)
        return out


class ProjectionGrad:
    """The gradients of a projection's tensors, summed over tiles; of those alone that `needs` names."""

    def __init__(
        self,
        projection: Projection,
        dtype: torch.dtype,
        needs: Sequence[bool],
        main_grads: Sequence[torch.Tensor | None],
    ):
        """`projection` as its parameters are; its products have `dtype`."""
        self._operands = projection.to(dtype)
        self._grads = [
            WeightGrad(tensor, main_grad=main_grad) if needed else None
            for tensor, needed, main_grad in zip(projection.tensors, needs, main_grads, strict=True)
        ]

    def add(self, d_y: torch.Tensor, x: torch.Tensor) -> None:
        """Adds what a tile contributes: d_y [C, out], x [C, in]."""
        weight, bias, a, b = self._grads
        if weight is not None:
            weight.add(d_y, x)
        if bias is not None:
            bias.add(d_y)
        if a is not None:
            a.add(torch.mm(d_y, self._operands.b).mul_(self._operands.scale), x)
        if b is not None:
            b.add(d_y, torch.mm(x, self._operands.a.t()).mul_(self._operands.scale))

    @property
    def totals(self) -> list[torch.Tensor | None]:
        """What was added so far, in float32."""
        return [None if grad is None else grad.begun() for grad in self._grads]

    def results(self) -> Iterator[torch.Tensor | None]:
        for grad in self._grads:
            yield None if grad is None else grad.result()
