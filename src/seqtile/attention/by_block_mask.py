"""Computes attention by flex attention, with a BlockMask."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from seqtile.attention.heads import count
from seqtile.attention.local import LocalAttention, visible
from seqtile.attention.segments import family

SIDE = 128  # tokens per side of a BlockMask's blocks, torch's default


def by_block_mask(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Calls flex attention with a BlockMask."""
    key = ("block mask", attention.reach, attention.heads.rows, bool(attention.spans), q.device)
    return attention.compute(q, k, v, attention.layout.once(key, lambda: block_mask(attention, len(q), q.device)))


def block_mask(attention: LocalAttention, batch: int, device: torch.device) -> BlockMask:
    """Returns the BlockMask of this rank's queries. No tensor is larger than queries x keys / 128^2.

    A query sees a key at or before its position and within the window if the key's document is the query's own or an
    ancestor of it. The documents that may see a key are consecutive, so each key is visible up to one end.
    """
    queries, layout, reach = count(attention.heads.rows), attention.layout, attention.reach
    keys = -(-layout.length // SIDE) * SIDE
    last = torch.full((batch, -(-queries // SIDE) * SIDE), -1)  # the last key that a query sees; -1 for none
    for row, at, (q0, q1, seen, two_ways) in visible(attention, batch):
        last[row, at : at + q1 - q0] = seen[-1][1] - 1 if two_ways else torch.arange(q0, q1)
    place = F.pad(torch.cat([torch.arange(*piece) for piece in attention.heads.rows]), (0, last.shape[1] - queries))
    ends, depth = torch.zeros(batch, keys, dtype=torch.long), torch.zeros(batch, keys, dtype=torch.long)
    for row in range(batch):
        documents = layout.documents[row if len(layout.documents) > 1 else 0]
        for (start, stop), path, end in zip(documents, *family(documents, layout.parents), strict=True):
            ends[row, start:stop] = end
            depth[row, start:stop] = torch.arange(stop - start) + count(path)
    of_query = depth[:, place]
    last, place, ends, depth, of_query = (x.to(device) for x in (last, place, ends, depth, of_query))

    def side(x: Tensor, of_keys: bool) -> Tensor:
        return x.view(len(x) if x.dim() > 1 else 1, *((1, -1) if of_keys else (-1, 1)), SIDE)

    begins = torch.arange(0, keys, SIDE, device=device)
    seen_by, own, away = side(last, False), side(place, False), side(of_query, False)
    end, at = side(ends, True), side(depth, True)
    some = (seen_by.amax(3) >= begins) & (own.amin(3) < end.amax(3)) & (away.amin(3) - at.amax(3) < reach)
    full = (seen_by.amin(3) >= begins + SIDE - 1) & (own.amax(3) < end.amin(3)) & (away.amax(3) - at.amin(3) < reach)

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_near = of_query[b, query] - depth[b, key] < reach
        return (key <= last[b, query]) & (place[query] < ends[b, key]) & is_near

    listed = (*_listed(some & ~full), *_listed(full))
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=SIDE, mask_mod=sees, seq_lengths=(queries, layout.length))


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of [B, queries / 128, keys / 128], returns how many are chosen, and all indices, the chosen
    first."""
    order = chosen.to(torch.int32).argsort(dim=2, descending=True, stable=True)
    return chosen.sum(2, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
