"""Row-wise cross-entropy and its gradient, in Triton.

One program takes one row of products hidden W' and reads it twice. The first pass computes the log-sum-exp by the
online softmax (Milakov and Gimelshein, arXiv:1805.02867) in float32, and the requested statistics. The second pass
overwrites the row with its gradient. Every thread keeps its own maximum and sums until the end of the row, so no thread
waits for another inside a loop. The compiler removes unused options.
"""

import torch
import triton
import triton.language as tl

from seqtile.kernels import LossOptions, RowVectors

NUM_WARPS = 8
THREADS = tl.constexpr(32 * NUM_WARPS)  # on AMD, whose warps have 64 threads, two threads share a maximum
COLUMNS = tl.constexpr(8)  # per thread and step: 16 bytes in half precision
STEP = tl.constexpr(THREADS.value * COLUMNS.value)
LOG2E = tl.constexpr(1.4426950408889634)  # for exp by exp2, which flushes results below 2**-126 to zero; tl.exp keeps
# them, with three more instructions.
SMALLEST = tl.constexpr(-1e38)  # finite, so that a first step of only -inf does not compute -inf - -inf


@triton.jit
def _tanh(x):
    """Computes tanh in float32, to 3e-7 relative. Near 0, where 1 - exp would cancel, it uses the Taylor polynomial up
    to x**9."""
    magnitude = tl.abs(x)
    decay = tl.exp2(magnitude * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    far = tl.where(x < 0, -far, far)
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(magnitude < 0.25, near, far)


@triton.jit
def _logits(head, columns, MASKED: tl.constexpr):
    """Returns the logits of `columns` (if MASKED, -inf beyond the row's end) and the slope of the soft cap.

    `head` is what logits are made of: the row's products, the bias, V, and the first options of `LossOptions.used`.
    """
    row_ptr, bias_ptr, vocab, logit_scale, softcap, temperature = head
    mask = columns < vocab if MASKED else None
    x = tl.load(row_ptr + columns, mask=mask).to(tl.float32)
    if logit_scale is not None:
        x *= logit_scale
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, mask=mask).to(tl.float32)
    slope = 1.0
    if softcap is not None:
        capped = _tanh(x * (1.0 / softcap))
        slope = 1.0 - capped * capped
        x = capped * softcap
    if temperature is not None:
        x *= 1.0 / temperature
    if MASKED:
        x = tl.where(mask, x, -float("inf"))
    return x, slope


