"""What an attention saves for its backward, taken apart: queries, keys and values are computed again, the rest is kept.

Autograd shows a hook every tensor that it saves (`torch.autograd.graph.saved_tensors_hooks`). The tensors that lie in
the storages that the attention was given are queries, keys and values, whatever their shape; for those the hook leaves
where they lie. All others, such as the output and its log-sum-exp, are saved a second time by a node behind the
attention, where a checkpoint around the layer sees them like any saved tensor. An attention must not change what it is
given: it would be computed again unchanged.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

LARGE = 4
"""What is kept besides the output may have this fraction of its bytes: a log-sum-exp, the lengths of documents."""


class Projected(NamedTuple):
    """Where queries, keys or values lay, and in which of the tensors that were projected."""

    projected: Callable[[], Sequence[torch.Tensor]]
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        return self.projected()[self.index].as_strided(self.size, self.stride, self.offset)


class Rest(NamedTuple):
    """Which of the other tensors it was."""

    kept: Callable[[], Sequence[torch.Tensor]]
    index: int

    def tensor(self) -> torch.Tensor:
        return self.kept()[self.index]


class Packing:
    """What is done with a tensor that the attention saves. Autograd holds on to it as long as to the graph."""

    def __init__(
        self,
        made: Sequence[torch.Tensor],
        projected: Callable[[], Sequence[torch.Tensor]],
        kept: Callable[[], Sequence[torch.Tensor]],
    ):
        self.storages = [tensor.untyped_storage() for tensor in made]
        self.dtype, self.projected, self.kept = made[0].dtype, projected, kept
        self.rest: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> Projected | Rest:
        storage = tensor.untyped_storage()
        for index, known in enumerate(self.storages):
            if storage is known and tensor.dtype == self.dtype:
                return Projected(self.projected, index, tensor.shape, tensor.stride(), tensor.storage_offset())
        self.rest.append(tensor.detach())
        return Rest(self.kept, len(self.rest) - 1)

    def finish(self) -> list[torch.Tensor]:
        """Lets go of all tensors; returns those that are to be kept elsewhere."""
        rest, self.rest, self.storages = self.rest, [], []
        return rest


def attend_and_keep(
    attend: Callable[..., torch.Tensor],
    qkv: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    projected: Callable[[], Sequence[torch.Tensor]],
    kept: Callable[[], Sequence[torch.Tensor]],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """attend(*qkv), and what it saved that does not lie in the storage of what was `made`, of which qkv are views.

    In the backward `projected` is asked for tensors like those, `kept` for what was returned here.
    """
    packing = Packing(made, projected, kept)
    with saved_tensors_hooks(packing.pack, lambda place: place.tensor()):
        out = attend(*qkv)
    return out, packing.finish()


def too_large(out: torch.Tensor, rest: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> int:
    """Bytes of what an attention saved besides its output and what it was `given`, if they are more than a fraction of
    the output's; else 0."""
    known = [tensor.untyped_storage() for tensor in (out, *given)]
    others: list[torch.UntypedStorage] = []
    for tensor in rest:
        storage = tensor.untyped_storage()
        if not any(storage is other for other in (*known, *others)):
            others.append(storage)
    size = sum(storage.nbytes() for storage in others)
    return size if size > out.numel() * out.element_size() // LARGE else 0
