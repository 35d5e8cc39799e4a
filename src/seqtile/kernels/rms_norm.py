"""RMSNorm and its backward in Triton: x / rms(x) * weight, computed in float32.

Heads [C, H, K] are normed in place, as rows of K elements. Source: Zhang & Sennrich, arXiv:1910.07467.
"""

from functools import cache

import torch
import triton
import triton.language as tl

# Untuned on a GPU: 16 elements per thread, in blocks of up to 512 threads, compile without spills.
ELEMENTS = 4096  # per block, unless a row has more
# The number of blocks, by warps, that one multiprocessor holds in the backward. Each block goes over many rows and sums
# their weight gradients.
RESIDENT = {8: 3, 16: 1}


@triton.jit
def token_and_head(row, heads):
    """Returns the token and the head of a row as int64: times a stride either may exceed 2**31. int32 rows divide
    faster."""
    return (row // heads).to(tl.int64), (row % heads).to(tl.int64)


@triton.jit
def _scale(x, is_row, width, eps):
    """Returns 1 / rms of rows. Returns 1 for the all-zero rows past the last: with eps 0, 0 * inf would reach the sum
    of d_weight."""
    return tl.rsqrt(tl.where(is_row, tl.sum(x * x, 1) / width + eps, 1.0))[:, None]


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, x_head_stride, out_stride, out_head_stride,
    rows, heads, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (columns < width)[None, :]
    token, head = token_and_head(row, heads)
    x = tl.load(x_ptr + (token * x_stride + head * x_head_stride)[:, None] + columns[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    normed = x * _scale(x, row < rows, width, eps)
    out_ptrs = out_ptr + (token * out_stride + head * out_head_stride)[:, None] + columns[None, :]
    tl.store(out_ptrs, (normed * weight[None, :]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward_kernel(
    x_ptr, weight_ptr, d_y_ptr, add_ptr, out_ptr, d_weight_ptr,
    x_stride, x_head_stride, d_y_stride, d_y_head_stride, add_stride, out_stride, out_head_stride,
    rows, heads, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    d_weight = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        token, head = token_and_head(row, heads)
        x_ptrs = x_ptr + (token * x_stride + head * x_head_stride)[:, None] + columns[None, :]
        d_y_ptrs = d_y_ptr + (token * d_y_stride + head * d_y_head_stride)[:, None] + columns[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        d_normed = tl.load(d_y_ptrs, mask=mask, other=0.0).to(tl.float32)
        scale = _scale(x, row < rows, width, eps)
        normed = x * scale
        if d_weight_ptr is not None:
            d_weight += d_normed * normed
        # Load the weight in every round, from the cache: kept in registers, it would make wide rows spill.
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        d_normed *= weight[None, :]
        d_x = scale * (d_normed - normed * (tl.sum(d_normed * normed, 1) / width)[:, None])
        if add_ptr is not None:
            add_ptrs = add_ptr + (token * add_stride)[:, None] + columns[None, :]
            d_x += tl.load(add_ptrs, mask=mask, other=0.0).to(tl.float32)
        out_ptrs = out_ptr + (token * out_stride + head * out_head_stride)[:, None] + columns[None, :]
        tl.store(out_ptrs, d_x.to(out_ptr.dtype.element_ty), mask=mask)
    if d_weight_ptr is not None:
        tl.store(d_weight_ptr + tl.program_id(0) * width + columns, tl.sum(d_weight, 0), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Launches the kernel, see `dispatch.rms_norm`."""
    assert weight.is_contiguous()
    (tokens, *heads, width), x_strides, out_strides = x.shape, x.stride(), out.stride()
    assert x_strides[-1] == out_strides[-1] == 1
    strides, heads = (*x_strides[:2], *out_strides[:2]), heads[0] if heads else 1  # one head needs no stride
    rows, block = tokens * heads, _block(width)
    _rms_norm_kernel[(-(-rows // block["ROWS"]),)](x, weight, out, *strides, rows, heads, width, eps, **block)


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    d_y: torch.Tensor,
    out: torch.Tensor,
    add: torch.Tensor | None,
    d_weight: torch.Tensor | None,
) -> None:
    """Launches the kernel, see `dispatch.rms_norm_backward`."""
    assert weight.is_contiguous()
    (tokens, *heads, width), x_strides, d_strides, out_strides = x.shape, x.stride(), d_y.stride(), out.stride()
    add_strides = (0, 1) if add is None else add.stride()
    assert x_strides[-1] == d_strides[-1] == out_strides[-1] == add_strides[-1] == 1
    heads = heads[0] if heads else 1
    rows, block = tokens * heads, _block(width)
    # At least two blocks of rows per program, so that with few rows programs also loop.
    programs = min(_multiprocessors(x.device) * RESIDENT[block["num_warps"]], -(-rows // (2 * block["ROWS"])))
    sums = None if d_weight is None else x.new_empty(programs, width, dtype=torch.float32)
    strides = *x_strides[:2], *d_strides[:2], add_strides[0], *out_strides[:2]
    _rms_norm_backward_kernel[(programs,)](x, weight, d_y, add, out, sums, *strides, rows, heads, width, eps, **block)
    if sums is not None:
        d_weight.add_(sums.sum(0))


@cache
def _block(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {"ROWS": max(1, ELEMENTS // columns), "WIDTH": columns, "num_warps": 8 if columns <= ELEMENTS else 16}


@cache
def _multiprocessors(device: torch.device) -> int:
    """Returns a GPU's number of multiprocessors; 4 in Triton's interpreter, to test sums of several."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
