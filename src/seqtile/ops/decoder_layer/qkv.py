"""Queries, keys and values of a group of heads, tile by tile: norm, projections, norms of heads, rotary embedding.

They lie side by side in one buffer [T, F], made by one product a tile.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from seqtile.kernels.launch import rms_norm, rms_norm_backward, rotary_
from seqtile.ops.decoder_layer.params import AttentionParams, Layout, Norm
from seqtile.ops.stack import Stack
from seqtile.ops.tiles import tiles
from seqtile.ops.weight_grad import WeightGrad
from seqtile.protocols import SequenceParallelAttention

_NORM, _Q, _Q_NORM, _K, _K_NORM, _V = 0, slice(1, 5), 5, slice(6, 10), 10, slice(11, 15)  # of AttentionParams.tensors


class Inputs(NamedTuple):
    """What queries, keys and values are computed from."""

    x: torch.Tensor
    """[T, D]"""
    cos: torch.Tensor | None
    """[T, K]; None for a layer without positions."""
    sin: torch.Tensor | None
    params: AttentionParams
    layout: Layout


class QKV(NamedTuple):
    """Queries, keys and values of a group."""

    views: Sequence[torch.Tensor]
    """As attention takes them: [B, h, S, K], twice [B, kv, S, K]."""
    bases: Sequence[torch.Tensor]
    """What they are views of."""
    unnormed: torch.Tensor | None
    """Queries and keys before their norms, of this rank's tokens [T, (h + kv) K], where these are kept."""


class QKVByGroup:
    """Queries, keys and values of one group after the other, in the order of `groups`.

    Over ranks, those of the next group are sent before attention computes with this one's; on one rank nothing is
    computed before it is asked for. With `keep_normed` the groups share norm(x) [T, D].
    """

    def __init__(
        self,
        inputs: Inputs,
        groups: Sequence[int],
        exchange: SequenceParallelAttention | None,
        *,
        keep_normed: bool = False,
        keep_unnormed: bool = False,
    ):
        self._inputs, self._left, self._exchange = inputs, list(groups), exchange
        self._normed = Normed(inputs, whole=keep_normed and len(self._left) > 1)
        self._keep_unnormed = keep_unnormed and inputs.params.q_norm is not None
        self._started: Callable[[], QKV] | None = None

    def take(self) -> QKV:
        started = self._started or self._start()
        qkv = started()
        self._started = self._start() if self._exchange is not None and self._left else None
        return qkv

    def _start(self) -> Callable[[], QKV]:
        layout = self._inputs.layout
        buffer, unnormed = project(self._inputs, self._left.pop(0), self._normed, self._keep_unnormed)
        heads, kv_heads = layout.group_heads
        whole = buffer.view(layout.batch, layout.length, heads + 2 * kv_heads, layout.head_dim).transpose(1, 2)
        views = whole.split((heads, kv_heads, kv_heads), 1)
        if self._exchange is None:
            return lambda: QKV(views, (buffer,), unnormed)
        arriving = self._exchange.start_to_heads(*views)

        def arrived() -> QKV:
            found = arriving()
            return QKV(found, found, unnormed)

        return arrived


class Normed:
    """Computes norm(x) of x [T, D] tile by tile; with `whole`, once, and keeps all of it for the groups that follow.

    What is kept allows larger tiles: a group's product is then as large as that of all heads is without groups.
    """

    def __init__(self, inputs: Inputs, whole: bool = False):
        self._x, self._norm, self._layout = inputs.x, inputs.params.norm, inputs.layout
        self._whole, self._known = whole, 0
        self.tokens = inputs.layout.chunk_tokens * (inputs.layout.groups if whole else 1)
        self._rows: torch.Tensor | None = None

    def tile(self, tile: slice) -> torch.Tensor:
        """Returns norm(x) of these tokens; the next call overwrites it, unless all are kept."""
        x = self._x
        if self._rows is None:
            rows = len(x) if self._whole else min(len(x), self.tokens)
            self._rows = x.new_empty(rows, x.shape[1], dtype=self._layout.dtype)
        if not self._whole:
            return rms_norm(x[tile], *self._norm, out=self._rows[: tile.stop - tile.start])
        if tile.stop > self._known:
            rms_norm(x[tile], *self._norm, out=self._rows[tile])
            self._known = tile.stop
        return self._rows[tile]


