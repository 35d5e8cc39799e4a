"""Divergences between the softmaxes of two linear heads, a student's and a teacher's, with one chunk of logits of each
alive at a time.

    student's hidden W' ─┐
                         ├─ row kernel ─ divergence [C], d_logits in the memory of the logits ─ d_hidden, d_W
    teacher's hidden W' ─┘

As in `logit_chunks.py`: of a sum the gradients are ready when its forward ends, of one value a token the chunks are
computed again in the backward, where each token's upstream gradient is known.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from seqtile.kernels import DivergenceOptions
from seqtile.kernels.dispatch import divergence_
from seqtile.ops.checks import (
    autocast_dtype,
    check_dense,
    check_device,
    check_first_derivative,
    check_no_transform,
    check_operands,
    check_shape,
)
from seqtile.ops.chunks import chunks, resolve_chunk_tokens
from seqtile.ops.linear import WeightGrad, main_grad_of, scale_
from seqtile.ops.linear_cross_entropy import check_number, check_reduction, labelled_rows, scatter_to_tokens
from seqtile.ops.logit_chunks import one_factor, power_of_two

_OP = "linear_divergence"


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
    """Computes the divergence between a student's and a teacher's next token over the whole vocabulary, without the
    logits of either.

    With p = softmax(student's logits / temperature) and q of the teacher's: KL(q, p), the forward divergence, for
    beta = 0; KL(p, q), the reverse one, for beta = 1; between them beta KL(q, m) + (1 - beta) KL(p, m), where
    m = beta q + (1 - beta) p, the generalised Jensen-Shannon divergence (On-Policy Distillation, arXiv:2306.13649).
    Logits are scale * hidden @ weight.T + bias, soft-capped, each head's by its own.

    Args:
        student_hidden, teacher_hidden: [..., D] each, of widths of their own; float32, bfloat16 or float16.
        student_weight, teacher_weight: [V, D], one vocabulary, the dtype of the head's hidden states (any of the three
            under autocast).
        mask: [...] bool, True where a token counts; what is left out costs nothing. None: all.
        reduction, num_items: as in `linear_cross_entropy`.
        return_entropy: return (divergence, entropies): of the student's softmax, float32 of the tokens' shape, without
            gradient, 0 where a token is left out.
        chunk_tokens: tokens of a chunk; None for max(2048, the larger D).

    Returns:
        A float32 scalar, or with "none" float32 of the tokens' shape. If no token counts it is 0 with zero gradients
        for "sum" and `num_items`, NaN with zero gradients for a plain "mean".

    Gradients of both heads, of what requires one: usually of the student alone. Of weights and biases they add up over
    chunks in float32 and are rounded once; a `main_grad` takes them as it does in `linear_cross_entropy`.

    FLOPs, with u = 2 n D V of each head for n tokens that count: student 3 u, teacher 1 u (3 u if it is trained). With
    "none", whose upstream gradients differ from token to token, student 4 u, teacher 2 u (4 u). Without gradients 1 u.

    Memory: a chunk of logits of each head, d_hidden, d_weight in float32 and its rounding; if some tokens are left out
    a chunk of each head's hidden states. Nothing else grows with T but a few numbers a token. Until its backward has
    run, the operands are kept. It breaks the graph of torch.compile and runs eagerly.

    Raises:
        TypeError, ValueError: types, dtypes, devices, shapes or numbers that do not fit, such as a teacher of another
            vocabulary; an empty sequence; a transform of torch.func.
        RuntimeError: in a backward with `create_graph=True`.
    """
    check_reduction(_OP, reduction, num_items)
    options = DivergenceOptions(
        beta=check_number(_OP, "beta", beta, 0, 1),
        temperature=check_number(_OP, "temperature", temperature, 0, above=True),
        student_scale=check_number(_OP, "student_scale", student_scale, -float("inf")),
        student_softcap=_cap("student_softcap", student_softcap),
        teacher_scale=check_number(_OP, "teacher_scale", teacher_scale, -float("inf")),
        teacher_softcap=_cap("teacher_softcap", teacher_softcap),
    )
    student = _Head(student_hidden, student_weight, student_bias)
    teacher = _Head(teacher_hidden, teacher_weight, teacher_bias)
    _check(student, teacher, mask)
    widest = max(student_hidden.shape[-1], teacher_hidden.shape[-1])
    tokens = resolve_chunk_tokens(chunk_tokens, widest)
    return _run(student, teacher, mask, options, tokens, reduction, num_items, return_entropy)


@torch.compiler.disable(reason="seqtile counts the tokens, and writes logits and gradients in one memory")
def _run(
    student: "_Head",
    teacher: "_Head",
    mask: torch.Tensor | None,
    options: DivergenceOptions,
    tokens: int,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
    return_entropy: bool,
) -> Any:
    check_no_transform(_OP)
    shape = student.hidden.shape[:-1]
    rows = None if mask is None else labelled_rows(mask.reshape(-1), False)
    count = shape.numel() if rows is None else rows.shape[0]
    settings = _Settings(options, tokens, reduction != "none" and torch.is_grad_enabled(), count)
    total, losses, entropies = DivergenceFunction.apply(settings, rows, *student.flat(), *teacher.flat())
    if reduction == "none":
        found = scatter_to_tokens(losses, rows, shape)
    elif reduction == "sum" or num_items is not None:
        divisor = num_items.to(total.device) if isinstance(num_items, torch.Tensor) else num_items
        found = total if num_items is None else total / divisor
    else:
        found = total / count if count else total + float("nan")  # torch's mean of nothing
    return (found, scatter_to_tokens(entropies, rows, shape)) if return_entropy else found


class _Head(NamedTuple):
    hidden: torch.Tensor
    """[..., D]; [T, D] where it is computed."""
    weight: torch.Tensor
    """[V, D]"""
    bias: torch.Tensor | None
    """[V]"""

    def flat(self) -> "_Head":
        bias = None if self.bias is None else self.bias.contiguous()
        return _Head(self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, bias)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its products."""
        return autocast_dtype(self.hidden) or self.hidden.dtype


