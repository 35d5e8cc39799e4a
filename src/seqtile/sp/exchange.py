"""The two all-to-alls of a layer: shards of the sequence become shares of the heads, and back.

q, k and v travel in one; a rank is sent the kv heads that its query heads read and no others, and of the queries those
that it computes. Splits are as uneven as the shares. The gradient of an all-to-all is the all-to-all back.
Source: Arctic Long Sequence Training, 3.2.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from seqtile.sp.context import SequenceParallel
from seqtile.sp.heads import Share, count, within


class AllToAllFunction(torch.autograd.Function):
    """A flat buffer, of which each rank of the group gets its split."""

    @staticmethod
    def forward(ctx, buffer: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all(buffer, sent, received, group)

    @staticmethod
    def backward(ctx, d_buffer: torch.Tensor):
        return all_to_all(d_buffer.contiguous(), ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(buffer: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sends each rank of the group its part of `buffer`, so many elements each, and returns theirs in order."""
    out = buffer.new_empty(sum(received))
    dist.all_to_all_single(out, buffer, received, sent, group=group)
    return out


def to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shares: Sequence[Share], ctx: SequenceParallel
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [B, H, S, K], k and v [B, KV, S, K] of this rank's S tokens, to this rank's share of the whole sequence:
    q [B, h, rows, K], k and v [B, kv, S * size, K]. One all-to-all."""
    local = q.shape[2]
    start = ctx.rank * local
    pieces = []
    for share in shares:
        rows = [slice(a - start, b - start) for a, b in within(share.rows, start, start + local)]
        pieces.append([*(q[:, share.q, row] for row in rows), k[:, share.kv], v[:, share.kv]])
    mine = shares[ctx.rank]
    batch, heads, kv_heads = q.shape[0], mine.q.stop - mine.q.start, mine.kv.stop - mine.kv.start
    shapes = []
    for source in range(ctx.size):
        rows_there = within(mine.rows, source * local, (source + 1) * local)
        shapes.append(
            [
                *((batch, heads, b - a, q.shape[3]) for a, b in rows_there),
                (batch, kv_heads, local, k.shape[3]),
                (batch, kv_heads, local, v.shape[3]),
            ]
        )
    received = _exchange(pieces, shapes, ctx)
    queries = [tensor for tensors in received for tensor in tensors[:-2]]
    keys, values = [tensors[-2] for tensors in received], [tensors[-1] for tensors in received]
    q_out = torch.cat(queries, 2) if queries else q.new_empty(batch, heads, 0, q.shape[3])
    return q_out, torch.cat(keys, 2), torch.cat(values, 2)


def to_tokens(out: torch.Tensor, local: int, shares: Sequence[Share], ctx: SequenceParallel) -> torch.Tensor:
    """out [B, h, rows, K] of this rank's share, to all heads of this rank's tokens [B, H, S, K]. One all-to-all."""
    mine = shares[ctx.rank]
    pieces: list[list[torch.Tensor]] = []
    done = 0
    for target in range(ctx.size):
        rows = count(within(mine.rows, target * local, (target + 1) * local))
        pieces.append([out[:, :, done : done + rows]])
        done += rows
    start = ctx.rank * local
    batch, width = out.shape[0], out.shape[3]
    here = [within(share.rows, start, start + local) for share in shares]
    shapes = [
        [(batch, share.q.stop - share.q.start, count(rows), width)] for share, rows in zip(shares, here, strict=True)
    ]
    received = [tensors[0] for tensors in _exchange(pieces, shapes, ctx)]
    heads: dict[int, list[tuple[tuple[int, int], torch.Tensor]]] = {}
    for share, rows, tensor in zip(shares, here, received, strict=True):
        done = 0
        found = heads.setdefault(share.q.start, [])
        for row in rows:
            found.append((row, tensor[:, :, done : done + row[1] - row[0]]))
            done += row[1] - row[0]
    in_order = [[piece for _, piece in sorted(found, key=lambda x: x[0])] for _, found in sorted(heads.items())]
    return torch.cat([torch.cat(pieces, 2) for pieces in in_order], 1)


def _exchange(
    pieces: list[list[torch.Tensor]], shapes: list[list[tuple[int, ...]]], ctx: SequenceParallel
) -> list[list[torch.Tensor]]:
    """Sends each rank its pieces, and takes from each what has these shapes."""
    sent = [sum(piece.numel() for piece in there) for there in pieces]
    sizes = [[torch.Size(shape).numel() for shape in there] for there in shapes]
    buffer = torch.cat([piece.reshape(-1) for there in pieces for piece in there])
    flat = AllToAllFunction.apply(buffer, sent, [sum(there) for there in sizes], ctx.group)
    parts = iter(flat.split([size for there in sizes for size in there]))
    return [[next(parts).view(shape) for shape in there] for there in shapes]
