"""Computes Llama's gated MLP, down(act(gate(x)) * up(x)), chunk by chunk along the tokens.

Only x is saved. With u = 2 * T * D * M FLOP, the forward costs 3 u. The backward recomputes gate and up (2 u), never
down, and adds 6 u. The sum, 11 u, equals the cost of an untiled MLP under activation checkpointing.
Source: Arctic Long Sequence Training, 3.1.1; Mini-Sequence Transformer, algorithms 1 and 3. `save_early.py` describes
how a checkpoint's recomputation skips the forward.
"""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node

from seqtile.kernels.dispatch import ACTIVATIONS, gated_activation_, gated_activation_backward_
from seqtile.ops.checks import (
    DTYPES,
    autocast_dtype,
    check_dense,
    check_device,
    check_first_derivative,
    check_no_transform,
    check_operands,
    check_shape,
)
from seqtile.ops.chunks import chunks, is_trial, mlp_chunk_tokens, to_be_filled
from seqtile.ops.linear import LowRank, NodeParams, Projection, main_grads_of, tensors_of, views_of
from seqtile.ops.save_early import save_early, saved_for
from seqtile.ops.weight_grads import finish_weight_grads

_OP = "gated_mlp"
Projections = tuple[Projection, ...]
"""Gate, up and down; or gate and up stacked in one projection, and down."""


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
    """Computes down(act(gate(x)) * up(x)) for every token of x, where each of the three is a linear layer.

    Args:
        x: [..., D], float32, bfloat16 or float16.
        gate_weight: [M, D], the dtype of x (any of the three under autocast).
        up_weight: [M, D], dtype as `gate_weight`. None if `gate_weight` [2M, D] stacks gate on up, as in Phi-3; then
            the bias and the adapter do too.
        down_weight: [D, M], dtype as `gate_weight`.
        gate_bias, up_bias: [M], the dtype of x.
        down_bias: [D], the dtype of x.
        gate_lora, up_lora, down_lora: `LowRank(a, b, scale)`, an adapter without dropout; a [r, in] and b [out, r] in
            any of the three dtypes, computed in the dtype of x.
        activation: "silu", or "gelu_tanh" (Hugging Face's gelu_pytorch_tanh).
        chunk_tokens: tokens per chunk; None for max(2048, D), and in a checkpoint or without gradients for at least as
            many as make 512 MiB of intermediates, see `seqtile.ops.chunks`.

    Returns:
        [..., D], the dtype of x (autocast's dtype under autocast).

    Gradients: of x in its dtype; of the parameters summed over chunks in float32, rounded once and returned once. If a
    parameter has a float32 `main_grad`, each chunk adds its gradient there instead, unrounded. A frozen parameter costs
    no product and no buffer.

    Memory: saves only x [T, D] for the backward. Allocates the output and a chunk [chunk_tokens, 2M] in the forward;
    d_x, a chunk [chunk_tokens, 3M] and the parameters' float32 gradients in the backward; never a [T, M] tensor.
    Adapters need a few more tensors [chunk_tokens, r].

    If all tokens fit in one chunk, the plain expression runs: 9 u instead of 11 u, and autograd saves its activations.
    Autocast casts the operands once, before the chunks. Under torch.compile the tiled path is one graph break.

    Raises:
        TypeError, ValueError: invalid dtypes, devices or shapes, an empty x, an unknown activation, a `main_grad` that
            is not float32 or has another shape.
        RuntimeError: in the backward, for second derivatives (`create_graph=True`).
    """
    for name, adapter in (("gate_lora", gate_lora), ("up_lora", up_lora), ("down_lora", down_lora)):
        if adapter is not None and not isinstance(adapter, LowRank):
            kind = type(adapter).__name__
            raise TypeError(f"{_OP}: {name} is a {kind}, expected seqtile.LowRank(a, b, scale) or None")
    gate, down = Projection.of(gate_weight, gate_bias, gate_lora), Projection.of(down_weight, down_bias, down_lora)
    if up_weight is None and (up_bias is not None or up_lora is not None):
        raise ValueError(f"{_OP}: without up_weight, gate_weight holds up too: pass its bias and adapter as gate's")
    up = () if up_weight is None else (Projection.of(up_weight, up_bias, up_lora),)
    return gated_mlp_of(x, (gate, *up, down), activation, chunk_tokens)


