"""The loop over chunks of logits, and its autograd: values of every labelled token, and at once the gradients of head
and hidden states.

For a chunk of C labelled tokens: logits = hidden W', the row kernel turns them into values and, in place, into their
gradient, and then d_W += d_logits' hidden and d_hidden = d_logits W. Three matrix products, one chunk of logits alive:

    hidden [C, D] ──mm──> logits [C, V] ──row kernel──> losses [C], d_logits [C, V] in the same memory
                                                                    ├──mm──> d_hidden [C, D]
                                                                    └──mm──> added to d_W [V, D], float32

Where all labelled tokens fit in one chunk there is no sum, and d_W is one product in its own dtype.

Of one total the gradients are ready when its forward ends, up to the upstream gradient. Of one value a token the
chunks are recomputed in the backward, because only there is each token's upstream gradient known.
Source: Arctic Long Sequence Training, 3.1; Mini-Sequence Transformer, algorithms 2 and 4. Exact, not approximate.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.kernels import LossOptions
from seqtile.kernels.dispatch import cross_entropy_
from seqtile.ops.checks import check_first_derivative
from seqtile.ops.chunks import chunks
from seqtile.ops.linear import WeightGrad, main_grad_of, scale_


@dataclass(frozen=True)
class Settings:
    """The numbers that do not change from chunk to chunk."""

    loss: LossOptions
    chunk_tokens: int
    dtype: torch.dtype
    """The dtype of the matrix products: that of the operands, or autocast's."""
    accumulate_dtype: torch.dtype
    """The dtype of the sums of the gradients of weight and bias."""


class Operands(NamedTuple):
    hidden: torch.Tensor
    """[T, D]"""
    weight: torch.Tensor
    """[V, D]"""
    bias: torch.Tensor | None
    """[V]"""
    target: torch.Tensor
    """[T] int64"""
    rows: torch.Tensor | None
    """[n] int64, the tokens that are labelled; None if all are."""
    class_weight: torch.Tensor | None
    """[V] float32"""

    def labelled(self) -> int:
        """Returns n, how many tokens are labelled."""
        return (self.target if self.rows is None else self.rows).shape[0]

    def part(self, chunk: slice, settings: Settings) -> torch.Tensor:
        """Returns hidden states of labelled tokens [C, D]: a view, unless some are ignored or the dtype is another."""
        return (self.hidden[chunk] if self.rows is None else self.hidden[self.rows[chunk]]).to(settings.dtype)

    def new_values(self, wanted: Collection[str] = ()) -> "Values":
        """Allocates the losses and the fields of `Values` that are wanted."""
        losses = self.hidden.new_empty(self.labelled(), dtype=torch.float32)
        dtypes = {name: torch.int64 if name == "predicted" else torch.float32 for name in wanted}
        return Values(losses, **{name: torch.empty_like(losses, dtype=dtype) for name, dtype in dtypes.items()})


class Values(NamedTuple):
    """Values of every labelled token, float32 [n]; None where not wanted."""

    losses: torch.Tensor
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    predicted: torch.Tensor | None = None
    """int64 [n], the token of the largest logit; without a gradient, as the two below."""
    mean: torch.Tensor | None = None
    """The mean logit."""
    squares: torch.Tensor | None = None
    """The sum of the squares of the probabilities."""


@dataclass
class Gradients:
    """The gradients of hidden states, weight and bias, up to one factor that they share (and the bias's own); None if
    not needed."""

    hidden: torch.Tensor | None
    weight: WeightGrad | None
    bias: WeightGrad | None
    labelled: int
    """The number of tokens that contributed."""
    d_logits: torch.Tensor | None = None
    """[n, V] of the only chunk, of which the weight's gradient is one product, with no sum over chunks."""


