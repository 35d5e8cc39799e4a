from functools import partial

import pytest
import torch
import torch.nn.functional as F

from seqtile.kernels.dispatch import gated_activation_, gated_activation_backward_
from support.assertions import assert_all_as_exact, assert_as_exact, poisoned
from support.choice import every_pair

SHAPES = [(63, 1000), (17, 1025), (5, 4097)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


ACTIVATION = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def reference(
    gate: torch.Tensor, up: torch.Tensor, d_product: torch.Tensor, activation: str = "silu"
) -> list[torch.Tensor]:
    """product, d_gate, d_up as autograd computes them in the dtype of its arguments."""
    gate, up = (tensor.detach().clone().requires_grad_() for tensor in (gate, up))
    product = ACTIVATION[activation](gate) * up
    product.backward(d_product)
    return [product, gate.grad, up.grad]


def inputs(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A buffer filled with NaN and three chunks in it, whose row stride exceeds the row length."""
    slab = poisoned(3, rows, width + 3, dtype=dtype, device=device)
    slab[:, :, :width] = torch.randn(3, rows, width, device=device) * 3
    return slab, [slab[i, :, :width] for i in range(3)]


@pytest.mark.in_interpreter("of 18 cases", only=every_pair)
@pytest.mark.parametrize("activation", ACTIVATION)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_forward_and_backward(rows: int, width: int, dtype: torch.dtype, activation: str, device: str) -> None:
    slab, (gate, up, d_product) = inputs(rows, width, dtype, device)
    same = reference(gate, up, d_product, activation)
    truth = reference(gate.double(), up.double(), d_product.double(), activation)
    gate_before, up_before = gate.clone(), up.clone()
    ours = gated_activation_(gate, up, activation)
    assert ours.data_ptr() == gate.data_ptr() and up.equal(up_before)
    assert_as_exact(ours, same[0], truth[0])
    gate.copy_(gate_before)
    gated_activation_backward_(gate, up, d_product, activation)
    assert_all_as_exact((d_product, gate, up), same, truth)
    assert slab[:, :, width:].isnan().all(), "wrote past a row"


@pytest.mark.alone
def test_row_offsets_are_int64(device: str) -> None:
    """Row 3 starts at element 3 * 2**30 > 2**31. The buffer is virtual memory: only a few rows of it are touched."""
    stride, width = 2**30, 1025
    slab = torch.empty(3 * stride + 3 * width, dtype=torch.bfloat16, device=device)
    gate, up, d_product = (slab[i * width :].as_strided((4, width), (stride, 1)) for i in range(3))
    for chunk in (gate, up, d_product):
        chunk.copy_(torch.randn(4, width, device=device))
    same = reference(gate.contiguous(), up.contiguous(), d_product.contiguous())
    truth = reference(gate.double(), up.double(), d_product.double())
    product = gate.clone()
    gated_activation_(product, up, "silu")
    assert_as_exact(product, same[0], truth[0])
    gated_activation_backward_(gate, up, d_product, "silu")
    for ours, theirs, true in zip((d_product, gate, up), same, truth, strict=True):
        assert_as_exact(ours.contiguous(), theirs, true)


@pytest.mark.parametrize("activation", ACTIVATION)
def test_extreme_gates(activation: str, device: str) -> None:
    """Where the sigmoid saturates, its products neither overflow nor become NaN."""
    gate = torch.tensor([[-1e4, -100.0, -1e-6, 0.0, 1e-6, 100.0, 1e4]], device=device)
    up, d_product = torch.randn_like(gate), torch.randn_like(gate)
    truth = reference(gate.double(), up.double(), d_product.double(), activation)
    gated_activation_backward_(gate, up, d_product, activation)
    for ours, true in zip((d_product, gate, up), truth, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-30)
