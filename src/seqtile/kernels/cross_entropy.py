"""Row-wise cross-entropy with its gradient, in Triton.

One program takes one row of products hidden W' and reads it twice: once for the log-sum-exp by the online softmax
(Milakov and Gimelshein, arXiv:1805.02867), in float32, together with whatever else is asked of the row, once to write
the gradient over it. Options that are off cost nothing: they are compiled away.
"""

import torch
import triton
import triton.language as tl

from seqtile.kernels.loss_options import LossOptions

BLOCK = 4096  # columns a step
NUM_WARPS = 8  # 16 columns a thread: no spill on sm_80, sm_90, sm_100


@triton.jit
def _tanh(x):
    """tanh in float32, to 3e-7 relative: near 0, where 1 - exp would cancel, its Taylor polynomial up to x**9."""
    magnitude = tl.abs(x)
    decay = tl.exp(-2.0 * magnitude)
    far = (1.0 - decay) / (1.0 + decay)
    far = tl.where(x < 0, -far, far)
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(magnitude < 0.25, near, far)


@triton.jit
def _logits(
    row_ptr, bias_ptr, columns, vocab, logit_scale, softcap, temperature, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr
):
    """The logits of `columns`, -inf beyond the row's end, and their slope: that of the cap alone."""
    mask = columns < vocab
    x = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32) * logit_scale
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    slope = 1.0
    if CAPPED:
        capped = _tanh(x * (1.0 / softcap))
        slope = 1.0 - capped * capped
        x = capped * softcap
    return tl.where(mask, x * (1.0 / temperature), -float("inf")), slope


