"""The gated MLP of Llama and its kin, down(silu(gate(x)) * up(x)), tile by tile along the tokens.

Only x is kept. The backward of a tile recomputes gate and up (2 u, where u = 2 * T * D * M FLOP), never down, and adds
6 u; with the forward's 3 u that is 11 u, which is also what an untiled MLP costs under activation checkpointing.
Source: Arctic Long Sequence Training, 3.1.1; Mini-Sequence Transformer, algorithms 1 and 3; see `saver.py` for how the
forward is spared in a checkpoint's replay.
"""

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node

from seqtile.kernels.launch import gated_activation_, gated_activation_backward_
from seqtile.ops.checks import autocast_dtype, check_first_derivative, check_operands, check_shape
from seqtile.ops.saver import save_input
from seqtile.ops.tiles import resolve_chunk_tokens, tiles
from seqtile.ops.weight_grad import WeightGrad

_OP = "gated_mlp"


def gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    activation: str = "silu",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """down_weight @ (silu(gate_weight @ x) * (up_weight @ x)) for every token of x.

    Args:
        x: [..., D], float32, bfloat16 or float16.
        gate_weight, up_weight: [M, D]; down_weight: [D, M]; the dtype of x (any of the three under autocast).
        activation: "silu", the only one so far.
        chunk_tokens: tokens a tile, see `ops/tiles.py`; None for its rule.

    Returns:
        [..., D], the dtype of x (autocast's dtype under autocast).

    Gradients: of x in its dtype; of the weights summed over tiles in float32, rounded once and returned once.

    Memory: saves x [T, D] for the backward and nothing else. Allocates the output, two tiles [chunk_tokens, M] in the
    forward; d_x, three tiles and three float32 weight gradients in the backward. No [T, M] tensor ever. The eager twins
    of CPU users need up to two float32 tiles more, in half precision five.

    No more tokens than a tile: the plain expression runs, 9 u instead of 11 u, and autograd saves what it saves.
    Under autocast the operands are cast once, before the tiles. Under torch.compile the tiled path is one graph break.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes that do not fit, an empty x, an unknown activation.
        RuntimeError: in the backward, for second derivatives (`create_graph=True`).
    """
    _check(x, gate_weight, up_weight, down_weight, activation)
    chunk_tokens = resolve_chunk_tokens(chunk_tokens, x.shape[-1])
    if x.shape[:-1].numel() <= chunk_tokens:
        return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)
    return _tiled(x, gate_weight, up_weight, down_weight, chunk_tokens)


def _check(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor, activation: str
) -> None:
    operands = {"x": x, "gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    check_operands(_OP, "x", operands)
    if x.dim() == 0 or x.numel() == 0:
        raise ValueError(f"{_OP}: x has shape {list(x.shape)}, expected [..., D] with at least one token")
    if gate_weight.dim() != 2 or gate_weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{_OP}: gate_weight has shape {list(gate_weight.shape)}, expected [M, D] with D = {x.shape[-1]}"
        )
    width, hidden_size = gate_weight.shape
    check_shape(_OP, "up_weight", up_weight, (width, hidden_size), "gate_weight's [M, D]")
    check_shape(_OP, "down_weight", down_weight, (hidden_size, width), "[D, M]")
    if activation != "silu":
        raise ValueError(f'{_OP}: activation is {activation!r}, expected "silu"')


@torch.compiler.disable(reason="seqtile.gated_mlp saves its input in a node of its own")
def _tiled(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    chunk_tokens: int,
) -> torch.Tensor:
    weights = (gate_weight, up_weight, down_weight)
    # Each weight gets a node of its own, in this order: gradients then reach down first, then up, then gate, as they do
    # without tiles. ZeRO-1 and -2 fill their buckets as gradients arrive, so ranks with and without tiles must agree.
    leaves = [weight.view_as(weight) for weight in weights]
    shape = x.shape
    x = x.to(autocast_dtype(x) or x.dtype).reshape(-1, shape[-1])
    node = None
    if torch.is_grad_enabled() and x.requires_grad:
        x, node = save_input(x, *weights)
    return GatedMLPFunction.apply(x, *leaves, weights, chunk_tokens, node).view(shape)


class GatedMLPFunction(torch.autograd.Function):
    """x [T, D] -> [T, D]. The weights come twice: as `leaves`, which take the gradients, and as they are, which are
    used. `node` holds (x, gate_weight, up_weight, down_weight) for the backward if x requires a gradient."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        gate_leaf: torch.Tensor,
        up_leaf: torch.Tensor,
        down_leaf: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        chunk_tokens: int,
        node: Node | None,
    ) -> torch.Tensor:
        ctx.chunk_tokens = chunk_tokens
        ctx.node = node
        if node is None:
            ctx.save_for_backward(x, *weights)
        gate_operand, up_operand, down_operand = (w.to(x.dtype) for w in weights)
        y = torch.empty_like(x)
        gate_buffer, up_buffer = x.new_empty(2, min(x.shape[0], chunk_tokens), gate_operand.shape[0])
        for tile in tiles(x.shape[0], chunk_tokens):
            rows = tile.stop - tile.start
            gate = torch.mm(x[tile], gate_operand.t(), out=gate_buffer[:rows])
            up = torch.mm(x[tile], up_operand.t(), out=up_buffer[:rows])
            torch.mm(gated_activation_(gate, up), down_operand.t(), out=y[tile])
        return y

    @staticmethod
    def backward(ctx, d_y: torch.Tensor):
        check_first_derivative(_OP)
        x, *weights = ctx.saved_tensors if ctx.node is None else ctx.node.saved_tensors
        needs_x, *needs_weight = ctx.needs_input_grad[:4]
        gate_operand, up_operand, down_operand = (w.to(x.dtype) for w in weights)
        d_gate_weight, d_up_weight, d_down_weight = (
            WeightGrad(w) if needed else None for w, needed in zip(weights, needs_weight, strict=True)
        )
        d_x = torch.empty_like(x) if needs_x else None
        buffers = x.new_empty(3, min(x.shape[0], ctx.chunk_tokens), gate_operand.shape[0])
        for tile in tiles(x.shape[0], ctx.chunk_tokens):
            gate, up, product = buffers[:, : tile.stop - tile.start]
            torch.mm(x[tile], gate_operand.t(), out=gate)
            torch.mm(x[tile], up_operand.t(), out=up)
            torch.mm(d_y[tile], down_operand, out=product)
            gated_activation_backward_(gate, up, product)
            d_gate, d_up = gate, up
            if d_down_weight is not None:
                d_down_weight.add(d_y[tile], product)
            if d_gate_weight is not None:
                d_gate_weight.add(d_gate, x[tile])
            if d_up_weight is not None:
                d_up_weight.add(d_up, x[tile])
            if d_x is not None:
                torch.mm(d_gate, gate_operand, out=d_x[tile])
                d_x[tile].addmm_(d_up, up_operand)
        d_weights = (None if grad is None else grad.result() for grad in (d_gate_weight, d_up_weight, d_down_weight))
        return d_x, *d_weights, None, None, None
