import pytest
import torch

from seqtile.kernels.dispatch import rms_norm, rms_norm_backward
from support.assertions import assert_as_exact, poisoned

# Rows of one block and of several, of a power of two and not; heads that lie in a wider row, as beside others.
SHAPES = [(63, 1000), (5, 4097), (63, 3, 128), (17, 5, 80)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-2  # large enough to show, next to inputs of this size


def reference(
    x: torch.Tensor, weight: torch.Tensor, d_y: torch.Tensor, add: torch.Tensor | None = None, eps: float = EPS
) -> list[torch.Tensor]:
    """y, d_x (plus `add`) and d_weight of Hugging Face's LlamaRMSNorm, whose float32 is float64 for float64."""
    x, weight = (tensor.detach().clone().requires_grad_() for tensor in (x, weight))
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * normed.to(x.dtype)
    y.backward(d_y.to(y.dtype))
    return [y, x.grad if add is None else x.grad + add, weight.grad]


def both(*operands: torch.Tensor | None, eps: float = EPS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The reference in the dtype of the operands, and the truth."""
    return reference(*operands, eps=eps), reference(*(None if o is None else o.double() for o in operands), eps=eps)


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, count: int = 4
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Poisoned slabs, and a tensor in each whose rows are further apart than they are long, in each by more; of heads,
    one more lies on either side. The last tensor is NaN."""
    tokens, *heads, width = shape
    slabs = [poisoned(tokens, sum(heads) + 2, width + 3 + i, dtype=dtype, device=device) for i in range(count)]
    tensors = [slab[:, 1:-1, :width] if heads else slab[:, 0, :width] for slab in slabs]
    for tensor in tensors[:-1]:
        tensor.copy_(torch.randn(shape, device=device) * torch.rand(*shape[:-1], 1, device=device))
    return slabs, tensors


def poison_left(slabs: list[torch.Tensor], tensors: list[torch.Tensor]) -> bool:
    """Whether nothing was written beside the tensors."""
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Also: the weight's gradient is added to what is there, and asking for it or not changes nothing else."""
    slabs, tensors = inputs(shape, dtype, device, count=3)
    x, d_y, out = tensors
    weight = torch.randn(shape[-1], device=device).to(dtype)
    (_, *same), (_, *truth) = both(x, weight, d_y)
    there = torch.randn(shape[-1], device=device)
    d_weight, before = there.clone(), [tensor.clone() for tensor in (x, d_y, weight)]
    assert rms_norm_backward(x, weight, EPS, d_y, out, d_weight=d_weight) is out
    assert_as_exact(out, same[0], truth[0])
    assert_as_exact(d_weight, there + same[1], there + truth[1])
    assert all(tensor.equal(old) for tensor, old in zip((x, d_y, weight), before, strict=True))
    frozen = torch.empty_like(out)
    rms_norm_backward(x, weight, EPS, d_y, frozen)
    torch.testing.assert_close(frozen, out)
    assert poison_left(slabs, tensors), "wrote past a row"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(63, 1000), (5, 4097)])
@pytest.mark.parametrize("place", ["out", "x", "d_y", "add"])
def test_backward_adds_and_may_overwrite_what_it_reads(
    rows: int, width: int, place: str, dtype: torch.dtype, device: str
) -> None:
    slabs, tensors = inputs((rows, width), dtype, device)
    x, d_y, add, out = tensors
    weight, d_weight = torch.randn(width, device=device).to(dtype), torch.zeros(width, device=device)
    (_, *same), (_, *truth) = both(x, weight, d_y, add)
    named = {"x": x, "d_y": d_y, "add": add, "out": out}
    before = {name: tensor.clone() for name, tensor in named.items() if name not in (place, "out")}
    rms_norm_backward(x, weight, EPS, d_y, named[place], add=add, d_weight=d_weight)
    assert_as_exact(named[place], same[0], truth[0])
    assert_as_exact(d_weight, same[1], truth[1])
    assert all(named[name].equal(old) for name, old in before.items())
    assert poison_left(slabs, tensors), "wrote past a row"


