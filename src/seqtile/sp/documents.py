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
    local: int,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    ctx: SequenceParallel,
    implementation: str,
    last_position: int = 0,
) -> Layout:
    """What the ranks of a group hold together. `position_ids` [B or 1, S], or of several axes [3 or 4, B, S], and
    `attention_mask` [B, S] are local, and of the same shape on every rank.

    As for Hugging Face, documents are told by positions that restart, where there is no mask; of several axes by the
    first of four, that of the text.

    One or two small collectives and a few waits for the device, once per forward. Raises ValueError on every rank for a
    mask with a hole or over documents.
    """
    masked = attention_mask is not None
    positions = _of_text(position_ids, local, ctx)
    positions = torch.cat(gather(positions, ctx), 1)
    valid = torch.ones_like(positions, dtype=torch.bool)
    if masked:
        valid = torch.cat(gather(attention_mask.to(torch.uint8), ctx), 1).bool()
    rows = tuple(_documents(*row) for row in zip(*_rows(positions, valid), strict=True))
    if masked and any(len(row) > 1 for row in rows):
        raise ValueError(
            "attention_mask has a hole, or position_ids restart under it, where Hugging Face would let all tokens of a "
            "row see each other; expected padding at the ends of rows, or packed documents without an attention_mask"
        )
    documents = rows if any(row != rows[0] for row in rows) else rows[:1]
    return Layout(ctx, local, documents, implementation, last_position)


def _of_text(position_ids: torch.Tensor, local: int, ctx: SequenceParallel) -> torch.Tensor:
    """The positions that tell documents, [B or 1, S]."""
    if position_ids.ndim == 2:
        return position_ids
    if len(position_ids) == 4:
        return position_ids[0]
    return torch.arange(ctx.rank * local, (ctx.rank + 1) * local, device=position_ids.device)[None]


def _rows(positions: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = max(len(positions), len(valid))
    return positions.expand(rows, -1), valid.expand(rows, -1)


def _documents(positions: torch.Tensor, valid: torch.Tensor) -> Rows:
    """Runs of tokens that are no padding and whose positions follow one another."""
    follows = (positions[1:] == positions[:-1] + 1) & valid[1:] & valid[:-1]
    starts = torch.cat([valid[:1], valid[1:] & ~follows]).nonzero().flatten()
    ends = torch.cat([valid[:-1] & ~follows, valid[-1:]]).nonzero().flatten() + 1
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))
