"""The common batch of a group's ranks, one `Layout` per forward: which tokens may attend to which, and the values that
layers derive from that. Only position_ids and attention_mask determine it.

First the ranks compare their data, so that none computes with shards of another batch: each shard carries a hash of the
whole batch, and every forward compares the ranks' hashes.
Source: Arctic Long Sequence Training, 3.4.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqtile.protocols import LAYOUT
from seqtile.sp.all_to_all import AllToAll, Rows
from seqtile.sp.balance import Balance
from seqtile.sp.groups import SequenceParallel, gather

WHOLE_LENGTH = "whole_length"  # in a shard of padded sequences: their tokens before padding
BATCH_HASH = "batch_hash"  # in a shard: the hash of its whole batch
CUTTERS = "sp.shard, sp.DataShardingCollator or sp.ShardedDataLoader"
_HASHED = 2**20  # elements that are hashed at once, at 24 bytes each
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # arbitrary odd numbers
_COMPARED = "[batch, tokens, has a mask, rows of position_ids, has a batch_hash, labelled tokens]"


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
        self.mask: Tensor | None = None
        """This rank's shard of the attention mask."""
        self.whole_length: Tensor | None = None
        """Tokens of a sequence before padding, if it was padded to be cut."""
        self.last_position = 0
        """The largest position_id of all ranks."""
        self.balance: Balance | None = None
        """The loss that balances experts, if requested."""
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

    def counted(self, router_logits: Tensor) -> Tensor:
        """Returns which of this rank's tokens [B S] with router logits are not padding."""
        first = self.sp_group.rank * self.local
        places = torch.arange(first, first + self.local, device=router_logits.device)
        inside = places < (self.length if self.whole_length is None else self.whole_length.to(places.device))
        rows = inside.expand(len(router_logits) // self.local, -1) if self.mask is None else inside & self.mask.bool()
        return rows.flatten()


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


def layout_of(
    local: int, position_ids: Tensor, mask: Tensor | None, sp_group: SequenceParallel, implementation: str
) -> Layout:
    """Returns the layout of the batch that the ranks of a group hold together. `position_ids` [B or 1, S] (or
    [3 or 4, B, S] with several axes) and the attention mask [B, S] are this rank's, with the same shape on every rank.

    As in Hugging Face, without a mask a document starts where a position is not its predecessor plus 1. If position_ids
    have four axes, the first one, the text's, decides; if they have three, a row is one document.

    One or two small collectives and one wait for the device, once per forward. Raises ValueError on every rank for a
    mask with a hole, or a mask over several documents.
    """
    if position_ids.ndim == 3 and len(position_ids) == 4:
        position_ids = position_ids[0]
    elif position_ids.ndim == 3:
        first = sp_group.rank * local
        position_ids = torch.arange(first, first + local, device=position_ids.device)[None]
    positions = torch.cat(list(gather(position_ids, sp_group)), 1)
    valid = torch.ones_like(positions, dtype=torch.bool)
    if mask is not None:
        valid = torch.cat(list(gather(mask.to(torch.uint8), sp_group)), 1).bool()
    rows = documents_of(*torch.broadcast_tensors(positions, valid))
    if mask is not None and any(len(row) > 1 for row in rows):
        raise ValueError(
            "attention_mask has a hole, or position_ids restart under it; expected padding at the ends of rows, or "
            "packed documents without an attention_mask"
        )
    documents = rows if any(row != rows[0] for row in rows) else rows[:1]
    return Layout(sp_group, local, documents, implementation)


def documents_of(positions: Tensor, valid: Tensor) -> tuple[Rows, ...]:
    """For each row of [B, S], returns the runs of tokens, without padding, whose positions are consecutive. One wait
    for the device."""
    follows = (positions[:, 1:] == positions[:, :-1] + 1) & valid[:, 1:] & valid[:, :-1]
    begins = torch.cat([valid[:, :1], valid[:, 1:] & ~follows], 1)
    ends = torch.cat([valid[:, :-1] & ~follows, valid[:, -1:]], 1)
    found = [[edges.nonzero().flatten().tolist() for edges in row] for row in torch.stack([begins, ends], 1).cpu()]
    return tuple(tuple((start, last + 1) for start, last in zip(*row, strict=True)) for row in found)


def hash_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns a number [] that differs if the integers in `tensors` or their order differ. Computed on their device,
    without waiting for it. Allocates at most 24 MiB, and a copy of a tensor that is not contiguous."""
    return _hash(torch.stack([_hash(values) for _, values in sorted(tensors.items())]))


def _hash(values: Tensor) -> Tensor:
    parts = values.flatten().split(_HASHED)
    return torch.stack([mixed(part, i * _HASHED).sum() for i, part in enumerate(parts)]).sum()


def mixed(values: Tensor, first: int = 0) -> Tensor:
    """Returns int64 [..., K] whose sum over K differs if the integers [..., K] or their order differ. `first`: the
    number of values before these. Allocates 24 bytes an element."""
    order = torch.arange(first + 1, first + values.shape[-1] + 1, device=values.device)
    found = values.to(torch.int64) + order.mul_(_FACTORS[0])  # sums and products wrap around
    found.mul_(_FACTORS[1])
    found.bitwise_xor_(found >> 32).mul_(_FACTORS[2])
    return found.bitwise_xor_(found >> 29)


def bits(tensor: Tensor) -> Tensor:
    """Returns a tensor's bits as integers, without a copy."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().view(getattr(torch, f"int{8 * tensor.element_size()}"))


def token_hashes(values: Tensor) -> Tensor:
    """Returns int64 [B, S] that differ for tokens of which the integers [B, S, ...] differ. Allocates 24 MiB besides
    (more if a token has over 2^20 integers)."""
    rows = []
    for row in values.flatten(2):
        rows.append(torch.cat([mixed(part).sum(1) for part in row.split(max(1, _HASHED // max(1, row.shape[1])))]))
    return torch.stack(rows)


def check_same_batch(
    tokens: Tensor,
    kwargs: Mapping[str, Any],
    batch_hash: Tensor | None,
    sp_group: SequenceParallel,
    expected: str,
    choices: Mapping[str, str],
) -> int:
    """Returns the largest of all ranks' position_ids. `tokens` are input_ids [B, S] or inputs_embeds [B, S, D]. Of the
    model's keyword arguments it reads position_ids, attention_mask and num_items_in_batch. `choices` are the ways in
    which modules compute.

    Raises ValueError on every rank, naming what was `expected`, if the ranks hold batches of different shapes or shards
    of different batches, if they have no position_ids, if all ranks hold the same tokens and nothing marks them as
    shards, or if a module's way is not the same on all ranks. One small collective and one wait for the device.
    """
    position_ids, items = kwargs.get("position_ids"), kwargs.get("num_items_in_batch")
    rows, last, own = 0, 0, batch_hash
    if position_ids is not None:
        rows, last = position_ids.shape[:-1].numel(), position_ids.max()
    if batch_hash is None:  # embeddings are not compared
        comparable = sp_group.size > 1 and position_ids is not None and not tokens.is_floating_point()
        own = hash_of({"tokens": tokens, "position_ids": position_ids}) if comparable else sp_group.rank
    sizes = [*tokens.shape[:2], int(kwargs.get("attention_mask") is not None), rows, int(batch_hash is not None)]
    way = zlib.crc32(repr(sorted(choices.items())).encode())
    numbers = (way, sizes, 0 if items is None else items, last, own)  # on the host and the device: one wait for all
    mine = torch.cat([torch.as_tensor(x, dtype=torch.int64, device=tokens.device).view(-1) for x in numbers])
    ranks = gather(mine, sp_group).tolist()
    ways = {rank.pop(0) for rank in ranks}
    shapes, lasts, hashes = [rank[:-2] for rank in ranks], [rank[-2] for rank in ranks], [rank[-1] for rank in ranks]
    wrong = None
    if len(ways) > 1:
        wrong = _differing(choices, sp_group)
        expected = "the same hooks, adapters and options on every rank of the group"
    elif any(shape != shapes[0] for shape in shapes):
        wrong = f"the ranks of a group hold batches of different shapes, {_COMPARED} = {shapes}"
    elif position_ids is None:
        wrong = "no position_ids came with the tokens, and nothing else tells a shard from a whole sequence"
    elif batch_hash is not None and len(set(hashes)) > 1:
        wrong = f"the ranks of a group hold shards of different batches, batch_hash = {hashes}"
    elif batch_hash is None and sp_group.size > 1 and len(set(hashes)) == 1:
        wrong = "every rank of the group holds the same tokens at the same positions"
    if wrong is not None:
        raise ValueError(f"{wrong}; expected {expected}")
    return max(lasts)


def _differing(choices: Mapping[str, str], sp_group: SequenceParallel) -> str:
    """Returns which module the ranks compute in different ways. One collective."""
    found: list = [None] * sp_group.size
    dist.all_gather_object(found, dict(choices), group=sp_group.group)
    names = [name for name in found[0] | found[-1] if len({each.get(name) for each in found}) > 1]
    name = next(iter(names), "a layer")
    return f"the ranks of a group compute {name} in different ways, {[each.get(name) for each in found]}"
