"""The autograd graph of one attention, held by a node of ours: what attention saves is taken apart.

Autograd shows a hook every tensor that it saves (`torch.autograd.graph.saved_tensors_hooks`). With `keep_qkv=False`,
tensors that lie in the storages that the attention was given are queries, keys and values, whatever their shape: of
those the hook leaves where they lie, and the backward gives the graph others that were computed again. All others, such
as the output and its log-sum-exp, are handed to the node, which saves them like any node does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from seqtile.ops.state import nodes_behind

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries [B, h, S, K], keys and values [B, kv, S, K] to what attention makes of them."""

LARGE = 4
"""What is kept besides the output may have this fraction of its bytes: a log-sum-exp, the lengths of documents."""


class QKVFunction(torch.autograd.Function):
    """Queries, keys and values as outputs of a node that holds none of them, as the node of a leaf would."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *d: torch.Tensor) -> tuple[None, None]:
        return None, None


class LateGradientFunction(torch.autograd.Function):
    """An identity whose gradient is computed when it is asked for, so that nothing but the graph holds on to it."""

    @staticmethod
    def forward(ctx, out: torch.Tensor, given: "Given") -> torch.Tensor:
        ctx.given = given
        return out.view_as(out)

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.given.d_out(), None


class OutsideLeaves(Exception):
    """An attention used leaves that require a gradient and that it was not known to use."""

    def __init__(self, leaves: Sequence[torch.Tensor]):
        super().__init__(f"{len(leaves)} leaves")
        self.leaves = leaves


@dataclass
class Given:
    """What the graph finds in the backward, for what it saved and as gradient; empty at all other times."""

    qkv: Sequence[torch.Tensor] = ()
    saved: Sequence[torch.Tensor] = ()
    d_out: Callable[[], torch.Tensor] | None = None


@dataclass
class Changed:
    """What was changed in place after the attention had saved it, known when the attention has returned."""

    qkv: bool = False
    saved: set[int] = field(default_factory=set)


class QKVPlace(NamedTuple):
    """Where a saved tensor lay, in which of queries, keys and values."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Packing:
    """What is done with a tensor that the attention saves. Autograd holds on to it as long as to the graph, so it lets
    go of all tensors when the attention has returned."""

    def __init__(self, bases: Sequence[torch.Tensor], keep_qkv: bool):
        self.given, self.changed = Given(), Changed()
        self._bases = () if keep_qkv else tuple((base.untyped_storage(), base._version, base.dtype) for base in bases)
        self._watched = tuple(bases)
        self._saved: list[tuple[torch.Tensor, int]] = []

    def pack(self, tensor: torch.Tensor) -> QKVPlace | int:
        storage = tensor.untyped_storage()
        for index, (known, version, dtype) in enumerate(self._bases):
            # What was changed in place cannot be computed again, and is saved.
            if storage is known and tensor.dtype == dtype and tensor._version == version:
                return QKVPlace(index, tensor.shape, tensor.stride(), tensor.storage_offset())
        self._saved.append((tensor.detach(), tensor._version))
        return len(self._saved) - 1

    def unpack(self, place: QKVPlace | int) -> torch.Tensor:
        in_qkv = isinstance(place, QKVPlace)
        if self.changed.qkv if in_qkv else place in self.changed.saved:
            raise RuntimeError(
                "the attention changed in place a tensor that its backward needs, expected it as it was saved; "
                "compute out of place there"
            )
        if in_qkv:
            return self.given.qkv[place.index].as_strided(place.size, place.stride, place.offset)
        return self.given.saved[place]

    def finish(self) -> list[torch.Tensor]:
        """Lets go of all tensors; returns those that are to be saved elsewhere."""
        versions = [version for _, version, _ in self._bases]
        self.changed.qkv = any(base._version != known for base, known in zip(self._watched, versions, strict=False))
        self.changed.saved = {i for i, (tensor, version) in enumerate(self._saved) if tensor._version != version}
        saved, self._saved, self._bases, self._watched = self._saved, [], (), ()
        return [tensor for tensor, _ in saved]


