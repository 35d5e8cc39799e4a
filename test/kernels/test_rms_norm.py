import pytest
import torch

from seqtile.kernels.dispatch import rms_norm, rms_norm_backward
from support.assertions import assert_as_exact, poisoned
from support.choice import every_pair

# Rows that fill one block or several, with and without a power of two; heads inside a wider row, next to others.
SHAPES = [(63, 1000), (5, 4097), (63, 3, 128), (17, 5, 80)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-2  # large enough to matter, relative to inputs of this size


def reference(
    x: torch.Tensor, weight: torch.Tensor, d_y: torch.Tensor, add: torch.Tensor | None = None, eps: float = EPS
) -> list[torch.Tensor]:
    """y, d_x (plus `add`) and d_weight of Hugging Face's LlamaRMSNorm, computed in float64 instead of float32 for
    float64."""
    x, weight = (tensor.detach().clone().requires_grad_() for tensor in (x, weight))
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * normed.to(x.dtype)
    y.backward(d_y.to(y.dtype))
    return [y, x.grad if add is None else x.grad + add, weight.grad]


def both(*operands: torch.Tensor | None, eps: float = EPS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The reference in the dtype of the operands, and in float64."""
    return reference(*operands, eps=eps), reference(*(None if o is None else o.double() for o in operands), eps=eps)


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, count: int = 4
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Buffers filled with NaN, each with a tensor whose row stride exceeds the row length by a different amount; heads
    have one extra head on either side. The last tensor is NaN."""
    tokens, *heads, width = shape
    slabs = [poisoned(tokens, sum(heads) + 2, width + 3 + i, dtype=dtype, device=device) for i in range(count)]
    tensors = [slab[:, 1:-1, :width] if heads else slab[:, 0, :width] for slab in slabs]
    for tensor in tensors[:-1]:
        tensor.copy_(torch.randn(shape, device=device) * torch.rand(*shape[:-1], 1, device=device))
    return slabs, tensors


def poison_left(slabs: list[torch.Tensor], tensors: list[torch.Tensor]) -> bool:
    """Whether nothing was written outside the tensors."""
    for tensor in tensors:
        tensor.fill_(0)
    return all(s.isnan().sum() == s.numel() - t.numel() for s, t in zip(slabs, tensors, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    slabs, tensors = inputs(shape, dtype, device, count=3)
    x, d_y, out = tensors
    weight = torch.randn(shape[-1], device=device).to(dtype)
    (same, *_), (truth, *_) = both(x, weight, d_y)
    before = x.clone(), weight.clone()
    assert rms_norm(x, weight, EPS, out) is out
    assert_as_exact(out, same, truth)
    assert x.equal(before[0]) and weight.equal(before[1])
    assert rms_norm(x, weight, EPS, x) is x
    assert x.equal(out), "in place"
    assert poison_left(slabs, tensors), "wrote past a row"


PLACES = [  # shape, where the gradient is written, whether something is added to it
    *((shape, "out", False) for shape in SHAPES),
    *((shape, place, True) for shape in SHAPES[:2] for place in ("out", "x", "d_y", "add")),
    *((SHAPES[2], place, False) for place in ("x", "d_y")),
]


@pytest.mark.in_interpreter("of 42 cases", only=every_pair)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "place", "added"), PLACES, ids=str)
def test_backward(shape: tuple[int, ...], place: str, added: bool, dtype: torch.dtype, device: str) -> None:
    """The output may overwrite an input. The weight's gradient is added to its buffer, and requesting it changes
    nothing else."""
    slabs, tensors = inputs(shape, dtype, device)
    named = dict(zip(("x", "d_y", "add", "out"), tensors, strict=True))
    x, d_y, out, add = named["x"], named["d_y"], named[place], named["add"] if added else None
    weight, there = torch.randn(shape[-1], device=device).to(dtype), torch.randn(shape[-1], device=device)
    (_, *same), (_, *truth) = both(x, weight, d_y, add)
    before = {name: tensor.clone() for name, tensor in named.items() if name not in (place, "out")}
    frozen, d_weight = torch.empty_like(out), there.clone()
    rms_norm_backward(x, weight, EPS, d_y, frozen, add=add)
    assert rms_norm_backward(x, weight, EPS, d_y, out, add=add, d_weight=d_weight) is out
    assert_as_exact(out, same[0], truth[0])
    assert_as_exact(d_weight, there + same[1], there + truth[1])
    torch.testing.assert_close(frozen, out)
    assert all(named[name].equal(old) for name, old in before.items())
    assert poison_left(slabs, tensors), "wrote past a row"


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    d_y: torch.Tensor,
    add: torch.Tensor | None = None,
    eps: float = EPS,
    of_out: torch.dtype = torch.float32,
) -> None:
    """As exact as torch in float32, rounded once to the dtype of the output."""
    same, truth = both(*(None if each is None else each.float() for each in (x, weight, d_y, add)), eps=eps)
    out, d_weight = torch.full_like(x, torch.nan, dtype=of_out), torch.zeros_like(weight, dtype=torch.float32)
    assert_as_exact(rms_norm(x, weight, eps, out), same[0].to(of_out), truth[0])
    rms_norm_backward(x, weight, eps, d_y, out, add=add, d_weight=d_weight)
    assert_as_exact(out, same[1].to(of_out), truth[1])
    assert_as_exact(d_weight, same[2], truth[2])


FLOAT, BFLOAT, HALF = DTYPES


@pytest.mark.parametrize(
    ("of_x", "of_weight", "of_d_y", "of_out"),
    [
        (BFLOAT, FLOAT, BFLOAT, BFLOAT),
        (FLOAT, BFLOAT, BFLOAT, FLOAT),
        (FLOAT, FLOAT, HALF, BFLOAT),
        (HALF, BFLOAT, FLOAT, FLOAT),
    ],
)
def test_mixed_dtypes(
    of_x: torch.dtype, of_weight: torch.dtype, of_d_y: torch.dtype, of_out: torch.dtype, device: str
) -> None:
    x, d_y, add = (torch.randn(63, 1000, device=device).to(dtype) for dtype in (of_x, of_d_y, of_d_y))
    check(x, torch.randn(1000, device=device).to(of_weight), d_y, add, of_out=of_out)


def test_more_rows_than_one_round_of_programs(device: str) -> None:
    """With four rows per block, the 256 programs of a backward loop twice, the last of them past the end."""
    x, d_y = torch.randn(2, 1030, 1000, device=device)
    check(x, torch.randn(1000, device=device), d_y)


@pytest.mark.alone
@pytest.mark.parametrize("heads", [1, 4])
def test_offsets_are_int64(heads: int, device: str) -> None:
    """The last of 4 rows (of tokens or of heads) starts at element 3 * 2**30 > 2**31. The buffer is virtual memory:
    only a few rows of it are touched."""
    stride, width = 2**30, 1025
    slab = torch.empty(3 * stride + 4 * width, dtype=torch.bfloat16, device=device)
    shape, strides = ((4, width), (stride, 1)) if heads == 1 else ((1, 4, width), (4 * stride, stride, 1))
    x, d_y, add, out = (slab[i * width :].as_strided(shape, strides) for i in range(4))
    for tensor in (x, d_y, add):
        tensor.copy_(torch.randn(shape, device=device))
    add = add if heads == 1 else None
    weight, d_weight = torch.randn(width, device=device), torch.zeros(width, device=device)
    same, truth = both(x, weight, d_y, add)
    assert_as_exact(rms_norm(x, weight, EPS, out), same[0].bfloat16(), truth[0])
    rms_norm_backward(x, weight, EPS, d_y, out, add=add, d_weight=d_weight)
    assert_as_exact(out, same[1], truth[1])
    assert_as_exact(d_weight, same[2], truth[2])


def test_eps_of_zero(device: str) -> None:
    """Five rows in blocks of four: the all-zero rows past the end have an rms of 0, which must not divide."""
    x, d_y = torch.randn(2, 5, 1000, device=device)
    check(x, torch.randn(1000, device=device), d_y, eps=0.0)


@pytest.mark.parametrize("size", [0.0, 1e-3, 3e4])
def test_eps_and_extreme_rows(size: float, device: str) -> None:
    """Zeros, rows to which eps matters, and float16 rows whose squares overflow float16."""
    x = (torch.rand(3, 257, device=device) * size).half()
    check(x, torch.randn(257, device=device), torch.randn(3, 257, device=device), eps=1e-6)


def test_only_rows_of_tokens_are_added(device: str) -> None:
    x, d_y, out, add = torch.randn(4, 2, 3, 16, device=device)
    for wrong in (add, add[:, 0]):
        with pytest.raises(AssertionError):
            rms_norm_backward(x, x[0, 0], EPS, d_y, out, add=wrong)
