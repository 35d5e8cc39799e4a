"""The kernels in plain PyTorch: what runs on a CPU, and wherever Triton is not installed.

Each function does what the one of the same name in `launch.py` documents.
"""

import torch


def cross_entropy_(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int, write_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    vocab = logits.shape[1]
    ignored = target == ignore_index
    in_range = (target >= 0) & (target < vocab)
    index = target.where(in_range, 0).unsqueeze(1)

    scores = logits.float()  # float32 logits: the same storage, so the softmax below is in place
    target_scores = scores.gather(1, index).squeeze(1)
    row_max = scores.amax(dim=1, keepdim=True)
    exponentials = scores.sub_(row_max).exp_()
    row_sum = exponentials.sum(dim=1, keepdim=True)
    lse = (row_sum.log() + row_max).squeeze(1).masked_fill_(~in_range, torch.nan).masked_fill_(ignored, 0.0)
    losses = (lse - target_scores).masked_fill_(ignored, 0.0)

    if write_grad:
        d_scores = exponentials.div_(row_sum)
        d_scores.scatter_add_(1, index, torch.full_like(index, -1, dtype=d_scores.dtype))
        d_scores.masked_fill_(~in_range.unsqueeze(1), torch.nan).masked_fill_(ignored.unsqueeze(1), 0.0)
        logits.copy_(d_scores)
    return losses, lse


def gated_activation_(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    g = gate.float()
    return gate.copy_(g.sigmoid().mul_(g).mul_(up.float()))


def gated_activation_backward_(gate: torch.Tensor, up: torch.Tensor, d_product: torch.Tensor) -> None:
    g, u, d = gate.float(), up.float(), d_product.float()  # float32: the same storage
    sigmoid = g.sigmoid()
    silu = g * sigmoid
    slope = sigmoid.lerp_(sigmoid.new_ones(()), silu)  # sigmoid + silu * (1 - sigmoid), the derivative of silu
    gate.copy_(slope.mul_(u).mul_(d))
    product = torch.mul(silu, u, out=slope)
    up.copy_(silu.mul_(d))
    d_product.copy_(product)
