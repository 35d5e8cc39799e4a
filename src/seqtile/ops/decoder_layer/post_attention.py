"""The part of a layer behind attention, chunk by chunk: output projection, residual, norm, MLP, residual.

h = x + scale o(attn_output), y = h + scale mlp(norm(h)). The node owns norm and MLP, and returns their gradients.
`AttentionFunction` owns the output projection. It computes the gradients of that projection and of attention's output
from the gradient of h alone. This node returns the gradient of h as the gradient of x:

    forward    attn_output ─ o ─(+ x)─ h ─ norm ─ mlp ─(+ h)─ y
    backward   d_y -> d_h, returned as the gradient of x; none of `attn_output`, since `AttentionFunction` computes it
               group by group

So this node reads the output projection before its gradient leaves the other node.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from seqtile.kernels.dispatch import rms_norm, rms_norm_backward
from seqtile.ops.checks import check_first_derivative
from seqtile.ops.chunks import chunks, to_be_filled
from seqtile.ops.decoder_layer.params import LayerSizes, MLPParams
from seqtile.ops.gated_mlp import MLPChunk
from seqtile.ops.linear import NodeParams, Projection, tensors_of
from seqtile.ops.save_early import saved_for
from seqtile.ops.weight_grads import finish_weight_grads


class PostAttentionFunction(torch.autograd.Function):
    """x [T, D] and what attention returned for each group [T, h K] to the layer's output [B, S, D].

    `node` holds x, these, and the parameters for the backward; where it is None, nothing before this needs a gradient
    and they are saved here. `rest` are the outputs of the groups, and leaves that stand for the tensors of `mlp` and
    take their gradients.
    """

    @staticmethod
    def forward(
        ctx,
        node: Node | None,
        sizes: LayerSizes,
        o: Projection,
        mlp: MLPParams,
        x: torch.Tensor,
        *rest: torch.Tensor | None,
    ) -> torch.Tensor:
        attn_output, params = rest[: sizes.groups], (o, *mlp)
        ctx.node, ctx.sizes, ctx.params = node, sizes, NodeParams.of(params)
        if node is None:
            ctx.save_for_backward(x, *attn_output, *tensors_of(params))
        y = to_be_filled(x, (sizes.batch, sizes.length, x.shape[1]), trial=sizes.trial)
        compute = _Chunks(sizes, params, x, attn_output)
        for _, h, normed in compute.each_chunk(y.view(x.shape)):
            h.add_(compute.mlp.forward(normed, out=normed), alpha=sizes.scale)
        return y

    @staticmethod
    def backward(ctx, d_y: torch.Tensor):
        check_first_derivative("decoder_layer")
        sizes: LayerSizes = ctx.sizes
        x, *saved = saved_for(ctx)
        attn_output, needs = saved[: sizes.groups], ctx.needs_input_grad[5 + sizes.groups :]
        needs = (*[False] * Projection.TENSORS, *needs)  # the gradient of o is the other node's
        params, (_, *sums) = ctx.params.restored(saved[sizes.groups :], needs)
        d_h = _backward(_Chunks(sizes, params, x, attn_output), sums, d_y.contiguous().view(x.shape))
        return None, None, None, None, d_h, *[None] * sizes.groups, *finish_weight_grads(tensors_of(sums))


def _backward(compute: "_Chunks", sums: Sequence[Any], d_y: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of h [T, D], and adds those of the parameters to `sums`. Its chunks are gone when the sums
    are rounded."""
    sizes, norm, of_norm = compute.sizes, compute.norm, sums[0].weight
    d_h = to_be_filled(compute.x, trial=sizes.trial)
    d_norm = None if of_norm is None else of_norm.total()
    d_rows = torch.empty_like(compute.rows)
    for chunk, h, normed in compute.each_chunk():
        d_normed = d_rows[: chunk.stop - chunk.start]
        compute.mlp.backward(normed, sizes.branch_gradient(d_y[chunk]), sums[1:], d_normed)
        rms_norm_backward(h, *norm, d_normed, d_h[chunk], add=d_y[chunk], d_weight=d_norm)
    return d_h


class _Chunks:
    """The loop over chunks, which forward and backward share, with buffers that serve every chunk."""

    def __init__(self, sizes: LayerSizes, params: Sequence[Any], x: torch.Tensor, attn_output: Sequence[torch.Tensor]):
        o, self.norm, *mlp = params
        count = min(len(x), sizes.chunk_tokens)
        self.sizes, self.x, self._o, self._attn_output = sizes, x, o.to(sizes.dtype), attn_output
        self.rows = x.new_empty(count, x.shape[1], dtype=sizes.dtype)
        self.mlp = MLPChunk(self.rows, count, mlp, sizes.activation)

    def each_chunk(self, out: torch.Tensor | None = None) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yields every chunk with h [C, D], written to `out` [T, D] if given, and norm(h) [C, D] in `rows`."""
        sizes, x = self.sizes, self.x
        buffer = torch.empty_like(x[: len(self.rows)]) if out is None else None
        for chunk in chunks(len(x), sizes.chunk_tokens):
            count = chunk.stop - chunk.start
            rows, h = self.rows[:count], out[chunk] if buffer is None else buffer[:count]
            projected = self._o.forward(sizes.concat_groups(self._attn_output, chunk), out=rows)
            torch.add(x[chunk], projected, alpha=sizes.scale, out=h)
            yield chunk, h, rms_norm(h, *self.norm, out=rows)
