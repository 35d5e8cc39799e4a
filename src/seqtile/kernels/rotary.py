"""Rotary embedding and its backward in Triton: every head of a token turned by the token's angles, in place.

x cos + turned(x) sin, where turned(x1, x2) = (-x2, x1) for the halves of a head; backwards, the transpose of that.
Source: Su et al., arXiv:2104.09864, in the form of halves that Hugging Face's models have.
"""

import torch
import triton
import triton.language as tl

NUM_WARPS = 4


@triton.jit
def _rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    x_stride,
    x_head_stride,
    cos_stride,
    sin_stride,
    heads,
    half,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    inside = column < half
    mask = (head < heads)[:, None] & inside[None, :]
    first = x_ptr + token * x_stride + head[:, None] * x_head_stride + column[None, :]
    second = first + half
    x1 = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    cos, sin = cos_ptr + token * cos_stride + column, sin_ptr + token * sin_stride + column
    cos1 = tl.load(cos, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    tl.store(first, y1.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(second, y2.to(x_ptr.dtype.element_ty), mask=mask)


def rotary_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> torch.Tensor:
    """See `launch.rotary_`."""
    tokens, heads, width = x.shape
    _rotary_kernel[(tokens,)](
        x,
        cos,
        sin,
        *x.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        heads,
        width // 2,
        BACKWARD=backward,
        HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(width // 2),
        num_warps=NUM_WARPS,
    )
    return x
