"""act(gate) * up and its backward, in Triton: element-wise, in place, computed in float32.

Both activations are gate * s with s = sigmoid(v(gate)), so that d act / d gate = s * (1 + gate * (1 - s) * v'(gate)).
SiLU has v(x) = x. GELU by tanh has v(x) = 2 sqrt(2 / pi) (x + 0.044715 x**3), because (1 + tanh(u)) / 2 = sigmoid(2 u).
"""

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)  # columns per program
NUM_WARPS = 4  # 8 columns per thread: one 16-byte access in half precision


@triton.jit
def _sigmoid(gate, GELU: tl.constexpr):
    """Returns s and v' of the activation."""
    slope = 1.0
    inner = gate
    if GELU:
        square = gate * gate
        inner = gate * (1.5957691216057308 + 0.07135481627260025 * square)
        slope = 1.5957691216057308 + 0.21406444881780076 * square
    return tl.sigmoid(inner), slope


@triton.jit
def _gated_activation_kernel(gate_ptr, up_ptr, gate_row_stride, up_row_stride, width, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31 at 150k tokens of Llama-8B's MLP
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate_ptrs = gate_ptr + row * gate_row_stride + columns
    gate = tl.load(gate_ptrs, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + columns, mask=mask).to(tl.float32)
    sigmoid, _ = _sigmoid(gate, GELU)
    product = gate * sigmoid * up
    tl.store(gate_ptrs, product.to(gate_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_activation_backward_kernel(
    gate_ptr, up_ptr, product_ptr, gate_row_stride, up_row_stride, product_row_stride, width, GELU: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate_ptrs = gate_ptr + row * gate_row_stride + columns
    up_ptrs = up_ptr + row * up_row_stride + columns
    product_ptrs = product_ptr + row * product_row_stride + columns
    gate = tl.load(gate_ptrs, mask=mask).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask).to(tl.float32)
    d_product = tl.load(product_ptrs, mask=mask).to(tl.float32)
    sigmoid, slope = _sigmoid(gate, GELU)
    activated = gate * sigmoid
    d_gate = d_product * up * sigmoid * (1.0 + gate * (1.0 - sigmoid) * slope)
    dtype = gate_ptr.dtype.element_ty
    tl.store(gate_ptrs, d_gate.to(dtype), mask=mask)
    tl.store(up_ptrs, (d_product * activated).to(dtype), mask=mask)
    tl.store(product_ptrs, (activated * up).to(dtype), mask=mask)


def gated_activation_(gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    """Launches the kernel, see `dispatch.gated_activation_`."""
    _launch(_gated_activation_kernel, activation, gate, up)


def gated_activation_backward_(gate: torch.Tensor, up: torch.Tensor, d_product: torch.Tensor, activation: str) -> None:
    """Launches the kernel, see `dispatch.gated_activation_backward_`."""
    _launch(_gated_activation_backward_kernel, activation, gate, up, d_product)


def _launch(kernel: triton.JITFunction, activation: str, *tensors: torch.Tensor) -> None:
    rows, width = tensors[0].shape
    strides, steps = zip(*(tensor.stride() for tensor in tensors), strict=True)
    assert set(steps) == {1}
    grid, gelu = (rows, -(-width // BLOCK.value)), activation == "gelu_tanh"
    kernel[grid](*tensors, *strides, width, GELU=gelu, num_warps=NUM_WARPS)