@triton.jit
def _add_step(
    start, head, class_weight_ptr, found, MASKED: tl.constexpr,
    SUMMED: tl.constexpr, ENTROPY: tl.constexpr, SQUARES: tl.constexpr, PREDICTED: tl.constexpr,
):  # fmt: skip
    """Returns every thread's statistics `found` [THREADS], updated with the step at `start`."""
    largest, total, sum_exp_shifted, squares, predicted, weights, weighted = found
    columns = start + tl.arange(0, THREADS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x, _ = _logits(head, columns, MASKED)
    if PREDICTED:
        of_step, place = tl.max(x, 1, return_indices=True)
        predicted = tl.where(of_step > largest, start + tl.arange(0, THREADS) * COLUMNS + place, predicted)
    else:
        of_step = tl.max(x, 1)
    new = tl.maximum(largest, of_step)
    difference = x - new[:, None]
    exponentials = tl.exp2(difference * LOG2E)
    decay = tl.exp2((largest - new) * LOG2E)
    if ENTROPY:
        products = exponentials * tl.where(exponentials > 0, difference, 0.0)
        sum_exp_shifted = decay * (sum_exp_shifted + (largest - new) * total) + tl.sum(products, 1)
    if SQUARES:
        squares = squares * decay * decay + tl.sum(exponentials * exponentials, 1)
    total = total * decay + tl.sum(exponentials, 1)
    if SUMMED:
        mask = columns < head[2] if MASKED else None
        x = tl.where(mask, x, 0.0) if MASKED else x
        if class_weight_ptr is not None:
            class_weight = tl.load(class_weight_ptr + columns, mask=mask, other=0.0 if MASKED else None)
            weights += class_weight
            x *= class_weight
        weighted += x
    return new, total, sum_exp_shifted, squares, predicted, weights, weighted


@triton.jit
def _statistics(
    head, class_weight_ptr, SUMMED: tl.constexpr, ENTROPY: tl.constexpr, SQUARES: tl.constexpr, PREDICTED: tl.constexpr
):
    """Returns statistics of one row's logits x: the largest, sum(exp(x - largest)), the entropy, the sum of squared
    probabilities, the index of the largest, sum(class_weight) and sum(class_weight * x). Those not requested are
    undefined."""
    vocab = head[2]
    largest = tl.full([THREADS], SMALLEST, tl.float32)
    nothing = tl.full([THREADS], 0.0, tl.float32)
    by_column = tl.full([THREADS, COLUMNS], 0.0, tl.float32)  # column sums that Triton 3.7 cannot compute inside a loop
    # In the order of `_add_step`: with e = exp(x - largest), the sums of e, e (x - largest) and e e.
    found = (largest, nothing, nothing, nothing, tl.full([THREADS], 0, tl.int32), by_column, by_column)
    whole = vocab // STEP * STEP
    for start in range(0, whole, STEP):
        found = _add_step(start, head, class_weight_ptr, found, False, SUMMED, ENTROPY, SQUARES, PREDICTED)
    if whole < vocab:
        found = _add_step(whole, head, class_weight_ptr, found, True, SUMMED, ENTROPY, SQUARES, PREDICTED)
    largest, total, sum_exp_shifted, squares, predicted, weights, weighted = found
    row_max = tl.max(largest, 0)
    decay = tl.exp2((largest - row_max) * LOG2E)
    row_sum = tl.sum(total * decay, 0)
    entropy, square_sum, first, weight_sum, weighted_sum = 0.0, 0.0, 0, vocab * 1.0, 0.0
    if ENTROPY:
        exp_shifted = tl.sum(decay * (sum_exp_shifted + tl.where(total > 0, largest - row_max, 0.0) * total), 0)
        entropy = tl.log(row_sum) - exp_shifted / row_sum
    if SQUARES:
        square_sum = tl.sum(squares * decay * decay, 0) / (row_sum * row_sum)
    if PREDICTED:
        first = tl.min(tl.where(largest == row_max, predicted, vocab), 0)
    if SUMMED:
        weighted_sum = tl.sum(tl.sum(weighted, 1), 0)
        if class_weight_ptr is not None:
            weight_sum = tl.sum(tl.sum(weights, 1), 0)
    return row_max, row_sum, entropy, square_sum, first, weight_sum, weighted_sum


@triton.jit
def _write_gradient(start, head, class_weight_ptr, label, of_row, MASKED: tl.constexpr):
    """Writes the gradient of one step of a row. `softmax_coef` multiplies exp(x - row_max)."""
    row_max, log_sum, softmax_coef, target_coef, class_coef, entropy, d_entropy = of_row
    row_ptr, vocab, first, in_thread = head[0], head[2], tl.arange(0, THREADS) * COLUMNS, tl.arange(0, COLUMNS)
    columns = start + first[:, None] + in_thread[None, :]
    mask = columns < vocab if MASKED else None
    x, slope = _logits(head, columns, MASKED)
    difference = x - row_max
    exponentials = tl.exp2(difference * LOG2E)
    is_target = in_thread[None, :] == (label - start - first)[:, None]  # each thread compares with constants
    gradient = exponentials * softmax_coef - tl.where(is_target, target_coef, 0.0)
    if class_coef is not None and class_weight_ptr is not None:
        gradient -= class_coef * tl.load(class_weight_ptr + columns, mask=mask)
    elif class_coef is not None:
        gradient -= class_coef
    if d_entropy is not None:
        logp = difference - log_sum
        gradient -= d_entropy * (tl.exp2(logp * LOG2E) * tl.where(exponentials > 0, logp + entropy, 0.0))
    tl.store(row_ptr + columns, (gradient * slope).to(row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store(values_ptr, row, value, in_range):
    """Stores a row's value if requested; NaN if the row's target is invalid."""
    if values_ptr is not None:
        tl.store(values_ptr + row, tl.where(in_range, value, float("nan")))


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, logits_row_stride, target_ptr, loss_ptr, bias_ptr, class_weight_ptr,
    lse_ptr, entropy_ptr, predicted_ptr, mean_ptr, squares_ptr, row_scale_ptr, lse_scale_ptr, entropy_scale_ptr,
    vocab, logit_scale, softcap, temperature, label_smoothing, z_loss, WRITE_GRAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31 within one chunk
    head = (logits_ptr + row * logits_row_stride, bias_ptr, vocab, logit_scale, softcap, temperature)
    target = tl.load(target_ptr + row)
    in_range = (target >= 0) & (target < vocab)
    label = tl.where(in_range, target, 0).to(tl.int32)
    # Read this before the reductions: their barriers keep every thread's read ahead of the writes at the end.
    target_logit, _ = _logits(head, label, False)
    row_max, row_sum, entropy, square_sum, predicted, weight_sum, weighted_sum = _statistics(
        head, class_weight_ptr, label_smoothing is not None or mean_ptr is not None,
        entropy_ptr is not None or entropy_scale_ptr is not None, squares_ptr is not None, predicted_ptr is not None,
    )  # fmt: skip
    # Keep row_max and log_sum apart: x - row_max is nearly exact, x - lse loses the digits below those of lse.
    row_sum = tl.where(in_range, row_sum, float("nan"))
    log_sum = tl.log(row_sum)
    lse = row_max + log_sum

    target_coef = 1.0 if label_smoothing is None else 1.0 - label_smoothing
    if class_weight_ptr is not None:
        target_coef *= tl.load(class_weight_ptr + label)
    class_coef = 0.0 if label_smoothing is None else label_smoothing / vocab
    loss = target_coef * (row_max - target_logit + log_sum) + z_loss * lse * lse
    if label_smoothing is not None:
        loss += class_coef * (weight_sum * lse - weighted_sum)
    tl.store(loss_ptr + row, loss)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, predicted)
    _store(lse_ptr, row, lse, in_range)
    _store(entropy_ptr, row, entropy, in_range)
    _store(mean_ptr, row, weighted_sum / vocab, in_range)
    _store(squares_ptr, row, square_sum, in_range)

    if WRITE_GRAD:
        row_scale = tl.load(row_scale_ptr + row) if row_scale_ptr is not None else 1.0
        softmax_coef = target_coef + 2.0 * z_loss * lse
        if label_smoothing is not None:
            softmax_coef += class_coef * weight_sum
        softmax_coef *= row_scale
        if lse_scale_ptr is not None:
            softmax_coef += tl.load(lse_scale_ptr + row)
        softmax_coef /= row_sum
        target_coef *= row_scale
        of_row = (
            row_max, log_sum, softmax_coef, target_coef, None if label_smoothing is None else class_coef * row_scale,
            entropy, None if entropy_scale_ptr is None else tl.load(entropy_scale_ptr + row),
        )  # fmt: skip
        whole = vocab // STEP * STEP
        for start in range(0, whole, STEP):
            _write_gradient(start, head, class_weight_ptr, label, of_row, False)
        if whole < vocab:
            _write_gradient(whole, head, class_weight_ptr, label, of_row, True)


def cross_entropy_(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    options: LossOptions,
    vectors: RowVectors,
    write_grad: bool,
) -> None:
    """Launches the kernel, see `dispatch.cross_entropy_`."""
    given = [vector for vector in (target, losses, *vectors) if vector is not None]
    assert vectors.mean is None or vectors.class_weight is None  # mean is computed from `weighted`, a weighted sum
    assert logits.stride(1) == 1 and all(vector.is_contiguous() for vector in given)
    rows, vocab = logits.shape
    numbers = vocab, *options.used, options.z_loss, write_grad
    _cross_entropy_kernel[(rows,)](logits, logits.stride(0), target, losses, *vectors, *numbers, num_warps=NUM_WARPS)
