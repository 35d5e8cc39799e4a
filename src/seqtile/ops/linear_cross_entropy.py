"""Linear projection and cross-entropy, with the logits of one tile alive at a time.

For a tile of C tokens: logits = hidden W', the row kernel turns them into losses and, in place, into
d_logits = softmax - onehot, and at once d_hidden = d_logits W and d_W += d_logits' hidden. So the gradients are ready
when the forward ends, at 3 matrix products in all and nothing recomputed; the backward only scales them.
Source: Arctic Long Sequence Training, 3.1; Mini-Sequence Transformer, algorithms 2 and 4. Exact, not approximate.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.kernels.launch import cross_entropy_
from seqtile.ops.checks import autocast_dtype, check_first_derivative, check_operands, check_shape
from seqtile.ops.tiles import resolve_chunk_tokens, tiles
from seqtile.ops.weight_grad import WeightGrad

_OP = "linear_cross_entropy"


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | float | torch.Tensor | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """cross_entropy(hidden @ weight.T, target) without the logits.

    Args:
        hidden: [T, D] or [B, S, D], float32, bfloat16 or float16.
        weight: [V, D], the dtype of `hidden` (any of the three under autocast).
        target: [T] or [B, S], int64, already shifted: target[t] is the token that follows hidden[t].
        ignore_index: tokens with this target count for nothing.
        reduction: "mean" over the tokens that are not ignored, or "sum".
        num_items: divides the sum instead of that count (Hugging Face's `num_items_in_batch`); only with "mean".
        chunk_tokens: tokens a tile, see `ops/tiles.py`; None for its rule.

    Returns:
        The loss, a float32 scalar. All tokens ignored: 0 with zero gradients for "sum" and for `num_items`; NaN with
        zero gradients for a plain "mean", as in torch.

    Gradients: of `hidden` in its dtype, of `weight` summed over tiles in float32 and rounded once. They are scaled by
    the upstream gradient in float32, in the backward, in place, so a second backward through one call raises.

    Memory: one tile of logits [chunk_tokens, V], d_hidden (the size of `hidden`), d_weight in float32. Nothing else
    grows with T but a few integers a token. Without gradients only the tile. On a CPU a half-precision tile has a
    float32 copy besides.

    Under autocast the operands are cast once, before the tiles. Under torch.compile this is one graph break.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes that do not fit, an empty sequence, an unknown reduction,
            a `num_items` that is not one positive number; on a CPU also a target outside [0, V). On a GPU such a
            target, which cannot be looked at without waiting for the device, makes loss and gradients NaN.
        RuntimeError: in a second backward, or one with `create_graph=True`.
    """
    _check(hidden, weight, target, reduction, num_items)
    chunk_tokens = resolve_chunk_tokens(chunk_tokens, hidden.shape[-1])
    return _tiled(hidden, weight, target, ignore_index, reduction, num_items, chunk_tokens)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
) -> None:
    check_operands(_OP, "hidden", {"hidden": hidden, "weight": weight})
    if hidden.dim() not in (2, 3):
        raise ValueError(f"{_OP}: hidden has shape {list(hidden.shape)}, expected [T, D] or [B, S, D]")
    if hidden.numel() == 0:
        raise ValueError(f"{_OP}: hidden has shape {list(hidden.shape)}, an empty sequence; pass at least one token")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"{_OP}: weight has shape {list(weight.shape)}, expected [V, D] with D = {hidden.shape[-1]}")
    check_shape(_OP, "target", target, tuple(hidden.shape[:-1]), "hidden's shape without D")
    if target.dtype != torch.int64:
        raise TypeError(f"{_OP}: target is {target.dtype}, expected torch.int64; use target.long()")
    if target.device != hidden.device:
        raise ValueError(f"{_OP}: target is on {target.device}, hidden on {hidden.device}; move them to one device")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'{_OP}: reduction is {reduction!r}, expected "mean" or "sum"')
    if num_items is not None and reduction == "sum":
        raise ValueError(f'{_OP}: num_items divides the sum, so it goes with reduction="mean", not with "sum"')
    if num_items is not None:
        _check_num_items(num_items)


def _check_num_items(num_items: int | float | torch.Tensor) -> None:
    if isinstance(num_items, bool) or not isinstance(num_items, int | float | torch.Tensor):
        raise TypeError(f"{_OP}: num_items is {num_items!r}, expected a number of tokens or a tensor of one")
    if isinstance(num_items, torch.Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"{_OP}: num_items has shape {list(num_items.shape)}, expected one number of tokens")
        if num_items.device.type != "cpu" or isinstance(num_items, FakeTensor):
            return  # its value is not known without waiting for the device
        num_items = num_items.item()
    if not num_items > 0:
        raise ValueError(f"{_OP}: num_items is {num_items}, expected a positive number of tokens")


def _check_range(target: torch.Tensor, vocab: int, ignore_index: int) -> None:
    outside = (target != ignore_index) & ((target < 0) | (target >= vocab))
    if outside.any():
        raise ValueError(
            f"{_OP}: target holds {target[outside][0].item()}, expected 0 <= target < {vocab} "
            f"or ignore_index ({ignore_index}); mask such tokens with ignore_index"
        )


@torch.compiler.disable(reason="seqtile.linear_cross_entropy computes its gradients in its forward")
def _tiled(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
    chunk_tokens: int,
) -> torch.Tensor:
    if target.device.type == "cpu" and not isinstance(target, FakeTensor):  # on a GPU this would wait for the device
        _check_range(target, weight.shape[0], ignore_index)
    hidden = hidden.to(autocast_dtype(hidden) or hidden.dtype).reshape(-1, hidden.shape[-1])
    target = target.reshape(-1).contiguous()
    differentiate = torch.is_grad_enabled()
    total = LinearCrossEntropyFunction.apply(hidden, weight, target, ignore_index, chunk_tokens, differentiate)
    if reduction == "sum":
        return total
    if num_items is not None:
        return total / (num_items.to(total.device).reshape(()) if isinstance(num_items, torch.Tensor) else num_items)
    labelled = (target != ignore_index).sum()
    return torch.where(labelled > 0, total / labelled.clamp(min=1), torch.nan)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The sum of the losses of hidden [T, D], weight [V, D], target [T]."""

    @staticmethod
    def forward(
        ctx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        ignore_index: int,
        chunk_tokens: int,
        differentiate: bool,
    ) -> torch.Tensor:
        needs_hidden, needs_weight = (differentiate and needed for needed in ctx.needs_input_grad[:2])
        operand = weight.to(hidden.dtype)  # a copy only under autocast
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = WeightGrad(weight) if needs_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        tokens = hidden.shape[0]
        buffer = hidden.new_empty(min(tokens, chunk_tokens), weight.shape[0])
        for tile in tiles(tokens, chunk_tokens):
            logits = buffer[: tile.stop - tile.start]
            torch.mm(hidden[tile], operand.t(), out=logits)
            losses, _ = cross_entropy_(
                logits, target[tile], ignore_index=ignore_index, write_grad=needs_hidden or needs_weight
            )
            total += losses.sum()
            if needs_hidden:
                torch.mm(logits, operand, out=d_hidden[tile])
            if needs_weight:
                d_weight.add(logits, hidden[tile])
        ctx.chunk_tokens = chunk_tokens
        ctx.weight_dtype = weight.dtype
        ctx.spent = False
        ctx.save_for_backward(d_hidden, d_weight.total if needs_weight else None)
        return total

    @staticmethod
    def backward(ctx, upstream: torch.Tensor):
        check_first_derivative(_OP)
        if ctx.spent:
            raise RuntimeError(f"{_OP} frees its gradients in the backward: a second backward needs a second forward")
        d_hidden, d_weight = ctx.saved_tensors
        ctx.spent = True
        scale = upstream.reshape(1)  # one dimension: a scalar tensor would be rounded to half precision first
        if d_hidden is not None:
            for tile in tiles(d_hidden.shape[0], ctx.chunk_tokens):
                torch.mul(d_hidden[tile], scale, out=d_hidden[tile])
        if d_weight is not None:
            d_weight = d_weight.mul_(scale).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None, None
