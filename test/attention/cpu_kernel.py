"""On a CPU, torch's FlashAttention for documents of several lengths: what its operators promise and refuse."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from seqtile.attention import torch_varlen

ROWS = 64  # queries whose scores are computed at once
EVERY_DTYPE = (*torch_varlen.DTYPES, torch.float32, torch.float64)


class Part(NamedTuple):
    """Some queries of a document, and the keys that they see."""

    queries: slice
    keys: slice
    hidden: Tensor
    """[n, m], True where a query does not see a key."""


@contextmanager
def kernel_on_cpu() -> Iterator[None]:
    """Inside, torch's operators compute on a CPU, in every dtype, and seqtile believes that they do."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    try:
        with patch.object(torch_varlen, "_lacking", lambda device: None):
            with patch.object(torch_varlen, "DTYPES", EVERY_DTYPE):
                yield
    finally:
        library._destroy()


@torch.autocast("cpu", enabled=False)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int, dropout: float,
    causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int, **others: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert not debug and not any(given is not None for given in others.values())
    out = torch.empty_like(q)
    sums = q.new_empty(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
    for part in _parts(q, k, v, starts_q, starts_k, max_q, max_k, dropout, causal, window_size_left, window_size_right):
        scores = _scores(q, k, part, scale)
        sums[:, part.queries] = scores.logsumexp(-1)
        out[part.queries] = (scores.softmax(-1) @ _heads(v[part.keys], q)).transpose(0, 1).to(q.dtype)
    random = torch.empty(2, dtype=torch.uint64)
    return out, sums.float() if q.dtype != torch.float64 else sums, random, random[0], q.new_empty(0)


@torch.autocast("cpu", enabled=False)
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts_q: Tensor, starts_k: Tensor,
    max_q: int, max_k: int, dropout: float, causal: bool, random: Tensor, unused: Tensor, *, scale: float,
    window_size_left: int, window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Like FlashAttention's backward, of `out` and `sums` as they are given, whatever scores they are of."""
    assert d_out.dtype == out.dtype == q.dtype and d_out.shape == out.shape == q.shape and out.stride(2) == 1
    assert sums.shape == (q.shape[1], len(q)) and sums.is_contiguous() and random.dtype == torch.uint64
    wide = torch.promote_types(q.dtype, torch.float32)
    d_q, d_k, d_v = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
    for part in _parts(q, k, v, starts_q, starts_k, max_q, max_k, dropout, causal, window_size_left, window_size_right):
        p = (_scores(q, k, part, scale) - sums[:, part.queries, None]).exp()
        queries, d, o = (x[part.queries].transpose(0, 1).to(wide) for x in (q, d_out, out))
        d_p = d @ _heads(v[part.keys], q).transpose(1, 2)
        d_scores = p * (d_p - (d * o).sum(-1, keepdim=True)) * scale
        d_q[part.queries] = (d_scores @ _heads(k[part.keys], q)).transpose(0, 1)
        for total, of_queries in ((d_k, d_scores.transpose(1, 2) @ queries), (d_v, p.transpose(1, 2) @ d)):
            total[part.keys] += of_queries.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(torch.empty_like(x).copy_(d_x) for x, d_x in ((q, d_q), (k, d_k), (v, d_v)))


def _parts(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int, dropout: float,
    causal: bool, left: int, right: int,
) -> Iterator[Part]:  # fmt: skip
    assert not torch.is_grad_enabled() and dropout == 0 and right == 0 and causal == (left < 0)
    assert q.dim() == k.dim() == v.dim() == 3 and q.dtype == k.dtype == v.dtype
    assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0 and q.shape[2] <= 256
    assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    for x in (q, k, v):
        assert x.stride(2) == 1 and all(step % 8 == 0 for step in (*x.stride()[:2], x.storage_offset()))
    for starts, x, longest in ((starts_q, q, max_q), (starts_k, k, max_k)):
        assert starts.dtype == torch.int32 and starts.is_contiguous() and len(starts) == len(starts_q) > 1
        assert starts[0] == 0 and starts[-1] == len(x) and starts.diff().max() <= longest
    for (q0, q1), (k0, k1) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        for first in range(q0, q1, ROWS):
            last = min(first + ROWS, q1)
            own = torch.arange(first, last)[:, None] - q1 + k1  # the key of each query
            start = k0 if left < 0 else max(k0, int(own[0]) - left)
            keys = slice(start, int(own[-1]) + 1)
            away = own - torch.arange(keys.start, keys.stop)
            yield Part(slice(first, last), keys, (away < 0) | ((away > left) & (left >= 0)))


def _scores(q: Tensor, k: Tensor, part: Part, scale: float) -> Tensor:
    queries = q[part.queries].transpose(0, 1).to(torch.promote_types(q.dtype, torch.float32))
    scores = queries @ _heads(k[part.keys], q).transpose(1, 2) * scale
    return scores.masked_fill_(part.hidden, -torch.inf)


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """Returns keys or values [m, kv, K] for all heads of the queries, [h, m, K]."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0)
