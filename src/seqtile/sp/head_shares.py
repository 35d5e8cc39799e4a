"""Head shares: the heads that each rank of a group computes, and the queries of them.

Heads are dealt out in order, balanced to within one. With more ranks than heads, the ranks of a head share its queries:
of 2 n pieces of the sequence, the i-th of n ranks takes the i-th and the i-th from the end, so that under a causal mask
each has the same work. Two ranks to a head:

    queries   0 . . . | . . . . | . . . . | . . . length
    rank      0         1         1         0

Source: Arctic Long Sequence Training, 3.2.1, without the limits of its 7.1 (heads divisible by ranks, ranks no more
than heads).
"""

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

Rows = tuple[tuple[int, int], ...]
"""[start, stop) of tokens of a sequence, in order."""


class HeadShare(NamedTuple):
    """The work of one rank."""

    q: slice
    """Query heads."""
    kv: slice
    """The kv heads that these query heads read."""
    kv_of_q: tuple[int, ...]
    """For each of these query heads its place among these kv heads."""
    rows: Rows
    """The queries: all of them unless ranks share a head."""

    @property
    def groups(self) -> list[tuple[slice, slice]]:
        """The query heads and kv heads to compute together, as places in this share: all if each kv head is read by as
        many, as kernels expect; or those of each kv head."""
        read = list(Counter(self.kv_of_q).values())
        if len(set(read)) == 1:
            return [(slice(None), slice(None))]
        ends = [0, *accumulate(read)]
        return [(slice(ends[kv], ends[kv + 1]), slice(kv, kv + 1)) for kv in range(len(read))]

    def place(self, token: int) -> int:
        """Returns how many of the queries come before that of `token`, which is among them."""
        return count(within(self.rows, 0, token))


def head_share(rank: int, size: int, q_heads: int, kv_heads: int, length: int) -> HeadShare:
    """Returns the share of `rank` of `size` in a sequence of `length` tokens. `kv_heads` divides `q_heads`."""
    first = rank * q_heads // size
    last = max(first + 1, (rank + 1) * q_heads // size)
    sharers = [other for other in range(size) if other * q_heads // size == first]
    part, parts = sharers.index(rank), len(sharers)
    ends = [length * i // (2 * parts) for i in range(2 * parts + 1)]
    low, high = (ends[part], ends[part + 1]), (ends[-part - 2], ends[-part - 1])
    pieces = [(low[0], high[1])] if low[1] == high[0] else [low, high]
    rows = tuple(piece for piece in pieces if piece[0] < piece[1])
    per_kv = q_heads // kv_heads
    kv = slice(first // per_kv, (last - 1) // per_kv + 1)
    return HeadShare(slice(first, last), kv, tuple(head // per_kv - kv.start for head in range(first, last)), rows)


def width(heads: slice) -> int:
    """Returns how many heads these are."""
    return heads.stop - heads.start


def within(rows: Rows, start: int, stop: int) -> Rows:
    """Returns what of `rows` lies in [start, stop)."""
    cut = ((max(first, start), min(last, stop)) for first, last in rows)
    return tuple((first, last) for first, last in cut if first < last)


def count(rows: Rows) -> int:
    """Returns how many tokens these are."""
    return sum(last - first for first, last in rows)
