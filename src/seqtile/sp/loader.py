"""Sequence parallelism over a loader whose ranks draw different samples, as data parallelism has it.

In a round every rank of the group draws a batch of its own, cuts it, and sends each other rank its shard: one
all-to-all of sizes and one of bytes, and no rank ever holds another's whole batch. The group then trains on the batches
of a round one after the other.
Source: Arctic Long Sequence Training, 4.2 (sequence parallelism over data parallelism).
"""

import io
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from seqtile.sp.collator import completed, part_of
from seqtile.sp.context import SequenceParallel, device_of
from seqtile.sp.exchange import all_to_all

_NOTHING, _FAILED = 0, -1  # in place of a size: the rank's loader is at its end; its batch could not be cut


class ShardedDataLoader:
    """Iterates over this rank's shards of the batches of all ranks of the group, in the same order on every rank.

    Args:
        dataloader: yields batches (dicts), different ones on different ranks; ranks may have different numbers of them.
        ctx: the group.
        device: where its shards are put; by default where the group's collectives run.

    An epoch has as many steps as the group's loaders have batches together, which data-parallel groups must have alike,
    as a DistributedSampler with drop_last gives them where their number divides the batches. `state_dict` tells how far
    it is; a run that loads it goes on with the step that would have come next, if the loader's order follows from
    torch's random state at the start of the epoch, its generator's, or its sampler's epoch.

    Raises ValueError on every rank, and none waits, if one of them fails to load a batch or to cut it.
    """

    def __init__(
        self, dataloader: Iterable[dict[str, Any]], ctx: SequenceParallel, device: torch.device | str | None = None
    ):
        self.dataloader, self.ctx, self.device = dataloader, ctx, device or device_of(ctx)
        self.epoch = self.steps = 0
        """The epoch that runs or comes next, and how many of its steps are done."""
        self._start: dict[str, Any] | None = None
        self._resume = False

    def __len__(self) -> int:
        """Steps of an epoch. A collective: every rank of the group calls it."""
        total = torch.tensor(len(self.dataloader), device=device_of(self.ctx))
        dist.all_reduce(total, group=self.ctx.group)
        return int(total)

    def set_epoch(self, epoch: int) -> None:
        """What comes next is this epoch, from its beginning unless a state of it has been loaded."""
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
        batches, self.steps = self._batches(), self.steps if self._resume else 0
        for found in rounds(batches, self.ctx, self.device, skip=self.steps):
            self.steps += 1
            yield found
        self.epoch, self.steps, self._start = self.epoch + 1, 0, None

    def _random_state(self) -> dict[str, Any]:
        generator = getattr(self.dataloader, "generator", None)
        return {"torch": torch.get_rng_state(), "loader": generator.get_state() if generator else None}

    def _batches(self) -> Iterator[dict[str, Any]]:
        """The loader's, drawn from the random state that this epoch began with."""
        generator = getattr(self.dataloader, "generator", None)
        resume, self._resume = self._resume, False
        if not resume:
            self._start = self._random_state()
            yield from self.dataloader
            return
        now = torch.get_rng_state()
        torch.set_rng_state(self._start["torch"])
        if generator is not None:
            generator.set_state(self._start["loader"])
        batches = iter(self.dataloader)
        first = next(batches, None)  # samplers draw their order when they are asked for the first batch
        torch.set_rng_state(now)
        if first is not None:
            yield first
            yield from batches


def rounds(
    batches: Iterator[dict[str, Any]], ctx: SequenceParallel, device: torch.device | str, skip: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's shards of what the ranks of the group draw, round by round, rank by rank; the first `skip` left out.

    Raises ValueError on every rank if one of them has no batch that can be cut.
    """
    ones = [1] * ctx.size
    while True:
        parcels, error = _parcels(batches, ctx)
        sent = torch.tensor([len(parcel) for parcel in parcels] if error is None else [_FAILED] * ctx.size)
        received = all_to_all(sent.to(device_of(ctx)), ones, ones, ctx.group).tolist()
        if error is not None or _FAILED in received:
            failed = f"rank {received.index(_FAILED)} of the group has no batch that can be cut"
            raise ValueError(f"{failed}: {error}" if error is not None else f"{failed}, see there") from error
        held = sum(size != _NOTHING for size in received)
        if held == 0:
            return
        if skip >= held:
            skip -= held
            continue
        buffer = torch.cat(parcels).to(device_of(ctx))
        found = all_to_all(buffer, sent.tolist(), received, ctx.group).split(received)
        for parcel in found:
            if len(parcel) == _NOTHING:
                continue
            if skip > 0:
                skip -= 1
                continue
            yield torch.load(io.BytesIO(parcel.cpu().numpy().tobytes()), map_location=device, weights_only=True)


def _parcels(batches: Iterator[dict[str, Any]], ctx: SequenceParallel) -> tuple[list[torch.Tensor], Exception | None]:
    """For each rank of the group its shard of the next batch, as bytes; none at the end. Or why there are none."""
    parcels = []
    try:
        if (batch := next(batches, None)) is None:
            return [torch.empty(0, dtype=torch.uint8)] * ctx.size, None
        whole = completed(batch)
        for rank in range(ctx.size):
            parcel = io.BytesIO()
            torch.save(part_of(whole, rank, ctx.size), parcel)
            parcels.append(torch.frombuffer(parcel.getbuffer(), dtype=torch.uint8))
    except Exception as error:  # raised on every rank, once all know of it
        return [], error
    return parcels, None
