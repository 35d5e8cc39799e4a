"""Records which rank of a group holds which tokens; and the collectives that give every rank the values of all
tokens."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from seqtile.ops.checks import check_first_derivative
from seqtile.ops.graph import nodes_behind
from seqtile.protocols import OF_ALL_RANKS
from seqtile.sp.groups import SequenceParallel, add_up, gather
from seqtile.sp.shards import places_of
from seqtile.tensor_like import View

Index = Tensor | slice
"""Indices in a tensor's first dimension: a slice where they are one run, as those of contiguous parts."""


class Owners:
    """Maps each token of a tensor [...] to the rank that has its values, and to the row of that rank's tensor [n, ...]:
    `places` has rank * most + row. Equal on all ranks of the group; on the CPU. `is_shared`: tokens may share a row."""

    def __init__(self, places: Tensor, most: int, sp_group: SequenceParallel, is_shared: bool = True):
        self.places, self.most, self.sp_group, self.is_shared = places, most, sp_group, is_shared
        self.shape = places.shape
        self._by_token: Owners | None = None
        self._on: dict[torch.device, tuple[Index, Index, Index]] = {}

    @classmethod
    def of_ranks(cls, ranks: Tensor, sp_group: SequenceParallel) -> "Owners":
        """Returns owners of which each rank holds one row for each of its tokens, in order."""
        flat = ranks.flatten().long()
        counts = flat.bincount(minlength=sp_group.size)
        most = int(counts.max())
        skipped = torch.arange(sp_group.size) * most - (counts.cumsum(0) - counts)  # places behind the rows of a rank
        places = torch.arange(len(flat)) + skipped.repeat_interleave(counts)
        if (flat[1:] < flat[:-1]).any():  # a rank has several runs of tokens
            places = torch.empty_like(flat).index_copy_(0, flat.argsort(stable=True), places)
        return cls(places.view(ranks.shape), most, sp_group, is_shared=False)

    @classmethod
    def of_parts(cls, rows: int, length: int, sp_group: SequenceParallel) -> "Owners":
        """Returns owners of [rows, length] tokens, of which each rank holds an equal part of each row, in order."""
        local, places = -(-length // sp_group.size), places_of(length, sp_group.nodes)
        if rows == 1:
            return cls(places[None], local, sp_group, is_shared=False)
        return cls.of_ranks((places // local).expand(rows, -1), sp_group)

    @property
    def ranks(self) -> Tensor:
        """The rank that holds each token's values."""
        return self.places // self.most

    def by_token(self) -> "Owners":
        """Returns the owners of values with one row per token."""
        if not self.is_shared:
            return self
        self._by_token = self._by_token or Owners.of_ranks(self.ranks, self.sp_group)
        return self._by_token

    def on(self, device: torch.device) -> tuple[Index, Index, Index]:
        """Returns indices on a device: the places of all flattened tokens, this rank's tokens among these, and their
        rows, a tensor if tokens share rows."""
        if device not in self._on:
            places, first = self.places.flatten(), self.sp_group.rank * self.most
            tokens = ((places >= first) & (places < first + self.most)).nonzero().squeeze(1)
            rows = places[tokens] - first
            self._on[device] = _index(places, device), _index(tokens, device), _index(rows, device, not self.is_shared)
        return self._on[device]

    def own(self, values: Tensor) -> Tensor:
        """Returns this rank's part [n, *] of the values [..., *] of all tokens. Differentiable."""
        if values.shape[: len(self.shape)] != self.shape:
            raise ValueError(f"expected values of the tokens {list(self.shape)}, got {list(values.shape)}")
        flat = values.reshape(self.shape.numel(), *values.shape[len(self.shape) :])
        return flat[self.on(values.device)[1]]

    def summed(self, gradients: Tensor, rows: int) -> Tensor:
        """Returns the gradients of this rank's rows from those of its tokens [n, *]. Sums the gradients of tokens that
        share a row in float32."""
        if not self.is_shared:
            return gradients
        dtype = torch.promote_types(gradients.dtype, torch.float32)
        total = gradients.new_zeros((rows, *gradients.shape[1:]), dtype=dtype)
        index = self.on(gradients.device)[2]
        return total.index_add_(0, index, gradients.to(dtype)).to(gradients.dtype)

    def whole(self, rows: Tensor) -> Tensor:
        """Returns the values [..., *] of all tokens from each rank's rows. One all-gather; not differentiable."""
        own, missing = rows.detach(), self.most - len(rows)
        own = F.pad(own, [0, 0] * (own.dim() - 1) + [0, missing]) if missing else own
        places, found = self.on(own.device)[0], gather(own, self.sp_group).flatten(0, 1)
        if isinstance(places, slice):
            return found[places].view((*self.shape, *rows.shape[1:])).clone()  # a view could not be changed in place
        return found[places.view(self.shape)]

    def viewed(self, view: View, device: torch.device | None = None) -> tuple["Owners", Tensor | None]:
        """Returns the owners of a view of the tokens, and the indices of this rank's rows in the view (None for all in
        order)."""
        places = self.places if device is None else self.places.to(device, non_blocking=True)
        places = view(places[..., None]).squeeze(-1).cpu()  # waits for the device if the view holds an index
        seen = Owners(places, self.most, self.sp_group)
        if self.is_shared:
            return seen, None
        (*_, rows), (*_, own_rows) = self.on(places.device), seen.on(places.device)
        is_same = own_rows.equal(torch.arange(rows.stop))
        return Owners.of_ranks(seen.ranks, self.sp_group), None if is_same else own_rows

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Owners):
            return self is other
        return (self.is_shared, self.most) == (other.is_shared, other.most) and self.places.equal(other.places)

    __hash__ = object.__hash__


def _index(index: Tensor, device: torch.device, may_be_slice: bool = True) -> Index:
    start = int(index[0]) if len(index) else 0
    run = slice(start, start + len(index))
    if may_be_slice and index.equal(torch.arange(run.start, run.stop)):
        return run
    return index.to(device, non_blocking=True)


class _Gathered(torch.autograd.Function):
    """Gathers the values of all tokens on every rank. All ranks compute the same from them and reducers average
    gradients, so the backward multiplies the gradient of a rank's rows by the size of the group."""

    seqtile_of_all_ranks = True

    @staticmethod
    def forward(node, rows: Tensor, owners: Owners) -> Tensor:
        node.owners, node.rows = owners, len(rows)
        found = owners.whole(rows)
        if not found.is_floating_point():
            node.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(node, gradient: Tensor) -> tuple[Tensor, None]:
        check_first_derivative("values over ranks")
        own = node.owners.own(gradient) * node.owners.sp_group.size
        return node.owners.summed(own, node.rows), None


class _OfTokens(torch.autograd.Function):
    """Expands rows that tokens share to one row per token."""

    @staticmethod
    def forward(node, rows: Tensor, owners: Owners) -> Tensor:
        node.owners, node.rows = owners, len(rows)
        return rows[owners.on(rows.device)[2]]

    @staticmethod
    def backward(node, gradient: Tensor) -> tuple[Tensor, None]:
        return node.owners.summed(gradient, node.rows), None


def of_tokens(rows: Tensor, owners: Owners) -> Tensor:
    """Returns the values [n, *] of this rank's tokens; copies if tokens share rows. Differentiable."""
    return _OfTokens.apply(rows, owners) if owners.is_shared else rows


class _Summed(torch.autograd.Function):
    """The sum of the ranks' tensors, on every rank; gradients as in `_Gathered`. One all-reduce."""

    seqtile_of_all_ranks = True

    @staticmethod
    def forward(node, own: Tensor, sp_group: SequenceParallel) -> Tensor:
        node.size = sp_group.size
        return add_up(own, sp_group)

    @staticmethod
    def backward(node, gradient: Tensor) -> tuple[Tensor, None]:
        check_first_derivative("values over ranks")
        return gradient * node.size, None


class _WholeGradient(torch.autograd.Function):
    """Returns the tensor itself. Its gradient is the mean of the ranks' gradients. One all-reduce in the backward."""

    @staticmethod
    def forward(node, whole: Tensor, sp_group: SequenceParallel) -> Tensor:
        node.sp_group = sp_group
        return whole.view_as(whole)

    @staticmethod
    def backward(node, gradient: Tensor) -> tuple[Tensor, None]:
        return add_up(gradient, node.sp_group) / node.sp_group.size, None


with_whole_gradient: Callable[[Tensor, SequenceParallel], Tensor] = _WholeGradient.apply
gathered: Callable[[Tensor, Owners], Tensor] = _Gathered.apply
summed: Callable[[Tensor, SequenceParallel], Tensor] = _Summed.apply


def depends_on_all_ranks(tensor: Tensor) -> bool:
    """Returns whether a tensor was computed from values of all ranks' tokens, other than by `with_whole_gradient`. Its
    gradient must be the same on every rank, so it cannot be used where each rank computes only its own rows."""

    def function(node: Node) -> Any:
        return getattr(node, "_forward_cls", None)

    nodes = nodes_behind([tensor.grad_fn], stops=lambda node: function(node) is _WholeGradient)
    return any(getattr(function(node), OF_ALL_RANKS, False) for node in nodes)