@triton.jit
def _statistics(
    row_ptr,
    bias_ptr,
    class_weight_ptr,
    vocab,
    logit_scale,
    softcap,
    temperature,
    HAS_BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    SMOOTHED: tl.constexpr,
    ENTROPY: tl.constexpr,
    PREDICTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of one row's logits x: the largest, log(sum(exp(x - largest))), entropy, the index of the largest, and sums of
    class_weight and of class_weight * x. What is not asked for is meaningless."""
    offsets = tl.arange(0, BLOCK)
    row_max = -3.4e38  # finite, so that a first block of -inf alone does not make -inf - -inf
    row_sum = 0.0
    centred_sum = 0.0  # sum of exp(x - max) * (x - max)
    weight_sum = 0.0
    weighted_sum = 0.0
    predicted = 0
    for start in range(0, vocab, BLOCK):
        columns = start + offsets
        x, _ = _logits(row_ptr, bias_ptr, columns, vocab, logit_scale, softcap, temperature, HAS_BIAS, CAPPED)
        block_max = tl.max(x, axis=0)
        if PREDICTED:
            predicted = tl.where(block_max > row_max, start + tl.argmax(x, axis=0), predicted)
        new_max = tl.maximum(row_max, block_max)
        exponentials = tl.exp(x - new_max)
        decay = tl.exp(row_max - new_max)
        if ENTROPY:
            centred = exponentials * tl.where(exponentials > 0, x - new_max, 0.0)
            centred_sum = decay * (centred_sum + (row_max - new_max) * row_sum) + tl.sum(centred, axis=0)
        row_sum = row_sum * decay + tl.sum(exponentials, axis=0)
        row_max = new_max
        if SMOOTHED:
            mask = columns < vocab
            weights = tl.where(mask, 1.0, 0.0)
            if HAS_CLASS_WEIGHT:
                weights = tl.load(class_weight_ptr + columns, mask=mask, other=0.0)
            weight_sum += tl.sum(weights, axis=0)
            weighted_sum += tl.sum(weights * tl.where(mask, x, 0.0), axis=0)
    log_sum = tl.log(row_sum)
    return row_max, log_sum, log_sum - centred_sum / row_sum, predicted, weight_sum, weighted_sum


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    logits_row_stride,
    target_ptr,
    bias_ptr,
    class_weight_ptr,
    loss_ptr,
    lse_ptr,
    entropy_ptr,
    predicted_ptr,
    row_scale_ptr,
    lse_scale_ptr,
    entropy_scale_ptr,
    vocab,
    logit_scale,
    softcap,
    temperature,
    label_smoothing,
    z_loss,
    HAS_BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    SMOOTHED: tl.constexpr,
    STORE_LSE: tl.constexpr,
    STORE_ENTROPY: tl.constexpr,
    STORE_PREDICTED: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    LSE_GRAD: tl.constexpr,
    ENTROPY_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31 within one tile
    row_ptr = logits_ptr + row * logits_row_stride
    target = tl.load(target_ptr + row)
    in_range = (target >= 0) & (target < vocab)
    label = tl.where(in_range, target, 0)
    # Read before the reductions: their barriers keep every thread's read ahead of the writes at the end.
    target_logit, _ = _logits(row_ptr, bias_ptr, label, vocab, logit_scale, softcap, temperature, HAS_BIAS, CAPPED)
    row_max, log_sum, entropy, predicted, weight_sum, weighted_sum = _statistics(
        row_ptr, bias_ptr, class_weight_ptr, vocab, logit_scale, softcap, temperature,
        HAS_BIAS, CAPPED, HAS_CLASS_WEIGHT, SMOOTHED, STORE_ENTROPY or ENTROPY_GRAD, STORE_PREDICTED, BLOCK,
    )  # fmt: skip
    # Kept apart where digits matter: x - row_max is nearly exact, x - lse has lost those below lse's own.
    log_sum = tl.where(in_range, log_sum, float("nan"))
    lse = row_max + log_sum

    of_target = 1.0 - label_smoothing
    if HAS_CLASS_WEIGHT:
        of_target *= tl.load(class_weight_ptr + label)
    of_class = label_smoothing / vocab
    loss = of_target * (row_max - target_logit + log_sum) + z_loss * lse * lse
    if SMOOTHED:
        loss += of_class * (weight_sum * lse - weighted_sum)
    tl.store(loss_ptr + row, loss)
    if STORE_LSE:
        tl.store(lse_ptr + row, lse)
    if STORE_ENTROPY:
        tl.store(entropy_ptr + row, tl.where(in_range, entropy, float("nan")))
    if STORE_PREDICTED:
        tl.store(predicted_ptr + row, predicted)

    if WRITE_GRAD:
        row_scale = 1.0
        if SCALE_ROWS:
            row_scale = tl.load(row_scale_ptr + row)
        of_all = row_scale * (of_target + of_class * weight_sum + 2.0 * z_loss * lse)
        if LSE_GRAD:
            of_all += tl.load(lse_scale_ptr + row)
        of_target *= row_scale
        of_class *= row_scale
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < vocab
            x, slope = _logits(row_ptr, bias_ptr, columns, vocab, logit_scale, softcap, temperature, HAS_BIAS, CAPPED)
            logp = x - row_max - log_sum
            probability = tl.exp(logp)
            gradient = probability * of_all - tl.where(columns == target, of_target, 0.0)
            if SMOOTHED and HAS_CLASS_WEIGHT:
                gradient -= of_class * tl.load(class_weight_ptr + columns, mask=mask, other=0.0)
            elif SMOOTHED:
                gradient -= of_class
            if ENTROPY_GRAD:
                surprise = probability * tl.where(probability > 0, logp + entropy, 0.0)
                gradient -= tl.load(entropy_scale_ptr + row) * surprise
            tl.store(row_ptr + columns, (gradient * slope).to(row_ptr.dtype.element_ty), mask=mask)


def cross_entropy_(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    options: LossOptions,
    *,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    lse: torch.Tensor | None,
    entropy: torch.Tensor | None,
    predicted: torch.Tensor | None,
    write_grad: bool,
    row_scale: torch.Tensor | None,
    lse_scale: torch.Tensor | None,
    entropy_scale: torch.Tensor | None,
) -> None:
    """See `launch.cross_entropy_`."""
    vectors = (target, losses, bias, class_weight, lse, entropy, predicted, row_scale, lse_scale, entropy_scale)
    assert logits.stride(1) == 1 and all(vector is None or vector.is_contiguous() for vector in vectors)
    rows, vocab = logits.shape
    _cross_entropy_kernel[(rows,)](
        logits,
        logits.stride(0),
        target,
        bias,
        class_weight,
        losses,
        lse,
        entropy,
        predicted,
        row_scale,
        lse_scale,
        entropy_scale,
        vocab,
        options.logit_scale,
        options.softcap,
        options.temperature,
        options.label_smoothing,
        options.z_loss,
        HAS_BIAS=bias is not None,
        CAPPED=options.softcap > 0,
        HAS_CLASS_WEIGHT=class_weight is not None,
        SMOOTHED=options.label_smoothing > 0,
        STORE_LSE=lse is not None,
        STORE_ENTROPY=entropy is not None,
        STORE_PREDICTED=predicted is not None,
        WRITE_GRAD=write_grad,
        SCALE_ROWS=row_scale is not None,
        LSE_GRAD=lse_scale is not None,
        ENTROPY_GRAD=entropy_scale is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
