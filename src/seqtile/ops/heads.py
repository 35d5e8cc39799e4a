"""The loop over chunks of the logits of one head or two, and its autograd, for losses whose rows are no cross-entropy.

    hidden of each head ──mm──> logits [C, V] of each ─ compute: losses [C], d_logits in the memory of the logits
                                                          ├──mm──> d_hidden [C, D] of each
                                                          └──mm──> added to d_W [V, D] of each, float32

As in `logit_chunks.py`: of a sum the gradients are ready when its forward ends, of one value a token the chunks are
computed again in the backward, where each token's upstream gradient is known.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from seqtile.ops.checks import (
    autocast_dtype,
    check_dense,
    check_device,
    check_first_derivative,
    check_operands,
    check_shape,
)
from seqtile.ops.chunks import chunks
from seqtile.ops.linear import WeightGrad, main_grad_of, scale_
from seqtile.ops.linear_cross_entropy import scatter_to_tokens
from seqtile.ops.logit_chunks import one_factor, power_of_two


class Head(NamedTuple):
    hidden: torch.Tensor
    """[..., D]; [T, D] where it is computed."""
    weight: torch.Tensor
    """[V, D]"""
    bias: torch.Tensor | None
    """[V]"""

    def flat(self) -> "Head":
        bias = None if self.bias is None else self.bias.contiguous()
        return Head(self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, bias)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its products."""
        return autocast_dtype(self.hidden) or self.hidden.dtype

    def check(self, op: str, name: str = "") -> None:
        """Raises TypeError or ValueError for tensors that do not fit each other; `name` begins their names."""
        tensors = {f"{name}{part}": tensor for part, tensor in self._asdict().items() if tensor is not None}
        check_operands(op, f"{name}hidden", tensors)
        shape, width = list(self.hidden.shape), self.hidden.shape[-1:].numel()
        if self.hidden.dim() == 0 or self.hidden.numel() == 0:
            raise ValueError(f"{op}: {name}hidden has shape {shape}, expected [..., D] with tokens")
        if self.weight.dim() != 2 or self.weight.shape[1] != width:
            raise ValueError(
                f"{op}: {name}weight has shape {list(self.weight.shape)}, expected [V, D] with D = {width}"
            )
        if self.bias is not None:
            check_shape(op, f"{name}bias", self.bias, (self.weight.shape[0],), "[V]")


class Rows(NamedTuple):
    """What is computed of the logits, and of which tokens."""

    op: str
    compute: Callable[..., None]
    """compute(logits, chunk, losses, extra, scale, write): of the chunks of logits, a list of [C, V], writes the losses
    [C] and what else `extra` [C] takes, and over the logits, where `write` says so for their head, the gradient of
    sum(scale * losses) times what `factors` divides it by. `chunk`: where in the tokens that count; `scale`: [C]."""
    factors: tuple[tuple[float, float], ...]
    """Of each head, what its written gradient is to be multiplied by for its products, and for its bias."""
    chunk_tokens: int
    at_once: bool
    """Whether gradients are computed in the forward, as of a sum."""
    count: int
    """How many tokens count."""


class HeadsFunction(torch.autograd.Function):
    """The sum of the losses of the tokens that count, each of them [n], and the extra value of each, without gradient.

    `rows`: [n] int64, the tokens that count; None if all do. Then three operands of each head, see `Head`.
    """

    @staticmethod
    def forward(ctx, settings: Rows, rows: torch.Tensor | None, *operands: torch.Tensor | None):
        heads = _heads(operands)
        ctx.settings, ctx.dtypes = settings, [head.dtype for head in heads]
        ctx.main_grads = [main_grad_of(parameter) for head in heads for parameter in (head.weight, head.bias)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, *operands)
        losses = heads[0].hidden.new_empty(settings.count, dtype=torch.float32)
        extra = torch.empty_like(losses)
        needs = ctx.needs_input_grad[2:] if settings.at_once else [False] * len(operands)
        sums = _pass(ctx, heads, rows, losses, extra, needs, None)
        ctx.sums = sums if settings.at_once else None
        ctx.mark_non_differentiable(extra)
        return losses.sum(), losses, extra

    @staticmethod
    def backward(ctx, upstream: torch.Tensor | None, d_losses: torch.Tensor | None, _: None):
        check_first_derivative(ctx.settings.op)
        (rows, *operands), sums, ctx.sums = ctx.saved_tensors, ctx.sums, None
        if upstream is None and d_losses is None:
            return None, None, *[None] * len(operands)
        if upstream is None and sums is not None:
            upstream, d_losses = one_factor(d_losses)
        unit = upstream
        if sums is None or d_losses is not None:
            del sums  # before there are others
            if upstream is not None:
                d_losses = upstream.expand(ctx.settings.count) + (0 if d_losses is None else d_losses)
            unit = power_of_two(d_losses)
            needs, scale = ctx.needs_input_grad[2:], (d_losses / unit).contiguous()
            sums = _pass(ctx, _heads(operands), rows, torch.empty_like(d_losses), None, needs, scale)
        return None, None, *_scaled(ctx, sums, unit)


