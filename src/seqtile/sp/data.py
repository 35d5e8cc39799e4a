"""A rank's shards of batches: cut from a batch that all ranks of the group have, or sent by ranks that draw different
batches.

`shard` and `DataShardingCollator`: all ranks of the group get the same samples (sample by `ctx.data_parallel_rank` and
`ctx.data_parallel_size`), make the same batch, and keep their own part of the sequence. Labels are shifted before the
cut, because the label of a shard's last token is in the next shard.

`ShardedDataLoader`: ranks draw different samples, as in data parallelism. In a round every rank of the group draws one
batch, cuts it, and sends each other rank its shard: one gather of who has a batch, and one scatter for each. No rank
ever holds another rank's whole batch. The group then trains on the round's batches one after the other.
Source: Arctic Long Sequence Training, 4.2 and 4.3.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from seqtile.sp.groups import SequenceParallel, device_of
from seqtile.sp.layout import BATCH_HASH, CUTTERS, WHOLE_LENGTH, hash_of

IGNORED = -100


class DataShardingCollator:
    """Wraps a Hugging Face collator, and keeps this rank's part of every sequence of its batch.

    It pads sequences to a multiple of the group's size. It adds to the batch: `shift_labels`; global `position_ids` if
    there are none; `num_items_in_batch`, the group's number of labelled tokens, with which a model's loss is exactly
    this rank's part of the group's loss; `batch_hash`, with which the model detects shards of different batches;
    `whole_length` if sequences were padded. `labels` stay. Values without a sequence dimension are kept whole.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]], ctx: SequenceParallel):
        self.collator = collator
        self.rank, self.size = ctx.rank, ctx.size  # not the group, which cannot be sent to a loader's workers

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        return parts_of(self.collator(samples), [self.rank], self.size)[0]


def shard(batch: dict[str, Any], ctx: SequenceParallel) -> dict[str, Any]:
    """Returns this rank's part of a whole batch, see `DataShardingCollator`. Raises ValueError for a batch without
    tokens and for a batch that is a shard already."""
    return parts_of(batch, [ctx.rank], ctx.size)[0]


def count_items(batches: list[dict[str, Tensor]], ctx: SequenceParallel) -> Tensor:
    """Returns the labelled tokens of an accumulation window, averaged over the data-parallel groups: the
    `num_items_in_batch` for losses that are summed over the window and averaged over the groups.

    `batches` are this rank's shards, with `shift_labels`. One all-reduce.
    """
    counts = torch.stack([(batch["shift_labels"] != IGNORED).sum() for batch in batches])
    total = counts.sum().to(device_of(ctx))
    dist.all_reduce(total)
    return (total * ctx.size / dist.get_world_size()).to(counts.device)  # ranks of one replica count the same labels


def parts_of(
    batch: dict[str, Any], ranks: Sequence[int], size: int, batch_hash: Tensor | None = None
) -> list[dict[str, Any]]:
    """Cuts a whole batch into `size` equal runs of tokens, wherever its documents end, and returns the shards of
    `ranks`, each with position_ids, shift_labels, num_items_in_batch and the batch's hash (`batch_hash`, if known)."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"expected a dict of tensors as batch, got a {type(batch).__name__}")
    if BATCH_HASH in batch:
        raise ValueError(f"this batch is a shard already, expected a whole one: cut it once, by one of {CUTTERS}")
    tokens = batch.get("inputs_embeds") if batch.get("input_ids") is None else batch["input_ids"]
    if tokens is None:
        raise ValueError(f"the batch has {', '.join(batch) or 'nothing'}, expected input_ids or inputs_embeds in it")
    batch, (rows, length) = dict(batch), tokens.shape[:2]
    local = -(-length // size)
    if "labels" in batch and "shift_labels" not in batch:
        batch["shift_labels"] = F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]
    if "shift_labels" in batch and "num_items_in_batch" not in batch:
        batch["num_items_in_batch"] = (batch["shift_labels"] != IGNORED).sum()
    if "position_ids" not in batch:
        batch["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
    dims = {name: dim for name, x in batch.items() if (dim := sequence_dim(name, x, rows, length)) is not None}
    integers = {name: batch[name] for name in dims if not batch[name].is_floating_point()}  # the same on any GPU
    batch[BATCH_HASH] = hash_of(integers) if batch_hash is None else batch_hash.to(tokens.device)
    if local * size > length:
        batch[WHOLE_LENGTH] = torch.tensor(length)

    def part(rank: int) -> dict[str, Any]:
        start, stop = min(rank * local, length), min((rank + 1) * local, length)
        views = {name: batch[name].narrow(dim, start, stop - start) for name, dim in dims.items()}
        padding = range(max(0, rank * local - length), max(0, (rank + 1) * local - length))
        if padding:
            return batch | {name: _padded(name, view, padding) for name, view in views.items()}
        return batch | {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}

    return [part(rank) for rank in ranks]  # copies, not views of the whole


def sequence_dim(name: str, value: Any, batch: int, length: int) -> int | None:
    """Returns a value's sequence dimension; None if it has none."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return None
    if name == "position_ids":
        return value.ndim - 1  # [B, S], or [3, B, S] for multimodal rotary embeddings
    return 1 if tuple(value.shape[:2]) in ((batch, length), (1, length)) else None


