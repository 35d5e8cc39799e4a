from collections.abc import Callable
from importlib import import_module
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import seqtile
from seqtile.ops.chunks import chunk_tokens_everywhere, chunks, keeps_nothing, resolve_chunk_tokens
from seqtile.ops.decoder_layer import decoder_layer
from seqtile.ops.decoder_layer.params import AttentionParams, LayerParams, MLPParams, Norm
from seqtile.ops.linear import Projection
from seqtile.rules import MIN_CHUNK_TOKENS


@given(tokens=st.integers(1, 10_000), chunk_tokens=st.integers(1, 12_000))
def test_chunks_cover_every_row_once_in_order(tokens: int, chunk_tokens: int) -> None:
    slices = list(chunks(tokens, chunk_tokens))
    assert [row for chunk in slices for row in range(chunk.start, chunk.stop)] == list(range(tokens))
    assert all(chunk.stop - chunk.start == chunk_tokens for chunk in slices[:-1])


def test_the_rule() -> None:
    assert resolve_chunk_tokens(None, 576) == MIN_CHUNK_TOKENS
    assert resolve_chunk_tokens(None, 4096) == 4096
    assert resolve_chunk_tokens(17, 4096) == 17


@pytest.mark.parametrize(("bad", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_chunk_tokens(bad: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="chunk_tokens: expected"):
        resolve_chunk_tokens(bad, 64)


@pytest.mark.parametrize("op", ["gated_mlp", "tiled"])
def test_what_no_chunk_writes_is_nan_in_a_trial(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise these rows would hold the untiled pass's values, and a lost chunk would only be found by luck."""
    module = import_module(f"seqtile.ops.{op}")
    monkeypatch.setattr(module, "chunks", lambda tokens, chunk_tokens: chunks(tokens, chunk_tokens)[:-1])
    x = torch.randn(12, 8, requires_grad=True)
    gate, up, down = torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 16)
    with chunk_tokens_everywhere(5):
        y = seqtile.gated_mlp(x, gate, up, down) if op == "gated_mlp" else seqtile.tiled(torch.sin, x)
    assert y[10:].isnan().all() and y[:10].isfinite().all()


def layer(x: torch.Tensor) -> torch.Tensor:
    norm, square = Norm(torch.ones(8), 1e-6), Projection(torch.randn(8, 8), None)
    attention = AttentionParams(norm, square, None, square, None, square, square)
    params = LayerParams(attention, MLPParams(norm, square, square, square))
    attend = lambda *qkv: F.scaled_dot_product_attention(*qkv).transpose(1, 2)  # noqa: E731
    return decoder_layer(x[None], params, None, attend, head_dim=4)


OPS: dict[str, Callable] = {
    "gated_mlp": lambda x: seqtile.gated_mlp(x, torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 16)),
    "tiled": lambda x: seqtile.tiled(torch.sin, x),
    "head.chunks": lambda x: seqtile.linear_log_probs(x, torch.randn(9, 8), torch.arange(12) % 9),
    "decoder_layer.post_attention": layer,
    "decoder_layer.attention": layer,
    "decoder_layer.qkv": layer,
}


@pytest.mark.parametrize("module", OPS)
def test_what_a_backward_does_not_write_is_nan_in_a_trial(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every thread: on a GPU autograd runs backwards in threads of its own, which see no ContextVar."""
    x = torch.randn(12, 8, requires_grad=True)
    with chunk_tokens_everywhere(5):
        y = OPS[module](x)
    ends = [-1] if module == "decoder_layer.qkv" else [-1] * 9  # its second loop reads what the first has not written

    def cut_short(tokens: int, chunk_tokens: int) -> list[slice]:
        return chunks(tokens, chunk_tokens)[: ends.pop() if ends else None]

    monkeypatch.setattr(import_module(f"seqtile.ops.{module}"), "chunks", cut_short)
    thread = Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    assert x.grad[10:].isnan().all()


@pytest.mark.parametrize(
    ("hidden", "mlp", "itemsize", "tokens"),
    [
        (1024, 3072, 2, 16_384),  # Qwen3-0.6B
        (1024, 3072, 4, 8192),
        (2560, 9728, 2, 5632),
        (4096, 14336, 2, 4096),  # Llama-8B
        (3584, 14336, 2, 3584),  # gemma-2-9b
        (5120, 25600, 2, 5120),
    ],
)
def test_of_an_mlp_that_keeps_nothing(hidden: int, mlp: int, itemsize: int, tokens: int) -> None:
    """A chunk makes 512 MiB or has max(2048, D) tokens; experts, and MLPs of unknown width, keep theirs."""
    assert resolve_chunk_tokens(None, hidden, 1, mlp, itemsize) == tokens
    assert resolve_chunk_tokens(17, hidden, 1, mlp, itemsize) == 17
    assert resolve_chunk_tokens(None, hidden, 8, mlp, itemsize) == resolve_chunk_tokens(None, hidden, 8) == 16_384


def test_where_nothing_is_kept() -> None:
    """In both forms of checkpointing the same in the forward and the recomputation, whatever other hooks there are."""
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(keeps_nothing())
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    for reentrant in (False, True):
        checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    with torch.no_grad():
        function(x)
    for reentrant in (False, True):
        with torch.autograd.graph.save_on_cpu():  # outside of a checkpoint: as TRL does to offload activations
            checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert found == [True] * 9
    found.clear()
    function(x)
    with torch.autograd.graph.save_on_cpu():
        function(x)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return function(x)

    checkpoint(lambda x: inside(x).cos(), x, use_reentrant=False).sum().backward()
    assert found == [False, True, True, True], "any hooks, inside a checkpoint too"