def losses_and_gradients(
    operands: Operands,
    settings: Settings,
    values: Values,
    needs: Sequence[bool] = (False, False, False),
    main_grads: Sequence[torch.Tensor | None] = (None, None),
    scales: Sequence[torch.Tensor | None] = (None, None, None),
) -> Gradients:
    """Goes over the chunks once, writes `values`, and returns those gradients of hidden, weight and bias that are in
    `needs`: of sum(row_scale * losses + lse_scale * lse + entropy_scale * entropies), where `scales` are these three,
    [n] float32. None stands for ones as `row_scale`, for zeros as the others.

    2 n D V FLOP for the logits, as many for d_hidden and for d_weight. Allocates one chunk of logits [C, V], d_hidden
    and d_weight; where some tokens are ignored, or autocast changes the dtype, one chunk [C, D] besides. Of a single
    chunk d_weight is left to `_scaled`, and the gradients keep the chunk, unless it goes to one of `main_grads`.
    """
    hidden, weight, bias, target, rows, class_weight = operands
    count = operands.labelled()
    matrix = weight.to(settings.dtype)  # a copy only under autocast
    buffer = _logits_buffer(min(count, settings.chunk_tokens), operands, settings)
    one_product = needs[1] and main_grads[0] is None and _is_one_product(operands, settings)
    gradients = _empty_gradients(operands, settings, (needs[0], needs[1] and not one_product, needs[2]))
    per_token = {**values._asdict(), **dict(zip(("row_scale", "lse_scale", "entropy_scale"), scales, strict=True))}

    def add(chunk: slice) -> None:  # a function, so that what it allocates is free again before the next chunk
        labels = target[chunk] if rows is None else target[rows[chunk]]
        x = operands.part(chunk, settings)  # [C, D]
        logits = torch.mm(x, matrix.t(), out=buffer[: x.shape[0]])  # [C, V]
        vectors = {name: None if vector is None else vector[chunk] for name, vector in per_token.items()}
        losses = vectors.pop("losses")
        vectors |= {"bias": bias, "class_weight": class_weight}
        cross_entropy_(logits, labels, losses, settings.loss, write_grad=any(needs), **vectors)
        d_logits = logits
        if one_product:
            gradients.d_logits = d_logits
        elif gradients.weight is not None:
            gradients.weight.add(d_logits, x)
        if gradients.bias is not None:
            gradients.bias.add(d_logits)
        if gradients.hidden is None:
            return
        if rows is not None:
            gradients.hidden.index_copy_(0, rows[chunk], torch.mm(d_logits, matrix, out=x).to(hidden.dtype))
        elif x.dtype != hidden.dtype:
            gradients.hidden[chunk].copy_(torch.mm(d_logits, matrix, out=x))
        else:
            torch.mm(d_logits, matrix, out=gradients.hidden[chunk])

    for chunk in chunks(count, settings.chunk_tokens):
        add(chunk)
    return gradients


