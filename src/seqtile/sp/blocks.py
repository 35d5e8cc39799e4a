"""Blocks of queries with the slice of the keys that one of them may see: no mask of length x length is ever made.

The same blocks serve documents, padding, windows, and ranks that have a part of the queries only.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from seqtile.sp.heads import Rows

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


def segments(rows: Rows, documents: Rows, window: int | None) -> Iterator[Block]:
    """The queries in `rows`, document by document, with the keys that they see; queries of padding are in none."""
    for first, last in rows:
        for start, stop in documents:
            q0, q1 = max(first, start), min(last, stop)
            if q0 < q1:
                yield Block(q0, q1, start if window is None else max(start, q0 - window + 1), q1)


def blocks(rows: Rows, documents: Rows, window: int | None, squares: bool = True) -> Iterator[Block]:
    """The segments, cut so that a mask is small. `squares`: a causal square needs no mask, however large it is."""
    for segment in segments(rows, documents, window):
        start, q1 = segment.k0, segment.q1
        q0 = segment.q0
        if squares and segment.is_square(window):
            yield segment
            continue
        while q0 < q1:
            end = _end(q0, q1, start, window)
            yield Block(q0, end, start if window is None else max(start, q0 - window + 1), end)
            q0 = end


def _end(q0: int, q1: int, start: int, window: int | None) -> int:
    """Where a block that begins at q0 ends, so that its mask is small: a window's worth at most, if there is one."""
    if window is not None:
        rows = min(window, max(1, MASK_ELEMENTS // (2 * window)))
    else:
        rows = max(1, MASK_ELEMENTS // max(1, q1 - start))
    return min(q1, q0 + rows)
