"""The autograd graph of one attention, held by a node of ours: the tensors that attention saves are taken apart.

Autograd shows a hook every tensor that it saves (`torch.autograd.graph.saved_tensors_hooks`):

    in the storage of q, k or v     -> only its place is kept; the backward looks there in q, k and v computed again
    any other (output, log-sum-exp) -> handed to the node, which saves it like any node does

Without groups q, k and v are kept as well, and all tensors go the second way.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from seqtile.ops.decoder_layer.qkv import QKV
from seqtile.ops.graph import gradients_of, leaves_behind, nodes_behind

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries [B, h, S, K], keys and values [B, kv, S, K] to attention's output."""

LARGE = 4
"""Tensors saved besides the output may have this fraction of its bytes: a log-sum-exp, the lengths of documents."""


class QKVFunction(torch.autograd.Function):
    """Queries, keys and values as outputs of a node that holds none of them, as the node of a leaf would."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.Tensor.detach, tensors))

    @staticmethod
    def backward(ctx, *d: torch.Tensor) -> tuple[None, None]:
        return None, None


class LazyGradientFunction(torch.autograd.Function):
    """An identity. Its backward takes the gradient out of `hooks.d_out`, so that nothing but the graph holds it."""

    @staticmethod
    def forward(ctx, out: torch.Tensor, hooks: "SavedTensors") -> torch.Tensor:
        ctx.hooks = hooks
        return out.view_as(out)

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.hooks.d_out.pop(), None


class UntrackedLeaves(Exception):
    """Raised if attention used leaves that require a gradient and that nobody declared; its argument lists them."""


class QKVView(NamedTuple):
    """The place of a saved tensor in queries, keys or values."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """The hooks of one attention. Autograd holds them as long as the graph, so they hold tensors only while the
    attention runs, and while its backward does."""

    def __init__(self, bases: Sequence[torch.Tensor]):
        """`bases` are what queries, keys and values are views of, unless they are saved like any other tensor."""
        self._bases = tuple((base, base._version) for base in bases)
        self._saved: list[tuple[torch.Tensor, int]] = []
        self._qkv_changed, self._changed = False, set()
        # Given for a backward, see `AttentionGraph.backward`:
        self.qkv: Sequence[torch.Tensor] = ()
        self.saved: Sequence[torch.Tensor] = ()
        self.d_out: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> QKVView | int:
        storage = tensor.untyped_storage()
        for index, (base, version) in enumerate(self._bases):
            # A tensor that was changed in place cannot be computed again, and is saved.
            in_base = storage is base.untyped_storage() and tensor.dtype == base.dtype
            if in_base and tensor._version == version:
                return QKVView(index, tensor.shape, tensor.stride(), tensor.storage_offset())
        self._saved.append((tensor.detach(), tensor._version))
        return len(self._saved) - 1

    def unpack(self, place: QKVView | int) -> torch.Tensor:
        in_qkv = isinstance(place, QKVView)
        if self._qkv_changed if in_qkv else place in self._changed:
            raise RuntimeError(
                "the attention changed in place a tensor that its backward needs, expected it as it was saved; "
                "compute out of place there"
            )
        if in_qkv:
            return self.qkv[place.index].as_strided(place.size, place.stride, place.offset)
        return self.saved[place]

    def finish(self) -> list[torch.Tensor]:
        """Releases all tensors, and notes which were changed in place. Returns those that must be saved elsewhere."""
        self._qkv_changed = any(base._version != version for base, version in self._bases)
        self._changed = {i for i, (tensor, version) in enumerate(self._saved) if tensor._version != version}
        saved, self._saved, self._bases = self._saved, [], ()
        return [tensor for tensor, _ in saved]


class AttentionGraph(NamedTuple):
    """The graph from queries, keys and values to attention's output, without large tensors."""

    output_edges: list[GradientEdge]
    """One; none if attention's output has no graph."""
    out: torch.Tensor
    """One element, expanded to the shape of attention's output."""
    input_edges: list[GradientEdge]
    """The edges of queries, keys and values."""
    shapes: list[tuple[torch.Size, torch.dtype]]
    hooks: SavedTensors

    def backward(
        self,
        d_out: list[torch.Tensor],
        qkv: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of queries, keys and values, and of `leaves`; None of a leaf that was not used. `d_out`
        holds that of what attention returned, and is emptied, so that its memory is free when attention has used it."""
        wanted, hooks = [*self.input_edges, *leaves], self.hooks
        hooks.qkv, hooks.saved, hooks.d_out = qkv, saved, d_out
        try:  # the graph serves a second backward, too (retain_graph=True); without tensors it costs nothing to keep
            found = gradients_of(self.output_edges, wanted, [self.out], retain_graph=True)
        finally:
            hooks.qkv, hooks.saved, hooks.d_out = (), (), []
        d_qkv = [
            self.out.new_zeros(shape, dtype=dtype) if d is None else d
            for d, (shape, dtype) in zip(found, self.shapes, strict=False)
        ]
        return [*d_qkv, *found[len(d_qkv) :]]


class RecordedAttention(NamedTuple):
    """An attention that has run."""

    local_output: torch.Tensor
    """Attention's output for this rank's tokens, made by `finish` from `raw_output`."""
    raw_output: torch.Tensor
    """The tensor that attention itself returned."""
    graph: AttentionGraph
    saved: list[torch.Tensor]
    """The tensors that the graph needs saved for its backward."""


def run_and_record(
    attend: Attend,
    finish: Callable[[torch.Tensor], torch.Tensor],
    qkv: QKV,
    *,
    keep_qkv: bool,
    known: Sequence[torch.Tensor] = (),
) -> RecordedAttention:
    """Runs finish(attend(*qkv)) and records its graph.

    With `keep_qkv` queries, keys and values are among what is to be saved. `known` are the leaves that attention is
    known to use; raises UntrackedLeaves for others, ValueError for what is computed from others.
    """
    hooks = SavedTensors(() if keep_qkv else qkv.bases)
    with torch.enable_grad(), saved_tensors_hooks(hooks.pack, hooks.unpack):
        made = QKVFunction.apply(qkv.views[0].new_empty((), requires_grad=True), qkv.views)
        input_edges = [get_gradient_edge(tensor) for tensor in made]  # now: attention may change them in place
        attn_output = attend(*made)
        out = LazyGradientFunction.apply(finish(attn_output), hooks)
    saved = hooks.finish()
    _check_leaves(out, input_edges[0], known)
    shapes = [(tensor.shape, tensor.dtype) for tensor in made]
    output_edges = [get_gradient_edge(out)] if out.requires_grad else []
    graph = AttentionGraph(output_edges, out.new_zeros(()).expand(out.shape), input_edges, shapes, hooks)
    return RecordedAttention(out.detach(), attn_output.detach(), graph, saved)


def _check_leaves(out: torch.Tensor, start: GradientEdge, known: Sequence[torch.Tensor]) -> None:
    """Raises UntrackedLeaves if the graph from `start` to `out` has leaves that are not `known`; ValueError if it goes
    on in nodes that were there before `start`."""
    first, ends = start.node, [out.grad_fn]
    oldest = min([node._sequence_nr() for node in nodes_behind(ends, first)], default=first._sequence_nr())
    if oldest < first._sequence_nr():  # a leaf's is the largest
        raise ValueError(
            "decoder_layer: attention uses a tensor that requires a gradient and is computed from others; expected "
            "leaves, such as parameters; leave this layer untiled (layer=False)"
        )
    allowed = {id(tensor) for tensor in known}
    missing = {id(leaf): leaf for leaf, _, _ in leaves_behind(ends, first) if id(leaf) not in allowed}
    if missing:
        raise UntrackedLeaves(list(missing.values()))


def excess_saved_bytes(out: torch.Tensor, saved: Sequence[torch.Tensor], extra: Sequence[torch.Tensor]) -> int:
    """Returns the bytes of what an attention saved besides its output and the `extra` tensors it was given, if they are
    more than a fraction of the output's; else 0."""
    known = [tensor.untyped_storage() for tensor in (out, *extra)]
    others: list[torch.UntypedStorage] = []
    for storage in (tensor.untyped_storage() for tensor in saved):
        if not any(storage is other for other in (*known, *others)):
            others.append(storage)
    size = sum(storage.nbytes() for storage in others)
    return size if size > out.numel() * out.element_size() // LARGE else 0
