"""Which heads, and which of their queries, each rank of a group computes.

Heads are dealt out in order, balanced to within one. With more ranks than heads, the ranks of a head share its queries:
of 2 n pieces of the sequence, the i-th of n ranks takes the i-th and the i-th from the end, so that under a causal mask
each has the same work.
Source: Arctic Long Sequence Training, 3.2.1, without the limits of its 7.1 (heads divisible by ranks, ranks no more
than heads).
"""

from typing import NamedTuple

Rows = tuple[tuple[int, int], ...]
"""[start, stop) of tokens of a sequence, in order."""


class Share(NamedTuple):
    """The work of one rank."""

    q: slice
    """Query heads."""
    kv: slice
    """The key and value heads that these query heads read."""
    kv_of_q: tuple[int, ...]
    """For each of these query heads its place among these kv heads."""
    rows: Rows
    """The queries: all of them unless ranks share a head."""

    @property
    def groups(self) -> list[tuple[slice, slice]]:
        """Of these query heads and these kv heads, which to compute together: all if each kv head is read by as many,
        as kernels expect; or those of each kv head."""
        read = [self.kv_of_q.count(kv) for kv in range(self.kv.stop - self.kv.start)]
        if len(set(read)) == 1:
            return [(slice(None), slice(None))]
        ends = [sum(read[:kv]) for kv in range(len(read) + 1)]
        return [(slice(ends[kv], ends[kv + 1]), slice(kv, kv + 1)) for kv in range(len(read))]

    def place(self, token: int) -> int:
        """How many of the queries come before that of `token`, which is among them."""
        return count(within(self.rows, 0, token))


def share_of(rank: int, size: int, q_heads: int, kv_heads: int, length: int) -> Share:
    """The share of `rank` of `size` in a sequence of `length` tokens. `kv_heads` divides `q_heads`."""
    if q_heads >= size:
        first, last = rank * q_heads // size, (rank + 1) * q_heads // size
        rows: Rows = ((0, length),)
    else:
        first = rank * q_heads // size
        last = first + 1
        sharers = [other for other in range(size) if other * q_heads // size == first]
        rows = _pieces(sharers.index(rank), len(sharers), length)
    per_kv = q_heads // kv_heads
    kv = slice(first // per_kv, (last - 1) // per_kv + 1)
    return Share(slice(first, last), kv, tuple(head // per_kv - kv.start for head in range(first, last)), rows)


def _pieces(part: int, parts: int, length: int) -> Rows:
    """The part-th piece and the part-th from the end, of 2 * parts pieces; as one if they touch."""
    if parts == 1:
        return ((0, length),)
    ends = [length * i // (2 * parts) for i in range(2 * parts + 1)]
    low, high = (ends[part], ends[part + 1]), (ends[-part - 2], ends[-part - 1])
    pieces = [(low[0], high[1])] if low[1] == high[0] else [low, high]
    return tuple(piece for piece in pieces if piece[0] < piece[1])


def within(rows: Rows, start: int, stop: int) -> Rows:
    """What of `rows` lies in [start, stop)."""
    cut = ((max(first, start), min(last, stop)) for first, last in rows)
    return tuple((first, last) for first, last in cut if first < last)


def count(rows: Rows) -> int:
    return sum(last - first for first, last in rows)
