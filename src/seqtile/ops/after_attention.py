"""The part of a layer behind attention, tile by tile: output projection, residual, norm, MLP, residual.

What attention returned is kept by a node of its own, without a copy, and reaches this part group by group.
"""

from collections.abc import Sequence

import torch

from seqtile.kernels.launch import rms_norm, rms_norm_backward
from seqtile.ops.checks import check_first_derivative
from seqtile.ops.into_attention import project_again
from seqtile.ops.layer_parts import Pass
from seqtile.ops.mlp_tile import MLPTile
from seqtile.ops.projection import ProjectionGrad
from seqtile.ops.tiles import tiles
from seqtile.ops.weight_grad import WeightGrad


class KeepFunction(torch.autograd.Function):
    """What attention returned for a group, [T, h K], to a token; saves it, and what attention saved, now. Its backward
    computes the gradient of this group's part alone."""

    @staticmethod
    def forward(ctx, out: torch.Tensor, state: Pass, group: int, *rest: torch.Tensor) -> torch.Tensor:
        ctx.state, ctx.group = state, group
        ctx.save_for_backward(out, *rest)
        return out.new_zeros(())

    @staticmethod
    def backward(ctx, _: torch.Tensor):
        check_first_derivative("decoder_layer")
        state: Pass = ctx.state
        layout, (out, *rest) = state.layout, state.kept[ctx.group]
        state.kept[ctx.group] = (None, *rest)  # the output, unless attention saved it, is done with
        if state.travel is not None and not state.repeats:  # now, on every rank: one whose attention saved nothing, too
            project_again(state, ctx.group)
        projection = state.weights.o.columns(layout.columns(ctx.group)[0]).to(layout.dtype)
        d_out = torch.empty_like(out, dtype=layout.dtype)
        for tile in tiles(len(out), layout.chunk_tokens):
            projection.backward(state.d_h[tile].to(layout.dtype), out=d_out[tile])
        if layout.scale != 1:
            d_out.mul_(layout.scale)
        return d_out.to(out.dtype), None, None, *[None] * len(rest)


class OnwardFunction(torch.autograd.Function):
    """What attention returned, by groups, to the layer's output [B, S, D]. `tokens`: how many of these there are."""

    @staticmethod
    def forward(
        ctx,
        state: Pass,
        outs: Sequence[torch.Tensor],
        main_grads: Sequence[torch.Tensor | None],
        tokens: int,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.state, ctx.tokens, ctx.main_grads = state, tokens, main_grads
        ctx.nodes = [token.grad_fn for token in tensors[1:tokens]]
        if None in ctx.nodes:
            ctx.save_for_backward(*outs)
        return _forward(state, outs)

    @staticmethod
    def backward(ctx, d_y: torch.Tensor):
        check_first_derivative("decoder_layer")
        state: Pass = ctx.state
        state.read()
        if None in ctx.nodes:  # nothing before attention is trained
            outs = ctx.saved_tensors
        else:
            state.kept = {group: node.saved_tensors for group, node in enumerate(ctx.nodes)}
            outs = [state.kept[group][0] for group in range(len(ctx.nodes))]
        needs = ctx.needs_input_grad[4 + ctx.tokens :]
        found = _backward(state, outs, d_y.contiguous().view(state.x.shape), needs, ctx.main_grads)
        tokens = [d_y.new_zeros(()) if need else None for need in ctx.needs_input_grad[4 : 4 + ctx.tokens]]
        if not any(ctx.needs_input_grad[4 : 4 + ctx.tokens]):
            state.d_h, state.tensors = None, ()
        return None, None, None, None, *tokens, *found


def _forward(state: Pass, outs: Sequence[torch.Tensor]) -> torch.Tensor:
    x, layout = state.x, state.layout
    weights = state.weights
    o, *into, down = (part.to(layout.dtype) for part in (weights.o, weights.gate, weights.up, weights.down))
    rows = min(len(x), layout.chunk_tokens)
    y = x.new_empty(layout.batch, layout.length, x.shape[1])
    branch = x.new_empty(rows, x.shape[1], dtype=layout.dtype)
    mlp = MLPTile(x, rows, into, down, layout.activation)
    for tile in tiles(len(x), layout.chunk_tokens):
        h, part = y.view(x.shape)[tile], branch[: tile.stop - tile.start]
        torch.add(x[tile], o.forward(_gathered(outs, tile, layout.dtype), out=part), alpha=layout.scale, out=h)
        h.add_(mlp.forward(rms_norm(h, *weights.mlp_norm, out=part), out=part), alpha=layout.scale)
    return y


def _backward(
    state: Pass,
    outs: Sequence[torch.Tensor],
    d_y: torch.Tensor,
    needs: Sequence[bool],
    main_grads: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Leaves the gradient of h in the pass, and returns those of the parameters."""
    x, layout = state.x, state.layout
    weights = state.weights
    parts = (weights.o, weights.gate, weights.up, weights.down)
    places = (slice(0, 4), slice(5, 9), slice(9, 13), slice(13, 17))
    o_grad, *into_grads, down_grad = grads = [
        ProjectionGrad(part, layout.dtype, needs[place], main_grads[place])
        for part, place in zip(parts, places, strict=True)
    ]
    norm_grad = WeightGrad(weights.mlp_norm.weight, main_grad=main_grads[4]) if needs[4] else None
    of_norm = None if norm_grad is None else norm_grad.begun()
    o, *into, down = (part.to(layout.dtype) for part in parts)
    rows = min(len(x), layout.chunk_tokens)
    d_h = torch.empty_like(x)
    h_rows, buffer, d_buffer = x.new_empty(rows, x.shape[1]), *x.new_empty(2, rows, x.shape[1], dtype=layout.dtype)
    mlp = MLPTile(x, rows, into, down, layout.activation)
    for tile in tiles(len(x), layout.chunk_tokens):
        count = tile.stop - tile.start
        h, normed, d_branch = h_rows[:count], buffer[:count], d_buffer[:count]
        attended = _gathered(outs, tile, layout.dtype)
        torch.add(x[tile], o.forward(attended, out=normed), alpha=layout.scale, out=h)
        rms_norm(h, *weights.mlp_norm, out=normed)
        d_y_tile = _scaled(d_y[tile], layout.scale, layout.dtype)
        mlp.backward(normed, d_y_tile, into_grads, down_grad, d_branch)
        rms_norm_backward(h, *weights.mlp_norm, d_branch, d_h[tile], add=d_y[tile], d_weight=of_norm)
        o_grad.add(_scaled(d_h[tile], layout.scale, layout.dtype), attended)
        del attended  # before the next is gathered
    state.d_h = d_h
    of_o, *of_mlp = ([*grad.results()] for grad in grads)
    of_norm = None if norm_grad is None else norm_grad.result()
    return [*of_o, of_norm, *(result for of_part in of_mlp for result in of_part)]


def _gathered(outs: Sequence[torch.Tensor], tile: slice, dtype: torch.dtype) -> torch.Tensor:
    """A tile of what attention returned, of all heads."""
    pieces = [out[tile] for out in outs]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)).to(dtype)


def _scaled(d: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return d.to(dtype) if scale == 1 else d.to(dtype) * scale
