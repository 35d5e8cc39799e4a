"""Triton kernels and their twins in plain PyTorch, without autograd; and the arguments of the row kernel of
cross-entropy: numbers that every row of a call shares, and vectors."""

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
    def used(self) -> tuple[bool, bool, bool, bool]:
        """Which of the first four change anything: what is off is compiled away."""
        return self.logit_scale != 1, self.softcap > 0, self.temperature != 1, self.label_smoothing > 0


class RowVectors(NamedTuple):
    """Vectors that a call reads or, if they are given, **writes**; contiguous."""

    bias: torch.Tensor | None = None
    """[V], any of the three dtypes."""
    class_weight: torch.Tensor | None = None
    """[V] float32."""
    lse: torch.Tensor | None = None
    """[C] float32, **written**: log-sum-exp of the logits."""
    entropy: torch.Tensor | None = None
    """[C] float32, **written**: the entropy of their softmax."""
    predicted: torch.Tensor | None = None
    """[C] int64, **written**: the index of the largest."""
    mean: torch.Tensor | None = None
    """[C] float32, **written**: the mean of the logits."""
    squares: torch.Tensor | None = None
    """[C] float32, **written**: the sum of the squares of their softmax."""
    row_scale: torch.Tensor | None = None
    """[C] float32; None for ones."""
    lse_scale: torch.Tensor | None = None
    """[C] float32; None for zeros."""
    entropy_scale: torch.Tensor | None = None
    """[C] float32; None for zeros."""
