"""Compares what the ranks of a group compute, so that none computes with a shard of another batch: every forward
compares a hash of the whole batch, and the ways in which modules compute.

Source: Arctic Long Sequence Training, 3.4.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seqtile.sp.groups import SequenceParallel, gather

_HASHED = 2**20  # elements that are hashed at once, at 24 bytes each
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # arbitrary odd numbers
_COMPARED = "[batch, tokens, has a mask, rows of position_ids, has a batch_hash, labelled tokens]"


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
    *along: Tensor,
) -> tuple[Any, ...]:
    """Returns the largest of all ranks' position_ids, and copies of the tensors `along` on the CPU. One small
    collective and one wait for the device.

    `tokens` are input_ids [B, S] or inputs_embeds [B, S, D]. Of the model's keyword arguments it reads position_ids,
    attention_mask and num_items_in_batch. `choices` are the ways in which modules compute.

    Raises ValueError on every rank, naming what was `expected`, if the ranks hold batches of different shapes or shards
    of different batches, if they have no position_ids, if all ranks hold the same tokens and nothing marks them as
    shards, or if a module's way is not the same on all ranks.
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
    numbers, *along = _on_host(gather(mine, sp_group), *along)
    ways, *shapes, lasts, hashes = numbers.T.tolist()
    shapes, wrong = [*zip(*shapes, strict=True)], None
    if len(set(ways)) > 1:
        wrong = _differing(choices, sp_group)
        expected = "the same hooks, adapters and options on every rank of the group"
    elif len(set(shapes)) > 1:
        wrong = f"the ranks of a group hold batches of different shapes, {_COMPARED} = {shapes}"
    elif position_ids is None:
        wrong = "no position_ids came with the tokens, and nothing else tells a shard from a whole sequence"
    elif batch_hash is not None and len(set(hashes)) > 1:
        wrong = f"the ranks of a group hold different batches, or shards of different ones, batch_hash = {hashes}"
    elif batch_hash is None and sp_group.size > 1 and len(set(hashes)) == 1:
        wrong = "every rank of the group holds the same tokens at the same positions"
    if wrong is not None:
        raise ValueError(f"{wrong}; expected {expected}")
    return max(lasts), *along


def _on_host(*tensors: Tensor) -> list[Tensor]:
    """Returns copies of tensors on the CPU, those with the widest elements first. One wait for the device."""
    parts = [tensor.flatten().view(torch.uint8) for tensor in tensors]
    copies = torch.cat(parts).cpu().split([len(part) for part in parts])
    return [copy.view(each.dtype).view(each.shape) for copy, each in zip(copies, tensors, strict=True)]


def _differing(choices: Mapping[str, str], sp_group: SequenceParallel) -> str:
    """Returns which module the ranks compute in different ways. One collective."""
    found: list = [None] * sp_group.size
    dist.all_gather_object(found, dict(choices), group=sp_group.group)
    names = [name for name in found[0] | found[-1] if len({each.get(name) for each in found}) > 1]
    name = next(iter(names), "a layer")
    return f"the ranks of a group compute {name} in different ways, {[each.get(name) for each in found]}"