def reduced(
    settings: Rows,
    heads: Sequence[Head],
    rows: torch.Tensor | None,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the losses, reduced as asked for, and the extra value of every token."""
    shape = heads[0].hidden.shape[:-1]
    total, losses, extra = HeadsFunction.apply(settings, rows, *[tensor for head in heads for tensor in head.flat()])
    extra = scatter_to_tokens(extra, rows, shape)
    if reduction == "none":
        return scatter_to_tokens(losses, rows, shape), extra
    if reduction == "sum":
        return total, extra
    if num_items is not None:
        return total / (num_items.to(total.device) if isinstance(num_items, torch.Tensor) else num_items), extra
    return total / settings.count if settings.count else total + float("nan"), extra  # torch's mean of nothing


def check_mask(op: str, mask: torch.Tensor | None, hidden: torch.Tensor) -> None:
    """Raises TypeError or ValueError for a mask that is not of the tokens."""
    if mask is not None:
        check_dense(op, "mask", mask)
        check_shape(op, "mask", mask, tuple(hidden.shape[:-1]), "the tokens' shape")
        check_device(op, "mask", mask, "hidden", hidden)
        if mask.dtype != torch.bool:
            raise TypeError(f"{op}: mask is {mask.dtype}, expected torch.bool, True where a token counts")


def _heads(operands: Sequence[torch.Tensor | None]) -> list[Head]:
    return [Head(*operands[i : i + 3]) for i in range(0, len(operands), 3)]


class _Sums(NamedTuple):
    """The gradients of one head, up to one factor; None where not needed."""

    hidden: torch.Tensor | None
    weight: WeightGrad | None
    bias: WeightGrad | None


def _pass(
    ctx: Any,
    heads: Sequence[Head],
    rows: torch.Tensor | None,
    losses: torch.Tensor,
    extra: torch.Tensor | None,
    needs: Sequence[bool],
    scale: torch.Tensor | None,
) -> list[_Sums]:
    """Goes over the chunks once, writes losses and extra values, and returns the gradients that are needed of
    sum(scale * losses), up to `Rows.factors`; a scale of None stands for ones."""
    settings, vocab = ctx.settings, heads[0].weight.shape[0]
    matrices = [head.weight.to(dtype) for head, dtype in zip(heads, ctx.dtypes, strict=True)]  # copies under autocast
    sums = [_begin(head, needs[3 * i : 3 * i + 3], rows) for i, head in enumerate(heads)]
    length, most = -(-vocab // 16) * 16, min(settings.count, settings.chunk_tokens)
    buffers = [h.hidden.new_empty(most, length, dtype=d)[:, :vocab] for h, d in zip(heads, ctx.dtypes, strict=True)]
    write = tuple(any(needs[3 * i : 3 * i + 3]) for i in range(len(heads)))

    def add(chunk: slice) -> None:  # a function, so that what it allocates is free again before the next chunk
        places = chunk if rows is None else rows[chunk]
        inputs = [head.hidden[places].to(dtype) for head, dtype in zip(heads, ctx.dtypes, strict=True)]
        logits = [
            torch.mm(x, matrix.t(), out=buffer[: x.shape[0]])
            for x, matrix, buffer in zip(inputs, matrices, buffers, strict=True)
        ]
        vectors = [None if vector is None else vector[chunk] for vector in (extra, scale)]
        settings.compute(logits, chunk, losses[chunk], *vectors, write)
        for of_head, d_logits, x, matrix in zip(sums, logits, inputs, matrices, strict=True):
            if of_head.weight is not None:
                of_head.weight.add(d_logits, x)
            if of_head.bias is not None:
                of_head.bias.add(d_logits)
            if of_head.hidden is None:
                continue
            if rows is None and x.dtype == of_head.hidden.dtype:
                torch.mm(d_logits, matrix, out=of_head.hidden[chunk])
            else:  # x is a copy, of no more use
                of_head.hidden[places] = torch.mm(d_logits, matrix, out=x).to(of_head.hidden.dtype)

    for chunk in chunks(settings.count, settings.chunk_tokens):
        add(chunk)
    return sums


def _begin(head: Head, needs: Sequence[bool], rows: torch.Tensor | None) -> _Sums:
    make = torch.empty_like if rows is None else torch.zeros_like
    return _Sums(
        make(head.hidden) if needs[0] else None,
        WeightGrad(head.weight) if needs[1] else None,
        WeightGrad(head.bias) if needs[2] else None,
    )


def _scaled(ctx: Any, sums: list[_Sums], unit: torch.Tensor) -> list[torch.Tensor | None]:
    """Returns the gradients times `unit`, one number, multiplied once in float32 and rounded; zeros if no token counts,
    whatever that number is."""
    settings, found = ctx.settings, []
    unit = (unit if settings.count else torch.ones_like(unit)).reshape(1).float()
    for i, (of_head, factors) in enumerate(zip(sums, settings.factors, strict=True)):
        of_products, of_bias = (unit * factor for factor in factors)
        main_grads = ctx.main_grads[2 * i : 2 * i + 2]
        found += [
            None if of_head.hidden is None else scale_(of_head.hidden, of_products),
            None if of_head.weight is None else of_head.weight.scaled(of_products, main_grads[0]),
            None if of_head.bias is None else of_head.bias.scaled(of_bias, main_grads[1]),
        ]
    return found
