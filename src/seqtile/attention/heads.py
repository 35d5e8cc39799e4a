"""Plans which heads and which queries each rank of a group computes.

Ranks get heads in order, balanced to within one. If there are more ranks than heads, the n ranks of a head share its
queries. These are cut into 2 n pieces; rank i takes the i-th piece from the start and the i-th from the end, so that
under a causal mask all ranks have the same work. With two ranks per head:

    queries   0 . . . | . . . . | . . . . | . . . length
    rank      0         1         1         0

Source: Arctic Long Sequence Training, 3.2.1, without the limits of its 7.1 (heads divisible by ranks, ranks no more
than heads).
"""

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from seqtile.rules import heads_of_rank

Rows = tuple[tuple[int, int], ...]
"""[start, stop) of tokens of a sequence, in order."""


class RankHeads(NamedTuple):
    """The heads that one rank computes."""

    q: slice
    """Query heads."""
    kv: slice
    """The kv heads that these query heads read."""
    kv_of_q: tuple[int, ...]
    """For each of these query heads, the index of its kv head within `kv`."""
    rows: Rows
    """The queries: all of them, unless ranks share a head."""

    @property
    def groups(self) -> list[tuple[slice, slice]]:
        """The query heads and kv heads to compute together, as indices within `q` and `kv`. One group if equally many
        query heads read each kv head, as kernels expect; else one group per kv head."""
        read = list(Counter(self.kv_of_q).values())
        if len(set(read)) == 1:
            return [(slice(None), slice(None))]
        ends = [0, *accumulate(read)]
        return [(slice(ends[kv], ends[kv + 1]), slice(kv, kv + 1)) for kv in range(len(read))]


def rank_heads(rank: int, size: int, q_heads: int, kv_heads: int, queries: Rows) -> RankHeads:
    """Returns the heads of `rank` out of `size` ranks that compute these queries. `kv_heads` must divide `q_heads`."""
    heads, kv = heads_of_rank(rank, size, q_heads, kv_heads)
    sharers = [other for other in range(size) if other * q_heads // size == heads.start]
    rows = zigzag(queries, sharers.index(rank), len(sharers))
    per_kv = q_heads // kv_heads
    return RankHeads(heads, kv, tuple(head // per_kv - kv.start for head in range(heads.start, heads.stop)), rows)


def zigzag(rows: Rows, part: int, parts: int) -> Rows:
    """Returns the part of so many: the part-th of 2 * parts pieces from the start, and the part-th from the end."""
    total = count(rows)
    ends = [total * i // (2 * parts) for i in range(2 * parts + 1)]
    found: list[tuple[int, int]] = []
    for start, stop in (*taken(rows, ends[part], ends[part + 1]), *taken(rows, ends[-part - 2], ends[-part - 1])):
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)


def width(heads: slice) -> int:
    """Returns the number of heads."""
    return heads.stop - heads.start


def within(rows: Rows, start: int, stop: int) -> Rows:
    """Returns the part of `rows` in [start, stop)."""
    cut = ((max(first, start), min(last, stop)) for first, last in rows)
    return tuple((first, last) for first, last in cut if first < last)


def taken(rows: Rows, start: int, stop: int) -> Rows:
    """Returns the tokens of `rows` from the start-th to before the stop-th."""
    found, before = [], 0
    for first, last in rows:
        found += within(((first, last),), first + start - before, first + stop - before)
        before += last - first
    return tuple(found)


def count(rows: Rows) -> int:
    """Returns the number of tokens."""
    return sum(last - first for first, last in rows)
