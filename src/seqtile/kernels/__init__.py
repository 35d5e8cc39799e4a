"""Triton kernels and eager versions of them in plain PyTorch, without autograd; and the arguments of the cross-entropy
kernel: numbers that all rows of a call share, and vectors."""

from typing import NamedTuple

import torch


class LossOptions(NamedTuple):
    """logits = cap(logit_scale * products + bias) / temperature, where cap(z) = softcap * tanh(z / softcap)."""

    logit_scale: float = 1.0
    softcap: float = 0.0
    """0 for no cap."""
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def used(self) -> tuple[float | None, ...]:
        """The first four options, None where one changes nothing: the compiler removes the code of such options."""
        return tuple(None if own == unused else own for own, unused in zip(self[:4], LossOptions(), strict=False))


class RowVectors(NamedTuple):
    """Vectors that a call reads or, if given, **writes**; contiguous."""

    bias: torch.Tensor | None = None
    """[V], any of the three dtypes."""
    class_weight: torch.Tensor | None = None
    """[V] float32."""
    lse: torch.Tensor | None = None
    """[C] float32, **written**: the log-sum-exp of the logits."""
    entropy: torch.Tensor | None = None
    """[C] float32, **written**: the entropy of the softmax."""
    predicted: torch.Tensor | None = None
    """[C] int64, **written**: the index of the largest logit."""
    mean: torch.Tensor | None = None
    """[C] float32, **written**: the mean of the logits."""
    squares: torch.Tensor | None = None
    """[C] float32, **written**: the sum of the squared probabilities."""
    row_scale: torch.Tensor | None = None
    """[C] float32; None for ones."""
    lse_scale: torch.Tensor | None = None
    """[C] float32; None for zeros."""
    entropy_scale: torch.Tensor | None = None
    """[C] float32; None for zeros."""