class _Settings(NamedTuple):
    options: DivergenceOptions
    chunk_tokens: int
    at_once: bool
    """Whether gradients are computed in the forward, as of a sum."""
    count: int
    """How many tokens count."""

    def factors(self) -> tuple[float, float]:
        """Returns what the kernel's gradients of the student's products, and the teacher's, are to be multiplied by."""
        options = self.options
        return options.student_scale / options.temperature, options.teacher_scale / options.temperature


class _Sums(NamedTuple):
    """The gradients of one head, up to one factor; None where not needed."""

    hidden: torch.Tensor | None
    weight: WeightGrad | None
    bias: WeightGrad | None


class DivergenceFunction(torch.autograd.Function):
    """The sum of the divergences of the tokens that count, each of them [n], and the student's entropies."""

    @staticmethod
    def forward(ctx, settings: _Settings, rows: torch.Tensor | None, *operands: torch.Tensor | None):
        heads = _Head(*operands[:3]), _Head(*operands[3:])
        ctx.settings, ctx.dtypes = settings, [head.dtype for head in heads]
        ctx.main_grads = [main_grad_of(parameter) for head in heads for parameter in (head.weight, head.bias)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, *operands)
        losses = heads[0].hidden.new_empty(settings.count, dtype=torch.float32)
        entropies = torch.empty_like(losses)
        needs = ctx.needs_input_grad[2:] if settings.at_once else [False] * 6
        ctx.sums = _pass(ctx, heads, rows, losses, entropies, needs, None) if settings.at_once else None
        if not settings.at_once:
            _pass(ctx, heads, rows, losses, entropies, needs, None)
        ctx.mark_non_differentiable(entropies)
        return losses.sum(), losses, entropies

    @staticmethod
    def backward(ctx, upstream: torch.Tensor | None, d_losses: torch.Tensor | None, _: None):
        check_first_derivative(_OP)
        (rows, *operands), sums, ctx.sums = ctx.saved_tensors, ctx.sums, None
        if upstream is None and d_losses is None:
            return (None,) * 8
        if upstream is None and sums is not None:
            upstream, d_losses = one_factor(d_losses)
        unit = upstream
        if sums is None or d_losses is not None:
            del sums
            if upstream is not None:
                d_losses = upstream.expand(ctx.settings.count) + (0 if d_losses is None else d_losses)
            unit = power_of_two(d_losses)
            heads, losses = (_Head(*operands[:3]), _Head(*operands[3:])), torch.empty_like(d_losses)
            needs, scale = ctx.needs_input_grad[2:], (d_losses / unit).contiguous()
            sums = _pass(ctx, heads, rows, losses, None, needs, scale)
        return None, None, *_scaled(ctx, sums, unit)


