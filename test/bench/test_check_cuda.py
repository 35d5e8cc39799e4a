"""The rules of `make check-cuda`, on meta tensors: they need neither a GPU nor a torch for CUDA."""

import pytest
import torch
from dev.check_cuda.attention import ORDER, Call, copies, refusals
from dev.check_cuda.rules import CudaRules
from dev.check_cuda.violations import unreported

BF16, FP32 = torch.bfloat16, torch.float32


def test_calls_that_break_a_rule_are_reported() -> None:
    assert unreported("meta") == {}


@pytest.mark.parametrize(
    ("dtype", "heads", "lengths", "width", "masked", "able"),
    [
        (BF16, (8, 2), (16, 16), 128, False, ("cudnn", "flash")),
        (BF16, (8, 8), (16, 32), 256, True, ("cudnn", "efficient")),
        (BF16, (8, 8), (16, 16), 264, False, ("efficient",)),
        (FP32, (8, 8), (1, 1), 64, False, ("efficient",)),
        (FP32, (8, 2), (16, 16), 64, False, ()),
    ],
)
def test_kernels_that_can_serve_a_call(
    dtype: torch.dtype, heads: tuple[int, int], lengths: tuple[int, int], width: int, masked: bool, able: tuple
) -> None:
    """Also, a kernel that can serve a call with operands as a model makes them copies none of them."""
    shapes = [(1, length, number, width) for length, number in zip(lengths, heads, strict=True)]
    q, k = (torch.empty(shape, dtype=dtype, device="meta").transpose(1, 2) for shape in shapes)
    mask = torch.empty(lengths, dtype=dtype, device="meta") if masked else None
    call = Call(q, k, k, mask, 0.0, not masked, heads[0] != heads[1])
    assert tuple(kernel for kernel in ORDER if not refusals(kernel, call)) == able
    assert not [copied for kernel in able for copied in copies(kernel, call)]


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("size", [(1, 64), (64, 1)])
def test_sums_of_a_lora_of_rank_1_are_right(size: tuple[int, int], beta: int) -> None:
    total = torch.empty(size, device="meta")
    left, right = (torch.empty(32, n, dtype=BF16, device="meta") for n in size)
    with CudaRules() as rules:
        torch.ops.aten.addmm.dtype_out(total, left.T, right, FP32, beta=beta, out=total)
    assert not rules.wrong()
