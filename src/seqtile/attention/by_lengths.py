"""Computes attention by kernels that get cumulative lengths of documents: flash attention."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqtile.attention.heads import Rows, count
from seqtile.attention.local import LocalAttention, in_parts, joined, visible, zeros
from seqtile.attention.recompute import Call, call_again_in_backward, gathered

LONG = 2**15
"""From how many keys on query heads that share them are computed one after the other, see `_head_by_head`."""


class PackedCall(NamedTuple):
    """A call of flash attention for several segments. The rows of the batch follow one another."""

    queries: Rows
    keys: Rows
    lengths: dict[str, Any]
    """The arguments that tell Hugging Face's flash attention where segments start."""


def by_lengths(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Calls flash attention for the segments of all rows, as packed sequences with cumulative lengths: once or, where
    documents share keys, in as many calls as needed so that no call gets more keys than a row has. Each segment is
    causal, aligned at its end."""
    (batch, heads, rows, _), layout = q.shape, attention.layout
    tokens, key = batch * rows, ("lengths", attention.reach, attention.heads.rows, q.device)
    calls = layout.once(key, lambda: list(_packed_calls(attention, batch, q.device)))
    if not calls:
        return zeros(q, v)
    asked, k, v = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v))
    queries = layout.once((*key, "q"), lambda: _index([call.queries for call in calls], tokens, q.device))
    asked = gathered(asked, queries)

    def computed(lengths: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        def call(q: Tensor, sinks: Tensor | None) -> Tensor:
            return attention.with_sinks(sinks).compute(q, k, v, **lengths)

        times = q.shape[1] // k.shape[1]
        is_long = rows < layout.length and q.requires_grad and k.shape[2] >= LONG
        return _head_by_head(call, q, sinks, times) if is_long and times > 1 else call(q, sinks)

    if layout.parents:
        again = [Call(partial(computed, call.lengths), call.keys) for call in calls]
        parts = [part for (part,) in in_parts((asked,), [count(call.queries) for call in calls], 2)]
        out = joined(list(call_again_in_backward(again, parts, k, v, attention.sinks, attention.draws)), 1)
    else:
        keys = layout.once((*key, "k"), lambda: _index([calls[0].keys], batch * layout.length, q.device))
        out = computed(calls[0].lengths, asked, gathered(k, keys), gathered(v, keys), attention.sinks)
    if queries is not None:
        out = out.new_zeros(1, tokens, heads, out.shape[3]).index_copy(1, queries, out)
    return out.view(batch, rows, heads, -1)


def _head_by_head(call: Callable[..., Tensor], q: Tensor, sinks: Tensor | None, times: int) -> Tensor:
    """Computes attention with one of the query heads of each kv head at a time. FlashAttention-2's backward makes
    gradients of the keys for every query head at once, and those of long keys are larger than anything that a part of
    the queries needs."""
    each = [slice(i, None, times) for i in range(times)]
    outs = [call(q[:, some], None if sinks is None else sinks[some]) for some in each]
    return torch.stack(outs, 3).flatten(2, 3)


def _packed_calls(attention: LocalAttention, batch: int, device: torch.device) -> Iterator[PackedCall]:
    rows, length = count(attention.heads.rows), attention.layout.length
    calls: list[list[tuple[Rows, Rows]]] = []  # for each call, the queries and the keys of its segments
    for row, at, (q0, q1, seen, _) in visible(attention, batch):
        queries = ((row * rows + at, row * rows + at + q1 - q0),)
        keys = tuple((row * length + start, row * length + stop) for start, stop in seen)
        if not calls or (attention.layout.parents and sum(count(sent) for _, sent in calls[-1]) + count(keys) > length):
            calls.append([])
        calls[-1].append((queries, keys))
    for call in calls:
        lengths: dict[str, Any] = {}
        of_segments = list(zip(*call, strict=True))
        for name, parts in zip("qk", of_segments, strict=True):
            sizes = [0, *map(count, parts)]
            ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
            lengths[f"cu_seq_lens_{name}"] = ends.to(device, non_blocking=True)
            lengths[f"max_length_{name}"] = max(sizes)
        yield PackedCall(*(tuple(chain(*parts)) for parts in of_segments), lengths)


def _index(parts: Iterable[Rows], tokens: int, device: torch.device) -> Tensor | None:
    """Returns the indices of these parts of flattened tokens; None if they are all tokens, in order."""
    pieces = list(chain(*parts))
    ends = [0, *(stop for _, stop in pieces)]
    if [start for start, _ in pieces] == ends[:-1] and ends[-1] == tokens:
        return None
    return torch.cat([torch.arange(*piece) for piece in pieces]).to(device, non_blocking=True)
