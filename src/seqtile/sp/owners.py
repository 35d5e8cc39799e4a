"""Which rank of a group holds which tokens, and what travels between ranks so that each has those of all."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from seqtile.ops.checks import check_first_derivative
from seqtile.protocols import OF_ALL_RANKS
from seqtile.sp.groups import SequenceParallel
from seqtile.tensor_like import View


class Owners:
    """For each of some tokens [...] the rank that holds it: the same on every rank of the group, on the CPU. A rank's
    rows [n, ...] are its tokens in their order there."""

    def __init__(self, ranks: Tensor, sp_group: SequenceParallel):
        self.ranks, self.sp_group, self.shape = ranks, sp_group, ranks.shape
        self._places: dict[torch.device, list[Tensor]] = {}

    @classmethod
    def of_sequences(cls, rows: int, length: int, local: int, sp_group: SequenceParallel) -> "Owners":
        """Returns those of [rows, length] tokens, of which each rank holds `local` neighbours in every row."""
        return cls((torch.arange(length) // local).to(torch.int16).expand(rows, -1), sp_group)

    def places(self, device: torch.device) -> list[Tensor]:
        """Returns for each rank where its rows are among all tokens, made flat."""
        if device not in self._places:
            ranks = self.ranks.flatten()
            found = [(ranks == rank).nonzero().squeeze(1) for rank in range(self.sp_group.size)]
            self._places[device] = [places.to(device, non_blocking=True) for places in found]
        return self._places[device]

    def own(self, values: Tensor) -> Tensor:
        """Returns this rank's rows [n, ...] of values [..., *] that it has of all tokens. With gradients."""
        if values.shape[: len(self.shape)] != self.shape:
            raise ValueError(f"expected values of the tokens {list(self.shape)}, got {list(values.shape)}")
        flat = values.reshape(self.shape.numel(), *values.shape[len(self.shape) :])
        return flat[self.places(values.device)[self.sp_group.rank]]

    def whole(self, rows: Tensor) -> Tensor:
        """Returns the values [..., *] of all tokens from each rank's rows. One all-gather; without gradients."""
        places = self.places(rows.device)
        most = max(map(len, places))
        own = F.pad(rows.detach(), [0, 0] * (rows.dim() - 1) + [0, most - len(rows)])
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in places]
        dist.all_gather(parts, own.contiguous(), group=self.sp_group.group)
        found = own.new_empty((*self.shape, *own.shape[1:]))  # no view, which could not be changed in place
        for where, part in zip(places, parts, strict=True):
            found.view(-1, *own.shape[1:])[where] = part[: len(where)]
        return found

    def viewed(self, view: View, device: torch.device | None = None) -> tuple["Owners", Tensor | None]:
        """Returns the owners of a view of the tokens, and which of this rank's rows it then has, in which order; None
        if all, in theirs."""
        tokens = torch.arange(self.shape.numel(), device=device).view(*self.shape, 1)
        tokens = view(tokens).squeeze(-1).cpu()  # waits for the device where an index is there
        owners = Owners(self.ranks.flatten()[tokens], self.sp_group)
        mine = self.ranks.flatten() == self.sp_group.rank
        row_of = mine.cumsum(0) - 1
        taken = row_of[tokens[owners.ranks == self.sp_group.rank]]
        return owners, None if taken.equal(row_of[mine]) else taken

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Owners) and self.ranks.equal(other.ranks))

    __hash__ = object.__hash__


class _Gathered(torch.autograd.Function):
    """The values of all tokens, on every rank. All ranks compute the same from them, and reducers average gradients:
    so that of a rank's rows is multiplied by the size of the group."""

    seqtile_of_all_ranks = True

    @staticmethod
    def forward(node, rows: Tensor, owners: Owners) -> Tensor:
        node.owners = owners
        found = owners.whole(rows)
        if not found.is_floating_point():
            node.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(node, gradient: Tensor) -> tuple[Tensor, None]:
        check_first_derivative("values over ranks")
        return node.owners.own(gradient) * node.owners.sp_group.size, None


class _Summed(torch.autograd.Function):
    """The sum of each rank's tensor, on every rank; gradients as in `_Gathered`. One all-reduce."""

    seqtile_of_all_ranks = True

    @staticmethod
    def forward(node, own: Tensor, sp_group: SequenceParallel) -> Tensor:
        node.size, total = sp_group.size, own.clone()
        dist.all_reduce(total, group=sp_group.group)
        return total

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
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=node.sp_group.group)
        return total / node.sp_group.size, None


with_whole_gradient: Callable[[Tensor, SequenceParallel], Tensor] = _WholeGradient.apply
gathered: Callable[[Tensor, Owners], Tensor] = _Gathered.apply
summed: Callable[[Tensor, SequenceParallel], Tensor] = _Summed.apply


def depends_on_all_ranks(tensor: Tensor) -> bool:
    """Says if a tensor was computed from values of all ranks' tokens. Its gradient has to be the same on every rank, so
    it is no operand where each rank computes its own rows."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if getattr(getattr(node, "_forward_cls", None), OF_ALL_RANKS, False):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return False
