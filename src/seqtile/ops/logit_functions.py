"""The autograd of tiles of logits: of one total, whose gradients are ready when its forward ends, and of one value a
token, whose tiles are recomputed in the backward, because only there is each token's upstream gradient known.
"""

import torch

from seqtile.ops.checks import check_first_derivative
from seqtile.ops.logit_tiles import Gradients, Operands, Settings, sweep


class TotalLossFunction(torch.autograd.Function):
    """The sum of the losses of `operands`, and without gradients their log-sum-exp, entropies and predicted tokens.

    3 matrix products in all, 1 without gradients. The upstream gradient is applied in the backward, once, in float32,
    in place, and what it is applied to is given away: a second backward (`retain_graph=True`) recomputes the tiles.
    """

    @staticmethod
    def forward(ctx, settings: Settings, metrics: bool, differentiate: bool, *operands: torch.Tensor | None):
        operands = Operands(*operands)
        values = operands.new_values(metrics, metrics)
        needs = [differentiate and needed for needed in ctx.needs_input_grad[3:6]]
        gradients = sweep(operands, settings, values, needs)
        ctx.gradients = gradients if any(needs) else None
        ctx.settings, ctx.needs = settings, needs
        ctx.save_for_backward(*operands)
        ctx.mark_non_differentiable(*(value for value in values[1:] if value is not None))
        return values.losses.sum(), *values[1:]

    @staticmethod
    def backward(ctx, upstream: torch.Tensor, *_):
        check_first_derivative("linear_cross_entropy")
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            operands = _saved(ctx)
            gradients = sweep(operands, ctx.settings, operands.new_values(), ctx.needs)
        return None, None, None, *gradients.scaled(upstream, ctx.settings), None, None, None


class TokenLossFunction(torch.autograd.Function):
    """The loss and, if wanted, the entropy of every labelled token, both with gradients; log-sum-exp and predicted
    token without. One matrix product in the forward, three in the backward; nothing but the operands is kept.
    """

    @staticmethod
    def forward(ctx, settings: Settings, entropy: bool, metrics: bool, *operands: torch.Tensor | None):
        operands = Operands(*operands)
        values = operands.new_values(entropy or metrics, metrics)
        sweep(operands, settings, values)
        ctx.settings = settings
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(value for value in (values.lse, values.predicted) if value is not None))
        return tuple(values)

    @staticmethod
    def backward(ctx, d_losses: torch.Tensor | None, _, d_entropy: torch.Tensor | None, __):
        check_first_derivative("a loss of every token")
        operands = _saved(ctx)
        values = operands.new_values()
        row_scale = torch.zeros_like(values.losses) if d_losses is None else d_losses.contiguous()
        entropy_scale = None if d_entropy is None else d_entropy.contiguous()
        unit = _unit(row_scale, entropy_scale)
        gradients: Gradients = sweep(
            operands,
            ctx.settings,
            values,
            ctx.needs_input_grad[3:6],
            row_scale / unit,
            None if entropy_scale is None else entropy_scale / unit,
        )
        return None, None, None, *gradients.scaled(unit, ctx.settings), None, None, None


def _saved(ctx) -> Operands:
    operands = Operands(*ctx.saved_tensors)
    if operands.weight.dim() != 2:
        raise RuntimeError(
            f"this backward recomputes logits, but the weight has become {list(operands.weight.shape)} since the "
            "forward: under ZeRO-3, gather it (deepspeed.zero.GatheredParameters) around forward and backward"
        )
    return operands


def _unit(losses: torch.Tensor, entropies: torch.Tensor | None) -> torch.Tensor:
    """A power of two near the largest of the scales: divided by it, they fit float16 whatever a GradScaler made them.

    [1], or a scalar.
    """
    if losses.numel() == 0:
        return losses.new_ones(1)
    peak = losses.abs().amax()
    if entropies is not None:
        peak = torch.maximum(peak, entropies.abs().amax())
    mantissa, _ = torch.frexp(peak)
    return torch.where(peak > 0, peak / mantissa, 1.0)
