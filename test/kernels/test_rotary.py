import pytest
import torch

from seqtile.kernels.dispatch import rotary_
from support.assertions import assert_as_exact, poisoned
from support.choice import every_pair

# Llama-8B's head chunk, and all of its heads; halves that are no power of two.
SHAPES = [(63, 5, 128), (7, 40, 128), (63, 3, 80), (17, 1, 250)]
FLOAT, HALVES = torch.float32, (torch.bfloat16, torch.float16)
OF_X_AND_ANGLES = [(FLOAT, FLOAT), (FLOAT, HALVES[0]), *((half, angles) for half in HALVES for angles in (half, FLOAT))]


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> torch.Tensor:
    """Hugging Face's apply_rotary_pos_emb, or the gradient that autograd sends back through it."""
    leaf = x.detach().clone().requires_grad_()
    x1, x2 = leaf.chunk(2, dim=-1)
    y = leaf * cos.unsqueeze(1) + torch.cat((-x2, x1), -1) * sin.unsqueeze(1)
    return torch.autograd.grad(y, leaf, x.to(y.dtype))[0] if backward else y


def inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, angles: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A buffer filled with NaN, x in it with an extra head on either side, cos and sin. Row strides exceed row lengths.
    The halves of cos and sin differ, to tell them apart, and so do their row strides."""
    tokens, heads, width = shape
    slab = poisoned(tokens, heads + 2, width + 3, dtype=dtype, device=device)
    slab[:, 1:-1, :width] = torch.randn(shape, device=device)
    cos, sin = (poisoned(tokens, width + more, dtype=angles, device=device)[:, :width] for more in (5, 7))
    for tensor in (cos, sin):
        tensor.copy_(torch.randn(tokens, width, device=device))
    return slab, slab[:, 1:-1, :width], cos, sin


@pytest.mark.in_interpreter("of 48 cases", only=every_pair)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("dtype", "angles"), OF_X_AND_ANGLES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary(
    shape: tuple[int, int, int], dtype: torch.dtype, angles: torch.dtype, backward: bool, device: str
) -> None:
    """As exact as torch in float32, rounded once."""
    slab, x, cos, sin = inputs(shape, dtype, angles, device)
    same = reference(x.float(), cos.float(), sin.float(), backward).to(dtype)
    truth = reference(x.double(), cos.double(), sin.double(), backward)
    before = cos.clone(), sin.clone()
    assert rotary_(x, cos, sin, backward=backward) is x
    assert_as_exact(x, same, truth)
    assert cos.equal(before[0]) and sin.equal(before[1])
    x.fill_(0)
    assert slab.isnan().sum() == slab.numel() - x.numel(), "wrote past a row"


@pytest.mark.alone
@pytest.mark.parametrize("of_heads", [False, True])
def test_offsets_are_int64(of_heads: bool, device: str) -> None:
    """The last row of x, cos and sin starts at element 3 * 2**30 > 2**31: the last token, or the last head if heads are
    cut from [H, T, K]. The buffers are virtual memory: only a few rows of them are touched."""
    stride, width = 2**30, 130
    slabs = [torch.empty(3 * stride + 4 * width, dtype=torch.bfloat16, device=device) for _ in range(3)]
    strides = (width, stride, 1) if of_heads else (stride, width, 1)
    x = slabs[0].as_strided((2, 4, width) if of_heads else (4, 2, width), strides)
    cos, sin = (slab.as_strided((len(x), width), (3 * stride // (len(x) - 1), 1)) for slab in slabs[1:])
    for tensor in (x, cos, sin):
        tensor.copy_(torch.randn(tensor.shape, device=device))
    same, truth = reference(x, cos, sin, False), reference(x.double(), cos.double(), sin.double(), False)
    assert_as_exact(rotary_(x, cos, sin), same, truth)