def gated_mlp_of(x: torch.Tensor, params: Projections, activation: str, chunk_tokens: int | None) -> torch.Tensor:
    """Computes `gated_mlp` from projections, whose weights may be quantized. The forward and the backward each
    dequantize such a weight once, and free the copy when they end."""
    _check(x, params, activation)
    chunk_tokens = mlp_chunk_tokens(chunk_tokens, x, params[-1].shape[1])
    fits = x.shape[:-1].numel() <= chunk_tokens
    if fits and not any(main_grad is not None for main_grad in main_grads_of(params)):
        return _untiled(x, params, activation)
    return _tiled(x, params, activation, chunk_tokens)


def _untiled(x: torch.Tensor, params: Projections, activation: str) -> torch.Tensor:
    *first, down = params
    made = [projection.differentiable(x) for projection in first]
    gate, up = made[0].chunk(2, dim=-1) if len(made) == 1 else made
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return down.differentiable(activated * up)


@torch.compiler.disable(reason="seqtile.gated_mlp saves its input in a node of its own")
def _tiled(x: torch.Tensor, params: Projections, activation: str, chunk_tokens: int) -> torch.Tensor:
    check_no_transform(_OP)
    shape, leaves = x.shape, views_of(params)
    x = x.to(autocast_dtype(x) or x.dtype).reshape(-1, shape[-1])
    (x,), node = save_early((x,), tensors_of(params))
    return GatedMLPFunction.apply(x, params, activation, chunk_tokens, node, *leaves).view(shape)


