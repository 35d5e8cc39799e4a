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
from seqtile.tensor_like import View


class Owners:
    """For each token of a tensor [...]: the rank that holds its values, and the index of that rank's row [n, ...] with
    them. Equal on all ranks of the group; on the CPU.

    Without `rows` each rank holds one row per token, in order. With `rows` tokens may share a row.
    """

    def __init__(self, ranks: Tensor, sp_group: SequenceParallel, rows: Tensor | None = None):
        self.ranks, self.sp_group, self.rows, self.shape = ranks, sp_group, rows, ranks.shape
        self._places: dict[torch.device, list[Tensor]] = {}
        self._rows: dict[tuple[int, torch.device], Tensor] = {}
        self._by_token: Owners | None = None

    def by_token(self) -> "Owners":
        """Returns the owners of values with one row per token."""
        if self.rows is None:
            return self
        self._by_token = self._by_token or Owners(self.ranks, self.sp_group)
        return self._by_token

    def flat(self) -> "Owners":
        """Returns the owners of the same tokens in one dimension."""
        return Owners(self.ranks.flatten(), self.sp_group, None if self.rows is None else self.rows.flatten())

    def places(self, device: torch.device) -> list[Tensor]:
        """For each rank, returns the indices of its tokens among all flattened tokens."""
        if device not in self._places:
            ranks = self.ranks.flatten()
            found = [(ranks == rank).nonzero().squeeze(1) for rank in range(self.sp_group.size)]
            self._places[device] = [places.to(device, non_blocking=True) for places in found]
        return self._places[device]

    def own_rows(self, device: torch.device) -> Tensor | None:
        """Returns the row index of each of this rank's tokens; None if each token has its own row, in order."""
        return None if self.rows is None else self._rows_of(self.sp_group.rank, device)

    def _rows_of(self, rank: int, device: torch.device) -> Tensor:
        if (rank, device) not in self._rows:
            rows = self.rows.flatten()[self.ranks.flatten() == rank]
            self._rows[rank, device] = rows.to(device, non_blocking=True)
        return self._rows[rank, device]

    def own(self, values: Tensor) -> Tensor:
        """Returns this rank's part [n, *] of the values [..., *] of all tokens. Differentiable."""
        if values.shape[: len(self.shape)] != self.shape:
            raise ValueError(f"expected values of the tokens {list(self.shape)}, got {list(values.shape)}")
        flat = values.reshape(self.shape.numel(), *values.shape[len(self.shape) :])
        return flat[self.places(values.device)[self.sp_group.rank]]

    def summed(self, gradients: Tensor, rows: int) -> Tensor:
        """Returns the gradients of this rank's rows from those of its tokens [n, *]. Sums the gradients of tokens that
        share a row in float32."""
        if (index := self.own_rows(gradients.device)) is None:
            return gradients
        dtype = torch.promote_types(gradients.dtype, torch.float32)
        total = gradients.new_zeros((rows, *gradients.shape[1:]), dtype=dtype)
        return total.index_add_(0, index, gradients.to(dtype)).to(gradients.dtype)

    def whole(self, rows: Tensor) -> Tensor:
        """Returns the values [..., *] of all tokens from each rank's rows. One all-gather; not differentiable."""
        places, device = self.places(rows.device), rows.device
        rows, size = rows.detach(), self.sp_group.size
        if self.rows is not None and size == 1:
            return rows[self.own_rows(device)].view(*self.shape, *rows.shape[1:])
        most = max(map(len, places)) if self.rows is None else len(rows)  # with shared rows all ranks have equally many
        own = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, most - len(rows)]).contiguous()
        parts = gather(own, self.sp_group)
        found = own.new_empty((*self.shape, *own.shape[1:]))  # not a view, which could not be changed in place
        for rank, (where, part) in enumerate(zip(places, parts, strict=True)):
            taken = slice(len(where)) if self.rows is None else self._rows_of(rank, device)
            found.view(-1, *own.shape[1:])[where] = part[taken]
        return found

    def viewed(self, view: View, device: torch.device | None = None) -> tuple["Owners", Tensor | None]:
        """Returns the owners of a view of the tokens, and the indices of this rank's rows in the view (None for all in
        order)."""
        tokens = torch.arange(self.shape.numel(), device=device).view(*self.shape, 1)
        tokens = view(tokens).squeeze(-1).cpu()  # waits for the device if it holds an index
        ranks = self.ranks.flatten()
        if self.rows is not None:
            return Owners(ranks[tokens], self.sp_group, self.rows.flatten()[tokens]), None
        owners, mine = Owners(ranks[tokens], self.sp_group), ranks == self.sp_group.rank
        row_of = mine.cumsum(0) - 1
        taken = row_of[tokens[owners.ranks == self.sp_group.rank]]
        return owners, None if taken.equal(row_of[mine]) else taken

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Owners):
            return self is other
        shares = [each.rows is not None for each in (self, other)]
        return self.ranks.equal(other.ranks) and (not any(shares) or (all(shares) and self.rows.equal(other.rows)))

    __hash__ = object.__hash__


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
        return rows[owners.own_rows(rows.device)]

    @staticmethod
    def backward(node, gradient: Tensor) -> tuple[Tensor, None]:
        return node.owners.summed(gradient, node.rows), None


def of_tokens(rows: Tensor, owners: Owners) -> Tensor:
    """Returns the values [n, *] of this rank's tokens; copies if tokens share rows. Differentiable."""
    return rows if owners.rows is None else _OfTokens.apply(rows, owners)


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
