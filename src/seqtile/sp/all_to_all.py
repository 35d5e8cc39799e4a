"""The two all-to-alls of a layer's attention: from sharded by tokens to sharded by heads, and back.

    by tokens                                 by heads
    q [B, H, S, K], k and v [B, KV, S, K] --> q [B, h, rows, K], k and v [B, kv, S * size, K]    one all-to-all
    out [B, S, H, K]                      <-- out [B, rows, h, K]                                another

A rank is sent the kv heads that its query heads read and no others, and of the queries those that it computes; so
splits are as uneven as the head shares. The gradient of either goes the other way. Every element is copied once on
either side of an all-to-all.

A rank's head share is the heads that it computes, and the queries of them.
Heads are dealt out in order, balanced to within one. With more ranks than heads, the ranks of a head share its queries:
of 2 n pieces of the sequence, the i-th of n ranks takes the i-th and the i-th from the end, so that under a causal mask
each has the same work. Two ranks to a head:

    queries   0 . . . | . . . . | . . . . | . . . length
    rank      0         1         1         0

Source: Arctic Long Sequence Training, 3.2.1, without the limits of its 7.1 (heads divisible by ranks, ranks no more
than heads).
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from seqtile.protocols import Arriving
from seqtile.rules import heads_of_rank
from seqtile.sp.groups import SequenceParallel

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
    heads, kv = heads_of_rank(rank, size, q_heads, kv_heads)
    sharers = [other for other in range(size) if other * q_heads // size == heads.start]
    part, parts = sharers.index(rank), len(sharers)
    ends = [length * i // (2 * parts) for i in range(2 * parts + 1)]
    low, high = (ends[part], ends[part + 1]), (ends[-part - 2], ends[-part - 1])
    pieces = [(low[0], high[1])] if low[1] == high[0] else [low, high]
    rows = tuple(piece for piece in pieces if piece[0] < piece[1])
    per_kv = q_heads // kv_heads
    return HeadShare(heads, kv, tuple(head // per_kv - kv.start for head in range(heads.start, heads.stop)), rows)


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


Q, K, V = range(3)


class Piece(NamedTuple):
    """A part of q, k or v that goes from one rank to another, as it lies with one of them."""

    tensor: int
    tokens: slice
    heads: slice


class Sharding(NamedTuple):
    """The pieces of q, k and v [B, heads, tokens, K] on this rank, on one side of the all-to-all."""

    sizes: Sequence[tuple[int, int]]
    """Tokens and heads of each."""
    pieces: Sequence[Sequence[Piece]]
    """For each rank of the group, what is sent to it, or received from it."""
    summed: tuple[int, ...] = ()
    """Those of which several ranks send the same place: gradients of kv heads that they share."""

    def of_queries(self) -> "Sharding":
        """Returns the same for q alone."""
        return Sharding(self.sizes[:1], [[piece for piece in pieces if piece.tensor == Q] for pieces in self.pieces])

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the pieces of these tensors, rank by rank, as [B, tokens, heads, K]."""
        pieces = [piece for of_rank in self.pieces for piece in of_rank]
        return [tensors[i].transpose(1, 2)[:, tokens, heads] for i, tokens, heads in pieces]

    def counts(self, tensors: Sequence[Tensor]) -> list[int]:
        """Returns how many elements the pieces for each rank have; of `tensors` it takes B and K."""
        each = [len(x) * x.shape[3] for x in tensors]
        return [sum(each[i] * width(tokens) * width(heads) for i, tokens, heads in pieces) for pieces in self.pieces]