def project(
    inputs: Inputs, group: int, normed: Normed, keep_unnormed: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The buffer [T, F] of a group; with `keep_unnormed`, its queries and keys before their norms."""
    x, cos, sin, params, layout = inputs
    stack, rotated = _stack(inputs, group), _rotated(layout)
    buffer = x.new_empty(len(x), stack.width, dtype=layout.dtype)
    unnormed = buffer.new_empty(len(x), rotated) if keep_unnormed else None
    for tile in tiles(len(x), normed.tokens):
        made = stack.projection.forward(normed.tile(tile), out=buffer[tile])[:, :rotated]
        if unnormed is not None:
            unnormed[tile] = made
        by_head = made.unflatten(1, (-1, layout.head_dim))
        for norm, heads in _norms_of_heads(params, layout):
            rms_norm(by_head[:, heads], *norm, out=by_head[:, heads])
        if cos is not None:
            rotary_(by_head, cos[tile], sin[tile])
    return buffer, unnormed


class QKVGradients:
    """The gradients of what is projected, and of the parameters before attention, added up over groups.

    Allocates with the first group, not while attention's backward runs before it, float32 sums of the parameters, and
    `d_normed` [T, D], the gradient of what the norm returned. `needs` and `main_grads` are of x and
    `AttentionParams.tensors`, and of the latter.
    """

    def __init__(self, inputs: Inputs, needs: Sequence[bool], main_grads: Sequence[torch.Tensor | None]):
        self._inputs, self._needs, self._main_grads = inputs, needs, main_grads
        self.sums: list[WeightGrad | None] = []
        self.d_normed: torch.Tensor | None = None

    def _begin(self) -> None:
        x, needs = self._inputs.x, self._needs[1:]
        self.sums = [
            WeightGrad(tensor, main_grad=main_grad) if need else None
            for tensor, need, main_grad in zip(
                self._inputs.params.tensors[: _V.stop], needs, self._main_grads, strict=False
            )
        ]
        if self._needs[0] or needs[_NORM]:
            self.d_normed = torch.empty_like(x, dtype=self._inputs.layout.dtype)

    def add(self, group: int, d_qkv: Sequence[torch.Tensor], unnormed: torch.Tensor | None) -> None:
        """Adds what a group contributes: the gradients of its queries [B, h, S, K], keys and values."""
        x, cos, sin, params, layout = self._inputs
        stack, rotated, needs = _stack(self._inputs, group), _rotated(layout), self._needs[1:]
        grads = stack.gradients([needs[place] for place in (_Q, _K, _V)])
        if not (begun := bool(self.sums)):
            self._begin()
        wanted = [d.transpose(1, 2).flatten(0, 1) for d in d_qkv]  # [T, h, K]; copies only of other layouts
        rows, normed = min(len(x), layout.chunk_tokens), Normed(self._inputs)
        d_rows = x.new_empty(rows, stack.width, dtype=layout.dtype)
        again = d_rows.new_empty(rows, rotated) if unnormed is None and params.q_norm is not None else None
        for tile in tiles(len(x), layout.chunk_tokens):
            count = tile.stop - tile.start
            d_tile, normed_tile = d_rows[:count], normed.tile(tile)
            torch.cat([d[tile].flatten(1).to(layout.dtype) for d in wanted], 1, out=d_tile)
            by_head = d_tile[:, :rotated].unflatten(1, (-1, layout.head_dim))
            if cos is not None:
                rotary_(by_head, cos[tile], sin[tile], backward=True)
            if params.q_norm is not None:
                before = unnormed[tile] if again is None else again[:count]
                if again is not None:
                    stack.projection.rows(slice(rotated)).forward(normed_tile, out=before)
                self._through_norms_of_heads(before.unflatten(1, (-1, layout.head_dim)), by_head)
            grads.add(d_tile, normed_tile)
            if self.d_normed is not None:
                stack.projection.backward(d_tile, out=self.d_normed[tile], add=begun)
        stack.spread(grads, [self.sums[place] for place in (_Q, _K, _V)])

    def _through_norms_of_heads(self, before: torch.Tensor, d_heads: torch.Tensor) -> None:
        """Makes the gradients of normed queries and keys [C, h, K] those of `before`, in place."""
        norms = _norms_of_heads(self._inputs.params, self._inputs.layout)
        for (norm, heads), place in zip(norms, (_Q_NORM, _K_NORM), strict=True):
            part, total = d_heads[:, heads], self.sums[place]
            of_weight = None if total is None else total.begun()
            rms_norm_backward(before[:, heads], *norm, part, part, d_weight=of_weight)

    def add_to_x(self, d_x: torch.Tensor) -> None:
        """Adds the gradient through the norm to `d_x` [T, D]; that of the norm's weight to its sum."""
        x, norm, layout = self._inputs.x, self._inputs.params.norm, self._inputs.layout
        d_normed, self.d_normed = self.d_normed, None
        if d_normed is None:
            return
        of_weight = None if self.sums[_NORM] is None else self.sums[_NORM].begun()
        for tile in tiles(len(x), layout.chunk_tokens):
            rows = d_x[tile]
            rms_norm_backward(x[tile], norm.weight, norm.eps, d_normed[tile], rows, add=rows, d_weight=of_weight)

    def results(self) -> list[torch.Tensor | None]:
        """Of the parameters before attention, in their order."""
        return [None if total is None else total.result() for total in self.sums]


def _rotated(layout: Layout) -> int:
    """The width of queries and keys together."""
    return sum(layout.group_heads) * layout.head_dim


def _norms_of_heads(params: AttentionParams, layout: Layout) -> list[tuple[Norm, slice]]:
    heads, kv_heads = layout.group_heads
    if params.q_norm is None:
        return []
    return [(params.q_norm, slice(heads)), (params.k_norm, slice(heads, heads + kv_heads))]


def _stack(inputs: Inputs, group: int) -> Stack:
    """What makes queries, keys and values of a group."""
    params, layout = inputs.params, inputs.layout
    of_q, of_kv = layout.columns(group)
    return Stack((params.q, params.k, params.v), (of_q, of_kv, of_kv), layout.dtype)
