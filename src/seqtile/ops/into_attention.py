"""The part of a layer before attention, tile by tile: norm, projections, norms of heads, rotary embedding.

Queries, keys and values of a group of heads lie side by side in one buffer [T, F], made by one product a tile. Of a
pass only x is kept; see `layer.py` for what is computed again.
"""

from collections.abc import Sequence

import torch

from seqtile.kernels.launch import rms_norm, rms_norm_backward, rotary_
from seqtile.ops.checks import check_first_derivative
from seqtile.ops.layer_parts import Layout, Norm, Pass
from seqtile.ops.projection import Projection, ProjectionGrad
from seqtile.ops.tiles import tiles
from seqtile.ops.weight_grad import WeightGrad

_NORM, _Q, _Q_NORM, _K, _K_NORM, _V = 0, slice(1, 5), 5, slice(6, 10), 10, slice(11, 15)  # of LayerWeights.into


class EnterFunction(torch.autograd.Function):
    """x and the parameters before attention to a token, on which all that is computed of them depends. Its backward
    runs after those of all groups and of what is behind attention, and has the gradient of x."""

    @staticmethod
    def forward(ctx, state: Pass, x: torch.Tensor, *leaves: torch.Tensor | None) -> torch.Tensor:
        ctx.state = state
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, _: torch.Tensor):
        check_first_derivative("decoder_layer")
        state: Pass = ctx.state
        d_x, d_normed, sums = state.d_h, state.d_normed, state.sums
        x, norm = state.x, state.weights.norm
        state.d_h = state.d_normed = state.sums = None
        state.tensors = ()
        if d_normed is not None:
            of_weight = _total(sums[_NORM])
            for tile in tiles(len(x), state.layout.chunk_tokens):
                rows = d_x[tile]
                rms_norm_backward(x[tile], norm.weight, norm.eps, d_normed[tile], rows, add=rows, d_weight=of_weight)
        found = [None if total is None else total.result() for total in sums or [None] * (len(state.needs) - 1)]
        return None, d_x if state.needs[0] else None, *found


class ProjectFunction(torch.autograd.Function):
    """The queries [B, h, S, K], keys and values [B, kv, S, K] of a group, views of one buffer."""

    @staticmethod
    def forward(ctx, token: torch.Tensor, state: Pass, group: int) -> tuple[torch.Tensor, ...]:
        ctx.state, ctx.group = state, group
        buffer, _ = project(state, group)
        return split(buffer, state.layout)

    @staticmethod
    def backward(ctx, *d_qkv: torch.Tensor):
        check_first_derivative("decoder_layer")
        state: Pass = ctx.state
        raw = state.projected.pop(ctx.group, (None, None))[1]  # and lets go of queries, keys and values
        state.kept.pop(ctx.group, None)
        _project_backward(state, ctx.group, d_qkv, raw)
        return d_qkv[0].new_zeros(()), None, None