class GatedMLPFunction(torch.autograd.Function):
    """x [T, D] -> [T, D]. The parameters are passed twice: as `leaves`, which receive the gradients, and in `params`,
    which are computed with. If x requires a gradient, `node` saves x and the parameters for the backward."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        params: Projections,
        activation: str,
        chunk_tokens: int,
        node: Node | None,
        *leaves: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.params, ctx.node, ctx.trial = NodeParams.of(params), node, is_trial()
        ctx.activation, ctx.chunk_tokens = activation, chunk_tokens
        if node is None:
            ctx.save_for_backward(x, *tensors_of(params))
        y = to_be_filled(x, trial=ctx.trial)
        mlp = MLPChunk(x, min(len(x), chunk_tokens), params, activation)
        for chunk in chunks(len(x), chunk_tokens):
            mlp.forward(x[chunk], out=y[chunk])
        return y

    @staticmethod
    def backward(ctx, d_y: torch.Tensor):
        check_first_derivative(_OP)
        x, *tensors = saved_for(ctx)
        params, sums = ctx.params.restored(tensors, ctx.needs_input_grad[5:])
        d_x = to_be_filled(x, trial=ctx.trial) if ctx.needs_input_grad[0] else None
        mlp = MLPChunk(x, min(len(x), ctx.chunk_tokens), params, ctx.activation)
        for chunk in chunks(len(x), ctx.chunk_tokens):
            mlp.backward(x[chunk], d_y[chunk], sums, None if d_x is None else d_x[chunk])
        return d_x, None, None, None, None, *finish_weight_grads(tensors_of(sums))


class MLPChunk:
    """Computes a chunk of a gated MLP, forward and backward, in buffers that all chunks share.

    Allocates [rows, 2M], and at the first backward [rows, M]. The products have the dtype of x; the parameters are cast
    to it.
    """

    def __init__(self, x: torch.Tensor, rows: int, params: Projections, activation: str):
        *self._first, self._down = [projection.to(x.dtype) for projection in params]
        self._activation = activation
        self._both = x.new_empty(rows, 2 * self._down.weight.shape[1])
        self._product: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes y [C, D] of x [C, D] to `out`, which may be x. 3 u, where u = 2 C D M FLOP."""
        gate, up, _ = self._gate_and_up(x)
        return self._down.forward(gated_activation_(gate, up, self._activation), out=out)

    def backward(self, x: torch.Tensor, d_y: torch.Tensor, sums: Projections, out: torch.Tensor | None) -> None:
        """Adds the gradients of the parameters to `sums`, and writes that of x to `out`, if given; `out` must not be x.
        Recomputes gate and up (2 u), then 6 u: 8 u."""
        gate, up, d_first = self._gate_and_up(x)  # the kernel writes the gradients where gate and up are
        if self._product is None:
            self._product = self._both.new_empty(self._both.shape[0], self._both.shape[1] // 2)
        product = self._product[: x.shape[0]]  # [C, M], holds the product's gradient first
        self._down.backward(d_y, out=product)
        gated_activation_backward_(gate, up, product, self._activation)
        self._down.add_gradients(sums[-1], d_y, product)
        for i, (projection, d_out) in enumerate(zip(self._first, d_first, strict=True)):
            projection.add_gradients(sums[i], d_out, x)
            if out is not None:
                projection.backward(d_out, out=out, add=i > 0)

    def _gate_and_up(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Computes gate and up, each [C, M]. Third, returns the outputs of the first projections: these two, or both
        side by side [C, 2M]."""
        both = self._both[: x.shape[0]]
        gate, up = both.chunk(2, dim=1)
        outs = (both,) if len(self._first) == 1 else (gate, up)
        for projection, out in zip(self._first, outs, strict=True):
            projection.forward(x, out=out)
        return gate, up, outs


def _check(x: torch.Tensor, params: Projections, activation: str) -> None:
    """Raises TypeError or ValueError for arguments that do not match each other."""
    fused = len(params) == 2
    named = dict(zip(("gate", "down") if fused else ("gate", "up", "down"), params, strict=True))
    operands: dict[str, Any] = {"x": x}
    for name, projection in named.items():
        if projection.quantized is None:
            operands[f"{name}_weight"] = projection.weight
        if projection.bias is not None:
            operands[f"{name}_bias"] = projection.bias
    check_operands(_OP, operands)
    if x.dim() == 0 or x.numel() == 0:
        raise ValueError(f"{_OP}: x has shape {list(x.shape)}, expected [..., D] with at least one token")
    gate = params[0].shape
    if len(gate) != 2 or gate[1] != x.shape[-1] or (fused and gate[0] % 2):
        expected = "[2M, D]" if fused else "[M, D]"
        raise ValueError(f"{_OP}: gate_weight has shape {list(gate)}, expected {expected} with D = {x.shape[-1]}")
    rows, hidden = gate
    for name, projection in named.items():
        shape, meaning = (rows, hidden), "gate_weight's [M, D]"
        if name == "down":
            shape, meaning = (hidden, rows // 2 if fused else rows), "[D, M]"
        check_shape(_OP, f"{name}_weight", projection, shape, meaning)
        if projection.bias is not None:
            check_shape(_OP, f"{name}_bias", projection.bias, shape[:1], f"one number a row of {name}_weight")
        if projection.a is not None or projection.b is not None:
            _check_adapter(f"{name}_lora", projection, shape, x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{_OP}: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")


def _check_adapter(name: str, projection: Projection, shape: Sequence[int], x: torch.Tensor) -> None:
    if isinstance(projection.scale, bool) or not isinstance(projection.scale, Real):
        raise TypeError(f"{_OP}: {name}.scale is {projection.scale!r}, expected a Python number")
    for half, tensor in (("a", projection.a), ("b", projection.b)):
        check_dense(_OP, f"{name}.{half}", tensor)
        if tensor.dim() != 2 or tensor.dtype not in DTYPES:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{_OP}: {name}.{half} is {found}, expected a floating-point matrix")
        check_device(_OP, f"{name}.{half}", tensor, "x", x)
    check_shape(_OP, f"{name}.a", projection.a, (len(projection.a), shape[1]), "[r, in]")
    check_shape(_OP, f"{name}.b", projection.b, (shape[0], len(projection.a)), "[out, r]")