@pytest.mark.parametrize("place", ["x", "d_y"])
def test_backward_of_heads_in_place(place: str, device: str) -> None:
    slabs, tensors = inputs((63, 3, 128), torch.float32, device)
    x, d_y, *_ = tensors
    weight, d_weight = torch.randn(128, device=device), torch.zeros(128, device=device)
    (_, *same), (_, *truth) = both(x, weight, d_y)
    out = x if place == "x" else d_y
    rms_norm_backward(x, weight, EPS, d_y, out, d_weight=d_weight)
    assert_as_exact(out, same[0], truth[0])
    assert_as_exact(d_weight, same[1], truth[1])
    assert poison_left(slabs, tensors), "wrote past a row"


@pytest.mark.parametrize(
    ("of_x", "of_weight", "of_d_y", "of_out"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.float16, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_mixed_dtypes(
    of_x: torch.dtype, of_weight: torch.dtype, of_d_y: torch.dtype, of_out: torch.dtype, device: str
) -> None:
    """Every operand in a dtype of its own; as exact as torch in float32, rounded once to the dtype of the output."""
    x, d_y, add = (torch.randn(63, 1000, device=device).to(dtype) for dtype in (of_x, of_d_y, of_d_y))
    weight, d_weight = torch.randn(1000, device=device).to(of_weight), torch.zeros(1000, device=device)
    same, truth = both(*(tensor.float() for tensor in (x, weight, d_y, add)))
    out = poisoned(63, 1000, dtype=of_out, device=device)
    assert_as_exact(rms_norm(x, weight, EPS, out), same[0].to(of_out), truth[0])
    rms_norm_backward(x, weight, EPS, d_y, out, add=add, d_weight=d_weight)
    assert_as_exact(out, same[1].to(of_out), truth[1])
    assert_as_exact(d_weight, same[2], truth[2])


def test_more_rows_than_one_round_of_programs(device: str) -> None:
    """Four rows a block: the 256 programs of a backward go round twice, the last of them past the end."""
    x, d_y = torch.randn(2, 1030, 1000, device=device)
    weight, d_weight = torch.randn(1000, device=device), torch.zeros(1000, device=device)
    (_, *same), (_, *truth) = both(x, weight, d_y)
    out = rms_norm_backward(x, weight, EPS, d_y, torch.full_like(x, torch.nan), d_weight=d_weight)
    assert_as_exact(out, same[0], truth[0])
    assert_as_exact(d_weight, same[1], truth[1])


@pytest.mark.alone
@pytest.mark.parametrize("heads", [1, 4])
def test_offsets_are_int64(heads: int, device: str) -> None:
    """The last of 4 rows begins at element 3 * 2**30 > 2**31, be they of tokens or of heads. The slab is virtual
    memory: only a few rows of it are touched."""
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
    """Five rows in blocks of four: those past the end, all zero, have no rms to be divided by."""
    x, d_y = torch.randn(2, 5, 1000, device=device)
    weight, d_weight = torch.randn(1000, device=device), torch.zeros(1000, device=device)
    same, truth = both(x, weight, d_y, eps=0.0)
    assert_as_exact(rms_norm(x, weight, 0.0, torch.empty_like(x)), same[0], truth[0])
    out = rms_norm_backward(x, weight, 0.0, d_y, torch.empty_like(x), d_weight=d_weight)
    assert_as_exact(out, same[1], truth[1])
    assert_as_exact(d_weight, same[2], truth[2])


@pytest.mark.parametrize("size", [0.0, 1e-3, 3e4])
def test_eps_and_extreme_rows(size: float, device: str) -> None:
    """Zeros, rows to which eps matters, and float16 whose squares float16 does not hold."""
    x = (torch.rand(3, 257, device=device) * size).half()
    d_y, weight = torch.randn(3, 257, device=device), torch.randn(257, device=device)
    same, truth = both(x.float(), weight, d_y, eps=1e-6)
    assert_as_exact(rms_norm(x, weight, 1e-6, torch.empty_like(d_y)), same[0], truth[0])
    out = rms_norm_backward(x, weight, 1e-6, d_y, torch.empty_like(d_y))
    assert_as_exact(out, same[1], truth[1])


def test_only_rows_of_tokens_are_added(device: str) -> None:
    x, d_y, out, add = torch.randn(4, 2, 3, 16, device=device)
    for wrong in (add, add[:, 0]):
        with pytest.raises(AssertionError):
            rms_norm_backward(x, x[0, 0], EPS, d_y, out, add=wrong)
