"""Steps of a loader whose ranks draw different samples: all samples, in one order, over epochs, and after a resume."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from tqdm import tqdm

from seqtile import sp
from seqtile.sp.groups import gather
from seqtile.sp.shards import in_order
from sp.over_ranks import context

SAMPLES = 23
Batch = dict[str, torch.Tensor]


def samples() -> list[Batch]:
    """Documents of unequal lengths, identified by their first token."""
    found = []
    for i in range(SAMPLES):
        ids = torch.cat([torch.tensor([1000 + i]), torch.arange(5 + 3 * i)])
        found.append({"input_ids": ids, "labels": ids.clone(), "name": torch.tensor(i)})
    return found


def collate(rows: list[Batch]) -> Batch:
    return {"input_ids": rows[0]["input_ids"][None], "labels": rows[0]["labels"][None], "name": rows[0]["name"]}


def made(kind: str, ctx: sp.SequenceParallel) -> sp.ShardedDataLoader:
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind == "sampler":
        sampler = DistributedSampler(range(SAMPLES), world, rank, shuffle=True, drop_last=True)
        return sp.ShardedDataLoader(DataLoader(samples(), collate_fn=collate, sampler=sampler), ctx)
    mine = samples()[rank::world]  # unequal numbers
    generator = torch.Generator().manual_seed(rank) if kind == "generator" else None
    return sp.ShardedDataLoader(DataLoader(mine, shuffle=True, generator=generator, collate_fn=collate), ctx)


def read(loader: sp.ShardedDataLoader, ctx: sp.SequenceParallel) -> Iterator[int]:
    """Yields each step's sample, assembled from its shards and compared with the whole."""
    for shard in loader:
        names = ("input_ids", "shift_labels", "position_ids")
        whole, shifted, positions = (in_order(gather(shard[name], ctx), ctx.nodes)[0] for name in names)
        i = int(shard["name"])
        ids = samples()[i]["input_ids"]
        assert whole[: len(ids)].equal(ids) and shifted[: len(ids) - 1].equal(ids[1:])
        assert (shifted[len(ids) - 1 :] == -100).all() and shard["num_items_in_batch"] == len(ids) - 1
        assert positions[: len(ids)].equal(torch.arange(len(ids))) and len(whole) - len(ids) < ctx.size
        assert len(shard["input_ids"][0]) == -(-len(ids) // ctx.size)
        yield i


def broken() -> Iterator[Batch]:
    raise OSError("no such file")
    yield {}


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(samples()[dist.get_rank() :: dist.get_world_size()])


class Unread(list):
    """Batches whose length cannot be read."""

    def __len__(self) -> int:
        raise OSError("no such file")


def lengths() -> None:
    """Only one rank reads it, as a progress bar does, while the others continue."""
    ctx = context(2)
    expected = {"sampler": 10, "random state": 12 if ctx.data_parallel_rank == 0 else 11}
    for kind, length in expected.items():
        loader, steps = made(kind, ctx), 0
        bar = tqdm(loader, leave=False) if ctx.rank == 0 else None
        for _ in bar or loader:
            steps += 1
            if steps == 3:
                state = loader.state_dict()
        assert steps == length and (bar is None or bar.total == length)
        resumed = made(kind, ctx)
        resumed.load_state_dict(state)
        resumed.set_epoch(0)
        assert ctx.rank == 1 or len(resumed) == length, "of an epoch, not of what is left of it"
        assert len(list(read(resumed, ctx))) == length - 3
    for without in (DataLoader(Stream(), collate_fn=collate), Unread()):
        loader = sp.ShardedDataLoader(without if ctx.rank == 1 else [], ctx)
        with pytest.raises(TypeError, match=r"the dataloader of rank 1 of the group has no len\(\)"):
            len(loader)
        steps = torch.tensor(sum(1 for _ in without) if ctx.rank == 1 else 0)
        dist.all_reduce(steps, group=ctx.group)
        assert len(list(loader)) == steps, "which asks for a length, and goes on without"


def epochs_of(kind: str) -> None:
    """Three epochs, each with all samples in its own order, the same on every rank; resumed at many steps of one
    epoch."""
    ctx = context(2)
    torch.manual_seed(dist.get_rank())
    whole, epochs = made(kind, ctx), []
    states = []
    for epoch in range(3):
        if kind == "sampler":
            whole.set_epoch(epoch)
        if epoch == 1:
            states.append((-1, whole.state_dict()))  # between two epochs
        names = []
        for step, name in enumerate(read(whole, ctx)):
            names.append(name)
            if epoch == 1:
                states.append((step, whole.state_dict()))
        assert len(names) == len(whole) and len(set(names)) == len(names)
        assert all(other.tolist() == names for other in gather(torch.tensor(names), ctx))
        epochs.append(names)
    assert len({tuple(names) for names in epochs}) > 1, "shuffled anew"
    for step, state in [states[0], *states[1::4]]:
        torch.manual_seed(99)
        resumed = made(kind, ctx)
        resumed.load_state_dict(state)
        assert list(read(resumed, ctx)) == epochs[1][step + 1 :], f"resumed after step {step}"
        assert resumed.epoch == 2


def failing() -> None:
    """Batches that cannot be cut or read raise on every rank. Before the first step there is a state."""
    ctx = context(2)
    for batches in ([{"labels": torch.ones(1, 4)}], broken()):
        loader = sp.ShardedDataLoader(batches if ctx.rank == 1 else [], ctx)
        with pytest.raises(ValueError, match="rank 1 of the group has no batch that can be cut"):
            next(iter(loader))
    before = made("random state", ctx).state_dict()
    made("random state", ctx).load_state_dict(before)


def parcels() -> None:
    """Each rank receives only its own shard."""
    ctx, sizes = context(2), []
    scatter = dist.scatter_object_list

    def measured(arrived: list, sent: list | None, **options: Any) -> None:
        sizes.extend(len(pickle.dumps(each)) for each in sent or ())
        scatter(arrived, sent, **options)

    for rows in (1, 2):
        whole = {"input_ids": torch.zeros(rows, 100_000, dtype=torch.int64)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "scatter_object_list", measured)
            (shard,) = sp.ShardedDataLoader([whole] if ctx.rank == 0 else [], ctx)
        local = 100_000 // ctx.size
        assert shard["input_ids"].shape == (rows, local)
        assert len(sizes) == (ctx.size if ctx.rank == 0 else 0)
        assert all(size < 2.1 * 8 * rows * local for size in sizes)
        sizes.clear()