class AttentionGraph(NamedTuple):
    """The graph from queries, keys and values to what attention returned; holds no tensor of any size."""

    end: GradientEdge | None
    """None if what attention returned depends on nothing."""
    out: torch.Tensor
    """One number that has the shape of what attention returned."""
    starts: list[GradientEdge]
    """Of queries, keys and values."""
    shapes: list[tuple[torch.Size, torch.dtype]]
    given: Given

    def backward(
        self,
        d_out: Callable[[], torch.Tensor],
        qkv: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor | None]:
        """The gradients of queries, keys and values, and of `leaves`; None of a leaf that was not used. `d_out` makes
        that of what attention returned."""
        wanted = [*self.starts, *leaves]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        self.given.qkv, self.given.saved, self.given.d_out = qkv, saved, d_out
        try:  # the graph serves a second backward, too (retain_graph=True); without tensors it costs nothing to keep
            if self.end is not None:
                found = torch.autograd.grad(self.end, wanted, self.out, retain_graph=True, allow_unused=True)
        finally:
            self.given.qkv, self.given.saved, self.given.d_out = (), (), None
        d_qkv = [
            self.out.new_zeros(shape, dtype=dtype) if d is None else d
            for d, (shape, dtype) in zip(found, self.shapes, strict=False)
        ]
        return [*d_qkv, *found[len(d_qkv) :]]


class Recorded(NamedTuple):
    """An attention that has run."""

    out: torch.Tensor
    attended: torch.Tensor
    """What attention itself returned."""
    graph: AttentionGraph
    saved: list[torch.Tensor]
    """What the graph needs saved for its backward."""


def record(
    attend: Attend,
    finish: Callable[[torch.Tensor], torch.Tensor],
    qkv: Sequence[torch.Tensor],
    bases: Sequence[torch.Tensor],
    *,
    keep_qkv: bool,
    known: Sequence[torch.Tensor] = (),
) -> Recorded:
    """finish(attend(*qkv)) and its graph.

    `bases` are what `qkv` are views of; with `keep_qkv` they are among what is to be saved. `known` are the leaves that
    attention is known to use; raises OutsideLeaves for others, ValueError for what is computed from others.
    """
    packing = Packing(bases, keep_qkv)
    with torch.enable_grad(), saved_tensors_hooks(packing.pack, packing.unpack):
        made = QKVFunction.apply(qkv[0].new_empty((), requires_grad=True), qkv)
        starts = [get_gradient_edge(tensor) for tensor in made]  # now: attention may change them in place
        attended = attend(*made)
        out = LateGradientFunction.apply(finish(attended), packing.given)
    saved = packing.finish()
    check_leaves(out.grad_fn, starts[0].node, known)
    shapes = [(tensor.shape, tensor.dtype) for tensor in made]
    end = get_gradient_edge(out) if out.requires_grad else None
    shaped = out.new_zeros(()).expand(out.shape)
    return Recorded(out.detach(), attended.detach(), AttentionGraph(end, shaped, starts, shapes, packing.given), saved)


def check_leaves(end: Node | None, start: Node, known: Sequence[torch.Tensor]) -> None:
    """Raises OutsideLeaves if the graph from `start` to `end` has leaves that are not `known`; ValueError if it goes on
    in nodes that were there before `start`."""
    allowed = {id(tensor) for tensor in known}
    leaves: dict[int, torch.Tensor] = {}
    for node in nodes_behind([end], start):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        elif node._sequence_nr() < start._sequence_nr():
            raise ValueError(
                "decoder_layer: attention uses a tensor that requires a gradient and is computed from others; expected "
                "leaves, such as parameters; leave this layer untiled (layer=False)"
            )
    if missing := [leaf for key, leaf in leaves.items() if key not in allowed]:
        raise OutsideLeaves(missing)


def too_large(out: torch.Tensor, saved: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> int:
    """Bytes of what an attention saved besides its output and what it was `given`, if they are more than a fraction of
    the output's; else 0."""
    known = [tensor.untyped_storage() for tensor in (out, *given)]
    others: list[torch.UntypedStorage] = []
    for tensor in saved:
        storage = tensor.untyped_storage()
        if not any(storage is other for other in (*known, *others)):
            others.append(storage)
    size = sum(storage.nbytes() for storage in others)
    return size if size > out.numel() * out.element_size() // LARGE else 0
