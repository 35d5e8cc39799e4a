"""The laws of a tiled MLP: bytes tracked at full size, and the error of its gradients against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from seqtile import gated_mlp
from seqtile.ops.weight_grads import WeightGrad
from support.assertions import relative_error
from support.measure import FlopCount, LiveBytes, eager_memory

pytestmark = eager_memory
K = 1024


@pytest.mark.full("5 s each; the buffers of a size do not depend on the activation", but=("256-qwen3_32b-gelu_tanh",))
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("size", "width"), [(4096, 14336), (5120, 25600)], ids=["llama3_8b", "qwen3_32b"])
@pytest.mark.parametrize("thousands", [256, 1024])
def test_memory_does_not_grow_with_length(thousands: int, size: int, width: int, activation: str) -> None:
    """Simulated in a checkpointed region at 8 thousand and a million tokens: beyond T * D tensors and the gradients,
    three chunks of the inner width and 10 %; and 11 u of products."""
    chunk = size * width * 2
    for tokens in (8 * K, thousands * K):
        with FakeTensorMode():
            x = torch.empty(tokens, size, dtype=torch.bfloat16, requires_grad=True)
            gate, up = (torch.empty(width, size, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
            down = torch.empty(size, width, dtype=torch.bfloat16, requires_grad=True)
            with FlopCount() as flops, LiveBytes() as memory:
                y = checkpoint(gated_mlp, x, gate, up, down, activation=activation, use_reentrant=False)
                y.backward(torch.ones_like(y))
        assert flops.total == 11 * 2 * tokens * size * width and not flops.unknown
        y_and_both_gradients = 3 * tokens * size * 2
        sums_and_their_roundings = 3 * width * size * (4 + 2)
        assert memory.peak - y_and_both_gradients - sums_and_their_roundings <= 3.3 * chunk


def plain(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_of_the_weight_gradients_does_not_grow_with_chunks(dtype: torch.dtype) -> None:
    """2 to 256 chunks: at most 1.05 times the error of one chunk, and 1.1 times that of untiled torch in this dtype."""
    tokens, size, width = 2048, 96, 260
    shapes = [(tokens, size), (width, size), (width, size), (size, width)]
    operands = [(torch.randn(shape) * (1 if i == 0 else shape[1] ** -0.5)).to(dtype) for i, shape in enumerate(shapes)]
    d_y = torch.randn(tokens, size).to(dtype)

    def gradients(function, kind: torch.dtype, **options: int) -> list[torch.Tensor]:
        leaves = [operand.to(kind).requires_grad_() for operand in operands]
        return torch.autograd.grad(function(*leaves, **options), leaves[1:], d_y.to(kind))

    truth, untiled = gradients(plain, torch.float64), gradients(plain, dtype)
    ours = {n: gradients(gated_mlp, dtype, chunk_tokens=-(-tokens // n)) for n in (2, 16, 256)}
    # For one chunk, use the tiled path on a sequence one token longer than a chunk: the plain path is torch's own.
    ours[1] = gradients(gated_mlp, dtype, chunk_tokens=tokens - 1)
    for i, true in enumerate(truth):
        errors = {n: relative_error(gradient[i], true) for n, gradient in ours.items()}
        assert max(errors.values()) <= 1.05 * errors[1], errors
        assert max(errors.values()) <= 1.1 * relative_error(untiled[i], true), errors


@pytest.mark.parametrize("shape", [(1, 5), (5, 1)])
def test_no_sum_on_a_gpu_is_a_row(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some releases of torch take one row for a bias, which they hand to cublasLt."""
    products = []
    monkeypatch.setattr(
        torch, "addmm", lambda total, left, right, **of: products.append((total, left @ right, of["out"]))
    )
    with FakeTensorMode():
        left, right = (torch.empty(8, size, dtype=torch.bfloat16, device="cuda") for size in shape)
        total = WeightGrad(torch.empty(shape, dtype=torch.bfloat16, device="cuda"))
        total.add(left, right)
        ((given, product, out),) = products
    assert given is out and given.shape == product.shape == (5, 1)
    assert given.untyped_storage()._cdata == total.buffer.untyped_storage()._cdata
    assert total[0 : shape[0]] is total, "zeros need not be written first"
