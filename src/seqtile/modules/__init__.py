"""The loss and the log-probabilities of a linear head as nn.Modules: options once, tensors at every call.

They hold no weight: every call gets the head's, which may be tied to an embedding or belong to a sharded module.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from seqtile.ops.head.cross_entropy import LossMetrics, linear_cross_entropy
from seqtile.ops.head.log_probs import linear_log_probs


class _WithOptions(nn.Module):
    """A module that keeps the arguments of its constructor as options."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.options = {name: value for name, value in given.items() if name not in ("self", "__class__")}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearCrossEntropyLoss(_WithOptions):
    """Computes nn.CrossEntropyLoss()(hidden @ weight.T + bias, target) without the logits; for the options see
    `seqtile.linear_cross_entropy`.

    `class_weight` is a buffer: it moves with the module and is in its state_dict. With it, "mean" divides `z_loss` too
    by the sum of the labels' weights; Liger divides it by their number. With `return_metrics` a call returns
    (loss, LossMetrics); `logsumexp` and `mean_entropy` have gradients.
    """

    class_weight: torch.Tensor | None

    def __init__(
        self,
        *,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        class_weight: torch.Tensor | None = None,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        accumulate_dtype: torch.dtype | None = torch.float32,
        chunk_tokens: int | None = None,
        return_metrics: bool = False,
    ) -> None:
        super().__init__(locals())
        self.register_buffer("class_weight", self.options.pop("class_weight"))

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        num_items: int | float | torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, LossMetrics]:
        """Computes the loss of hidden [..., D] under weight [V, D] and bias [V], with target [...] and `num_items`; for
        dtypes, memory and errors see `seqtile.linear_cross_entropy`."""
        return linear_cross_entropy(
            hidden, weight, target, bias=bias, num_items=num_items, class_weight=self.class_weight, **self.options
        )


class LinearLogProbs(_WithOptions):
    """Computes log softmax((hidden @ weight.T + bias) / temperature)[target] without the logits; for the options see
    `seqtile.linear_log_probs`."""

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        outputs: Collection[str] = (),
        to_be_summed: bool = False,
        ignore_index: int | None = -100,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        accumulate_dtype: torch.dtype | None = torch.float32,
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__(locals())

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, bias: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes the log-probabilities of target [...] from hidden [..., D] under weight [V, D] and bias [V]; for
        dtypes, memory and errors see `seqtile.linear_log_probs`."""
        return linear_log_probs(hidden, weight, target, bias=bias, **self.options)