def _padded(name: str, value: Tensor, padding: range) -> Tensor:
    """Returns `value` [..., tokens, ...] with the padding tokens `padding` (their indices in the batch's padding)
    appended. In `position_ids` they form their own document, so no other token attends to them."""
    if name == "position_ids":
        tail = torch.arange(padding.start, padding.stop, device=value.device, dtype=value.dtype)
        return torch.cat([value, tail.expand(*value.shape[:-1], -1)], -1)
    fill = IGNORED if name in ("labels", "shift_labels") else 0
    return F.pad(value, [0, 0] * (value.ndim - 2) + [0, len(padding)], value=fill)


class ShardedDataLoader:
    """Iterates over this rank's shards of the batches of all ranks of the group, in the same order on every rank.

    Args:
        dataloader: yields batches (dicts), different ones on different ranks; ranks may have different numbers of them.
        ctx: the group.
        device: the device of the shards; by default the device that the group's collectives use.

    An epoch has as many steps as the group's loaders together have batches. All data-parallel groups must have the same
    number; a DistributedSampler with drop_last ensures this if the number of groups divides the batches. `state_dict`
    holds the progress. A run that loads it continues with the next step, if the loader's order depends only on torch's
    random state at the start of the epoch, on its generator's state, or on its sampler's epoch.

    Raises ValueError on every rank, without a deadlock, if a rank fails to load or to cut a batch.
    """

    def __init__(
        self, dataloader: Iterable[dict[str, Any]], ctx: SequenceParallel, device: torch.device | str | None = None
    ):
        self.dataloader, self.sp_group, self.device = dataloader, ctx, device or device_of(ctx)
        self.epoch = self.steps = 0
        """The current or next epoch, and the number of its finished steps."""
        self._generator: torch.Generator | None = getattr(dataloader, "generator", None)
        self._start: dict[str, Any] | None = None
        self._resume = False
        try:
            length, self._no_length = len(dataloader), None
        except Exception as error:  # raised when the length is read; the other ranks would wait for this one
            length, self._no_length = None, error
        self._lengths: list[int | None] = [None] * ctx.size
        dist.all_gather_object(self._lengths, length, group=ctx.group)

    def __len__(self) -> int:
        """Returns the steps per epoch, from the dataloaders' lengths when this object was created."""
        if None in self._lengths:
            rank = self._lengths.index(None)
            raise TypeError(
                f"the dataloader of rank {rank} of the group has no len(), expected one with a length on every rank; "
                "iterate without asking for it"
            ) from self._no_length
        return sum(self._lengths)

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch. It starts from its first step, unless a state of this epoch was loaded."""
        if epoch != self.epoch:
            self.epoch, self.steps, self._resume = epoch, 0, False
        sampler = getattr(self.dataloader, "batch_sampler", None)
        for holder in (self.dataloader, getattr(self.dataloader, "sampler", None), getattr(sampler, "sampler", None)):
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "steps": self.steps, "start": self._start or self._random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.steps, self._start = state["epoch"], state["steps"], state["start"]
        self._resume = True
        self.set_epoch(self.epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.steps = self.steps if self._resume else 0
        yield from self._shards(self._batches())
        self.epoch, self.steps, self._start = self.epoch + 1, 0, None

    def _random_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "loader": self._generator and self._generator.get_state()}

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Yields the loader's batches, drawn with the random state at the start of this epoch."""
        resume, self._resume = self._resume, False
        self._start = self._start if resume else self._random_state()
        with torch.random.fork_rng(devices=(), enabled=resume):
            torch.set_rng_state(self._start["torch"])
            if self._generator is not None:
                self._generator.set_state(self._start["loader"])
            batches = iter(self.dataloader)
            first = list(islice(batches, 1))  # samplers draw their order with the first batch
        yield from chain(first, batches)

    def _shards(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields this rank's shards of the batches that the group's ranks draw, round by round, rank by rank, without
        the finished steps. Raises ValueError on every rank if one of them fails to draw or to cut its batch."""
        size, group, skip = self.sp_group.size, self.sp_group.group, self.steps
        while True:
            shards, error, states = None, None, [None] * size
            try:
                if (batch := next(batches, None)) is not None:
                    batch = tree_map_only(Tensor, Tensor.cpu, batch)  # another rank may not have this rank's device
                    shards = parts_of(batch, range(size), size)
            except Exception as failed:  # raised on every rank, after all have been told
                error = failed
            dist.all_gather_object(states, (shards is not None, error and str(error)), group=group)
            for rank, (_, said) in enumerate(states):
                if said is not None:
                    raise ValueError(f"rank {rank} of the group has no batch that can be cut: {said}") from error
            found = [rank for rank, (has_batch, _) in enumerate(states) if has_batch]
            if not found:
                return
            for rank in found[skip:]:
                arrived: list = [None]
                sent = shards if rank == self.sp_group.rank else None
                dist.scatter_object_list(arrived, sent, group=group, group_src=rank)
                self.steps += 1
                yield tree_map_only(Tensor, lambda value: value.to(self.device), arrived[0])
            skip = max(0, skip - len(found))
