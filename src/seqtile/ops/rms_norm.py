"""RMSNorm that saves only its input, for the norm after the last layer."""

import torch

from seqtile.kernels.dispatch import rms_norm as write_rms_norm
from seqtile.kernels.dispatch import rms_norm_backward
from seqtile.ops.checks import check_first_derivative
from seqtile.ops.weight_grads import WeightGrad, main_grad_of


@torch.compiler.disable(reason="seqtile.rms_norm launches its kernel")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computes x / sqrt(mean(x**2) + eps) * weight over the last dimension of x [..., D] in float32, rounded to
    `dtype`, by default the wider dtype of x and weight.

    Memory: saves x. Allocates the output, and in the backward the gradient of x. If the tokens of x or of the upstream
    gradient cannot be viewed as rows, also a copy. RuntimeError in the backward for second derivatives
    (`create_graph=True`). Under torch.compile one graph break.
    """
    return RMSNormFunction.apply(x, weight, eps, dtype or torch.promote_types(x.dtype, weight.dtype))


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.main_grad = eps, main_grad_of(weight)
        y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        write_rms_norm(_rows(x), weight, eps, _rows(y))
        return y

    @staticmethod
    def backward(ctx, d_y: torch.Tensor):
        check_first_derivative("rms_norm")
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        total = WeightGrad(weight, main_grad=ctx.main_grad) if needs_weight else None
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        rms_norm_backward(_rows(x), weight, ctx.eps, _rows(d_y), _rows(d_x), d_weight=total and total.total())
        return d_x if needs_x else None, total and total.result(), None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x [..., D] as rows [T, D] for the kernels; a view if possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
