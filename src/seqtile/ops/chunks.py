"""Decides how many tokens a chunk has, for the loss and the MLP alike.

    chunk_tokens = max(2048, D), in a mixture of experts max(2048 * experts / experts per token, D)
    of MLPs and layers that keep nothing: at least as many as make 512 MiB of what an MLP computes, (5 M + D) a token

The rule depends on the model alone: the chunk size is constant in the number of tokens, equal on all ranks, and
independent of free memory. An MLP or a layer keeps nothing where its forward runs without gradients or in a
checkpoint, see `keeps_nothing`.

- C >= D keeps the memory traffic of the weights below that of the activations (Mini-Sequence Transformer, 3.4): a chunk
  of C tokens reads D * M weights and C * (D + M) activations.
- C >= 2048 keeps small models compute-bound: a chunk also reads and writes its fp32 weight gradient once, 8 bytes for
  2 * C FLOP. At 2048 tokens that is 512 FLOP per byte, about three times what an H200 needs.

- 512 MiB: under checkpointing the intermediates of one layer at a time exist, so that small models have room for
  longer chunks, and run untiled up to these lengths. The steps of a chunk cost Python about the same at any width: an
  MLP in chunks makes a fifth more function calls a layer than an untiled one. Without checkpointing the chunk stays
  short, since an untiled MLP then keeps its intermediates in every layer.

At Llama-8B's shape (D 4096, M 14336, V 128256) a chunk has 4096 tokens: 112 MiB per tensor in the MLP, 590 MiB of all,
1.0 GiB of logits.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from itertools import pairwise
from numbers import Integral

import torch

from seqtile.ops.checks import autocast_dtype
from seqtile.ops.state import having
from seqtile.rules import default_chunk_tokens

_everywhere: ContextVar[int | None] = ContextVar("everywhere", default=None)


def chunk_tokens_everywhere(tokens: int) -> AbstractContextManager[None]:
    """Inside, every chunk has `tokens` tokens, whatever the caller requested. For trials on short batches."""
    return having(_everywhere, tokens)


def is_trial() -> bool:
    """Returns whether the current forward runs inside `chunk_tokens_everywhere`. A backward does not know: on a GPU it
    runs in another thread, which does not see the ContextVar."""
    return not torch.compiler.is_compiling() and _everywhere.get() is not None  # a compiler cannot trace a ContextVar


def keeps_nothing() -> bool:
    """Returns whether a forward keeps nothing for the step's backward: without gradients, or in a checkpoint.

    The same in the forward and the recomputation of a checkpoint. So any hooks for saved tensors are taken for those of
    a checkpoint: others, which keep tensors elsewhere, may then be given more to keep, but a recomputation with other
    chunks would be wrong. A compiler is told no."""
    if torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():  # also in the forward of a reentrant checkpoint
        return True
    is_in_backward = torch._C._current_graph_task_id() != -1  # as every recomputation is
    return is_in_backward or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def resolve_chunk_tokens(
    chunk_tokens: int | None, hidden_size: int, sparsity: float = 1, mlp_size: int = 0, itemsize: int = 2
) -> int:
    """Returns the number of tokens per chunk: `chunk_tokens` if given, else the rule above.

    `sparsity` is experts / experts per token in a mixture of experts, 1 elsewhere. All experts share a chunk's tokens,
    so a chunk has at least 2048 * sparsity of them, on average 2048 per expert. `mlp_size` is the inner width of an MLP
    that keeps nothing, else 0; `itemsize` are the bytes of an element of its products.

    Raises TypeError or ValueError if `chunk_tokens` is not a positive int.
    """
    if not torch.compiler.is_compiling() and (tokens := _everywhere.get()) is not None:
        return tokens
    if chunk_tokens is None:
        return default_chunk_tokens(hidden_size, sparsity, mlp_size, itemsize)
    if type(chunk_tokens) is not int and (not isinstance(chunk_tokens, Integral) or isinstance(chunk_tokens, bool)):
        raise TypeError(f"chunk_tokens: expected an int or None, got {chunk_tokens!r}; pass a number of tokens")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: expected at least 1 token, got {chunk_tokens}; leave it None for the default")
    return int(chunk_tokens)


def mlp_chunk_tokens(chunk_tokens: int | None, x: torch.Tensor, mlp_size: int, sparsity: float = 1) -> int:
    """Returns the number of tokens per chunk, see `resolve_chunk_tokens`, of an MLP of x [..., D] or of a layer around
    it. `mlp_size`: the MLP's inner width, 0 if it is not known."""
    size, dtype = mlp_size if chunk_tokens is None and keeps_nothing() else 0, autocast_dtype(x) or x.dtype
    return resolve_chunk_tokens(chunk_tokens, x.shape[-1], sparsity, size, dtype.itemsize)


def chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    """Returns slices of at most `chunk_tokens` rows that cover `tokens` rows in order."""
    return [slice(start, stop) for start, stop in pairwise([*range(0, tokens, chunk_tokens), tokens])]


def to_be_filled(
    like: torch.Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, *, trial: bool
) -> torch.Tensor:
    """Allocates a tensor for chunks to fill, like `like` except for `shape` and `dtype`.

    With `trial` (`is_trial()` of the forward, which a node keeps for its backward) it is filled with NaN, so that rows
    that no chunk writes become visible; otherwise they could hold the untiled pass's values.
    """
    out = torch.empty_like(like, dtype=dtype) if shape is None else like.new_empty(shape, dtype=dtype)
    return out.fill_(math.nan) if trial and out.is_floating_point() else out
