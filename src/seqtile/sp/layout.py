"""The common batch of a group's ranks, one `ShardedLayout` per forward."""

from typing import Any

import torch
from torch import Tensor, nn

from seqtile.attention.heads import Rows
from seqtile.attention.layout import Layout, text_positions
from seqtile.protocols import LAYOUT
from seqtile.sp.all_to_all import AllToAll
from seqtile.sp.groups import SequenceParallel, gather
from seqtile.sp.shards import in_order


class ShardedLayout(Layout):
    """The whole sequences of a group's batch, of which each rank holds a part."""

    def __init__(self, sp_group: SequenceParallel, local: int, documents: tuple[Rows, ...], implementation: str):
        super().__init__(local * sp_group.size, documents, implementation)
        self.sp_group = sp_group
        self.local = local
        """Tokens of a sequence on each rank."""
        self.tokens = sp_group.nodes.tokens_of(sp_group.rank, self.length)
        """The [start, stop) of those on this rank."""
        self.is_masked_outside = False
        """True if a mask was made outside the text model; it is causal except in the spans."""
        self.attended: set[int] = set()
        """The ids of the modules that have attended."""
        self.convolution: Any = None
        """The arguments of a recurrent layer's convolution, kept until its rule runs."""
        self.position_ids: Tensor | None = None
        """This rank's position_ids. A model without attention does not pass them to its base model."""

    def all_to_all(self, q_heads: int, kv_heads: int, by_kv: tuple[bool, ...], in_nodes: bool = False) -> AllToAll:
        """Returns the all-to-all of tensors with these numbers of heads, see `AllToAll`."""
        arguments = (q_heads, kv_heads, by_kv, self.local, in_nodes)
        return self.once(("all-to-all", *arguments), lambda: AllToAll(self.sp_group, *arguments))


def layout_in(kwargs: dict[str, Any], module: nn.Module) -> ShardedLayout:
    """Removes the layout from a module's keyword arguments, and records that the module attended. ValueError without
    one."""
    if (layout := kwargs.pop(LAYOUT, None)) is None:
        raise ValueError(
            f"no layout came with the tokens of {type(module).__name__}: call the model that sp.apply_ulysses was "
            "given, as a whole; models that do not pass keyword arguments on or have an image encoder are not supported"
        )
    layout.attended.add(id(module))
    return layout


def gathered_positions(
    position_ids: Tensor, mask: Tensor | None, sp_group: SequenceParallel
) -> tuple[Tensor, Tensor | None]:
    """Returns the `text_positions` and the mask of whole sequences from each rank's, of the same shape on every rank.
    One or two small collectives."""
    nodes, length = sp_group.nodes, sp_group.size * position_ids.shape[-1]
    text = text_positions(position_ids, nodes.tokens_of(sp_group.rank, length))
    whole = in_order(gather(text, sp_group), nodes)
    return whole, None if mask is None else in_order(gather(mask.to(torch.uint8), sp_group), nodes)
