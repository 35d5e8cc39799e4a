from functools import partial

import pytest
import torch

from seqtile.ops.rms_norm import rms_norm
from support.assertions import assert_as_exact
from support.choice import every_value
from support.measure import eager_memory, saved_and_peak

D, EPS = 130, 1e-2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.Tensor]:
    """x and weight, requiring gradients, and the gradient of the output."""
    x, weight, d_y = (torch.randn(size, device=device).to(dtype) for size in ((*shape, D), (D,), (*shape, D)))
    return [x.requires_grad_(), weight.requires_grad_(), d_y]


def plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Hugging Face's LlamaRMSNorm, computed in float64 instead of float32 for float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def run(
    function, x: torch.Tensor, weight: torch.Tensor, d_y: torch.Tensor, dtype: torch.dtype | None = None
) -> list[torch.Tensor | None]:
    """y and the gradients of x and weight, in `dtype`."""
    leaves = [o.detach().to(dtype or o.dtype).requires_grad_(o.requires_grad) for o in (x, weight)]
    y = function(*leaves, EPS)
    y.backward(d_y.to(y.dtype))
    return [y, *(leaf.grad for leaf in leaves)]


def assert_right(operands: list[torch.Tensor], ours: list[torch.Tensor | None]) -> None:
    same, truth = run(plain, *operands), run(plain, *operands, torch.float64)
    for mine, theirs, true in zip(ours, same, truth, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            assert_as_exact(mine, theirs, true)


@pytest.mark.in_interpreter("one end-to-end case of each op and dtype", only=every_value)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(63,), (3, 17), (2, 3, 17), ()], ids=str)
def test_output_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    operands = make(*shape, dtype=dtype, device=device)
    ours = run(rms_norm, *operands)
    assert ours[0].shape == (*shape, D)
    assert_right(operands, ours)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_weight_of_another_dtype(dtype: torch.dtype, device: str) -> None:
    """A float32 weight: its gradient is not rounded, and the output is float32, as in Hugging Face."""
    x, weight, d_y = make(63, dtype=dtype, device=device)
    operands = [x, weight.detach().float().requires_grad_(), d_y.float()]
    assert_right(operands, run(rms_norm, *operands))


@pytest.mark.parametrize("view", ["rows", "batch", "transposed", "reversed"])
def test_views(view: str, device: str) -> None:
    """x with a row stride above the row length, one that cannot be viewed as rows, and one of strided columns."""
    wide, weight, _ = make(8, 2 * 17, device=device)
    wide = wide.detach()
    x = {
        "rows": wide.view(-1, 2 * D)[:, 3 : D + 3],
        "batch": wide[:, 1:17],
        "transposed": wide.transpose(0, 1),
        "reversed": wide.view(-1, D, 2)[..., 1],
    }[view]
    assert not x.is_contiguous()
    d_y, leaf = torch.randn(x.shape, device=device), x.detach().requires_grad_()
    assert leaf.stride() == x.stride()
    y = rms_norm(leaf, weight, EPS)
    y.backward(d_y)
    assert_right([x.requires_grad_(), weight, d_y], [y, leaf.grad, weight.grad])


@eager_memory
@pytest.mark.parametrize("strided", [False, True])
def test_memory(strided: bool) -> None:
    """Only x is saved; the peak grows only by y, d_y and d_x, also if the row stride exceeds the row length."""
    measured = []
    for tokens in (20_000, 80_000):  # the eager kernel's blocks of 1 MiB are full at both lengths
        x, weight, _ = make(tokens, dtype=torch.bfloat16)
        if strided:
            x = torch.cat((x, x), -1).detach()[:, :D].requires_grad_()
        measured.append(saved_and_peak(partial(rms_norm, weight=weight, eps=EPS), x))
    (saved, peak), (saved_longer, peak_longer) = measured
    assert saved == saved_longer == 0
    assert peak_longer - peak == 60_000 * 3 * 2 * D
    assert peak - 20_000 * 3 * 2 * D <= 10 * 2**20


def test_no_tokens(device: str) -> None:
    x, weight, d_y = make(0, device=device)
    y, d_x, d_weight = run(rms_norm, x, weight, d_y)
    assert y.shape == d_x.shape == (0, D) and d_weight.equal(torch.zeros_like(weight))
