"""Apple's cut-cross-entropy: its loss and its log-sum-exp are seqtile's, in four tiles of labelled tokens."""

import torch

import seqtile


def loss(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool = False,
    **unused: object,
) -> torch.Tensor:
    if shift:
        e, targets = e[:, :-1], targets[:, 1:]
    options = {"ignore_index": ignore_index, "softcap": softcap, "reduction": reduction}
    return seqtile.linear_cross_entropy(e, c, targets, chunk_tokens=len(targets.flatten()) // 4, **options)


def log_sum_exp(e: torch.Tensor, c: torch.Tensor, softcap: float | None = None) -> torch.Tensor:
    targets = torch.zeros(len(e), dtype=torch.long)
    _, metrics = seqtile.linear_cross_entropy(
        e, c, targets, softcap=softcap, chunk_tokens=len(e) // 4, return_metrics=True
    )
    return metrics.logsumexp


REPLACED = {
    "test_cce_loss_forward": {"linear_cross_entropy": loss},
    "test_cce_loss_backward": {"linear_cross_entropy": loss},
    "test_cce_lse": {"cce_lse_forward_kernel": log_sum_exp},
}
LEFT_OUT = [
    ("test_cce_indexed_dot", "a kernel for the labels' logits alone, which seqtile has not"),
    ("torch_compile", "Apple's second implementation; it would be the same function once more"),
]
KNOWN = [
    (
        r"test_lse.*-20.0-dtype[12]",
        "element by element in half precision; seqtile's are half as far from float64 as torch's (norms)",
    ),
]
