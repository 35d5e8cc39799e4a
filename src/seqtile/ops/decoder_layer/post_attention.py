"""What follows attention in a layer, tile by tile: output projection, residual, norm, MLP, residual.

h = x + scale o(attended), y = h + scale mlp(norm(h)). The node has the gradients of norm and MLP. Those of the output
projection and of what attention returned are the attention's node's own, from the gradient of h alone, which this node
returns as that of x: so this node reads the output projection before its gradient leaves, and the other after.
"""

from collections.abc import Sequence

import torch
from torch.autograd.graph import Node

from seqtile.kernels.launch import rms_norm, rms_norm_backward
from seqtile.ops.checks import check_first_derivative
from seqtile.ops.decoder_layer.params import Layout, MLPParams, gathered, scaled
from seqtile.ops.mlp_tile import MLPTile
from seqtile.ops.projection import Projection, ProjectionGrad
from seqtile.ops.tiles import tiles
from seqtile.ops.weight_grad import WeightGrad, main_grad_of


class SaveEarlyFunction(torch.autograd.Function):
    """x and what attention returned, handed through; saves them, and the parameters, before what follows has run, so
    that a checkpoint's replay ends here (see `ops/saver.py`)."""

    @staticmethod
    def forward(ctx, parameters: Sequence[torch.Tensor | None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors, *parameters)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *d


class PostAttentionFunction(torch.autograd.Function):
    """x [T, D] and what attention returned for each group [T, h K] to the layer's output [B, S, D].

    `node` holds x, these, and the parameters for the backward; where it is None, nothing before this needs a gradient
    and they are saved here. `leaves` stand for `mlp.tensors` and take their gradients.
    """

    @staticmethod
    def forward(
        ctx,
        node: Node | None,
        layout: Layout,
        o: Projection,
        mlp: MLPParams,
        x: torch.Tensor,
        *rest: torch.Tensor | None,
    ) -> torch.Tensor:
        outs = rest[: layout.groups]
        ctx.node, ctx.layout = node, layout
        ctx.main_grads = [main_grad_of(tensor) for tensor in mlp.tensors]
        ctx.o, ctx.mlp = o.with_tensors([None] * 4), mlp.with_tensors([None] * len(mlp.tensors))
        if node is None:
            ctx.save_for_backward(x, *outs, *o.tensors, *mlp.tensors)
        return _forward(layout, o, mlp, x, outs)

    @staticmethod
    def backward(ctx, d_y: torch.Tensor):
        check_first_derivative("decoder_layer")
        layout: Layout = ctx.layout
        x, *saved = ctx.saved_tensors if ctx.node is None else ctx.node.saved_tensors
        outs, parameters = saved[: layout.groups], saved[layout.groups :]
        o, mlp = ctx.o.with_tensors(parameters[:4]), ctx.mlp.with_tensors(parameters[4:])
        needs = ctx.needs_input_grad[5 + layout.groups :]
        grads = _MLPGradients(mlp, layout.dtype, needs, ctx.main_grads)
        d_h = _backward(layout, o, mlp, x, outs, d_y.contiguous().view(x.shape), grads)
        # The attention's node computes the gradients of what it returned; autograd wants tensors of their shape.
        placeholders = [out.new_zeros(()).expand(out.shape) for out in outs]
        return None, None, None, None, d_h, *placeholders, *grads.results()


class _MLPGradients:
    """Sums over tiles, in the order of `MLPParams.tensors`."""

    def __init__(
        self,
        mlp: MLPParams,
        dtype: torch.dtype,
        needs: Sequence[bool],
        main_grads: Sequence[torch.Tensor | None],
    ):
        self._norm = WeightGrad(mlp.norm.weight, main_grad=main_grads[0]) if needs[0] else None
        self.of_norm = None if self._norm is None else self._norm.begun()
        places = (slice(start, start + 4) for start in (1, 5, 9))
        *self.into, self.down = self._projections = [
            ProjectionGrad(part, dtype, needs[place], main_grads[place])
            for part, place in zip((mlp.gate, mlp.up, mlp.down), places, strict=True)
        ]

    def results(self) -> list[torch.Tensor | None]:
        of_norm = None if self._norm is None else self._norm.result()
        return [of_norm, *(result for part in self._projections for result in part.results())]


def _forward(
    layout: Layout, o: Projection, mlp: MLPParams, x: torch.Tensor, outs: Sequence[torch.Tensor]
) -> torch.Tensor:
    o, *into, down = (part.to(layout.dtype) for part in (o, mlp.gate, mlp.up, mlp.down))
    rows = min(len(x), layout.chunk_tokens)
    y = x.new_empty(layout.batch, layout.length, x.shape[1])
    branch = x.new_empty(rows, x.shape[1], dtype=layout.dtype)
    of_tile = MLPTile(x, rows, into, down, layout.activation)
    for tile in tiles(len(x), layout.chunk_tokens):
        h, part = y.view(x.shape)[tile], branch[: tile.stop - tile.start]
        torch.add(x[tile], o.forward(gathered(outs, tile, layout.dtype), out=part), alpha=layout.scale, out=h)
        h.add_(of_tile.forward(rms_norm(h, *mlp.norm, out=part), out=part), alpha=layout.scale)
    return y


def _backward(
    layout: Layout,
    o: Projection,
    mlp: MLPParams,
    x: torch.Tensor,
    outs: Sequence[torch.Tensor],
    d_y: torch.Tensor,
    grads: _MLPGradients,
) -> torch.Tensor:
    """The gradient of h [T, D]; adds those of the parameters to `grads`."""
    o, *into, down = (part.to(layout.dtype) for part in (o, mlp.gate, mlp.up, mlp.down))
    rows = min(len(x), layout.chunk_tokens)
    d_h = torch.empty_like(x)
    h_rows, buffer, d_buffer = x.new_empty(rows, x.shape[1]), *x.new_empty(2, rows, x.shape[1], dtype=layout.dtype)
    of_tile = MLPTile(x, rows, into, down, layout.activation)
    for tile in tiles(len(x), layout.chunk_tokens):
        count = tile.stop - tile.start
        h, normed, d_normed = h_rows[:count], buffer[:count], d_buffer[:count]
        torch.add(x[tile], o.forward(gathered(outs, tile, layout.dtype), out=normed), alpha=layout.scale, out=h)
        rms_norm(h, *mlp.norm, out=normed)
        of_tile.backward(normed, scaled(d_y[tile], layout), grads.into, grads.down, d_normed)
        rms_norm_backward(h, *mlp.norm, d_normed, d_h[tile], add=d_y[tile], d_weight=grads.of_norm)
    return d_h
