"""RMSNorm that keeps its input and nothing else, for the norm behind the last layer."""

import torch

from seqtile.kernels.launch import rms_norm as write_rms_norm
from seqtile.kernels.launch import rms_norm_backward
from seqtile.ops.checks import check_first_derivative


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension of x [..., D], in float32, rounded to x's dtype.

    Memory: saves x. Allocates the output, in the backward the gradient of x; nothing else of their size.
    RuntimeError in the backward for second derivatives (`create_graph=True`).
    """
    return RMSNormFunction.apply(x, weight, eps)


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        write_rms_norm(x.contiguous().view(-1, x.shape[-1]), weight, eps, y.view(-1, x.shape[-1]))
        return y

    @staticmethod
    def backward(ctx, d_y: torch.Tensor):
        check_first_derivative("rms_norm")
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows, d_rows = (tensor.contiguous().view(-1, x.shape[-1]) for tensor in (x, d_y))
        rms_norm_backward(rows, weight, ctx.eps, d_rows, d_x.view(rows.shape), d_weight=d_weight)
        return d_x if needs_x else None, None if d_weight is None else d_weight.to(weight.dtype), None