def split(buffer: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
    heads, kv_heads = layout.group_heads
    whole = buffer.view(layout.batch, layout.length, heads + 2 * kv_heads, layout.head_dim).transpose(1, 2)
    return whole.split((heads, kv_heads, kv_heads), 1)


def project_again(state: Pass, group: int) -> torch.Tensor:
    """The buffer that queries, keys and values of a group were views of; computed once in a backward."""
    if group not in state.projected:
        state.projected[group] = project(state, group, keep_raw=True)
    return state.projected[group][0]


def project(state: Pass, group: int, keep_raw: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The buffer [T, F] of a group; with `keep_raw`, its queries and keys before their norms, if they have any."""
    x, cos, sin, *_ = state.tensors
    weights, layout = state.weights, state.layout
    stack = _stack(state, group)
    buffer = x.new_empty(len(x), len(stack.weight), dtype=layout.dtype)
    turned = _turned(layout)
    raw = buffer.new_empty(len(x), turned) if keep_raw and weights.q_norm is not None else None
    rows = x.new_empty(min(len(x), layout.chunk_tokens), x.shape[1], dtype=layout.dtype)
    for tile in tiles(len(x), layout.chunk_tokens):
        normed = rms_norm(x[tile], *weights.norm, out=rows[: tile.stop - tile.start])
        made = stack.forward(normed, out=buffer[tile])[:, :turned]
        if raw is not None:
            raw[tile] = made
        by_head = made.unflatten(1, (-1, layout.head_dim))
        for norm, heads in _norms_of_heads(weights.q_norm, weights.k_norm, layout):
            rms_norm(by_head[:, heads], *norm, out=by_head[:, heads])
        if cos is not None:
            rotary_(by_head, cos[tile], sin[tile])
    return buffer, raw


def _project_backward(state: Pass, group: int, d_qkv: Sequence[torch.Tensor], raw: torch.Tensor | None) -> None:
    """Adds to the gradients of what is normed and of the parameters."""
    x, cos, sin, *_ = state.tensors
    weights, layout = state.weights, state.layout
    stack, turned = _stack(state, group), _turned(layout)
    if state.sums is None:
        state.sums = _sums(state)
    needs = state.needs[1:]
    grads = ProjectionGrad(stack, layout.dtype, _any(needs[_Q], needs[_K], needs[_V]), [None] * 4)
    begun = state.d_normed is not None
    if not begun and (state.needs[0] or needs[_NORM]):
        state.d_normed = torch.empty_like(x, dtype=layout.dtype)
    wanted = [d.transpose(1, 2).flatten(0, 1) for d in d_qkv]  # [T, h, K]; a copy only of batches laid out otherwise
    rows, width = min(len(x), layout.chunk_tokens), len(stack.weight)
    normed_rows, d_rows = (
        x.new_empty(rows, x.shape[1], dtype=layout.dtype),
        x.new_empty(rows, width, dtype=layout.dtype),
    )
    raw_rows = d_rows.new_empty(rows, turned) if raw is None and weights.q_norm is not None else None
    for tile in tiles(len(x), layout.chunk_tokens):
        count = tile.stop - tile.start
        d_tile, normed = d_rows[:count], rms_norm(x[tile], *weights.norm, out=normed_rows[:count])
        torch.cat([d[tile].flatten(1).to(layout.dtype) for d in wanted], 1, out=d_tile)
        by_head = d_tile[:, :turned].unflatten(1, (-1, layout.head_dim))
        if cos is not None:
            rotary_(by_head, cos[tile], sin[tile], backward=True)
        if weights.q_norm is not None:
            before = raw_rows[:count] if raw is None else raw[tile]
            if raw is None:
                stack.rows(slice(turned)).forward(normed, out=before)
            before = before.unflatten(1, (-1, layout.head_dim))
            norms = _norms_of_heads(weights.q_norm, weights.k_norm, layout)
            for (norm, heads), place in zip(norms, (_Q_NORM, _K_NORM), strict=True):
                part, total = by_head[:, heads], _total(state.sums[place])
                rms_norm_backward(before[:, heads], *norm, part, part, d_weight=total)
        grads.add(d_tile, normed)
        if state.d_normed is not None:
            stack.backward(d_tile, out=state.d_normed[tile], add=begun)
    _spread(state, group, grads)


def _turned(layout: Layout) -> int:
    """The width of queries and keys together."""
    return sum(layout.group_heads) * layout.head_dim


def _norms_of_heads(q_norm: Norm | None, k_norm: Norm | None, layout: Layout) -> list[tuple[Norm, slice]]:
    heads, kv_heads = layout.group_heads
    return [] if q_norm is None else [(q_norm, slice(heads)), (k_norm, slice(heads, heads + kv_heads))]


def _projections(state: Pass, group: int) -> list[Projection]:
    weights = state.weights
    of_q, of_kv = state.layout.columns(group)
    return [weights.q.rows(of_q), weights.k.rows(of_kv), weights.v.rows(of_kv)]


def _stack(state: Pass, group: int) -> Projection:
    """One projection that makes queries, keys and values of a group side by side, in the dtype of the products; of
    their adapters one whose b has blocks."""
    parts = [part.to(state.layout.dtype) for part in _projections(state, group)]
    weight = torch.cat([part.weight for part in parts])
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts])
    if all(part.a is None for part in parts):
        return Projection(weight, bias, None, None, 1.0)
    a = torch.cat([part.a for part in parts if part.a is not None])
    b = weight.new_zeros(len(weight), len(a))
    for part, rows, ranks in _blocks(parts):
        b[rows, ranks] = part.b * part.scale
    return Projection(weight, bias, a, b, 1.0)


def _blocks(parts: Sequence[Projection]) -> list[tuple[Projection, slice, slice]]:
    """Of projections with adapters, the rows and the columns of their block."""
    found, row, rank = [], 0, 0
    for part in parts:
        rows = slice(row, row + len(part.weight))
        row = rows.stop
        if part.a is not None:
            found.append((part, rows, slice(rank, rank + len(part.a))))
            rank += len(part.a)
    return found


def _spread(state: Pass, group: int, grads: ProjectionGrad) -> None:
    """Adds what a group contributes to each parameter's gradient."""
    d_weight, d_bias, d_a, d_b = grads.totals
    parts, (of_q, of_kv) = _projections(state, group), state.layout.columns(group)
    blocks = {id(part): (rows, ranks) for part, rows, ranks in _blocks(parts)}
    row = 0
    for part, place, columns in zip(parts, (_Q, _K, _V), (of_q, of_kv, of_kv), strict=True):
        of_weight, of_bias, of_a, of_b = state.sums[place]
        rows = slice(row, row + len(part.weight))
        row = rows.stop
        if of_weight is not None:
            of_weight.add_rows(columns, d_weight[rows])
        if of_bias is not None:
            of_bias.add_rows(columns, d_bias[rows])
        if id(part) in blocks:
            _, ranks = blocks[id(part)]
            if of_a is not None:
                of_a.add_whole(d_a[ranks])
            if of_b is not None:
                of_b.add_rows(columns, d_b[rows, ranks] * part.scale)


def _sums(state: Pass) -> list[WeightGrad | None]:
    parameters = state.weights.into
    return [
        WeightGrad(tensor, main_grad=main_grad) if need else None
        for tensor, need, main_grad in zip(parameters, state.needs[1:], state.main_grads, strict=True)
    ]


def _total(grad: WeightGrad | None) -> torch.Tensor | None:
    """A vector to which a norm's backward adds."""
    return None if grad is None else grad.begun()


def _any(*needs: Sequence[bool]) -> list[bool]:
    return [any(of_one) for of_one in zip(*needs, strict=True)]
