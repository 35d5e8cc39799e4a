import pytest
import torch
import torch.nn.functional as F

from assertions import assert_as_exact, poisoned
from seqtile.kernels.launch import cross_entropy_

IGNORE = -100


def reference(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and d_logits as torch computes them from logits in their dtype, with a float32 (or float64) softmax."""
    leaf = logits.detach().clone().requires_grad_()
    upcast = leaf if leaf.dtype == torch.float64 else leaf.float()
    losses = F.cross_entropy(upcast, target, ignore_index=IGNORE, reduction="none")
    losses.sum().backward()
    return losses, leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab"), [(63, 1000), (17, 4097), (3, 49152), (2, 128256)])
def test_losses_and_gradient(rows: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    slab = poisoned(rows, vocab + 5, dtype=dtype, device=device)  # rows further apart than they are long
    logits = slab[:, :vocab].copy_(torch.randn(rows, vocab, device=device) * 5)
    target = torch.randint(0, vocab, (rows,), device=device)
    target[0] = vocab - 1
    target[1::3] = IGNORE
    losses, d_logits = reference(logits, target)
    true_losses, true_d_logits = reference(logits.double(), target)
    lse = logits.double().logsumexp(1).masked_fill(target == IGNORE, 0)
    logits[1::3] = torch.nan  # ignored rows are not looked at

    our_losses, our_lse = cross_entropy_(logits, target, ignore_index=IGNORE, write_grad=True)

    assert our_losses.dtype == our_lse.dtype == torch.float32
    assert_as_exact(our_losses, losses, true_losses)
    assert_as_exact(our_lse, lse.float(), lse)
    assert_as_exact(logits, d_logits, true_d_logits)
    assert logits[target == IGNORE].count_nonzero() == 0
    assert slab[:, vocab:].isnan().all(), "wrote past a row"


def test_losses_alone(device: str) -> None:
    logits = torch.randn(63, 1000, device=device)
    target = torch.randint(0, 1000, (63,), device=device)
    with_gradient, _ = cross_entropy_(logits.clone(), target, ignore_index=IGNORE, write_grad=True)
    alone, _ = cross_entropy_(logits.clone(), target, ignore_index=IGNORE, write_grad=False)
    torch.testing.assert_close(alone, with_gradient, rtol=0, atol=0)


@pytest.mark.parametrize("outside", [1000, -1, 2**40])
def test_target_out_of_range_poisons_its_row_alone(outside: int, device: str) -> None:
    logits = torch.randn(5, 1000, device=device)
    target = torch.tensor([1, outside, 3, IGNORE, 5], device=device)
    losses, lse = cross_entropy_(logits, target, ignore_index=IGNORE, write_grad=True)
    bad = torch.tensor([False, True, False, False, False], device=device)
    assert losses.isnan().equal(bad) and lse.isnan().equal(bad)
    assert logits.isnan().all(1).equal(bad) and logits.isnan().any(1).equal(bad)


def test_extreme_logits(device: str) -> None:
    """A row whose softmax is one-hot, one that is flat, one with masked (-inf) columns."""
    logits = torch.zeros(3, 5000, device=device)
    logits[0, 4999] = 1e4
    logits[2, :4500] = -torch.inf
    target = torch.tensor([4999, 17, 4600], device=device)
    _, d_logits = reference(logits, target)
    losses, _ = cross_entropy_(logits, target, ignore_index=IGNORE, write_grad=True)
    expected = torch.tensor([0.0, 5000.0, 500.0], dtype=torch.float64)
    expected[1:] = expected[1:].log()
    torch.testing.assert_close(losses.double().cpu(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits, d_logits, rtol=1e-5, atol=1e-7)


def test_row_offsets_are_int64(device: str) -> None:
    """Row 3 begins at element 3 * 2**30 > 2**31. The slab is virtual memory: only four rows of it are touched."""
    stride, vocab = 2**30, 1000
    slab = torch.empty(3 * stride + vocab, dtype=torch.bfloat16, device=device)
    logits = slab.as_strided((4, vocab), (stride, 1))
    logits.copy_(torch.randn(4, vocab, device=device))
    target = torch.randint(0, vocab, (4,), device=device)
    losses, d_logits = reference(logits.contiguous(), target)
    our_losses, _ = cross_entropy_(logits, target, ignore_index=IGNORE, write_grad=True)
    torch.testing.assert_close(our_losses, losses)
    torch.testing.assert_close(logits.contiguous(), d_logits)
