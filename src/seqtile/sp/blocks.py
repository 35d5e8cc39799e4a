"""Attention of some queries of a sequence, document by document: no tensor of length x length is ever made.

What a block of queries sees is a slice of the keys, and a small mask where that is not all of it. The same blocks serve
documents, padding, windows, and ranks that have a part of the queries only.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from seqtile.sp.documents import Layout

MASK_ELEMENTS = 2**24  # of the largest mask: 16 MiB of bools


class Block(NamedTuple):
    """Queries [q0, q1) and the keys [k0, k1) that one of them may see."""

    q0: int
    q1: int
    k0: int
    k1: int

    def is_square(self, window: int | None) -> bool:
        """Whether it is a causal square, for which no mask is needed."""
        return self.q0 == self.k0 and self.q1 == self.k1 and (window is None or self.k1 - self.k0 <= window)

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor:
        """[q1 - q0, k1 - k0], True where a query sees a key."""
        distance = torch.arange(self.q0, self.q1, device=device)[:, None] - torch.arange(
            self.k0, self.k1, device=device
        )
        return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


class How(NamedTuple):
    """What an attention is asked for."""

    window: int | None = None
    """A query sees this many keys, itself among them; None for all."""
    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, how: How) -> torch.Tensor:
    mask = None if block.is_square(how.window) else block.mask(how.window, q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=how.scaling, dropout_p=how.dropout
    )


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, how: How) -> torch.Tensor:
    """By matrix products, as Hugging Face's eager attention: the softmax in float32, a soft cap of the scores."""
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if how.scaling is None else how.scaling)
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores.masked_fill(~block.mask(how.window, q.device), -torch.inf)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, how.dropout) @ v


IMPLEMENTATIONS = {"sdpa": sdpa, "eager": eager}


def blocks(
    rows: tuple[tuple[int, int], ...],
    documents: tuple[tuple[int, int], ...],
    window: int | None,
    squares: bool = True,
) -> Iterator[Block]:
    """The queries in `rows`, document by document, with the keys that they see; queries of padding are in none.

    `squares`: whether a causal square needs no mask, however large it is.
    """
    for first, last in rows:
        for start, stop in documents:
            q0, q1 = max(first, start), min(last, stop)
            while q0 < q1:
                block = Block(q0, q1, start, q1)
                if not (squares and block.is_square(window)):
                    end = _end(q0, q1, start, window)
                    block = Block(q0, end, start if window is None else max(start, q0 - window + 1), end)
                yield block
                q0 = block.q1


def _end(q0: int, q1: int, start: int, window: int | None) -> int:
    """Where a block that begins at q0 ends, so that its mask is small: a window's worth at most, if there is one."""
    if window is not None:
        rows = min(window, max(1, MASK_ELEMENTS // (2 * window)))
    else:
        rows = max(1, MASK_ELEMENTS // max(1, q1 - start))
    return min(q1, q0 + rows)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: tuple[tuple[int, int], ...],
    layout: Layout,
    how: How,
) -> torch.Tensor:
    """The queries q [B, h, rows, K] of the tokens in `rows` against k and v [B, h, length, K], within their documents.

    Queries of padding get zeros.
    """
    if len(layout.documents) == 1:
        return _attend_alike(q, k, v, rows, layout.documents[0], layout.implementation, how)
    found = [
        _attend_alike(q[i : i + 1], k[i : i + 1], v[i : i + 1], rows, documents, layout.implementation, how)
        for i, documents in enumerate(layout.documents)
    ]
    return torch.cat(found)


def _attend_alike(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: tuple[tuple[int, int], ...],
    documents: tuple[tuple[int, int], ...],
    implementation: str,
    how: How,
) -> torch.Tensor:
    """For rows of a batch that have the same documents."""
    compute = IMPLEMENTATIONS[implementation]
    places, done = [], 0
    for first, last in rows:
        places.append((first, last, done))
        done += last - first
    found, filled = [], 0
    for block in blocks(rows, documents, how.window, squares=compute is sdpa):
        at = next(place + block.q0 - first for first, last, place in places if first <= block.q0 < last)
        if at > filled:
            found.append(_nothing(q, v, at - filled))
        keys, here = slice(block.k0, block.k1), slice(at, at + block.q1 - block.q0)
        found.append(compute(q[:, :, here], k[:, :, keys], v[:, :, keys], block, how))
        filled = here.stop
    if filled < done or not found:
        found.append(_nothing(q, v, done - filled))
    return found[0] if len(found) == 1 else torch.cat(found, 2)


def _nothing(q: torch.Tensor, v: torch.Tensor, rows: int) -> torch.Tensor:
    return q.new_zeros(q.shape[0], q.shape[1], rows, v.shape[3])
