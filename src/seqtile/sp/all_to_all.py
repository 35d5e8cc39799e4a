"""The two all-to-alls of a layer's attention: from sharded by tokens to sharded by heads, and back.

    by tokens                                 by heads
    q [B, H, S, K], k and v [B, KV, S, K] --> q [B, h, rows, K], k and v [B, kv, S * size, K]    one all-to-all
    out [B, S, H, K]                      <-- out [B, rows, h, K]                                another

A rank receives only the queries that it computes and the kv heads that they read (heads.py), so splits are as uneven as
the ranks' heads. With heads dealt within nodes (nodes.py) a rank receives queries of its own node's tokens, and keys
and values from every node. Gradients take the opposite way.

Every element is copied once on each side of an all-to-all: with one copy per tensor, or on several nodes per tensor and
part of a node, if all ranks have equal numbers of heads and one run of tokens (on nodes an even number of ranks does);
else with one per tensor and rank.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from seqtile.attention.heads import RankHeads, Rows, count, width, within
from seqtile.protocols import PendingTensors
from seqtile.sp.groups import ALONE, SequenceParallel

Piece = tuple[int, slice, slice]
"""A part of a tensor that one rank sends to another: the tensor's index, its tokens and its heads."""


class Block(NamedTuple):
    """What several ranks that follow one another send or receive, equally much each."""

    ranks: int
    starts: list[int | None]
    """For each tensor, the first of its tokens here; None for a tensor of which they send nothing."""


