"""Which tokens may attend to which: documents, padding and windows, told by position_ids and attention_mask alone.

Known once per forward, on every rank of the group, and passed to every layer. No S x S mask is ever made: what a block
of queries sees is a slice of the keys, and a small mask where that is not all of it.
Source: Arctic Long Sequence Training, 3.4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from seqtile.sp.context import SequenceParallel, gather

MASK_ELEMENTS = 2**24  # of the largest mask: 16 MiB of bools


class Block(NamedTuple):
    """Queries [q0, q1) and the keys [k0, k1) that one of them may see."""

    q0: int
    q1: int
    k0: int
    k1: int

    def is_square(self, window: int | None) -> bool:
        """Whether it is a causal square, for which no mask is needed."""
        return self.q0 == self.k0 and self.q1 == self.k1 and (window is None or self.k1 - self.k0 <= window)

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor:
        """[q1 - q0, k1 - k0], True where a query sees a key."""
        distance = torch.arange(self.q0, self.q1, device=device)[:, None] - torch.arange(
            self.k0, self.k1, device=device
        )
        return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


@dataclass(frozen=True)
class Layout:
    """The whole sequences of a group's batch, as every layer's attention is given it."""

    ctx: SequenceParallel
    local: int
    """Tokens of a sequence on each rank."""
    documents: tuple[tuple[tuple[int, int], ...], ...]
    """For each row of the batch the [start, stop) of its documents; padding is in none. One entry if all are alike."""
    implementation: str
    """The attention that is wrapped."""

    @property
    def length(self) -> int:
        return self.local * self.ctx.size

    @property
    def is_plain(self) -> bool:
        """Whether every row is one document without padding."""
        return self.documents == (((0, self.length),),)


def layout_of(
    shape: tuple[int, int],
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    ctx: SequenceParallel,
    implementation: str,
) -> Layout:
    """What the ranks of a group hold together. `position_ids` [B or 1, S], `attention_mask` [B, S], local both.

    Three small collectives and one wait for the device, once per forward. Raises ValueError on every rank if the ranks
    hold batches of different shapes.
    """
    batch, local = shape
    device = position_ids.device
    masked = int(attention_mask is not None)
    shapes = gather(torch.tensor([batch, local, masked, len(position_ids)], device=device), ctx)
    shapes = torch.stack(shapes).tolist()
    if any(other != shapes[0] for other in shapes):
        raise ValueError(
            f"the ranks of a group hold batches of different shapes, [batch, tokens, has a mask, rows of position_ids] "
            f"= {shapes}; expected shards of the same batch, as sp.DataShardingCollator cuts them"
        )
    positions = torch.cat(gather(position_ids, ctx), 1)
    valid = torch.cat(gather(attention_mask.to(torch.uint8), ctx), 1).bool() if attention_mask is not None else None
    if valid is None:
        valid = torch.ones_like(positions, dtype=torch.bool)
    rows = tuple(_documents(*row) for row in zip(*_rows(positions, valid), strict=True))
    return Layout(ctx, local, rows if any(row != rows[0] for row in rows) else rows[:1], implementation)


def _rows(positions: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = max(len(positions), len(valid))
    return positions.expand(rows, -1), valid.expand(rows, -1)


def _documents(positions: torch.Tensor, valid: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Runs of tokens that are no padding and whose positions follow one another."""
    follows = (positions[1:] == positions[:-1] + 1) & valid[1:] & valid[:-1]
    starts = torch.cat([valid[:1], valid[1:] & ~follows]).nonzero().flatten()
    ends = torch.cat([valid[:-1] & ~follows, valid[-1:]]).nonzero().flatten() + 1
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def blocks(
    rows: tuple[tuple[int, int], ...], documents: tuple[tuple[int, int], ...], window: int | None
) -> Iterator[Block]:
    """The queries in `rows`, document by document, with the keys that they see; queries of padding are in none."""
    for first, last in rows:
        for start, stop in documents:
            q0, q1 = max(first, start), min(last, stop)
            while q0 < q1:
                block = Block(q0, q1, start, q1)
                if not block.is_square(window):
                    end = _end(q0, q1, start, window)
                    block = Block(q0, end, start if window is None else max(start, q0 - window + 1), end)
                yield block
                q0 = block.q1


def _end(q0: int, q1: int, start: int, window: int | None) -> int:
    """Where a block that begins at q0 ends, so that its mask is small: a window's worth at most, if there is one."""
    if window is not None:
        rows = min(window, max(1, MASK_ELEMENTS // (2 * window)))
    else:
        rows = max(1, MASK_ELEMENTS // max(1, q1 - start))
    return min(q1, q0 + rows)
