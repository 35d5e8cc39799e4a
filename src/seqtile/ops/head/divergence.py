"""Divergences between the next-token distributions of a student and a teacher. Only one chunk of logits of each exists
at a time, see `chunks.py`."""

from functools import partial

import torch

from seqtile.kernels import LossOptions
from seqtile.kernels.dispatch import divergence_
from seqtile.ops.checks import check_device, check_loss_options, check_mask, check_number, check_reduction
from seqtile.ops.head.chunks import ChunkedHeads, Head, LogitChunk
from seqtile.ops.head.reduction import masked_loss
from seqtile.ops.torch_function import dispatched

_OP = "linear_divergence"


@dispatched
def linear_divergence(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
    num_items: int | float | torch.Tensor | None = None,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    student_scale: float = 1.0,
    teacher_scale: float = 1.0,
    return_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the divergence between a student's and a teacher's next-token distributions over the whole vocabulary,
    without storing the logits of either.

    Let p = softmax(student logits / temperature), and q the same for the teacher. For beta = 0 the divergence is the
    forward KL(q, p), for beta = 1 the reverse KL(p, q), and in between the generalised Jensen-Shannon divergence
    beta KL(q, m) + (1 - beta) KL(p, m), where m = beta q + (1 - beta) p (On-Policy Distillation, arXiv:2306.13649).
    Each head's logits are scale * hidden @ weight.T + bias, then soft-capped.

    Args:
        student_hidden, teacher_hidden: [..., D], where D may differ; float32, bfloat16 or float16.
        student_weight, teacher_weight: [V, D] with the same V, in the dtype of the head's hidden states (any of the
            three under autocast).
        mask: [...] bool, True for tokens that count; the others cost nothing. None: all count.
        reduction, num_items: as in `linear_cross_entropy`.
        return_entropy: return (divergence, entropies). The entropies are those of the student's softmax: float32 of the
            tokens' shape, without gradient, 0 for tokens that do not count.
        chunk_tokens: tokens per chunk; None for max(2048, the larger D).

    Returns:
        A float32 scalar, or with "none" float32 of the tokens' shape. If no token counts it is 0 with zero gradients
        for "sum" and `num_items`, NaN with zero gradients for a plain "mean".

    Gradients: of every tensor of both heads that requires one, usually only the student's. Gradients of weights and
    biases are summed over chunks in float32. They are rounded once, or added unrounded to the parameter's `main_grad`.

    FLOPs for n tokens that count, with u = 2 n D V for each head: student 3 u, teacher 1 u (3 u if it is trained). With
    "none", where upstream gradients differ between tokens: student 4 u, teacher 2 u (4 u). Without gradients 1 u.

    Memory: one chunk of logits of each head, d_hidden, d_weight in float32 and its rounded copy (if there is only one
    chunk, as in `linear_cross_entropy`). If some tokens do not count, also one chunk of each head's hidden states. Only
    a few bytes per token otherwise grow with T. The operands are kept until the backward has run. The function breaks
    the graph of torch.compile and runs eagerly.

    Raises:
        TypeError, ValueError: invalid types, dtypes, devices, shapes or numbers, such as a teacher with another
            vocabulary; an empty sequence; a transform of torch.func.
        RuntimeError: in a backward with `create_graph=True`.
    """
    check_reduction(_OP, reduction, num_items)
    beta = check_number(_OP, "beta", beta, 0, 1)
    options = (
        check_loss_options(_OP, student_scale, student_softcap, temperature, prefix="student_"),
        check_loss_options(_OP, teacher_scale, teacher_softcap, temperature, prefix="teacher_"),
    )
    student = Head(student_hidden, student_weight, student_bias)
    teacher = Head(teacher_hidden, teacher_weight, teacher_bias)
    _check(student, teacher, mask)
    heads, values = (student, teacher), (torch.float32 if return_entropy else None,)
    chunked = ChunkedHeads.make(heads, (), chunk_tokens, _OP, partial(_divergences, beta), options, values=values)
    found, (entropies,) = masked_loss(chunked, mask, reduction, num_items)
    return (found, entropies) if return_entropy else found


def _divergences(beta: float, options: tuple[LossOptions, LossOptions], chunk: LogitChunk) -> None:
    """The row function: computes the divergences and the student's entropies."""
    (losses, entropy), (row_scale,), write = chunk.values, chunk.scales, chunk.write_grads
    vectors = {"biases": chunk.biases, "entropy": entropy, "row_scale": row_scale}
    divergence_(*chunk.logits, losses, beta, options, write=write, **vectors)


def _check(student: Head, teacher: Head, mask: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError for tensors that do not match each other."""
    student.check(_OP, "student_")
    teacher.check(_OP, "teacher_")
    words = student.weight.shape[0], teacher.weight.shape[0]
    if words[0] != words[1]:
        raise ValueError(
            f"{_OP}: the student has a vocabulary of {words[0]} tokens and the teacher one of {words[1]}, expected "
            "the same; cut off the rows that only pad the longer weight"
        )
    shape = tuple(student.hidden.shape[:-1])
    if tuple(teacher.hidden.shape[:-1]) != shape:
        raise ValueError(
            f"{_OP}: teacher_hidden has shape {list(teacher.hidden.shape)}, expected the tokens of student_hidden, "
            f"{list(shape)}"
        )
    check_device(_OP, "teacher_hidden", teacher.hidden, "student_hidden", student.hidden)
    check_mask(_OP, mask, student.hidden)