class AllToAll:
    """The all-to-alls of tensors [B, heads, tokens, K]: from shards of `local` tokens to each rank's heads, and back.

    `by_kv` says for each tensor whether its heads are kv heads, of which a rank gets all tokens, or query heads, of
    which it gets only the queries that it computes. `in_nodes`: heads are dealt within each node.
    """

    def __init__(
        self,
        sp_group: SequenceParallel,
        q_heads: int,
        kv_heads: int,
        by_kv: Sequence[bool],
        local: int,
        in_nodes: bool = False,
    ):
        nodes, size, rank, length = sp_group.nodes, sp_group.size, sp_group.rank, local * sp_group.size
        ranks = nodes.heads(q_heads, kv_heads, length, in_nodes)
        held = [nodes.tokens_of(other, length) for other in range(size)]
        self.sp_group, self._by_kv = sp_group, by_kv
        self._totals = [kv_heads if is_kv else q_heads for is_kv in by_kv]
        self._local, self._sharers = local, nodes.per_node if in_nodes else size
        self.heads = mine = ranks[rank]
        """This rank's heads."""

        def pieces(holder: int, heads: RankHeads, by_heads: bool) -> list[Piece]:
            """Returns what the holder of the tokens sends to the rank with the heads, as indices on either side."""
            found = []
            for i, is_kv in enumerate(by_kv):
                rows, own = (((0, length),), heads.kv) if is_kv else (heads.rows, heads.q)
                for run in held[holder]:
                    for first, last in within(rows, *run):
                        at = count(within(rows if by_heads else held[holder], 0, first))
                        found.append((i, slice(at, at + last - first), slice(0, width(own)) if by_heads else own))
            return found

        # The pieces of each rank, and the tokens and heads of each tensor on this rank; first by tokens, then by heads.
        by_tokens = [pieces(rank, heads, False) for heads in ranks]
        self._pieces = by_tokens, [pieces(holder, mine, True) for holder in range(size)]
        by_heads = [(length, width(mine.kv)) if is_kv else (count(mine.rows), width(mine.q)) for is_kv in by_kv]
        self._sizes = [(local, total) for total in self._totals], by_heads
        self._blocks = None
        if q_heads % self._sharers == 0 and (kv_heads % self._sharers == 0 or self._sharers % kv_heads == 0):
            self._blocks = self._blocks_of(held, in_nodes)
        is_shared = sum(width(heads.kv) for heads in ranks) > kv_heads
        self._summed = [i for i, is_kv in enumerate(by_kv) if is_kv and is_shared]
        """The tensors of which several ranks send the same elements on the way back."""

    def start(self, tensors: Sequence[Tensor], *, to_heads: bool) -> PendingTensors:
        """Starts an all-to-all. Returns a function, to be called once, that waits for the results, contiguous as
        [B, tokens, heads, K]. Elements that several ranks send are summed in float32. Not differentiable. A tensor of a
        wider dtype is sent as several elements of the narrowest.

        Allocates the send buffer, then the receive buffer, then the results; never all three at once. Raises
        ValueError, on every rank and before anything is sent, for dtypes that cannot be sent in either direction.
        """
        dtypes = [x.dtype for x in tensors]
        wire = _wire_dtype(dtypes, self._summed)
        sources = [_viewed(x, wire).transpose(1, 2) for x in tensors]
        batch, widths = len(sources[0]), [x.shape[3] for x in sources]
        sent_counts, counts = (self._counts(batch, widths, by_heads) for by_heads in (not to_heads, to_heads))
        sent = sources[0].new_empty(sum(sent_counts))
        for _, part, place in self._places(sources, sent, not to_heads):
            place.copy_(part)
        received = sent.new_empty(sum(counts))
        work = dist.all_to_all_single(received, sent, counts, sent_counts, group=self.sp_group.started(), async_op=True)

        def wait() -> list[Tensor]:
            nonlocal sent, received
            work.wait()
            arrived, sent, received = received, None, None
            shapes = [(batch, *size, k) for size, k in zip(self._sizes[to_heads], widths, strict=True)]
            results = self._unpacked(arrived, shapes, to_heads)
            return [x.view(dtype).transpose(1, 2) for x, dtype in zip(results, dtypes, strict=True)]

        return wait

    def _counts(self, batch: int, widths: Sequence[int], by_heads: bool) -> list[int]:
        """Returns the number of elements in each rank's pieces."""
        each = [batch * k for k in widths]
        return [sum(each[i] * width(tokens) * width(heads) for i, tokens, heads in of) for of in self._pieces[by_heads]]

    def _blocks_of(self, held: Sequence[Rows], in_nodes: bool) -> tuple[list[Block], list[Block]] | None:
        """Returns what ranks send in blocks, first by tokens, then by heads; None where that differs between ranks.
        Their numbers of heads are equal."""
        if any(len(runs) > 1 for runs in held):
            return None
        nodes, local = self.sp_group.nodes, self._local
        own = self.sp_group.rank // nodes.per_node

        def block(first: int, stop: int) -> Block:
            node, place = divmod(first, nodes.per_node)
            of_queries = held[first][0][0] if not in_nodes else place * local if node == own else None
            return Block(stop - first, [held[first][0][0] if is_kv else of_queries for is_kv in self._by_kv])

        breaks = [i for i in range(1, nodes.size) if i % nodes.per_node == 0 or held[i - 1][0][1] != held[i][0][0]]
        by_tokens = range(0, nodes.size + 1, self._sharers)
        return tuple([block(*ends) for ends in pairwise(edges)] for edges in (by_tokens, [0, *breaks, nodes.size]))

    def _places(
        self, tensors: Sequence[Tensor], buffer: Tensor, by_heads: bool
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields the pieces of tensors [B, tokens, heads, K], each with its tensor's index and its place in a buffer.
        If all ranks have equally many heads, the pieces of a tensor and a block are one view [ranks, 1, B, tokens,
        heads, K] by heads, and by tokens [ranks / n, n, B, tokens, heads, K], where n ranks read the same kv heads."""
        if self._blocks is None:
            parts = [(i, tensors[i][:, tokens, heads]) for of in self._pieces[by_heads] for i, tokens, heads in of]
            places = buffer.split([part.numel() for _, part in parts])
            for (i, part), place in zip(parts, places, strict=True):
                yield i, part, place.view(part.shape)
            return
        for ranks, starts in self._blocks[by_heads]:
            parts = {}
            for i, start in enumerate(starts):
                if start is not None and by_heads:
                    part = tensors[i][:, start : start + ranks * self._local].unflatten(1, (ranks, 1, -1))
                    parts[i] = part.permute(1, 2, 0, 3, 4, 5)
                elif start is not None:
                    part = tensors[i].unflatten(2, (min(ranks, self._totals[i]), 1, -1))
                    parts[i] = part.permute(2, 3, 0, 1, 4, 5)
            sizes = [part.shape[2:].numel() for part in parts.values()]
            here, buffer = buffer.tensor_split([ranks * sum(sizes)])
            places = here.view(ranks, sum(sizes)).split(sizes, 1)
            for (i, part), place in zip(parts.items(), places, strict=True):
                yield i, part, place.view(len(part), -1, *part.shape[2:])

    def _unpacked(self, arrived: Tensor, shapes: Sequence[tuple[int, ...]], by_heads: bool) -> list[Tensor]:
        """Returns the tensors whose pieces are in a buffer."""
        summed, wide = [] if by_heads else self._summed, torch.promote_types(arrived.dtype, torch.float32)
        in_one_sum = self._blocks is not None and len(self._blocks[by_heads]) == 1
        added = [] if in_one_sum else summed  # added rank by rank, so not in a narrow dtype
        results = [
            arrived.new_zeros(shape, dtype=wide) if i in added else arrived.new_empty(shape)
            for i, shape in enumerate(shapes)
        ]
        for i, part, place in self._places(results, arrived, by_heads):
            if i in added:
                for of_rank in [place] if self._blocks is None else place.split(1, 1):
                    part.add_(of_rank)
            elif i in summed:
                torch.sum(place, 1, keepdim=True, out=part)
            else:
                part.copy_(place)
        return [result.to(arrived.dtype) for result in results]


def _wire_dtype(dtypes: Sequence[torch.dtype], summed: Sequence[int]) -> torch.dtype:
    """Returns the dtype in which all tensors are sent. Raises ValueError if a sum, now or in the backward, needs
    another."""
    wire = min(dtypes, key=lambda dtype: dtype.itemsize)
    if any(dtypes[i] != wire for i in summed):
        found = ", ".join(map(str, dtypes))
        raise ValueError(
            f"heads that ranks share are in another dtype than the rest, {found}; expected the narrowest of these: let "
            "the layer compute all of them in one dtype, or use fewer ranks to a sequence"
        )
    return wire


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a view of a tensor's bytes in a dtype that is not wider."""
    return x if x.dtype == dtype else (x if x.stride(-1) == 1 else x.contiguous()).view(dtype)


class AllToAllFunction(torch.autograd.Function):
    """An all-to-all that waits for its result. Its backward is the opposite all-to-all."""

    @staticmethod
    def forward(ctx, all_to_all: AllToAll, to_heads: bool, *tensors: Tensor):
        ctx.all_to_all, ctx.to_heads = all_to_all, to_heads
        return tuple(all_to_all.start(tensors, to_heads=to_heads)())

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return None, None, *ctx.all_to_all.start(gradients, to_heads=not ctx.to_heads)()


def exchanged(all_to_all: AllToAll, to_heads: bool, *tensors: Tensor) -> Sequence[Tensor]:
    """Returns these tensors after an all-to-all, differentiably; in a single process, returns them unchanged."""
    return tensors if all_to_all.sp_group is ALONE else AllToAllFunction.apply(all_to_all, to_heads, *tensors)
