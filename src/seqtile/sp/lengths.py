"""Flash attention's form: documents one behind the other in one call, told apart by their cumulative lengths."""

from typing import Any, NamedTuple

import torch

from seqtile.sp.blocks import segments
from seqtile.sp.heads import count
from seqtile.sp.wrapped import Attention, nothing


class Lengths(NamedTuple):
    queries: torch.Tensor | None
    """Which of the flattened queries are in a document, document by document; None for all in order."""
    keys: torch.Tensor | None
    """The keys that they see, likewise."""
    arguments: dict[str, Any]
    """How Hugging Face's flash attention is told where documents begin."""


def by_lengths(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All segments of all rows in one call, as sequences of their own, causal from their ends."""
    batch, heads, rows, _ = q.shape
    key = ("lengths", attention.window, attention.share.rows)
    queries, keys, arguments = attention.layout.once(key, lambda: _lengths(attention, batch, q.device))
    if arguments["max_length_q"] == 0:
        return nothing(q, v, rows)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    q, k, v = (x if index is None else x[index] for x, index in ((q, queries), (k, keys), (v, keys)))
    out = attention.compute(*(x.transpose(0, 1)[None] for x in (q, k, v)), **arguments)[0]
    if queries is not None:
        out = out.new_zeros(batch * rows, heads, out.shape[2]).index_copy(0, queries, out)
    return out.view(batch, rows, heads, -1)


def _lengths(attention: Attention, batch: int, device: torch.device) -> Lengths:
    share, length = attention.share, attention.layout.length
    rows = count(share.rows)
    queries, keys = [], []
    for row in range(batch):
        for segment in segments(share.rows, attention.layout.of(row), attention.window):
            at = row * rows + share.place(segment.q0)
            queries.append(torch.arange(at, at + segment.q1 - segment.q0))
            keys.append(torch.arange(row * length + segment.k0, row * length + segment.k1))
    arguments: dict[str, Any] = {}
    for name, parts in (("q", queries), ("k", keys)):
        sizes = torch.tensor([0, *map(len, parts)])
        arguments[f"cu_seq_lens_{name}"] = sizes.cumsum(0, dtype=torch.int32).to(device)
        arguments[f"max_length_{name}"] = int(sizes.max())
    return Lengths(_index(queries, batch * rows, device), _index(keys, batch * length, device), arguments)


def _index(parts: list[torch.Tensor], whole: int, device: torch.device) -> torch.Tensor | None:
    """The parts as one; None if they are [0, whole) in order."""
    index = torch.cat(parts) if parts else torch.arange(0)
    return None if index.equal(torch.arange(whole)) else index.to(device)
