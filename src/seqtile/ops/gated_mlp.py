"""The gated MLP of Llama and its kin, down(act(gate(x)) * up(x)), tile by tile along the tokens.

Only x is kept. The backward of a tile recomputes gate and up (2 u, where u = 2 * T * D * M FLOP), never down, and adds
6 u; with the forward's 3 u that is 11 u, which is also what an untiled MLP costs under activation checkpointing.
Source: Arctic Long Sequence Training, 3.1.1; Mini-Sequence Transformer, algorithms 1 and 3; see `saver.py` for how the
forward is spared in a checkpoint's replay.
"""

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node

from seqtile.ops.checks import autocast_dtype, check_first_derivative, check_no_transform
from seqtile.ops.mlp_checks import check_adapters, check_gated_mlp
from seqtile.ops.mlp_tile import MLPTile
from seqtile.ops.projection import LowRank, Projection, ProjectionGrad
from seqtile.ops.saver import save_input
from seqtile.ops.tiles import resolve_chunk_tokens, tiles
from seqtile.ops.weight_grad import main_grad_of


def gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor | None,
    down_weight: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_lora: LowRank | None = None,
    up_lora: LowRank | None = None,
    down_lora: LowRank | None = None,
    activation: str = "silu",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) for every token of x, where each of the three is a linear layer.

    Args:
        x: [..., D], float32, bfloat16 or float16.
        gate_weight, up_weight: [M, D]; down_weight: [D, M]; the dtype of x (any of the three under autocast).
            up_weight None: gate_weight is [2M, D], gate above up, as in Phi-3, and so are its bias and adapter.
        gate_bias, up_bias: [M]; down_bias: [D]; the dtype of x.
        gate_lora, up_lora, down_lora: `LowRank(a, b, scale)`, adapters without dropout: a [r, in], b [out, r], any of
            the three dtypes; computed in that of x.
        activation: "silu", or "gelu_tanh" (Hugging Face's gelu_pytorch_tanh).
        chunk_tokens: tokens a tile, see `ops/tiles.py`; None for its rule.

    Returns:
        [..., D], the dtype of x (autocast's dtype under autocast).

    Gradients: of x in its dtype; of the parameters summed over tiles in float32, rounded once and returned once. A
    parameter with a float32 `main_grad` takes its gradient there instead, unrounded, tile by tile. What is frozen costs
    no product and no buffer.

    Memory: saves x [T, D] for the backward and nothing else. Allocates the output and a tile [chunk_tokens, 2M] in the
    forward; d_x, a tile [chunk_tokens, 3M] and the parameters' float32 gradients in the backward. Never a [T, M]
    tensor. Adapters need some [chunk_tokens, r] besides.

    No more tokens than a tile: the plain expression runs, 9 u instead of 11 u, and autograd saves what it saves.
    Under autocast the operands are cast once, before the tiles. Under torch.compile the tiled path is one graph break.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes that do not fit, an empty x, an unknown activation, a
            `main_grad` that is not float32 or of another shape.
        RuntimeError: in the backward, for second derivatives (`create_graph=True`).
    """
    check_adapters(gate_lora=gate_lora, up_lora=up_lora, down_lora=down_lora)
    projections = [Projection.of(gate_weight, gate_bias, gate_lora), Projection.of(down_weight, down_bias, down_lora)]
    if up_weight is not None:
        projections.insert(1, Projection.of(up_weight, up_bias, up_lora))
    check_gated_mlp(x, projections, activation, up_bias, up_lora)
    chunk_tokens = resolve_chunk_tokens(chunk_tokens, x.shape[-1])
    tensors = [tensor for projection in projections for tensor in projection.tensors]
    fits = x.shape[:-1].numel() <= chunk_tokens
    if fits and all(main_grad_of(tensor) is None for tensor in tensors):
        return _plain(x, *projections, activation=activation)
    return _tiled(x, projections, activation, chunk_tokens)


def _plain(x: torch.Tensor, *projections: Projection, activation: str) -> torch.Tensor:
    *into, down = projections
    gate, up = into[0].plain(x).chunk(2, dim=-1) if len(into) == 1 else (projection.plain(x) for projection in into)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return down.plain(activated * up)


@torch.compiler.disable(reason="seqtile.gated_mlp saves its input in a node of its own")
def _tiled(x: torch.Tensor, projections: list[Projection], activation: str, chunk_tokens: int) -> torch.Tensor:
    check_no_transform("gated_mlp")
    # Each parameter gets a node of its own, in this order: gradients then arrive as they do without tiles, last one
    # first. ZeRO-1 and -2 fill their buckets as gradients arrive, so ranks with and without tiles must agree.
    tensors = [tensor for projection in projections for tensor in projection.tensors]
    leaves = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
    shape = x.shape
    x = x.to(autocast_dtype(x) or x.dtype).reshape(-1, shape[-1])
    node = None
    if torch.is_grad_enabled() and x.requires_grad:
        x, node = save_input(x, *tensors)
    return GatedMLPFunction.apply(x, projections, activation, chunk_tokens, node, *leaves).view(shape)


class GatedMLPFunction(torch.autograd.Function):
    """x [T, D] -> [T, D]. The parameters come twice: as `leaves`, which take the gradients, and in `projections`, which
    are used. `node` holds x and the parameters for the backward if x requires a gradient."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        projections: list[Projection],
        activation: str,
        chunk_tokens: int,
        node: Node | None,
        *leaves: torch.Tensor | None,
    ) -> torch.Tensor:
        tensors = [tensor for projection in projections for tensor in projection.tensors]
        ctx.scales = [projection.scale for projection in projections]
        ctx.main_grads = [main_grad_of(tensor) for tensor in tensors]
        ctx.activation, ctx.chunk_tokens, ctx.node = activation, chunk_tokens, node
        if node is None:
            ctx.save_for_backward(x, *tensors)
        *into, down = (projection.to(x.dtype) for projection in projections)
        y = torch.empty_like(x)
        mlp = MLPTile(x, min(x.shape[0], chunk_tokens), into, down, activation)
        for tile in tiles(x.shape[0], chunk_tokens):
            mlp.forward(x[tile], out=y[tile])
        return y

    @staticmethod
    def backward(ctx, d_y: torch.Tensor):
        check_first_derivative("gated_mlp")
        x, *tensors = ctx.saved_tensors if ctx.node is None else ctx.node.saved_tensors
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        originals = [Projection(*tensors[4 * i : 4 * i + 4], scale) for i, scale in enumerate(ctx.scales)]
        *into_grads, down_grad = grads = [
            ProjectionGrad(original, x.dtype, needs[4 * i : 4 * i + 4], ctx.main_grads[4 * i : 4 * i + 4])
            for i, original in enumerate(originals)
        ]
        *into, down = (original.to(x.dtype) for original in originals)
        d_x = torch.empty_like(x) if needs_x else None
        mlp = MLPTile(x, min(x.shape[0], ctx.chunk_tokens), into, down, ctx.activation)
        for tile in tiles(x.shape[0], ctx.chunk_tokens):
            mlp.backward(x[tile], d_y[tile], into_grads, down_grad, None if d_x is None else d_x[tile])
        return d_x, None, None, None, None, *(result for grad in grads for result in grad.results())
