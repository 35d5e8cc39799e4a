"""Some rows of several projections of one input as one: a single product for queries, keys and values of a group."""

from collections.abc import Iterator, Sequence

import torch

from seqtile.ops.projection import Projection, ProjectionGrad
from seqtile.ops.weight_grad import WeightGrad


class Stack:
    """`rows` of each of `parts`, one above the other, in `dtype`: a copy. Adapters become one, whose b has blocks."""

    def __init__(self, parts: Sequence[Projection], rows: Sequence[slice], dtype: torch.dtype):
        self._rows = rows
        self._parts = [part.rows(of_part).to(dtype) for part, of_part in zip(parts, rows, strict=True)]
        self.projection = self._stacked()

    @property
    def width(self) -> int:
        """Of what it makes of a token."""
        return len(self.projection.weight)

    def gradients(self, needs: Sequence[Sequence[bool]]) -> ProjectionGrad:
        """Sums for the stack: of weights, biases, and the halves of adapters, where a part needs them."""
        wanted = [any(of_parts) for of_parts in zip(*needs, strict=True)]
        return ProjectionGrad(self.projection, self.projection.weight.dtype, wanted, [None] * 4)

    def spread(self, grads: ProjectionGrad, sums: Sequence[Sequence[WeightGrad | None]]) -> None:
        """Adds the sums of the stack to those of the whole parts: weight, bias, a and b of each; None is not needed."""
        d_weight, d_bias, d_a, d_b = grads.totals
        for part, whole, (of_weight, of_bias, of_a, of_b), (rows, ranks) in zip(
            self._parts, self._rows, sums, self._blocks(), strict=True
        ):
            if of_weight is not None:
                of_weight.add_rows(whole, d_weight[rows])
            if of_bias is not None:
                of_bias.add_rows(whole, d_bias[rows])
            if of_a is not None:
                of_a.add_whole(d_a[ranks])
            if of_b is not None:
                of_b.add_rows(whole, d_b[rows, ranks] * part.scale)

    def _stacked(self) -> Projection:
        parts = self._parts
        weight, bias = torch.cat([part.weight for part in parts]), None
        if any(part.bias is not None for part in parts):
            bias = torch.cat([weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts])
        if all(part.a is None for part in parts):
            return Projection(weight, bias, None, None, 1.0)
        a = torch.cat([part.a for part in parts if part.a is not None])
        b = weight.new_zeros(len(weight), len(a))
        for part, (rows, ranks) in zip(parts, self._blocks(), strict=True):
            if part.a is not None:
                b[rows, ranks] = part.b * part.scale
        return Projection(weight, bias, a, b, 1.0)

    def _blocks(self) -> Iterator[tuple[slice, slice]]:
        """For each part, its rows of the stack, and the ranks that its adapter has there."""
        row = rank = 0
        for part in self._parts:
            rows = slice(row, row + len(part.weight))
            ranks = slice(rank, rank + (0 if part.a is None else len(part.a)))
            row, rank = rows.stop, ranks.stop
            yield rows, ranks
