"""The Jensen-Shannon divergence of a student's head from a frozen teacher's of the same size, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from benchmark.device import DEVICE
from benchmark.shapes import Case, K, Lengths, Shape
from benchmark.subject import Forward, Subject, compiled, needs

from seqtile import linear_divergence

BETA = 0.5
ROWS = 64  # that are looked at in full size
LENGTHS: Lengths = {
    "small": {"tiny": (300, 5000)},
    "cpu": {"smollm2_135m": (4 * K,)},
    "quick": {"llama3_8b": (8 * K,)},
    "full": {"llama3_8b": (8 * K, 64 * K)},
}


@dataclass
class Heads:
    hidden: torch.Tensor  # [T, D]
    weight: torch.Tensor  # [V, D]
    teacher_hidden: torch.Tensor  # [T, D]
    teacher_weight: torch.Tensor  # [V, D]
    upstream: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.weight


def operands(shape: Shape, tokens: int, dtype: torch.dtype) -> Heads:
    hidden, of_teacher = (torch.randn(tokens, shape.hidden, device=DEVICE, dtype=dtype) for _ in range(2))
    scale = shape.hidden**-0.5
    weights = [torch.randn(shape.vocab, shape.hidden, device=DEVICE, dtype=dtype) * scale for _ in range(2)]
    upstream = torch.tensor(0.25, device=DEVICE)
    return Heads(hidden.requires_grad_(), weights[0].requires_grad_(), of_teacher, weights[1], upstream)


def whole_logits(heads: Heads) -> torch.Tensor:
    logits = F.linear(heads.hidden, heads.weight), F.linear(heads.teacher_hidden, heads.teacher_weight)
    logp, logq = (x.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(1) for x in logits)
    logm = ((1 - BETA) * logp.exp() + BETA * logq.exp()).log()
    of_student, of_teacher = (F.kl_div(logm, x, reduction="batchmean", log_target=True) for x in (logp, logq))
    return (1 - BETA) * of_student + BETA * of_teacher


def huggingface(heads: Heads) -> Forward:
    return Forward(partial(whole_logits, heads))


def huggingface_compiled(heads: Heads) -> Forward:
    return Forward(partial(compiled(whole_logits), heads))


def liger(heads: Heads) -> Forward:
    needs("liger_kernel")
    from liger_kernel.transformers import LigerFusedLinearJSD

    divergence = LigerFusedLinearJSD(jsd_beta=BETA)
    return Forward(
        lambda: divergence(heads.hidden, heads.weight, heads.teacher_hidden, heads.teacher_weight, shift_labels=None)
    )


def trl(heads: Heads) -> Forward:
    """The loss of its DistillationTrainer."""
    needs("trl", gpu=False)
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    mask = torch.ones(1, len(heads.hidden), device=DEVICE)
    weights = heads.weight, heads.teacher_weight
    return Forward(
        lambda: _chunked_divergence_loss(heads.hidden[None], heads.teacher_hidden[None], *weights, mask, BETA)[0]
    )


def seqtile(heads: Heads) -> Forward:
    return Forward(
        lambda: linear_divergence(heads.hidden, heads.weight, heads.teacher_hidden, heads.teacher_weight, beta=BETA)
    )


CONTESTANTS: dict[str, Callable[[Heads], Forward]] = {
    "huggingface": huggingface,
    "huggingface_compiled": huggingface_compiled,
    "liger": liger,
    "trl": trl,
    "seqtile": seqtile,
}


def last_rows(heads: Heads, loss: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the student's last hidden states, which other tokens have no part in."""
    return [heads.hidden.grad[-ROWS:]]


def right_rows(heads: Heads) -> list[torch.Tensor]:
    hidden = heads.hidden.detach()[-ROWS:].double().requires_grad_()
    of_teacher = heads.teacher_hidden[-ROWS:].double(), heads.teacher_weight.double()
    rows = replace(heads, hidden=hidden, weight=heads.weight.detach().double())
    rows = replace(rows, teacher_hidden=of_teacher[0], teacher_weight=of_teacher[1])
    whole_logits(rows).backward(heads.upstream.double() * len(hidden) / len(heads.hidden))
    return [hidden.grad]


def flops(shape: Shape, tokens: int) -> float:
    """Three products of the student's head, and the teacher's logits."""
    return 4 * 2.0 * tokens * shape.hidden * shape.vocab


SUBJECT = Subject("linear_divergence", operands, CONTESTANTS, flops, last_rows, right_rows, LENGTHS)


def test_linear_divergence(compare, case: Case, contestant: str) -> None:
    compare(SUBJECT, case, contestant)
