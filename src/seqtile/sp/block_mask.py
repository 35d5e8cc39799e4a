"""Flex attention's form: a BlockMask, of intervals of keys, one to each query."""

import torch
from torch.nn.attention.flex_attention import BlockMask

from seqtile.sp.blocks import segments
from seqtile.sp.heads import count
from seqtile.sp.wrapped import Attention

SIDE = 128  # tokens a side of its blocks, torch's default


def by_block_mask(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    key = ("block mask", attention.window, attention.share.rows)
    return attention.compute(q, k, v, attention.layout.once(key, lambda: _block_mask(attention, len(q), q.device)))


def _block_mask(attention: Attention, batch: int, device: torch.device) -> BlockMask:
    """Of the keys [first, last] that each query sees, no tensor larger than queries x keys / 128^2."""
    share, length = attention.share, attention.layout.length
    queries = count(share.rows)
    shape = (batch, -(-queries // SIDE) * SIDE)
    first, last = torch.full(shape, length), torch.full(shape, -1)  # as of a query that sees nothing
    for row in range(batch):
        for segment in segments(share.rows, attention.layout.of(row), attention.window):
            at, tokens = share.place(segment.q0), torch.arange(segment.q0, segment.q1)
            here = slice(at, at + len(tokens))
            first[row, here] = (
                segment.k0 if attention.window is None else (tokens - attention.window + 1).clamp(segment.k0)
            )
            last[row, here] = tokens
    first, last = first.to(device), last.to(device)
    begin, end = (x.view(batch, -1, 1, SIDE) for x in (first, last))
    keys = torch.arange(0, length, SIDE, device=device)
    some = (begin.amin(3) < keys + SIDE) & (end.amax(3) >= keys)
    full = (begin.amax(3) <= keys) & (end.amin(3) >= keys + SIDE - 1)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~full),
        *_listed(full),
        BLOCK_SIZE=SIDE,
        mask_mod=lambda b, h, query, key: (first[b, query] <= key) & (key <= last[b, query]),
        seq_lengths=(queries, length),
    )


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row [B, queries / 128, keys / 128] how many are chosen, and which, those first."""
    order = chosen.to(torch.int32).argsort(dim=2, descending=True, stable=True)
    return chosen.sum(2, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
