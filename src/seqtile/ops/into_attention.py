"""The part of a layer before attention, tile by tile: norm, projections, norms of heads, rotary embedding.

Queries, keys and values of a group of heads lie side by side in one buffer [T, F], made by one product a tile. Of a
pass only x is kept; see `layer.py` for what is computed again.
"""

from collections.abc import Callable, Sequence

import torch

from seqtile.kernels.launch import rms_norm, rms_norm_backward, rotary_
from seqtile.ops.checks import check_first_derivative
from seqtile.ops.layer_parts import Layout, Made, Norm, Pass
from seqtile.ops.stack import Stack
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
        _finish(state)
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
    """The queries [B, h, S, K], keys and values [B, kv, S, K] of a group, as attention takes them."""

    @staticmethod
    def forward(ctx, token: torch.Tensor, state: Pass, group: int, bases: list[torch.Tensor]):
        """`bases` takes what they are views of."""
        ctx.state, ctx.group = state, group
        made = _made(state, group, group + 1, keep_raw=False)
        bases += made.bases
        return tuple(made.qkv)

    @staticmethod
    def backward(ctx, *d_qkv: torch.Tensor):
        check_first_derivative("decoder_layer")
        state: Pass = ctx.state
        state.kept.pop(ctx.group, None)
        raw = state.projected[ctx.group].raw if ctx.group in state.projected else None
        state.projected.pop(ctx.group, None)  # queries, keys and values
        _finish(state)
        if state.travel is None:
            _project_backward(state, ctx.group, d_qkv, raw)
        else:
            arriving, group = state.travel.send_back(*d_qkv), ctx.group
            state.returning = lambda: _project_backward(state, group, arriving(), raw)
        return d_qkv[0].new_zeros(()), None, None, None


def _finish(state: Pass) -> None:
    """The backward of the group whose gradients are on their way."""
    if (returning := state.returning) is not None:
        state.returning = None
        returning()


def project_again(state: Pass, group: int) -> Sequence[torch.Tensor]:
    """What queries, keys and values of a group were views of; computed once in a backward."""
    if group not in state.projected:
        state.projected[group] = _made(state, group, group - 1, keep_raw=True)
    return state.projected[group].bases


def _made(state: Pass, group: int, following: int, keep_raw: bool) -> Made:
    """Queries, keys and values of a group. Over ranks, those of the `following` group are sent meanwhile, and travel
    while attention computes with these."""
    started = state.ahead.pop(group, None) or _started(state, group, keep_raw)
    made = started()
    known = following in state.projected or following in state.ahead
    if state.travel is not None and not state.repeats and not known and 0 <= following < state.layout.groups:
        state.ahead[following] = _started(state, following, keep_raw)
    return made


def _started(state: Pass, group: int, keep_raw: bool) -> Callable[[], Made]:
    buffer, raw = project(state, group, keep_raw)
    heads, kv_heads = state.layout.group_heads
    layout = state.layout
    whole = buffer.view(layout.batch, layout.length, heads + 2 * kv_heads, layout.head_dim).transpose(1, 2)
    qkv = whole.split((heads, kv_heads, kv_heads), 1)
    if state.travel is None:
        return lambda: Made(qkv, (buffer,), raw)
    arriving = state.travel.send(*qkv)

    def arrived() -> Made:
        found = arriving()
        return Made(found, found, raw)

    return arrived


def project(state: Pass, group: int, keep_raw: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The buffer [T, F] of a group; with `keep_raw`, its queries and keys before their norms, if they have any."""
    x, cos, sin, *_ = state.tensors
    weights, layout = state.weights, state.layout
    stack = _stack(state, group)
    buffer = x.new_empty(len(x), stack.width, dtype=layout.dtype)
    turned = _turned(layout)
    raw = buffer.new_empty(len(x), turned) if keep_raw and weights.q_norm is not None else None
    rows = x.new_empty(min(len(x), layout.chunk_tokens), x.shape[1], dtype=layout.dtype)
    for tile in tiles(len(x), layout.chunk_tokens):
        normed = rms_norm(x[tile], *weights.norm, out=rows[: tile.stop - tile.start])
        made = stack.projection.forward(normed, out=buffer[tile])[:, :turned]
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
    grads = stack.gradients([needs[place] for place in (_Q, _K, _V)])
    begun = state.d_normed is not None
    if not begun and (state.needs[0] or needs[_NORM]):
        state.d_normed = torch.empty_like(x, dtype=layout.dtype)
    wanted = [d.transpose(1, 2).flatten(0, 1) for d in d_qkv]  # [T, h, K]; a copy only of batches laid out otherwise
    rows, widths = min(len(x), layout.chunk_tokens), (x.shape[1], stack.width)
    normed_rows, d_rows = (x.new_empty(rows, width, dtype=layout.dtype) for width in widths)
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
                stack.projection.rows(slice(turned)).forward(normed, out=before)
            before = before.unflatten(1, (-1, layout.head_dim))
            norms = _norms_of_heads(weights.q_norm, weights.k_norm, layout)
            for (norm, heads), place in zip(norms, (_Q_NORM, _K_NORM), strict=True):
                part, total = by_head[:, heads], _total(state.sums[place])
                rms_norm_backward(before[:, heads], *norm, part, part, d_weight=total)
        grads.add(d_tile, normed)
        if state.d_normed is not None:
            stack.projection.backward(d_tile, out=state.d_normed[tile], add=begun)
    stack.spread(grads, [state.sums[place] for place in (_Q, _K, _V)])


def _turned(layout: Layout) -> int:
    """The width of queries and keys together."""
    return sum(layout.group_heads) * layout.head_dim


def _norms_of_heads(q_norm: Norm | None, k_norm: Norm | None, layout: Layout) -> list[tuple[Norm, slice]]:
    heads, kv_heads = layout.group_heads
    return [] if q_norm is None else [(q_norm, slice(heads)), (k_norm, slice(heads, heads + kv_heads))]


def _stack(state: Pass, group: int) -> Stack:
    """What makes queries, keys and values of a group."""
    weights = state.weights
    of_q, of_kv = state.layout.columns(group)
    return Stack((weights.q, weights.k, weights.v), (of_q, of_kv, of_kv), state.layout.dtype)


def _sums(state: Pass) -> list[WeightGrad | None]:
    parameters = state.weights.into
    return [
        WeightGrad(tensor, main_grad=main_grad) if need else None
        for tensor, need, main_grad in zip(parameters, state.needs[1:], state.main_grads, strict=True)
    ]


def _total(grad: WeightGrad | None) -> torch.Tensor | None:
    """A vector to which a norm's backward adds."""
    return None if grad is None else grad.begun()
