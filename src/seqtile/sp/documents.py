"""Which tokens may attend to which: documents, padding and windows, told by position_ids and attention_mask alone.

Known once per forward, on every rank of the group, and passed to every layer.
Source: Arctic Long Sequence Training, 3.4.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from seqtile.sp.context import SequenceParallel, gather
from seqtile.sp.heads import Rows


@dataclass(frozen=True)
class Layout:
    """The whole sequences of a group's batch, as every layer's attention is given it."""

    ctx: SequenceParallel
    local: int
    """Tokens of a sequence on each rank."""
    documents: tuple[Rows, ...]
    """For each row of the batch the [start, stop) of its documents; padding is in none. One entry if all are alike."""
    implementation: str
    """The attention that is wrapped."""

    last_position: int = 0
    """The largest of all position_ids."""
    asked: set[int] = field(default_factory=set, compare=False, repr=False)
    """The modules that have attended, by id."""
    made: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What is made once for all layers, see `once`."""

    @property
    def length(self) -> int:
        return self.local * self.ctx.size

    def of(self, row: int) -> Rows:
        """The documents of a row of the batch."""
        return self.documents[row if len(self.documents) > 1 else 0]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, which every layer that asks by this key shares."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


def layout_of(
    shape: tuple[int, int],
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    ctx: SequenceParallel,
    implementation: str,
) -> Layout:
    """What the ranks of a group hold together. `position_ids` [B or 1, S], `attention_mask` [B, S], local both.

    Two or three small collectives and a few waits for the device, once per forward. Raises ValueError on every rank if
    the ranks hold batches of different shapes.
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
    documents = rows if any(row != rows[0] for row in rows) else rows[:1]
    return Layout(ctx, local, documents, implementation, int(positions.max()))


def _rows(positions: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = max(len(positions), len(valid))
    return positions.expand(rows, -1), valid.expand(rows, -1)


def _documents(positions: torch.Tensor, valid: torch.Tensor) -> Rows:
    """Runs of tokens that are no padding and whose positions follow one another."""
    follows = (positions[1:] == positions[:-1] + 1) & valid[1:] & valid[:-1]
    starts = torch.cat([valid[:1], valid[1:] & ~follows]).nonzero().flatten()
    ends = torch.cat([valid[:-1] & ~follows, valid[-1:]]).nonzero().flatten() + 1
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))