def _logits_buffer(rows: int, operands: Operands, settings: Settings) -> torch.Tensor:
    """Allocates [rows, V], each row at a multiple of 16 elements: elsewhere a GPU reads one element at a time."""
    vocab = operands.weight.shape[0]
    length = vocab if torch.compiler.is_compiling() else -(-vocab // 16) * 16  # it compiles no product into a part
    return operands.hidden.new_empty(rows, length, dtype=settings.dtype)[:, :vocab]


def _is_one_product(operands: Operands, settings: Settings) -> bool:
    """Tells if d_weight may be the product of one chunk, rounded before it is scaled: float16 has no range for that."""
    fits = 0 < operands.labelled() <= settings.chunk_tokens
    dtype = operands.weight.dtype
    return fits and dtype != torch.float16 and dtype in (settings.dtype, torch.float32)


def _empty_gradients(operands: Operands, settings: Settings, needs: Sequence[bool]) -> Gradients:
    hidden, weight, bias, _, rows, _ = operands
    make, dtype = torch.empty_like if rows is None else torch.zeros_like, settings.accumulate_dtype
    return Gradients(
        hidden=make(hidden) if needs[0] else None,
        weight=WeightGrad(weight, dtype) if needs[1] else None,
        bias=WeightGrad(bias, dtype) if needs[2] else None,
        labelled=operands.labelled(),
    )


class SummedLossFunction(torch.autograd.Function):
    """The sum of the losses of `operands`, and their `Values`, of which those named in `wanted` besides the losses.

    3 matrix products in all, 1 without gradients. The upstream gradient is applied in the backward, once, in float32,
    in place, and what it is applied to is given away: a second backward (`retain_graph=True`) recomputes the chunks.
    So does a backward whose gradients are not those of one factor for all tokens, which is known only there: because
    log-sum-exps or entropies have one, or the tokens' losses have different ones. 3 products more.
    """

    @staticmethod
    def forward(ctx, settings: Settings, wanted: tuple[str, ...], differentiate: bool, *operands: torch.Tensor | None):
        operands = Operands(*operands)
        values = operands.new_values(wanted)
        ctx.needs = [differentiate and needed for needed in ctx.needs_input_grad[3:6]]
        _prepare_backward(ctx, settings, operands, values)
        ctx.gradients, ctx.unit = _summed_gradients(ctx, operands, values)
        return values.losses.sum(), *values

    @staticmethod
    def backward(ctx, upstream: torch.Tensor | None, *d_values: torch.Tensor | None):
        check_first_derivative("linear_cross_entropy")
        gradients, ctx.gradients = ctx.gradients, None
        d_losses, *d_metrics = d_values
        if upstream is None and d_losses is not None:
            upstream, d_losses = one_factor(d_losses)
        if d_losses is not None or any(d_metric is not None for d_metric in d_metrics):
            del gradients  # before there are others
            operands = _saved(ctx)
            if upstream is not None:
                d_losses = upstream.expand(operands.labelled()) + (0 if d_losses is None else d_losses)
            return _recomputed(ctx, operands, d_losses, *d_metrics)
        if upstream is None:
            return (None,) * 9
        if gradients is None:
            operands = _saved(ctx)
            gradients, _ = _summed_gradients(ctx, operands, operands.new_values())
        return None, None, None, *_scaled(ctx, gradients, upstream * ctx.unit), None, None, None


def one_factor(d_losses: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the factor that `d_losses` [n] holds for every token, and None; or None and `d_losses`, if they differ.

    Waits for the device, in a backward that has nothing else to do yet. In a simulation, without values, it is one.
    """
    first = d_losses[0] if len(d_losses) else d_losses.new_ones(())
    equal = isinstance(d_losses, FakeTensor) or d_losses.is_meta or bool((d_losses == first).all())
    return (first, None) if equal else (None, d_losses)


class PerTokenLossFunction(torch.autograd.Function):
    """The `Values` of `operands`: their losses and those named in `wanted`. One matrix product in the forward, three in
    the backward; nothing but the operands is kept.
    """

    @staticmethod
    def forward(ctx, settings: Settings, wanted: tuple[str, ...], differentiate: bool, *operands: torch.Tensor | None):
        operands = Operands(*operands)
        values = operands.new_values(wanted)
        _prepare_backward(ctx, settings, operands, values)
        losses_and_gradients(operands, settings, values)
        return tuple(values)

    @staticmethod
    def backward(ctx, *d_values: torch.Tensor | None):
        check_first_derivative("linear_log_probs, or linear_cross_entropy with reduction='none',")
        return _recomputed(ctx, _saved(ctx), *d_values)


def _prepare_backward(ctx, settings: Settings, operands: Operands, values: Values) -> None:
    """Leaves what both functions need in their backward; a gradient that is not there is then None, not zeros."""
    ctx.settings = settings
    ctx.main_grads = [main_grad_of(parameter) for parameter in (operands.weight, operands.bias)]
    ctx.save_for_backward(*operands)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*[value for value in values[3:] if value is not None])


def _summed_gradients(ctx, operands: Operands, values: Values) -> tuple[Gradients, torch.Tensor | float]:
    """Writes `values`; returns the gradients of the sum of the losses, up to a factor, and that factor."""
    if operands.class_weight is None or not any(ctx.needs):
        return losses_and_gradients(operands, ctx.settings, values, ctx.needs, ctx.main_grads), 1.0
    unit = power_of_two(operands.class_weight)
    scale = (1 / unit).expand_as(values.losses).contiguous()
    return losses_and_gradients(operands, ctx.settings, values, ctx.needs, ctx.main_grads, (scale, None, None)), unit


def _recomputed(ctx, operands: Operands, *d_values: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients where every labelled token has upstream gradients of its own, [n] float32: `d_values`, of
    its loss, log-sum-exp and entropy, and None of the others. One pass over the chunks."""
    values, (d_losses, d_lse, d_entropy, *_) = operands.new_values(), d_values
    d_losses = torch.zeros_like(values.losses) if d_losses is None else d_losses
    of_losses = d_losses if operands.class_weight is None else d_losses * power_of_two(operands.class_weight)
    unit = power_of_two(of_losses, d_lse, d_entropy)
    scales = [None if scale is None else scale.contiguous() / unit for scale in (d_losses, d_lse, d_entropy)]
    gradients = losses_and_gradients(operands, ctx.settings, values, ctx.needs_input_grad[3:6], ctx.main_grads, scales)
    return None, None, None, *_scaled(ctx, gradients, unit), None, None, None


def _scaled(ctx, gradients: Gradients, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients, multiplied once by `factor` (float32, one number) in float32, in place, and rounded.

    If no token is labelled all are zeros, whatever the factor is: 1/0 where nothing is divided must not make them NaN.
    """
    settings = ctx.settings
    if gradients.labelled == 0:
        factor = torch.ones_like(factor)
    factor = factor.reshape(1) / settings.loss.temperature  # one dimension: a scalar would first be rounded
    of_products = factor * settings.loss.logit_scale
    if gradients.hidden is not None:
        scale_(gradients.hidden, of_products)
    weight, bias = gradients.weight, gradients.bias
    if gradients.d_logits is not None:
        operands = Operands(*ctx.saved_tensors)
        weight = WeightGrad(operands.weight, operands.weight.dtype)
        weight.add(gradients.d_logits, operands.part(slice(0, gradients.labelled), settings))
    return (
        gradients.hidden,
        None if weight is None else weight.scaled(of_products, ctx.main_grads[0]),
        None if bias is None else bias.scaled(factor, ctx.main_grads[1]),
    )


def _saved(ctx) -> Operands:
    operands = Operands(*ctx.saved_tensors)
    if operands.weight.dim() != 2:
        raise RuntimeError(
            f"this backward recomputes logits, but the weight has become {list(operands.weight.shape)} since the "
            "forward: under ZeRO-3, gather it (deepspeed.zero.GatheredParameters) around forward and backward"
        )
    return operands


def power_of_two(*factors: torch.Tensor | None) -> torch.Tensor:
    """Returns a power of two [1] near the largest finite magnitude in `factors` (float32), divided by 2**6.

    The gradient of a chunk of logits is stored in the operands' dtype. What multiplies it is divided by this first and
    multiplied back in float32 at the end, exactly, so that it fits float16 whatever a GradScaler or class weights are;
    2**6 of float16's 2**16 are used, so that the smaller ones keep their digits and the products still fit.
    """
    finite = [factor.where(factor.isfinite(), 0.0).abs() for factor in factors if factor is not None]
    if finite[0].numel() == 0:
        return finite[0].new_ones(1)
    peak = torch.stack([factor.amax() for factor in finite]).amax().clamp(max=2.0**126).reshape(1)
    mantissa, _ = torch.frexp(peak)
    return torch.where(peak > 0, peak / mantissa / 64, 1.0)