def _pass(
    ctx: Any,
    heads: tuple[_Head, _Head],
    rows: torch.Tensor | None,
    losses: torch.Tensor,
    entropies: torch.Tensor | None,
    needs: Sequence[bool],
    scale: torch.Tensor | None,
) -> list[_Sums]:
    """Goes over the chunks once, writes losses and entropies, and returns the gradients that are needed of
    sum(scale * losses), up to `_Settings.factors`; a scale of None stands for ones."""
    settings, vocab = ctx.settings, heads[0].weight.shape[0]
    matrices = [head.weight.to(dtype) for head, dtype in zip(heads, ctx.dtypes, strict=True)]  # copies under autocast
    sums = [_begin(head, needs[3 * i : 3 * i + 3], rows) for i, head in enumerate(heads)]
    length, most = -(-vocab // 16) * 16, min(settings.count, settings.chunk_tokens)
    buffers = [h.hidden.new_empty(most, length, dtype=d)[:, :vocab] for h, d in zip(heads, ctx.dtypes, strict=True)]
    write = tuple(any(needs[3 * i : 3 * i + 3]) for i in range(2))

    def add(chunk: slice) -> None:  # a function, so that what it allocates is free again before the next chunk
        places = chunk if rows is None else rows[chunk]
        inputs = [head.hidden[places].to(dtype) for head, dtype in zip(heads, ctx.dtypes, strict=True)]
        logits = [
            torch.mm(x, matrix.t(), out=buffer[: x.shape[0]])
            for x, matrix, buffer in zip(inputs, matrices, buffers, strict=True)
        ]
        vectors = {"entropy": entropies, "row_scale": scale}
        vectors = {name: None if vector is None else vector[chunk] for name, vector in vectors.items()}
        vectors |= {"student_bias": heads[0].bias, "teacher_bias": heads[1].bias}
        divergence_(*logits, losses[chunk], settings.options, write=write, **vectors)
        for of_head, d_logits, x, matrix in zip(sums, logits, inputs, matrices, strict=True):
            if of_head.weight is not None:
                of_head.weight.add(d_logits, x)
            if of_head.bias is not None:
                of_head.bias.add(d_logits)
            if of_head.hidden is None:
                continue
            if rows is None and x.dtype == of_head.hidden.dtype:
                torch.mm(d_logits, matrix, out=of_head.hidden[chunk])
            else:  # x is a copy, of no more use
                of_head.hidden[places] = torch.mm(d_logits, matrix, out=x).to(of_head.hidden.dtype)

    for chunk in chunks(settings.count, settings.chunk_tokens):
        add(chunk)
    return sums


def _begin(head: _Head, needs: Sequence[bool], rows: torch.Tensor | None) -> _Sums:
    make = torch.empty_like if rows is None else torch.zeros_like
    return _Sums(
        make(head.hidden) if needs[0] else None,
        WeightGrad(head.weight) if needs[1] else None,
        WeightGrad(head.bias) if needs[2] else None,
    )


def _scaled(ctx: Any, sums: list[_Sums], unit: torch.Tensor) -> list[torch.Tensor | None]:
    """Returns the gradients times `unit`, one number, multiplied once in float32 and rounded; zeros if no token counts,
    whatever that number is."""
    settings, found = ctx.settings, []
    unit = (unit if settings.count else torch.ones_like(unit)).reshape(1).float()
    for i, (of_head, factor) in enumerate(zip(sums, settings.factors(), strict=True)):
        of_products, of_bias = unit * factor, unit / settings.options.temperature
        main_grads = ctx.main_grads[2 * i : 2 * i + 2]
        found += [
            None if of_head.hidden is None else scale_(of_head.hidden, of_products),
            None if of_head.weight is None else of_head.weight.scaled(of_products, main_grads[0]),
            None if of_head.bias is None else of_head.bias.scaled(of_bias, main_grads[1]),
        ]
    return found


def _cap(name: str, softcap: float | None) -> float:
    return 0.0 if softcap is None else check_number(_OP, name, softcap, 0, above=True)


def _check(student: _Head, teacher: _Head, mask: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError for tensors that do not fit each other."""
    for name, head in (("student", student), ("teacher", teacher)):
        tensors = {f"{name}_{part}": tensor for part, tensor in head._asdict().items() if tensor is not None}
        check_operands(_OP, f"{name}_hidden", tensors)
        if head.hidden.dim() == 0 or head.hidden.numel() == 0:
            raise ValueError(f"{_OP}: {name}_hidden has shape {list(head.hidden.shape)}, expected [..., D] with tokens")
        width = head.hidden.shape[-1]
        if head.weight.dim() != 2 or head.weight.shape[1] != width:
            raise ValueError(
                f"{_OP}: {name}_weight has shape {list(head.weight.shape)}, expected [V, D] with D = {width}"
            )
        if head.bias is not None:
            check_shape(_OP, f"{name}_bias", head.bias, (head.weight.shape[0],), "[V]")
    words = student.weight.shape[0], teacher.weight.shape[0]
    if words[0] != words[1]:
        raise ValueError(
            f"{_OP}: the student has a vocabulary of {words[0]} tokens and the teacher one of {words[1]}, expected one "
            "and the same; cut off the rows that only pad the longer weight"
        )
    shape = tuple(student.hidden.shape[:-1])
    if tuple(teacher.hidden.shape[:-1]) != shape:
        raise ValueError(
            f"{_OP}: teacher_hidden has shape {list(teacher.hidden.shape)}, expected the tokens of student_hidden, "
            f"{list(shape)}"
        )
    check_device(_OP, "teacher_hidden", teacher.hidden, "student_hidden", student.hidden)
    if mask is not None:
        check_dense(_OP, "mask", mask)
        check_shape(_OP, "mask", mask, shape, "the tokens' shape")
        check_device(_OP, "mask", mask, "student_hidden", student.hidden)
        if mask.dtype != torch.bool:
            raise TypeError(f"{_OP}: mask is {mask.dtype}, expected torch.bool, True where a token counts")
