"""What the row kernel computes from a row of products: the same for every row of a call."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LossOptions:
    """logits = cap(logit_scale * products + bias) / temperature, where cap(z) = softcap * tanh(z / softcap)."""

    logit_scale: float = 1.0
    softcap: float = 0.0
    """0 for no cap."""
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
