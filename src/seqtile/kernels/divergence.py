"""Row-wise divergence of two softmaxes over one vocabulary, and its gradients, in Triton.

One program takes one row of products of each head and reads both three times: for the log-sum-exps, for the divergence,
and to write the gradients over the rows. It compares log-probabilities after subtracting the largest logit, so that
equal rows have a divergence of 0 to float32's precision.
"""

import torch
import triton
import triton.language as tl

from seqtile.kernels import LossOptions
from seqtile.kernels.cross_entropy import COLUMNS, LOG2E, NUM_WARPS, STEP, THREADS, _logits, _statistics

FORWARD, REVERSE, MIXED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TINY = tl.constexpr(2.0**-126)  # the smallest number that Triton accepts as a float32


@triton.jit
def _probabilities(head, columns, row_max, log_sum):
    """Returns the probabilities of `columns`, their logarithms, and the slope of the soft cap; `head` as in
    `_logits`."""
    x, slope = _logits(head, columns, True)
    logp = x - row_max - log_sum
    return tl.exp2(logp * LOG2E), logp, slope


@triton.jit
def _terms(p, logp, q, logq, beta, KIND: tl.constexpr):
    """Returns log(p / m) and log(q / m) for every word, where m is what a distribution is compared with: the other one
    or the mixture. 0 where the distribution itself is 0."""
    if KIND == MIXED:
        logm = tl.log(tl.maximum((1.0 - beta) * p + beta * q, TINY))
        return tl.where(p > 0, logp - logm, 0.0), tl.where(q > 0, logq - logm, 0.0)
    return tl.where(p > 0, logp - logq, 0.0), tl.where(q > 0, logq - logp, 0.0)


@triton.jit
def _divergence_kernel(
    student_ptr, student_stride, teacher_ptr, teacher_stride,
    student_bias_ptr, teacher_bias_ptr, loss_ptr, entropy_ptr, row_scale_ptr,
    vocab, beta, student_scale, student_cap, teacher_scale, teacher_cap, temperature,
    KIND: tl.constexpr, STUDENT_GRAD: tl.constexpr, TEACHER_GRAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31 within one chunk
    student = (student_ptr + row * student_stride, student_bias_ptr, vocab, student_scale, student_cap, temperature)
    teacher = (teacher_ptr + row * teacher_stride, teacher_bias_ptr, vocab, teacher_scale, teacher_cap, temperature)
    s_max, s_sum, entropy, _, _, _, _ = _statistics(student, None, False, entropy_ptr is not None, False, False)
    t_max, t_sum, _, _, _, _, _ = _statistics(teacher, None, False, False, False, False)
    s_log, t_log = tl.log(s_sum), tl.log(t_sum)
    of_student, of_teacher = tl.full([THREADS], 0.0, tl.float32), tl.full([THREADS], 0.0, tl.float32)
    for start in range(0, vocab, STEP):
        columns = start + tl.arange(0, THREADS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        p, logp, s_slope = _probabilities(student, columns, s_max, s_log)
        q, logq, t_slope = _probabilities(teacher, columns, t_max, t_log)
        p_term, q_term = _terms(p, logp, q, logq, beta, KIND)
        of_student += tl.sum(p * p_term, 1)
        of_teacher += tl.sum(q * q_term, 1)
    student_sum, teacher_sum = tl.sum(of_student, 0), tl.sum(of_teacher, 0)
    if KIND == FORWARD:
        loss = teacher_sum
    elif KIND == REVERSE:
        loss = student_sum
    else:
        loss = beta * teacher_sum + (1.0 - beta) * student_sum
    tl.store(loss_ptr + row, loss)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)
    if STUDENT_GRAD or TEACHER_GRAD:
        row_scale = tl.load(row_scale_ptr + row) if row_scale_ptr is not None else 1.0
        for start in range(0, vocab, STEP):
            columns = start + tl.arange(0, THREADS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            p, logp, s_slope = _probabilities(student, columns, s_max, s_log)
            q, logq, t_slope = _probabilities(teacher, columns, t_max, t_log)
            p_term, q_term = _terms(p, logp, q, logq, beta, KIND)
            if KIND == FORWARD:
                d_student, d_teacher = p - q, q * (q_term - teacher_sum)
            elif KIND == REVERSE:
                d_student, d_teacher = p * (p_term - student_sum), q - p
            else:
                d_student, d_teacher = (1.0 - beta) * p * (p_term - student_sum), beta * q * (q_term - teacher_sum)
            if STUDENT_GRAD:
                d_student = (d_student * (row_scale * s_slope)).to(student_ptr.dtype.element_ty)
                tl.store(student[0] + columns, d_student, mask=columns < vocab)
            if TEACHER_GRAD:
                d_teacher = (d_teacher * (row_scale * t_slope)).to(teacher_ptr.dtype.element_ty)
                tl.store(teacher[0] + columns, d_teacher, mask=columns < vocab)


def divergence_(
    student: torch.Tensor,
    teacher: torch.Tensor,
    losses: torch.Tensor,
    beta: float,
    options: tuple[LossOptions, LossOptions],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    entropy: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    write: tuple[bool, bool],
) -> None:
    """Launches the kernel, see `dispatch.divergence_`."""
    given = [vector for vector in (losses, *biases, entropy, row_scale) if vector is not None]
    assert student.stride(1) == teacher.stride(1) == 1 and all(vector.is_contiguous() for vector in given)
    rows, vocab = student.shape
    of_student, of_teacher = options
    numbers = vocab, beta, *of_student.used[:2], *of_teacher.used[:3]
    logits, kind = (student, student.stride(0), teacher, teacher.stride(0)), {0.0: 0, 1.0: 1}.get(beta, 2)
    _divergence_kernel[(rows,)](
        *logits, *biases, losses, entropy, row_scale, *numbers, kind, *write, num_warps=NUM_WARPS
    )
