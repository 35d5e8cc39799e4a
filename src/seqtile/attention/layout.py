"""Which tokens of a batch may attend to which, one `Layout` per forward, and the values that layers derive from that.
Only position_ids, cumulative lengths and attention_mask determine it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqtile.attention.heads import Rows

VARLEN = "seqtile_varlen_or_"
"""The name of the attention without masks, before that of the attention whose place it takes, see varlen.py."""


class Layout:
    """The sequences of a batch in one forward, and values derived from them once.

    All layers share one object, also in a checkpoint's recomputation. It is no dataclass, dict or tuple, because FSDP2
    copies these when it casts a layer's arguments.
    """

    def __init__(self, length: int, documents: tuple[Rows, ...], implementation: str):
        self.length = length
        """Tokens of a sequence."""
        self.documents = documents
        """For each row of the batch, the [start, stop) of its documents, without padding. One entry if all rows are
        alike."""
        self.parents: tuple[int | None, ...] = ()
        """If rows of the batch share prefixes: for each document of the one row, the earlier document that it
        continues, see sp/prefixes.py."""
        self.spans: tuple[tuple[Rows, ...], tuple[Rows, ...]] = ((), ())
        """For layers without and with a window, and each entry of documents: the [start, stop) of spans whose tokens
        see each other in both directions, if there are any."""
        self.implementation = implementation
        """The attention that computes heads, by Hugging Face's name."""
        self.has_mask = False
        """True if the batch has an attention mask, which tells padding."""
        self.whole_length: Tensor | int | None = None
        """Tokens of a sequence before padding, if it was padded to be cut over ranks."""
        self._made: dict[Any, Any] = {}  # see `once`

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns the result of `make`, computed once per key and shared by all layers."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def text_positions(position_ids: Tensor, tokens: Rows | None = None) -> Tensor:
    """Returns the positions [B or 1, S] that tell documents apart, from position_ids [B or 1, S], or [3 or 4, B, S]
    with several axes: of four axes the first one, the text's; of three, a row is one document. `tokens`: those of the
    whole sequence that these are; None for all."""
    if position_ids.ndim < 3:
        return position_ids
    is_told = len(position_ids) == 4
    tokens = ((0, position_ids.shape[-1]),) if tokens is None else tokens
    return position_ids[0] if is_told else indices(tokens, position_ids.device)[None]


def indices(tokens: Sequence[tuple[int, int]], device: torch.device | None = None) -> Tensor:
    """Returns the indices of these tokens."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in tokens])


def document_edges(position_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the edges, see `edges_of`, of the documents of whole sequences, from position_ids and attention mask. As
    in Hugging Face, without a mask a document starts where a position is not its predecessor plus 1."""
    positions = text_positions(position_ids)
    valid = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask.bool()
    return edges_of(*torch.broadcast_tensors(positions, valid))


def documents_at(edges: Tensor, has_mask: bool) -> tuple[Rows, ...]:
    """Returns the documents of a batch from its edges, as `Layout` has them. Raises ValueError for a mask with a hole,
    or a mask over several documents."""
    rows = rows_between(edges)
    if has_mask and any(len(row) > 1 for row in rows):
        raise ValueError(
            "attention_mask has a hole, or position_ids restart under it; expected padding at the ends of rows, or "
            "packed documents without an attention_mask"
        )
    return rows if any(row != rows[0] for row in rows) else rows[:1]


def edges_of(positions: Tensor, valid: Tensor) -> Tensor:
    """For each row of [B, S], returns the first and the last tokens of the runs whose positions are consecutive,
    without padding: bool [B, 2, S]."""
    follows = (positions[:, 1:] == positions[:, :-1] + 1) & valid[:, 1:] & valid[:, :-1]
    begins = torch.cat([valid[:, :1], valid[:, 1:] & ~follows], 1)
    ends = torch.cat([valid[:, :-1] & ~follows, valid[:, -1:]], 1)
    return torch.stack([begins, ends], 1)


def rows_between(edges: Tensor) -> tuple[Rows, ...]:
    """For each row of edges [B, 2, S], returns the [start, stop) of its runs. One wait for the device."""
    found = [[each.nonzero().flatten().tolist() for each in row] for row in edges.cpu()]
    return tuple(tuple((start, last + 1) for start, last in zip(*row, strict=True)) for row in found)
