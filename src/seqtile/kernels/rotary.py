"""Rotary embedding and its backward in Triton: rotates every head of a token by the token's angles, in place.

x cos + turned(x) sin, where turned(x1, x2) = (-x2, x1) for the halves of a head; the backward applies the transpose.
Source: Su et al., arXiv:2104.09864, with the halves of Hugging Face's models.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from seqtile.kernels.rms_norm import token_and_head

# Untuned on a GPU; one of the sizes that compile without spills for any number of heads.
ELEMENTS = 1024  # per program, of each half of its heads
NUM_WARPS = 4  # 8 columns per thread: one 16-byte access in half precision


@triton.jit(do_not_specialize=["rows"])
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, x_stride, x_head_stride, cos_stride, sin_stride, rows, heads, half,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)[None, :]
    mask = (row < rows)[:, None] & (column < half)
    token, head = token_and_head(row, heads)
    first = x_ptr + (token * x_stride + head * x_head_stride)[:, None] + column
    second = first + half
    x1 = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    cos, sin = cos_ptr + (token * cos_stride)[:, None] + column, sin_ptr + (token * sin_stride)[:, None] + column
    cos1 = tl.load(cos, mask=mask, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + half, mask=mask, other=0.0).to(tl.float32)
    sin1 = tl.load(sin, mask=mask, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + half, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        sin1, sin2 = -sin2, -sin1
    y1 = x1 * cos1 - x2 * sin1
    y2 = x2 * cos2 + x1 * sin2
    tl.store(first, y1.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(second, y2.to(x_ptr.dtype.element_ty), mask=mask)


def rotary_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> None:
    """Launches the kernel, see `dispatch.rotary_`."""
    tokens, heads, width = x.shape
    (*strides, x_step), (cos_stride, cos_step), (sin_stride, sin_step) = x.stride(), cos.stride(), sin.stride()
    assert x_step == cos_step == sin_step == 1
    rows, block = tokens * heads, _block(width)
    sizes = *strides, cos_stride, sin_stride, rows, heads, width // 2
    _rotary_kernel[(-(-rows // block["ROWS"]),)](x, cos, sin, *sizes, BACKWARD=backward, **block, num_warps=NUM_WARPS)


@cache
def _block(width: int) -> dict[str, int]:
    half = triton.next_power_of_2(width // 2)
    return {"ROWS": max(1, ELEMENTS // half), "HALF": half}
