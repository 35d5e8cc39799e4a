"""The loss of TRL's DistillationTrainer by `linear_divergence`, in the place of its `_chunked_divergence_loss`."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from seqtile.ops.linear_divergence import linear_divergence


def divergence_loss(
    student_hidden_states: torch.Tensor,
    teacher_hidden_states: torch.Tensor,
    student_lm_head_weight: torch.Tensor,
    teacher_lm_head_weight: torch.Tensor,
    completion_mask: torch.Tensor,
    beta: float,
    num_items_in_batch: torch.Tensor | int | None = None,
    student_lm_head_bias: torch.Tensor | None = None,
    teacher_lm_head_bias: torch.Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what TRL's function of these arguments does: the loss, the sum of the student's entropies and how many
    tokens count. Hidden states [B, K, D] of each, weights [V, D], mask [B, K]."""
    mask = completion_mask != 0
    count = mask.sum()
    loss, entropies = linear_divergence(
        student_hidden_states,
        _whole(student_lm_head_weight, student_hidden_states),
        teacher_hidden_states,
        _whole(teacher_lm_head_weight, teacher_hidden_states),
        beta=beta,
        temperature=temperature,
        mask=mask,
        reduction="sum",
        student_bias=_scaled(student_lm_head_bias, student_hidden_states, student_logit_scale),
        teacher_bias=_scaled(teacher_lm_head_bias, teacher_hidden_states, teacher_logit_scale),
        student_softcap=student_final_logit_softcapping,
        teacher_softcap=teacher_final_logit_softcapping,
        student_scale=student_logit_scale,
        teacher_scale=teacher_logit_scale,
        return_entropy=True,
    )
    divisor: Any = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return loss / (divisor.to(loss.device) if isinstance(divisor, torch.Tensor) else divisor), entropies.sum(), count


def _scaled(bias: torch.Tensor | None, hidden: torch.Tensor, scale: float) -> torch.Tensor | None:
    """Returns a head's bias, which TRL scales with the product."""
    return None if bias is None else _whole(bias, hidden) * scale


def _whole(parameter: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Returns a head's parameter gathered, in the dtype of its hidden states unless autocast sees to that."""
    parameter = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return parameter if torch.is_autocast_enabled(hidden.device.type) else parameter.to(hidden.dtype)
