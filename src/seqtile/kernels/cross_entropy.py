"""Row-wise cross-entropy with its gradient, in Triton.

One program takes one row of logits and reads it twice: once for the log-sum-exp by the online softmax (Milakov and
Gimelshein, arXiv:1805.02867), in float32, once to write softmax - onehot over it.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # columns a step
NUM_WARPS = 8  # 16 columns a thread: no spill on sm_80, sm_90, sm_100


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    logits_row_stride,
    target_ptr,
    loss_ptr,
    lse_ptr,
    vocab,
    ignore_index,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31 within one tile
    row_ptr = logits_ptr + row * logits_row_stride
    target = tl.load(target_ptr + row)
    columns = tl.arange(0, BLOCK)

    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        if WRITE_GRAD:
            for start in range(0, vocab, BLOCK):
                zeros = tl.zeros([BLOCK], dtype=row_ptr.dtype.element_ty)
                tl.store(row_ptr + start + columns, zeros, mask=start + columns < vocab)
    else:
        in_range = (target >= 0) & (target < vocab)
        # Read before the reductions: their barriers keep every thread's read ahead of the writes at the end.
        target_logit = tl.load(row_ptr + tl.where(in_range, target, 0)).to(tl.float32)
        row_max = -3.4e38  # finite, so that a first block of -inf alone does not make -inf - -inf
        row_sum = 0.0
        for start in range(0, vocab, BLOCK):
            x = tl.load(row_ptr + start + columns, mask=start + columns < vocab, other=-float("inf")).to(tl.float32)
            new_max = tl.maximum(row_max, tl.max(x, axis=0))
            row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(x - new_max), axis=0)
            row_max = new_max
        lse = tl.where(in_range, row_max + tl.log(row_sum), float("nan"))
        tl.store(loss_ptr + row, lse - target_logit)
        tl.store(lse_ptr + row, lse)
        if WRITE_GRAD:
            for start in range(0, vocab, BLOCK):
                mask = start + columns < vocab
                x = tl.load(row_ptr + start + columns, mask=mask, other=-float("inf")).to(tl.float32)
                gradient = tl.exp(x - lse) - tl.where(start + columns == target, 1.0, 0.0)
                tl.store(row_ptr + start + columns, gradient.to(row_ptr.dtype.element_ty), mask=mask)


def cross_entropy_(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int, write_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `launch.cross_entropy_`."""
    assert logits.stride(1) == 1 and target.is_contiguous()
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    _cross_entropy_kernel[(rows,)](
        logits,
        logits.stride(0),
        target,
        losses,
        lse,
        vocab,
        ignore_index,
        WRITE_GRAD=write_grad,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return losses, lse
