"""The two all-to-alls of a layer's attention: from sharded by tokens to sharded by heads, and back.

    by tokens                                 by heads
    q [B, S, H, K], k and v [B, S, KV, K] --> q [B, rows, h, K], k and v [B, S * size, kv, K]    one all-to-all
    out [B, S, H, K]                      <-- out [B, rows, h, K]                                another

A rank is sent the kv heads that its query heads read and no others, and of the queries those that it computes; so
splits are as uneven as the head shares. The gradient of either goes the other way. Every element is copied once on
either side of an all-to-all.
Source: Arctic Long Sequence Training, 3.2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from seqtile.sp.groups import SequenceParallel
from seqtile.sp.head_shares import HeadShare, count, head_share, within

Q, K, V = range(3)


class Piece(NamedTuple):
    """A part of one of the tensors q, k and v [B, tokens, heads, K]."""

    tensor: int
    tokens: slice
    heads: slice


class Sharding(NamedTuple):
    """How q, k and v lie on this rank on one side of the all-to-all."""

    sizes: Sequence[tuple[int, int]]
    """Tokens and heads of each tensor."""
    pieces: Sequence[Sequence[Piece]]
    """For each rank of the group, what is sent to it, or received from it."""
    summed: tuple[int, ...] = ()
    """The tensors of which several ranks send the same place: gradients of kv heads that they share."""

    def parts(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        return [[tensors[i][:, tokens, heads] for i, tokens, heads in pieces] for pieces in self.pieces]

    def of_queries(self) -> "Sharding":
        """Returns the same for q alone, whose way attention's output takes back."""
        return Sharding(self.sizes[:1], [[piece for piece in pieces if piece.tensor == Q] for pieces in self.pieces])


class AllToAll(NamedTuple):
    """The all-to-alls of attention with so many heads, made once a forward for all layers."""

    group: dist.ProcessGroup
    share: HeadShare
    """This rank's."""
    by_tokens: Sharding
    by_heads: Sharding

    @classmethod
    def create(cls, q_heads: int, kv_heads: int, local: int, ctx: SequenceParallel) -> "AllToAll":
        """Returns those of sequences of `local` tokens a rank."""
        shares = [head_share(rank, ctx.size, q_heads, kv_heads, local * ctx.size) for rank in range(ctx.size)]
        mine, length = shares[ctx.rank], local * ctx.size
        kv = (length, mine.kv.stop - mine.kv.start)
        summed = (K, V) if sum(share.kv.stop - share.kv.start for share in shares) > kv_heads else ()
        sent = [_pieces(ctx.rank, share, local)[0] for share in shares]
        received = [_pieces(rank, mine, local)[1] for rank in range(ctx.size)]
        by_tokens = Sharding([(local, q_heads), (local, kv_heads), (local, kv_heads)], sent, summed)
        return cls(ctx.group, mine, by_tokens, Sharding([(count(mine.rows), len(mine.kv_of_q)), kv, kv], received))

    def start_to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> "Pending":
        """Sends q [B, H, S, K], k and v [B, KV, S, K]; what arrives is [B, tokens, heads, K]. Without gradients."""
        return Pending(_as_computed(q, k, v), self.by_tokens, self.by_heads, self.group)

    def start_to_tokens(self, *d_qkv: torch.Tensor) -> "Pending":
        """Sends gradients of q [B, h, rows, K], k and v [B, kv, length, K]; what arrives is [B, S, heads, K]."""
        return Pending([d.transpose(1, 2) for d in d_qkv], self.by_heads, self.by_tokens, self.group)

    def to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Returns q [B, h, rows, K], k and v [B, kv, length, K] of this rank's share, from those of its tokens, q
        [B, H, S, K], k and v [B, KV, S, K]; in the dtype that attention computes in."""
        found = AllToAllFunction.apply(self.by_tokens, self.by_heads, self.group, *_as_computed(q, k, v))
        return [x.transpose(1, 2) for x in found]

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """Returns all heads of this rank's tokens [B, S, H, K], from out [B, rows, h, K] of each rank's share."""
        by_heads, by_tokens = self.by_heads.of_queries(), self.by_tokens.of_queries()
        return AllToAllFunction.apply(by_heads, by_tokens, self.group, out)[0]


def _pieces(rank: int, share: HeadShare, local: int) -> tuple[list[Piece], list[Piece]]:
    """Returns what of the tokens of `rank` goes to a share: where it lies by tokens, and where by heads."""
    start, every = rank * local, slice(None)
    by_tokens = [Piece(tensor, slice(0, local), share.kv) for tensor in (K, V)]
    by_heads = [Piece(tensor, slice(start, start + local), every) for tensor in (K, V)]
    for first, last in within(share.rows, start, start + local):
        at = share.place(first)
        by_tokens.append(Piece(Q, slice(first - start, last - start), share.q))
        by_heads.append(Piece(Q, slice(at, at + last - first), every))
    return by_tokens, by_heads


def _as_computed(*qkv: torch.Tensor) -> list[torch.Tensor]:
    """Returns q, k and v as [B, S, heads, K], in the one dtype that attention computes in."""
    q, k, v = qkv
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if dtype == torch.float32 and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
    return [x.to(dtype).transpose(1, 2) for x in qkv]


class AllToAllFunction(torch.autograd.Function):
    """Tensors of one sharding to another."""

    @staticmethod
    def forward(ctx, source: Sharding, target: Sharding, group: dist.ProcessGroup, *tensors: torch.Tensor):
        ctx.source, ctx.target, ctx.group = source, target, group
        return tuple(Pending(tensors, source, target, group).wait())

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        return None, None, None, *Pending(gradients, ctx.target, ctx.source, ctx.group).wait()


class Pending:
    """One all-to-all that has been started. What several ranks send for one place is added in float32.

    Allocates what is sent, then what is received, then the results; never all three.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], source: Sharding, target: Sharding, group: dist.ProcessGroup):
        self._target = target
        self._shapes = [(len(x), *size, x.shape[3]) for x, size in zip(tensors, target.sizes, strict=True)]
        sent = source.parts(tensors)
        received = target.parts([torch.empty(shape, device="meta") for shape in self._shapes])
        sent_sizes, received_sizes = ([sum(x.numel() for x in parts) for parts in side] for side in (sent, received))
        self._sent: torch.Tensor | None = tensors[0].new_empty(sum(sent_sizes))
        places = self._sent.split([part.numel() for parts in sent for part in parts])
        for part, place in zip((part for parts in sent for part in parts), places, strict=True):
            place.view(part.shape).copy_(part)
        self._received: torch.Tensor | None = self._sent.new_empty(sum(received_sizes))
        self._work = dist.all_to_all_single(
            self._received, self._sent, received_sizes, sent_sizes, group=group, async_op=True
        )

    def wait(self) -> list[torch.Tensor]:
        """Waits for what arrives, and puts it in its places. To be called once."""
        self._work.wait()
        received, target = self._received, self._target
        self._sent = self._received = None
        results = []
        for i, shape in enumerate(self._shapes):
            dtype = torch.promote_types(received.dtype, torch.float32) if i in target.summed else received.dtype
            make = received.new_zeros if i in target.summed else received.new_empty
            results.append(make(shape, dtype=dtype))
        pieces = [piece for of_rank in target.pieces for piece in of_rank]
        parts = [part for of_rank in target.parts(results) for part in of_rank]
        for piece, part, values in zip(pieces, parts, received.split([x.numel() for x in parts]), strict=True):
            put = part.add_ if piece.tensor in target.summed else part.copy_
            put(values.view(part.shape))
        return [result.to(received.dtype) for result in results]
