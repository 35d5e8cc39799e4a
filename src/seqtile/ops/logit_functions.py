"""The autograd of tiles of logits: of one total, whose gradients are ready when its forward ends, and of one value a
token, whose tiles are recomputed in the backward, because only there is each token's upstream gradient known.
"""

import torch

from seqtile.ops.checks import check_first_derivative
from seqtile.ops.logit_tiles import Gradients, Operands, Settings, Values, sweep
from seqtile.ops.weight_grad import main_grad_of


class TotalLossFunction(torch.autograd.Function):
    """The sum of the losses of `operands`, and if wanted their log-sum-exp and entropies, all three with gradients, and
    their predicted tokens.

    3 matrix products in all, 1 without gradients. The upstream gradient is applied in the backward, once, in float32,
    in place, and what it is applied to is given away: a second backward (`retain_graph=True`) recomputes the tiles.
    So does a backward in which log-sum-exps or entropies have a gradient, which is known only there: 3 products more.
    """

    @staticmethod
    def forward(ctx, settings: Settings, metrics: bool, differentiate: bool, *operands: torch.Tensor | None):
        operands = Operands(*operands)
        values = operands.new_values(metrics, metrics)
        ctx.needs = [differentiate and needed for needed in ctx.needs_input_grad[3:6]]
        _prepare_backward(ctx, settings, operands, values)
        ctx.gradients, ctx.unit = _total_gradients(ctx, operands, values)
        return values.losses.sum(), *values[1:]

    @staticmethod
    def backward(ctx, upstream: torch.Tensor | None, *d_metrics: torch.Tensor | None):
        check_first_derivative("linear_cross_entropy")
        gradients, ctx.gradients = ctx.gradients, None
        if any(d_values is not None for d_values in d_metrics):
            del gradients  # before there are others
            operands = _saved(ctx)
            d_losses = None if upstream is None else upstream.expand(operands.labelled())
            return _recomputed(ctx, operands, d_losses, *d_metrics)
        if upstream is None:
            return (None,) * 9
        if gradients is None:
            operands = _saved(ctx)
            gradients, _ = _total_gradients(ctx, operands, operands.new_values())
        return None, None, None, *_scaled(ctx, gradients, upstream * ctx.unit), None, None, None


class TokenLossFunction(torch.autograd.Function):
    """The loss of every labelled token, and if wanted its log-sum-exp and entropy, all with gradients, and predicted
    token. One matrix product in the forward, three in the backward; nothing but the operands is kept.
    """

    @staticmethod
    def forward(ctx, settings: Settings, entropy: bool, metrics: bool, *operands: torch.Tensor | None):
        operands = Operands(*operands)
        values = operands.new_values(entropy or metrics, metrics)
        _prepare_backward(ctx, settings, operands, values)
        sweep(operands, settings, values)
        return tuple(values)

    @staticmethod
    def backward(ctx, *d_values: torch.Tensor | None):
        check_first_derivative("linear_log_probs, or linear_cross_entropy with reduction='none',")
        return _recomputed(ctx, _saved(ctx), *d_values)


def _prepare_backward(ctx, settings: Settings, operands: Operands, values: Values) -> None:
    """What both functions leave for their backward; a gradient that is not there is then None, not zeros."""
    ctx.settings = settings
    ctx.main_grads = [main_grad_of(parameter) for parameter in (operands.weight, operands.bias)]
    ctx.save_for_backward(*operands)
    ctx.set_materialize_grads(False)
    if values.predicted is not None:
        ctx.mark_non_differentiable(values.predicted)


def _total_gradients(ctx, operands: Operands, values: Values) -> tuple[Gradients, torch.Tensor | float]:
    """Writes `values`; the gradients of the sum of the losses, up to a factor, and that factor."""
    if operands.class_weight is None or not any(ctx.needs):
        return sweep(operands, ctx.settings, values, ctx.needs, main_grads=ctx.main_grads), 1.0
    unit = power_of_two(operands.class_weight)
    scale = (1 / unit).expand_as(values.losses).contiguous()
    return sweep(operands, ctx.settings, values, ctx.needs, scale, main_grads=ctx.main_grads), unit


def _recomputed(
    ctx,
    operands: Operands,
    d_losses: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    d_entropy: torch.Tensor | None,
    _: None,
) -> tuple[torch.Tensor | None, ...]:
    """What a backward returns where every labelled token has gradients of its own, [n] float32 each, by one sweep."""
    values = operands.new_values()
    d_losses = torch.zeros_like(values.losses) if d_losses is None else d_losses
    of_losses = d_losses if operands.class_weight is None else d_losses * power_of_two(operands.class_weight)
    unit = power_of_two(of_losses, d_lse, d_entropy)
    scales = [None if scale is None else scale.contiguous() / unit for scale in (d_losses, d_lse, d_entropy)]
    gradients = sweep(operands, ctx.settings, values, ctx.needs_input_grad[3:6], *scales, ctx.main_grads)
    return None, None, None, *_scaled(ctx, gradients, unit), None, None, None


def _scaled(ctx, gradients: Gradients, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return gradients.scaled(factor, ctx.settings, ctx.main_grads, lambda: Operands(*ctx.saved_tensors))


def _saved(ctx) -> Operands:
    operands = Operands(*ctx.saved_tensors)
    if operands.weight.dim() != 2:
        raise RuntimeError(
            f"this backward recomputes logits, but the weight has become {list(operands.weight.shape)} since the "
            "forward: under ZeRO-3, gather it (deepspeed.zero.GatheredParameters) around forward and backward"
        )
    return operands


def power_of_two(*factors: torch.Tensor | None) -> torch.Tensor:
    """[1], a power of two near the largest finite magnitude in `factors` (float32), divided by 2**6.

    The gradient of a tile of logits is stored in the operands' dtype. What multiplies it is divided by this first and
    multiplied back in float32 at the end, exactly, so that it fits float16 whatever a GradScaler or class weights are;
    2**6 of float16's 2**16 are used, so that the smaller ones keep their digits and the products still fit.
    """
    finite = [factor.where(factor.isfinite(), 0.0).abs() for factor in factors if factor is not None]
    if finite[0].numel() == 0:
        return finite[0].new_ones(1)
    peak = torch.stack([factor.amax() for factor in finite]).amax().clamp(max=2.0**126).reshape(1)
    mantissa, _ = torch.frexp(peak)
    return torch.where(peak > 0, peak / mantissa / 64, 1.0)
