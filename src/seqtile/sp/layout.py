"""The common batch of a group's ranks, one `Layout` per forward: which tokens may attend to which, and the values that
layers derive from that. Only position_ids and attention_mask determine it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqtile.protocols import LAYOUT
from seqtile.sp.all_to_all import AllToAll
from seqtile.sp.groups import SequenceParallel, gather
from seqtile.sp.heads import Rows


class Layout:
    """The whole sequences of a group's batch in one forward, and values derived from them once.

    All layers share one object, also in a checkpoint's recomputation. It is no dataclass, dict or tuple, because FSDP2
    copies these when it casts a layer's arguments.
    """

    def __init__(self, sp_group: SequenceParallel, local: int, documents: tuple[Rows, ...], implementation: str):
        self.sp_group = sp_group
        self.local = local
        """Tokens of a sequence on each rank."""
        self.documents = documents
        """For each row of the batch, the [start, stop) of its documents, without padding. One entry if all rows are
        alike."""
        self.parents: tuple[int | None, ...] = ()
        """If rows of the batch share prefixes: for each document of the one row, the earlier document that it
        continues, see prefixes.py."""
        self.spans: tuple[tuple[Rows, ...], tuple[Rows, ...]] = ((), ())
        """For layers without and with a window, and each entry of documents: the [start, stop) of spans whose tokens
        see each other in both directions, if there are any."""
        self.is_masked_outside = False
        """True if a mask was made outside the text model; it is causal except in the spans."""
        self.implementation = implementation
        """The model's original attention, which computes this rank's heads."""
        self.attended: set[int] = set()
        """The ids of the modules that have attended."""
        self.convolution: Any = None
        """The arguments of a recurrent layer's convolution, kept until its rule runs."""
        self.position_ids: Tensor | None = None
        """This rank's position_ids. A model without attention does not pass them to its base model."""
        self.has_mask = False
        """True if the batch has an attention mask, which tells padding."""
        self.whole_length: Tensor | int | None = None
        """Tokens of a sequence before padding, if it was padded to be cut."""
        self._made: dict[Any, Any] = {}  # see `once`

    @property
    def length(self) -> int:
        """Tokens of a whole sequence."""
        return self.local * self.sp_group.size

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns the result of `make`, computed once per key and shared by all layers."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def all_to_all(self, q_heads: int, kv_heads: int, by_kv: tuple[bool, ...]) -> AllToAll:
        """Returns the all-to-all of tensors with these numbers of heads, see `AllToAll`."""
        arguments = (q_heads, kv_heads, by_kv, self.local)
        return self.once(("all-to-all", *arguments), lambda: AllToAll(self.sp_group, *arguments))


def layout_in(kwargs: dict[str, Any], module: nn.Module) -> Layout:
    """Removes the layout from a module's keyword arguments, and records that the module attended. ValueError without
    one."""
    if (layout := kwargs.pop(LAYOUT, None)) is None:
        raise ValueError(
            f"no layout came with the tokens of {type(module).__name__}: call the model that sp.apply_ulysses was "
            "given, as a whole; models that do not pass keyword arguments on or have an image encoder are not supported"
        )
    layout.attended.add(id(module))
    return layout


def text_positions(position_ids: Tensor, first: int = 0) -> Tensor:
    """Returns the positions [B or 1, S] that tell documents apart, from position_ids [B or 1, S], or [3 or 4, B, S]
    with several axes: of four axes the first one, the text's; of three, a row is one document. `first`: the index of
    the first of these tokens in the whole sequence."""
    if position_ids.ndim < 3:
        return position_ids
    length = position_ids.shape[-1]
    is_told = len(position_ids) == 4
    return position_ids[0] if is_told else torch.arange(first, first + length, device=position_ids.device)[None]


def gathered_positions(
    position_ids: Tensor, mask: Tensor | None, sp_group: SequenceParallel
) -> tuple[Tensor, Tensor | None]:
    """Returns the `text_positions` and the mask of whole sequences from each rank's, of the same shape on every rank.
    One or two small collectives."""
    text = text_positions(position_ids, sp_group.rank * position_ids.shape[-1])
    whole = torch.cat(list(gather(text, sp_group)), 1)
    return whole, None if mask is None else torch.cat(list(gather(mask.to(torch.uint8), sp_group)), 1)


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
