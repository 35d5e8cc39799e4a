"""The loss of a language-model head, forward and backward, side by side.

The upstream gradient is 1/4, as it is where four batches are accumulated: a loss that computes its gradients in the
forward has to take it up.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from benchmark.device import DEVICE
from benchmark.shapes import SOFTCAP, Case, Shape
from benchmark.subject import Absent, Forward, Subject, compiled, needs
from torch import nn

from seqtile import linear_cross_entropy

ROWS = 64  # that are looked at in full size
TRL_WORDS = 32768  # of the vocabulary at a time, as in trl.trainer.utils


@dataclass
class Head:
    hidden: torch.Tensor  # [T, D]
    weight: torch.Tensor  # [V, D]
    target: torch.Tensor  # [T]
    softcap: float | None
    upstream: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.weight


def operands(shape: Shape, tokens: int, dtype: torch.dtype) -> Head:
    hidden = torch.randn(tokens, shape.hidden, device=DEVICE, dtype=dtype).requires_grad_()
    weight = (torch.randn(shape.vocab, shape.hidden, device=DEVICE, dtype=dtype) * shape.hidden**-0.5).requires_grad_()
    target = torch.randint(shape.vocab, (tokens,), device=DEVICE)
    return Head(hidden, weight, target, SOFTCAP if shape.softcap else None, torch.tensor(0.25, device=DEVICE))


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def logits_and_loss(head: Head, reduction: str = "mean") -> torch.Tensor:
    logits = capped(F.linear(head.hidden, head.weight), head.softcap)
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), head.target, reduction=reduction
    )


def huggingface(head: Head) -> Forward:
    return Forward(partial(logits_and_loss, head))


def huggingface_compiled(head: Head) -> Forward:
    return Forward(partial(compiled(logits_and_loss), head))


def torch_linear(head: Head) -> Forward:
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        raise Absent("this torch has no tiled F.linear_cross_entropy")
    if head.softcap:
        raise Absent("it knows no soft cap")
    options = nn.LinearCrossEntropyOptions()
    return Forward(lambda: F.linear_cross_entropy(head.hidden, head.weight, head.target, options=options))


def liger(head: Head) -> Forward:
    needs("liger_kernel")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(softcap=head.softcap)
    return Forward(lambda: loss(head.weight, head.hidden, head.target))


def deepspeed_tiled(head: Head) -> Forward:
    """As its documentation has it, with tiles of about 1 GiB of logits (ALST, 3.1), of equal numbers of tokens: their
    means' mean or, where they have different numbers of labels, their sum, divided."""
    needs("deepspeed", gpu=False)
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    tokens = len(head.hidden)
    tiles = max(2, tokens * len(head.weight) * 4 // 2**30)
    tiles = next(n for n in range(tiles, tokens + 1) if tokens % n == 0)

    labels = (head.target >= 0).sum()
    reduction = "mean" if labels == tokens else "sum"

    def of_tile(_: object, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return logits_and_loss(replace(head, hidden=hidden, target=target), reduction)

    def compute() -> torch.Tensor:
        hidden, target = head.hidden[None], head.target[None]
        loss = TiledFusedLogitsLoss.apply(of_tile, None, hidden, target, None, tiles, [head.weight], reduction)
        return loss if reduction == "mean" else loss / labels

    return Forward(compute)


def cce(head: Head) -> Forward:
    """With its default, which leaves out what adds little to the gradients."""
    needs("cut_cross_entropy")
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return Forward(lambda: cut_cross_entropy(head.hidden, head.weight, head.target, softcap=head.softcap))


def quack(head: Head) -> Forward:
    needs("quack")
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    if head.softcap:
        raise Absent("it knows no soft cap")
    return Forward(lambda: chunked_linear_cross_entropy(head.hidden, head.weight, head.target))


def trl(head: Head) -> Forward:
    """TRL's head, which SFTTrainer uses; on a CPU it is not its kernels that run but their fallback."""
    needs("trl", gpu=False)
    from trl.kernels import ChunkedLogProbFunction

    def compute() -> torch.Tensor:
        labelled = head.target >= 0
        rows, labels = head.hidden[labelled], head.target[labelled]
        return -ChunkedLogProbFunction.apply(rows, head.weight, None, labels, 1.0, TRL_WORDS, head.softcap, 1.0, ())[
            0
        ].mean()

    return Forward(compute)


def seqtile(head: Head, **options: int) -> Forward:
    options = {"softcap": head.softcap} | options
    return Forward(lambda: linear_cross_entropy(head.hidden, head.weight, head.target, **options))


CONTESTANTS: dict[str, Callable[[Head], Forward]] = {
    "huggingface": huggingface,
    "huggingface_compiled": huggingface_compiled,
    "torch": torch_linear,
    "liger": liger,
    "deepspeed_tiled": deepspeed_tiled,
    "cce": cce,
    "quack": quack,
    "trl": trl,
    "seqtile": seqtile,
}


def last_rows(head: Head, loss: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the last hidden states, which other tokens have no part in."""
    return [head.hidden.grad[-ROWS:]]


def right_rows(head: Head) -> list[torch.Tensor]:
    hidden = head.hidden.detach()[-ROWS:].double().requires_grad_()
    rows = replace(head, hidden=hidden, weight=head.weight.detach().double(), target=head.target[-ROWS:])
    labelled, of_all = ((target >= 0).sum() for target in (rows.target, head.target))
    logits_and_loss(rows).backward(head.upstream.double() * labelled / of_all)
    return [hidden.grad]


def flops(shape: Shape, tokens: int) -> float:
    """Three products: logits, gradient of the hidden states, gradient of the weight."""
    return 3 * 2.0 * tokens * shape.hidden * shape.vocab


SUBJECT = Subject("linear_cross_entropy", operands, CONTESTANTS, flops, last_rows, right_rows)


def test_linear_cross_entropy(compare, case: Case, contestant: str) -> None:
    compare(SUBJECT, case, contestant)
