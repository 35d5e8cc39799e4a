"""The two all-to-alls of a layer: shards of the sequence become shares of the heads, and back.

q, k and v travel in one; a rank is sent the kv heads that its query heads read and no others, and of the queries those
that it computes. Splits are as uneven as the shares. The way back is the queries' route, backwards; so is the gradient
of either. Tensors here are [B, tokens, heads, K]. Every element is copied once on either side of an all-to-all.
Source: Arctic Long Sequence Training, 3.2.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from seqtile.sp.context import SequenceParallel
from seqtile.sp.heads import Share, count, share_of, within

_Q, _K, _V = range(3)


class Piece(NamedTuple):
    """A part of one of the tensors that travel."""

    tensor: int
    tokens: slice
    heads: slice

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self.tensor][:, self.tokens, self.heads]


class Route(NamedTuple):
    sent: list[list[Piece]]
    """For each rank of the group, what of this rank's tensors it is sent."""
    received: list[list[Piece]]
    """For each rank of the group, where what it sends goes in the tensors that this rank makes of it."""

    def reversed(self) -> "Route":
        return Route(self.received, self.sent)


class Trade(NamedTuple):
    """Tokens for heads, and back, of the attentions of a model that have so many heads: made once a forward."""

    ctx: SequenceParallel
    share: Share
    """Of this rank."""
    local: int
    q_heads: int
    kv_heads: int
    out: Route
    back: Route

    @classmethod
    def of(cls, q_heads: int, kv_heads: int, local: int, ctx: SequenceParallel) -> "Trade":
        shares = [share_of(rank, ctx.size, q_heads, kv_heads, local * ctx.size) for rank in range(ctx.size)]
        mine = shares[ctx.rank]
        sent = [[here for here, _ in _between(ctx.rank, share, local)] for share in shares]
        received = [[there for _, there in _between(rank, mine, local)] for rank in range(ctx.size)]
        queries = ([[piece for piece in there if piece.tensor == _Q] for there in side] for side in (sent, received))
        return cls(ctx, mine, local, q_heads, kv_heads, Route(sent, received), Route(*queries).reversed())

    def to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """q [B, H, S, K], k and v [B, KV, S, K] of this rank's S tokens, to this rank's share of the whole sequence:
        q [B, h, rows, K], k and v [B, kv, S * size, K], in the dtype that attention computes in."""
        tensors, shapes = self._leaving(q, k, v)
        return [x.transpose(1, 2) for x in ExchangeFunction.apply(self.out, shapes, self.ctx.group, *tensors)]

    def send(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> "Exchange":
        """`to_heads` on its way, without gradients; its result are [B, tokens, heads, K]."""
        tensors, shapes = self._leaving(q, k, v)
        return Exchange(tensors, self.out, shapes, self.ctx.group)

    def send_back(self, *d_qkv: torch.Tensor) -> "Exchange":
        """The gradients of what `to_heads` returned on their way; the result are [B, S, heads, K] of this rank's
        tokens."""
        tensors = [d.transpose(1, 2) for d in d_qkv]
        heads = (self.q_heads, self.kv_heads, self.kv_heads)
        shapes = [(len(d), self.local, of, d.shape[3]) for d, of in zip(tensors, heads, strict=True)]
        return Exchange(tensors, self.out.reversed(), shapes, self.ctx.group)

    def _leaving(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
        """What is sent, [B, S, heads, K], and the shapes of what is made of it."""
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        if dtype == torch.float32 and torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
        rows, length = count(self.share.rows), k.shape[2] * self.ctx.size
        kv_heads = self.share.kv.stop - self.share.kv.start
        sizes = ((rows, len(self.share.kv_of_q)), (length, kv_heads), (length, kv_heads))
        tensors = [x.to(dtype).transpose(1, 2) for x in (q, k, v)]
        return tensors, [(len(x), *size, x.shape[3]) for x, size in zip(tensors, sizes, strict=True)]

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """out [B, rows, h, K] of this rank's share, to all heads of this rank's tokens [B, S, H, K]."""
        shape = (len(out), self.local, self.q_heads, out.shape[3])
        return ExchangeFunction.apply(self.back, [shape], self.ctx.group, out)[0]


def _between(rank: int, share: Share, local: int) -> Iterator[tuple[Piece, Piece]]:
    """What of the tokens of `rank` goes to a share: where it lies with the one, and where with the other."""
    start = rank * local
    everything = slice(None)
    for first, last in within(share.rows, start, start + local):
        at = share.place(first)
        there = slice(at, at + last - first)
        yield Piece(_Q, slice(first - start, last - start), share.q), Piece(_Q, there, everything)
    for tensor in (_K, _V):
        yield Piece(tensor, slice(0, local), share.kv), Piece(tensor, slice(start, start + local), everything)


class ExchangeFunction(torch.autograd.Function):
    """Tensors along a route, to tensors of these shapes."""

    @staticmethod
    def forward(ctx, route: Route, shapes: list[torch.Size], group: dist.ProcessGroup, *tensors: torch.Tensor):
        ctx.route, ctx.group, ctx.shapes = route, group, [tensor.shape for tensor in tensors]
        return tuple(exchange(tensors, route, shapes, group))

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        return None, None, None, *exchange(gradients, ctx.route.reversed(), ctx.shapes, ctx.group)


def exchange(
    tensors: Sequence[torch.Tensor], route: Route, shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """One all-to-all, waited for; see `Exchange`."""
    return Exchange(tensors, route, shapes, group).result()


class Exchange:
    """One all-to-all on its way. What several ranks send for one place, gradients of a kv head they share, is added in
    float32.

    Allocates what is sent, then what is received, then the results; never all three.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], route: Route, shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
    ):
        self._route, self._blank = route, [torch.empty(shape, device="meta") for shape in shapes]
        sent = [sum(piece.of(tensors).numel() for piece in there) for there in route.sent]
        received = [sum(piece.of(self._blank).numel() for piece in there) for there in route.received]
        self._sent: torch.Tensor | None = _packed(tensors, route)
        self._arriving: torch.Tensor | None = self._sent.new_empty(sum(received))
        self._work = dist.all_to_all_single(self._arriving, self._sent, received, sent, group=group, async_op=True)

    def result(self) -> list[torch.Tensor]:
        """Waits for what arrives, and puts it in its places. To be called once."""
        self._work.wait()
        arrived, blank = self._arriving, self._blank
        self._sent = self._arriving = None
        places = [piece for there in self._route.received for piece in there]
        sizes = [piece.of(blank).numel() for piece in places]
        made, added = [], []
        for i, whole in enumerate(blank):
            covered = sum(size for place, size in zip(places, sizes, strict=True) if place.tensor == i)
            added.append(covered > whole.numel())
            dtype = torch.promote_types(arrived.dtype, torch.float32) if added[i] else arrived.dtype
            make = arrived.new_zeros if added[i] else arrived.new_empty
            made.append(make(whole.shape, dtype=dtype))
        for place, values in zip(places, arrived.split(sizes), strict=True):
            part = place.of(made)
            put = part.add_ if added[place.tensor] else part.copy_
            put(values.view(part.shape))
        return [tensor.to(arrived.dtype) for tensor in made]


def _packed(tensors: Sequence[torch.Tensor], route: Route) -> torch.Tensor:
    """What is sent, rank by rank, in one buffer."""
    pieces = [piece.of(tensors) for there in route.sent for piece in there]
    sizes = [piece.numel() for piece in pieces]
    buffer = tensors[0].new_empty(sum(sizes))
    for piece, place in zip(pieces, buffer.split(sizes), strict=True):
        place.view(piece.shape).copy_(piece)
    return buffer


def all_to_all(buffer: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sends each rank of the group its part of `buffer`, so many elements each, and returns theirs in order."""
    out = buffer.new_empty(sum(received))
    dist.all_to_all_single(out, buffer, received, sent, group=group)
    return out