class AllToAll(NamedTuple):
    """One all-to-all of a group: tensors [B, heads, tokens, K] of one sharding to another."""

    group: dist.ProcessGroup
    source: Sharding
    target: Sharding

    def reversed(self) -> "AllToAll":
        """Returns the way back, which gradients take."""
        return AllToAll(self.group, self.target, self.source)

    def of_queries(self) -> "AllToAll":
        """Returns that of q alone, whose way attention's output takes back."""
        return AllToAll(self.group, self.source.of_queries(), self.target.of_queries())

    def start(self, tensors: Sequence[Tensor]) -> Arriving:
        """Starts it, and returns what waits for its results, to be called once. Those are contiguous as [B, tokens,
        heads, K]; what several ranks send for one place is added in float32. Without gradients. Tensors of a wider
        dtype than others travel as several elements of theirs.

        Allocates what is sent, then what is received, then the results; never all three. Raises ValueError, before
        anything is sent and alike on every rank, for dtypes that could not go this way or could not come back.
        """
        dtypes = [x.dtype for x in tensors]
        wire = _wire_dtype(dtypes, (*self.source.summed, *self.target.summed))
        tensors = [_viewed(x, wire) for x in tensors]
        parts, counts, target = self.source.parts(tensors), self.target.counts(tensors), self.target
        shapes = [(len(x), *size, x.shape[3]) for x, size in zip(tensors, target.sizes, strict=True)]
        sent_counts = self.source.counts(tensors)
        sent = tensors[0].new_empty(sum(sent_counts))
        for part, place in zip(parts, sent.split([part.numel() for part in parts]), strict=True):
            place.view(part.shape).copy_(part)
        received = sent.new_empty(sum(counts))
        work = dist.all_to_all_single(received, sent, counts, sent_counts, group=self.group, async_op=True)

        def wait() -> list[Tensor]:
            nonlocal sent, received
            work.wait()
            arrived, sent, received = received, None, None
            results, dtype = [], torch.promote_types(arrived.dtype, torch.float32)
            for i, shape in enumerate(shapes):
                result = arrived.new_zeros(shape, dtype=dtype) if i in target.summed else arrived.new_empty(shape)
                results.append(result.transpose(1, 2))
            parts, pieces = target.parts(results), [piece for of_rank in target.pieces for piece in of_rank]
            for piece, part, values in zip(pieces, parts, arrived.split([x.numel() for x in parts]), strict=True):
                put = part.add_ if piece.tensor in target.summed else part.copy_
                put(values.view(part.shape))
            results = [result.to(arrived.dtype) for result in results]
            return [_viewed(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]

        return wait


def _wire_dtype(dtypes: Sequence[torch.dtype], summed: Sequence[int]) -> torch.dtype:
    """Returns the dtype that all travel as. ValueError for what has to be added in another, here or on the way back."""
    wire = min(dtypes, key=lambda dtype: dtype.itemsize)
    if any(dtypes[i] != wire for i in summed):
        found = ", ".join(map(str, dtypes))
        raise ValueError(
            f"heads that ranks share are in another dtype than the rest, {found}; expected the narrowest of these: let "
            "the layer compute all of them in one dtype, or use fewer ranks to a sequence"
        )
    return wire


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bytes of [B, heads, tokens, K] as elements of a dtype."""
    return x if x.dtype == dtype else x.transpose(1, 2).contiguous().view(dtype).transpose(1, 2)


class AllToAllFunction(torch.autograd.Function):
    """An all-to-all, waited for; that of its gradients is the reversed one."""

    @staticmethod
    def forward(ctx, all_to_all: AllToAll, *tensors: Tensor):
        ctx.all_to_all = all_to_all
        return tuple(all_to_all.start(tensors)())

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return None, *ctx.all_to_all.reversed().start(gradients)()


def plan_tokens_to_heads(q_heads: int, kv_heads: int, local: int, ctx: SequenceParallel) -> AllToAll:
    """Returns the all-to-all of q, k and v from shards of `local` tokens to head shares."""
    length = local * ctx.size
    shares = [head_share(rank, ctx.size, q_heads, kv_heads, length) for rank in range(ctx.size)]
    mine = shares[ctx.rank]
    sent = [_pieces(ctx.rank, share, local)[0] for share in shares]
    received = [_pieces(rank, mine, local)[1] for rank in range(ctx.size)]
    by_tokens = [(local, q_heads), (local, kv_heads), (local, kv_heads)]
    by_heads = [(count(mine.rows), width(mine.q)), (length, width(mine.kv)), (length, width(mine.kv))]
    summed = (K, V) if sum(width(share.kv) for share in shares) > kv_heads else ()
    return AllToAll(ctx.group, Sharding(by_tokens, sent, summed), Sharding(by_heads, received))


def plan_heads(heads: int, groups: int, is_shared: Sequence[bool], local: int, ctx: SequenceParallel) -> AllToAll:
    """Returns the all-to-all from shards of `local` tokens to head shares of tensors of which all tokens are wanted: of
    `heads` heads, at least one a rank, or where `is_shared` of `groups`, each read by as many heads."""
    length = local * ctx.size
    shares = [head_share(rank, ctx.size, heads, groups, length) for rank in range(ctx.size)]
    all_tokens = slice(0, local)

    def placed(share: HeadShare, rank: int) -> tuple[list[Piece], list[Piece]]:
        """What of the tokens of `rank` goes to a share: where it lies by tokens, and where by heads."""
        chosen = [share.kv if shared else share.q for shared in is_shared]
        here = slice(rank * local, (rank + 1) * local)
        by_tokens = [Piece(i, all_tokens, of_share) for i, of_share in enumerate(chosen)]
        return by_tokens, [Piece(i, here, slice(0, width(of_share))) for i, of_share in enumerate(chosen)]

    mine, counts = shares[ctx.rank], [groups if shared else heads for shared in is_shared]
    sent = [placed(share, ctx.rank)[0] for share in shares]
    received = [placed(mine, rank)[1] for rank in range(ctx.size)]
    several = sum(width(share.kv) for share in shares) > groups
    summed = tuple(i for i, shared in enumerate(is_shared) if shared and several)
    widths = [width(mine.kv if shared else mine.q) for shared in is_shared]
    by_tokens = Sharding([(local, count) for count in counts], sent, summed)
    return AllToAll(ctx.group, by_tokens, Sharding([(length, count) for count in widths], received))


def _pieces(rank: int, share: HeadShare, local: int) -> tuple[list[Piece], list[Piece]]:
    """Returns what of the tokens of `rank` goes to a share: where it lies by tokens, and where by heads."""
    start, kv = rank * local, slice(0, width(share.kv))
    by_tokens = [Piece(tensor, slice(0, local), share.kv) for tensor in (K, V)]
    by_heads = [Piece(tensor, slice(start, start + local), kv) for tensor in (K, V)]
    for first, last in within(share.rows, start, start + local):
        at = share.place(first)
        by_tokens.append(Piece(Q, slice(first - start, last - start), share.q))
        by_heads.append(Piece(Q, slice(at, at + last - first), slice(0, width(share.q))))
    return by_tokens, by_heads
