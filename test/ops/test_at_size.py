"""Properties that only a GPU shows: chunks with more than 2**31 elements, and real allocations."""

import pytest
import torch
import torch.nn.functional as F

from seqtile import gated_mlp, linear_cross_entropy
from support.assertions import assert_all_as_exact, assert_as_exact

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def operand(*shape: int, scale: float) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_()


def test_mlp_chunk_beyond_int32() -> None:
    """163,840 tokens of Llama-8B's MLP in one chunk: 2.3e9 elements. The last rows are as right as in a small run."""
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


def test_loss_chunk_beyond_int32() -> None:
    """17,000 tokens of Llama-8B's vocabulary in one chunk: 2.2e9 logits. The last rows are right too."""
    tokens, hidden_size, vocab = 17_000, 256, 128_256
    hidden = operand(tokens + 1, hidden_size, scale=1.0)
    weight = operand(vocab, hidden_size, scale=hidden_size**-0.5)
    target = torch.randint(0, vocab, (tokens + 1,), device="cuda")
    losses = linear_cross_entropy(hidden, weight, target, reduction="none", chunk_tokens=tokens)
    losses.sum().backward()
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = hidden[tokens - 64 : tokens].detach().to(dtype).requires_grad_()
        logits = leaf @ weight.detach().to(dtype).T
        theirs = F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), target[tokens - 64 : tokens])
        theirs.backward()
        results.append([theirs * 64, leaf.grad * 64])
    ours = (losses[tokens - 64 : tokens].sum(), hidden.grad[tokens - 64 : tokens])
    assert_all_as_exact(ours, *results)


@pytest.mark.parametrize("ignored", [0.0, 0.75])
def test_loss_allocates_what_it_says(ignored: float) -> None:
    """A chunk of logits, d_hidden, d_weight in float32 and its rounded copy, and 5 % of the chunk in addition."""
    tokens, hidden_size, vocab = 16_384, 4096, 128_256
    hidden = operand(tokens, hidden_size, scale=1.0)
    weight = operand(vocab, hidden_size, scale=0.02)
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    target[torch.rand(tokens, device="cuda") < ignored] = -100
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, target)
    forward = torch.cuda.max_memory_allocated() - before
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    chunk, d_hidden, d_weight = 4096 * vocab * 2, tokens * hidden_size * 2, vocab * hidden_size * 4
    workspace = 64 * 2**20  # cuBLAS's own
    assert forward - d_hidden - d_weight <= 1.05 * chunk + workspace
    assert peak - d_hidden - d_weight <= max(1.05 * chunk, d_weight // 2) + workspace


def test_the_device_is_never_waited_for_without_ignored_tokens() -> None:
    hidden, weight = operand(5000, 256, scale=1.0), operand(32_000, 256, scale=0.1)
    target = torch.randint(0, 32_000, (5000,), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        num_items = torch.tensor(77)  # on the CPU
        linear_cross_entropy(hidden, weight, target, ignore_index=None, num_items=num_items).backward()
        linear_cross_entropy(hidden, weight, target, ignore_index=None, bias=weight[:, 0]).backward()
        linear_cross_entropy(hidden, weight, target, ignore_index=None, reduction="none").sum().backward()
        loss, metrics = linear_cross_entropy(hidden, weight, target, ignore_index=None, return_metrics=True)
        (loss + metrics.logsumexp.square().mean() - metrics.mean_entropy).backward()
        with pytest.raises(RuntimeError, match="synchronizing"):
            linear_cross_entropy(hidden, weight, target)
    finally:
        torch.cuda.set_sync_debug_mode("default")
