"""Describes which keys the queries of a sequence see, without a mask of length x length. A segment is the queries of
one document with the keys that they may see. Two documents and padding, on a rank that holds the queries marked q:

            keys   0 ---------- 9 ---- 14   padding
    queries 0 .    |
              q      segment 1: a mask, since another rank holds some queries of the square
              q    |
            9 q           segment 2: a causal square, no mask
              q                   segment 3: no keys, zeros

A document may continue another one, as completions continue their prompt. Its queries then also see the keys of that
document and of the documents that it continues.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqtile.attention.heads import Rows, count
from seqtile.attention.layout import Layout

MASK_ELEMENTS = 2**24  # of the largest mask: 16 MiB of bools


class Block(NamedTuple):
    """Queries [q0, q1) and the keys that at least one of them may see; no keys for padding."""

    q0: int
    q1: int
    keys: Rows
    """In the order of positions: up to q1, or beyond it if `two_ways`."""
    two_ways: bool = False
    """True for a span whose tokens see each other in both directions: each query also sees all keys after itself."""

    def is_causal(self, reach: int) -> bool:
        """Returns whether each query sees all keys up to its own; the last query sees the last key."""
        return bool(self.keys) and not self.two_ways and count(self.keys) <= reach

    def is_square(self, reach: int) -> bool:
        """Returns whether the block is a causal square, which needs no mask."""
        return self.is_causal(reach) and self.keys == ((self.q0, self.q1),)

    def mask(self, reach: int, device: torch.device) -> Tensor:
        """Returns bool [queries, keys], True where a query sees a key."""
        keys = torch.arange(count(self.keys), device=device)
        first = len(keys) - (self.keys[-1][1] - self.q0) if self.keys else 0  # the first query's index among the keys
        queries = torch.arange(first, first + self.q1 - self.q0, device=device)
        distance = queries[:, None] - keys
        return (distance < reach) if self.two_ways else (distance >= 0) & (distance < reach)


def segments(layout: Layout, rows: Rows, reach: int, spans: tuple[Rows, ...] = ()) -> list[list[Block]]:
    """For each entry of the layout's documents, returns the queries in `rows` as segments, document by document."""
    key = ("segments", rows, reach, bool(spans))
    of_rows = zip(layout.documents, spans or ((),) * len(layout.documents), strict=True)
    found = (list(segments_of(rows, row, reach, spanned, layout.parents)) for row, spanned in of_rows)
    return layout.once(key, lambda: list(found))


def segments_of(
    rows: Rows, documents: Rows, reach: int, spans: Rows = (), parents: Sequence[int | None] = ()
) -> Iterator[Block]:
    before, _ = family(documents, parents)
    for first, last in rows:
        for (start, stop), path in zip(documents, before, strict=True):
            q0, q1 = max(first, start), min(last, stop)
            if q0 < q1:
                if first < q0:
                    yield Block(first, q0, ())
                for begin, end in spans:
                    begin, end = max(begin, start), min(end, stop)
                    if q0 < end and begin < q1:
                        if q0 < begin:
                            yield Block(q0, begin, _within_reach((*path, (start, begin)), q0, reach))
                        q0, last_of_span = max(q0, begin), min(q1, end)
                        yield Block(q0, last_of_span, _within_reach((*path, (start, end)), q0, reach), two_ways=True)
                        q0 = last_of_span
                if q0 < q1:
                    yield Block(q0, q1, _within_reach((*path, (start, q1)), q0, reach))
                first = q1
        if first < last:
            yield Block(first, last, ())


def family(documents: Rows, parents: Sequence[int | None]) -> tuple[list[Rows], list[int]]:
    """For each document, returns the documents that it continues, first to last; and the end of the last document that
    continues it."""
    before: list[Rows] = []
    ends = [stop for _, stop in documents]
    parents = parents or (None,) * len(documents)
    for parent in parents:
        before.append(() if parent is None else (*before[parent], documents[parent]))
    for i in reversed(range(len(documents))):
        if parents[i] is not None:
            ends[parents[i]] = max(ends[parents[i]], ends[i])
    return before, ends


def _within_reach(keys: Rows, q0: int, reach: int) -> Rows:
    """Returns `keys` without those that are further than `reach` before the first query, q0, which is in their last
    part."""
    left, trimmed = keys[-1][1] - q0 + reach - 1, []
    for start, stop in reversed(keys):
        if left > 0:
            trimmed.append((max(start, stop - left), stop))
        left -= stop - start
    return tuple(reversed(trimmed))


def blocks(found: Iterable[Block], reach: int, is_uncut: Callable[[Block], bool], whole: int = 0) -> Iterator[Block]:
    """Yields the segments, cut into blocks with small masks: a block has at most as many queries as a query sees keys.
    A segment stays uncut if `is_uncut` returns True, because it then needs no mask. `whole`: how many keys the masks of
    padding have."""
    for segment in found:
        q0, q1, keys, two_ways = segment
        if is_uncut(segment) or not (keys or whole):
            yield segment
            continue
        if not keys:
            size = max(1, MASK_ELEMENTS // whole)
            yield from (Block(start, min(q1, start + size), ()) for start in range(q0, q1, size))
            continue
        size = min(reach, max(1, MASK_ELEMENTS // min(count(keys), 2 * reach)))
        while q0 < q1:
            end = min(q1, q0 + size)
            stop = keys[-1][1] if two_ways else end
            yield Block(q0, end, _within_reach((*keys[:-1], (keys[-1][0], stop)), q0, reach), two_ways)
            q0 = end
