"""What only a GPU shows: tiles with more than 2**31 elements, and the memory that is really allocated."""

import pytest
import torch
import torch.nn.functional as F

from assertions import assert_as_exact
from seqtile import gated_mlp, linear_cross_entropy

pytestmark = pytest.mark.gpu


def operand(*shape: int, scale: float) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_()


def test_mlp_tile_beyond_int32() -> None:
    """163,840 tokens of Llama-8B's MLP in one tile: 2.3e9 elements. The last rows are as right as in a small run."""
    tokens, hidden, width = 163_840, 512, 14_336
    x = operand(tokens + 1, hidden, scale=1.0)
    weights = [operand(width, hidden, scale=hidden**-0.5) for _ in range(2)] + [operand(hidden, width, scale=0.01)]
    y = gated_mlp(x, *weights, chunk_tokens=tokens)
    y.backward(torch.ones_like(y))
    last = x[tokens - 64 : tokens].detach().requires_grad_()

    def plain(x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        leaf = x.detach().to(dtype).requires_grad_()
        gate, up, down = (weight.detach().to(dtype) for weight in weights)
        out = F.linear(F.silu(F.linear(leaf, gate)) * F.linear(leaf, up), down)
        out.backward(torch.ones_like(out))
        return [out, leaf.grad]

    same, truth = plain(last, torch.bfloat16), plain(last, torch.float64)
    for ours, theirs, true in zip((y, x.grad), same, truth, strict=True):
        assert_as_exact(ours[tokens - 64 : tokens], theirs, true)


def test_loss_allocates_what_it_says() -> None:
    """A tile of logits, d_hidden, d_weight in float32 and in bfloat16, and next to nothing else."""
    tokens, hidden_size, vocab = 16_384, 4096, 128_256
    hidden = operand(tokens, hidden_size, scale=1.0)
    weight = operand(vocab, hidden_size, scale=0.02)
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, target).backward()
    allocated = torch.cuda.max_memory_allocated() - before
    tile, d_hidden, d_weight = 4096 * vocab * 2, tokens * hidden_size * 2, vocab * hidden_size * 6
    assert allocated <= max(tile + d_hidden + d_weight * 4 // 6, d_hidden + d_weight) + 64 * 2**20
