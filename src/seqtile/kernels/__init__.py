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
    def used(self) -> tuple[bool, bool, bool, bool]:
        """Whether each of the first four options changes anything. The compiler removes the code of unused options."""
        return self.logit_scale != 1, self.softcap > 0, self.temperature != 1, self.label_smoothing > 0


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
