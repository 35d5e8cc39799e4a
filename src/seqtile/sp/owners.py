"""Which rank of a group holds which tokens, and the collectives that give each rank the values of all."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from seqtile.ops.checks import check_first_derivative
from seqtile.protocols import OF_ALL_RANKS
from seqtile.sp.groups import SequenceParallel, add_up, gather
from seqtile.tensor_like import View


class Owners:
    """For each of some tokens [...] the rank that holds its values, and which of that rank's rows [n, ...] they are:
    the same on every rank of the group, on the CPU.

    Without `rows` each rank holds a row of each of its tokens, in their order. With them tokens may share rows.
    """

    def __init__(self, ranks: Tensor, sp_group: SequenceParallel, rows: Tensor | None = None):
        self.ranks, self.sp_group, self.rows, self.shape = ranks, sp_group, rows, ranks.shape
        self._places: dict[torch.device, list[Tensor]] = {}
        self._rows: dict[tuple[int, torch.device], Tensor] = {}
        self._by_token: Owners | None = None

    @classmethod
    def of_sequences(cls, rows: int, length: int, local: int, sp_group: SequenceParallel) -> "Owners":
        """Returns those of [rows, length] tokens, of which each rank holds `local` neighbours in every row."""
        return cls((torch.arange(length) // local).to(torch.int16).expand(rows, -1), sp_group)

    def by_token(self) -> "Owners":
        """Returns the owners of values that each rank has a row of for each of its tokens."""
        if self.rows is None:
            return self
        self._by_token = self._by_token or Owners(self.ranks, self.sp_group)
        return self._by_token

    def flat(self) -> "Owners":
        """Returns those of the same tokens in one dimension."""
        return Owners(self.ranks.flatten(), self.sp_group, None if self.rows is None else self.rows.flatten())

    def places(self, device: torch.device) -> list[Tensor]:
        """Returns for each rank where its tokens are among all tokens, made flat."""
        if device not in self._places:
            ranks = self.ranks.flatten()
            found = [(ranks == rank).nonzero().squeeze(1) for rank in range(self.sp_group.size)]
            self._places[device] = [places.to(device, non_blocking=True) for places in found]
        return self._places[device]

    def own_rows(self, device: torch.device) -> Tensor | None:
        """Returns for each of this rank's tokens which of its rows has the values; None if they follow each other."""
        return None if self.rows is None else self._rows_of(self.sp_group.rank, device)

    def _rows_of(self, rank: int, device: torch.device) -> Tensor:
        if (rank, device) not in self._rows:
            rows = self.rows.flatten()[self.ranks.flatten() == rank]
            self._rows[rank, device] = rows.to(device, non_blocking=True)
        return self._rows[rank, device]

    def own(self, values: Tensor) -> Tensor:
        """Returns of values [..., *] of all tokens those of this rank's tokens, [n, *]. With gradients."""
        if values.shape[: len(self.shape)] != self.shape:
            raise ValueError(f"expected values of the tokens {list(self.shape)}, got {list(values.shape)}")
        flat = values.reshape(self.shape.numel(), *values.shape[len(self.shape) :])
        return flat[self.places(values.device)[self.sp_group.rank]]

    def summed(self, gradients: Tensor, rows: int) -> Tensor:
        """Returns the gradients of this rank's rows from those of its tokens [n, *]; where tokens share a row, their
        sum, in float32."""
        if (index := self.own_rows(gradients.device)) is None:
            return gradients
        dtype = torch.promote_types(gradients.dtype, torch.float32)
        total = gradients.new_zeros((rows, *gradients.shape[1:]), dtype=dtype)
        return total.index_add_(0, index, gradients.to(dtype)).to(gradients.dtype)

    def whole(self, rows: Tensor) -> Tensor:
        """Returns the values [..., *] of all tokens from each rank's rows. One all-gather; without gradients."""
        places, device = self.places(rows.device), rows.device
        rows, size = rows.detach(), self.sp_group.size
        if self.rows is not None and size == 1:
            return rows[self.own_rows(device)].view(*self.shape, *rows.shape[1:])
        most = max(map(len, places)) if self.rows is None else len(rows)  # shared rows are as many on every rank
        own = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, most - len(rows)]).contiguous()
        parts = gather(own, self.sp_group)
        found = own.new_empty((*self.shape, *own.shape[1:]))  # no view, which could not be changed in place
        for rank, (where, part) in enumerate(zip(places, parts, strict=True)):
            taken = slice(len(where)) if self.rows is None else self._rows_of(rank, device)
            found.view(-1, *own.shape[1:])[where] = part[taken]
        return found

    def viewed(self, view: View, device: torch.device | None = None) -> tuple["Owners", Tensor | None]:
        """Returns the owners of a view of the tokens, and which of this rank's rows it then has, in which order; None
        if all, in theirs."""
        tokens = torch.arange(self.shape.numel(), device=device).view(*self.shape, 1)
        tokens = view(tokens).squeeze(-1).cpu()  # waits for the device where an index is there
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
    """The values of all tokens, on every rank. All ranks compute the same from them, and reducers average gradients:
    so that of a rank's rows is multiplied by the size of the group."""

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
    """From the rows that tokens share to a row of each token."""

    @staticmethod
    def forward(node, rows: Tensor, owners: Owners) -> Tensor:
        node.owners, node.rows = owners, len(rows)
        return rows[owners.own_rows(rows.device)]

    @staticmethod
    def backward(node, gradient: Tensor) -> tuple[Tensor, None]:
        return node.owners.summed(gradient, node.rows), None


def of_tokens(rows: Tensor, owners: Owners) -> Tensor:
    """Returns the values [n, *] of this rank's tokens. Copies them where tokens share rows; with gradients."""
    return rows if owners.rows is None else _OfTokens.apply(rows, owners)


class _Summed(torch.autograd.Function):
    """The sum of each rank's tensor, on every rank; gradients as in `_Gathered`. One all-reduce."""

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
    """The tensor itself, whose gradient is the mean of what ranks have for it. One all-reduce in the backward."""

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
    """Says if a tensor was computed from values of all ranks' tokens, other than by `with_whole_gradient`. Its gradient
    has to be the same on every rank, so it is no operand where each rank computes its own rows."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        function = getattr(node, "_forward_cls", None)
        if getattr(function, OF_ALL_RANKS, False):
            return True
        if node is not None and node not in seen and function is not _WholeGradient:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return False
