"""Groups of ranks that hold the shards of the same sequences, and their collectives."""

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from seqtile.attention.nodes import Nodes
from seqtile.sp.meshes import Shared, shared_along


@dataclass(frozen=True)
class SequenceParallel:
    """One rank's view of a group of ranks that hold the shards of the same sequences."""

    group: dist.ProcessGroup | None
    """The process group of its ranks; None in `ALONE`."""
    rank: int
    """This rank's index in the group. Of a sequence it holds S tokens, on one node [rank * S, (rank + 1) * S); for
    several see nodes.py."""
    size: int
    """The number of ranks in the group."""
    data_parallel_rank: int
    """The index of the group's replica, the rank for a sampler; without named axes that of the group."""
    data_parallel_size: int
    """The number of replicas, for a sampler."""
    before: Callable[[], object] = field(default=lambda: None, compare=False, repr=False)
    """Called before each collective of a forward or a backward."""
    per_node: int | None = None
    """The number of its ranks on each node, one after the other; None: all are on one."""

    @property
    def nodes(self) -> Nodes:
        """The nodes of its ranks."""
        return Nodes(self.size, self.per_node or self.size)

    def started(self) -> dist.ProcessGroup | None:
        """Returns the process group, for a collective that starts now."""
        self.before()
        return self.group

    def __deepcopy__(self, memo: dict) -> "SequenceParallel":
        return self  # a copy of a model is sharded over the same ranks


ALONE = SequenceParallel(None, 0, 1, 0, 1)
"""A single process without torch.distributed."""


def initialize(
    sequence_parallel_size: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    per_node: int | None = None,
) -> SequenceParallel:
    """Creates or wraps the groups for sequence parallelism. torch.distributed must be initialised, and every rank must
    call this. Give exactly one of the first three arguments.

    Args:
        sequence_parallel_size: creates groups of this many neighbouring ranks each.
        group: an existing group that contains this rank.
        mesh: a DeviceMesh, or a part of it. Ranks share a sequence along its axis sp or cp, whichever is larger than 1,
            and over nodes along sp_node, if there is one: `mesh["sp_node", "sp"]`. The axes dp, dp_replicate and
            dp_shard count replicas; ranks along tp, pp and ep belong to one replica, so they draw the same samples. Of
            a mesh of one dimension without names that is the group.
        per_node: how many of a group's ranks are on each node, one after the other; see "Several nodes" in the docs. By
            default the ranks' host names tell; if nodes have unequal numbers of them, all are taken as one node. So
            does the group's size.

    Runs two collectives. Under NCCL, call `torch.cuda.set_device` before. Raises ValueError, on every rank, if
    torch.distributed is not initialised, if not exactly one of the three is given, if the size does not divide the
    number of ranks, if the names of a mesh's axes do not tell who shares a sequence, if per_node makes unequal nodes,
    if ranks ask for different things, or if NCCL finds that ranks use the same CUDA device.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised: start the script by torchrun, init_process_group first")
    world, rank, error, own, shared = dist.get_world_size(), dist.get_rank(), None, None, None
    try:
        shared = _asked(sequence_parallel_size, group, mesh, world)
        if (own := next((ranks for ranks in shared.groups if rank in ranks), None)) is None:
            raise ValueError(f"rank {rank} is in none of the groups {shared.groups}, expected a group for every rank")
    except Exception as wrong:  # raised when all ranks know
        error = ValueError(str(wrong) or type(wrong).__name__)
    asked = per_node, sequence_parallel_size, shared and shared.axis
    hosts, groups = _agreed(asked, own, error, world)
    told = shared.per_node if per_node is None else per_node
    per_node = {ranks: _per_node(ranks, hosts, told) for ranks in groups}[tuple(own)]
    if shared.axis is None:
        group, _ = dist.new_subgroups_by_enumeration([*map(list, groups)])
    elif mesh is not None:
        group = mesh.get_group(shared.axis or None)
    if len(own) > per_node and rank == 0:
        said = f"{len(own)} ranks share a sequence, {per_node} on each of {len(own) // per_node} nodes, and send "
        said += f"across nodes what takes the fewest bytes; per_node={len(own)} takes them as one node"
        print(f"seqtile.sp: {said}", file=sys.stderr)
    if shared.replica is not None:
        place, replicas = shared.replica, shared.replicas
    else:
        place, replicas = groups.index(tuple(own)), len(groups)
    return SequenceParallel(group, dist.get_rank(group), len(own), place, replicas, per_node=per_node)


def _agreed(
    asked: tuple, own: list[int] | None, error: ValueError | None, world: int
) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Returns the host name of each rank, and the groups of all ranks, `own` among them. Raises ValueError on every
    rank if one has an error, or if ranks asked for different groups."""
    found = _gathered((socket.gethostname(), asked, own, error and str(error)), world)
    hosts, by_rank, groups, errors = zip(*found, strict=True)
    if (said := next(filter(None, errors), None)) is not None:
        raise error or ValueError(f"another rank cannot share sequences: {said}")
    if any(other != asked for other in by_rank) or any(groups[rank] != ranks for ranks in groups for rank in ranks):
        raise ValueError(
            "the ranks ask for different groups, expected the same arguments on every rank: per_node is "
            f"{', '.join(repr(number) for number, *_ in by_rank)}, and groups are {', '.join(map(str, groups))}"
        )
    return hosts, sorted({*map(tuple, groups)})


def _asked(size: int | None, group: dist.ProcessGroup | None, mesh: DeviceMesh | None, world: int) -> Shared:
    """Returns which ranks share sequences. Raises ValueError for arguments that do not tell."""
    given = {"sequence_parallel_size": size, "group": group, "mesh": mesh}
    if len(named := [name for name, value in given.items() if value is not None]) != 1:
        got = " and ".join(named) or "None for each"
        raise ValueError(f"expected exactly one of sequence_parallel_size, group and mesh, got {got}")
    if mesh is not None:
        return shared_along(mesh)
    if group is not None:
        return Shared([dist.get_process_group_ranks(group)], "", None, None, 0)
    if not isinstance(size, int) or size < 1 or world % size:
        raise ValueError(f"sequence_parallel_size is {size!r}, expected a divisor of the {world} ranks")
    return Shared([[*range(first, first + size)] for first in range(0, world, size)], None, None, None, 0)


def _gathered(own: tuple, world: int) -> list[tuple]:
    """Returns each rank's own value. Raises ValueError if NCCL finds that ranks use the same CUDA device."""
    found: list = [None] * world
    try:
        dist.all_gather_object(found, own)
    except dist.DistBackendError as error:
        said = [line for line in str(error).splitlines() if "Duplicate GPU" in line]
        if not said:
            raise
        raise ValueError(
            f"expected each rank of a node on its own CUDA device, got cuda:{torch.cuda.current_device()} ({said[0]}); "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before sp.initialize'
        ) from error
    return found


def _per_node(ranks: Sequence[int], hosts: Sequence[str], told: int | None) -> int:
    """Returns how many ranks of a group are on each node, as told, or by the names of their hosts; all of them if their
    numbers are unequal."""
    size = len(ranks)
    if told is not None:
        if not isinstance(told, int) or isinstance(told, bool) or told < 1 or (size % told and told % size):
            raise ValueError(f"per_node is {told!r}, expected a divisor or a multiple of the {size} ranks of a group")
        return min(told, size)
    runs = [(host, len([*run])) for host, run in groupby(hosts[rank] for rank in ranks)]
    is_even = len({number for _, number in runs}) == 1 and len({host for host, _ in runs}) == len(runs)
    if not is_even and dist.get_rank() == ranks[0]:
        where = ", ".join(f"{number} on {host}" for host, number in runs)
        said = "nodes do not have equally many of its ranks, one after the other, so all are taken as one node"
        print(f"seqtile.sp: a sequence is shared by {where}; {said}", file=sys.stderr)
    return runs[0][1] if is_even else size


def gather(tensor: Tensor, sp_group: SequenceParallel) -> Tensor:
    """Returns [ranks, *]: each rank's `tensor`, which must have the same shape on all ranks of the group. Without
    gradients."""
    if sp_group is ALONE:
        return tensor.detach()[None]
    found = tensor.new_empty((sp_group.size, *tensor.shape))
    dist.all_gather(list(found), tensor.contiguous(), group=sp_group.started())
    return found


def add_up(tensor: Tensor, sp_group: SequenceParallel) -> Tensor:
    """Returns the sum of each rank's tensor. Without gradients."""
    total = tensor.detach().contiguous().clone()
    if sp_group is not ALONE:
        dist.all_reduce(total, group=sp_group.started())
    return total


def device_of(sp_group: SequenceParallel) -> torch.device:
    """Returns the device that the group's collectives need: the CPU if its backend takes CPU tensors."""
    on_cpu = "cpu" in dist.get_backend_config(sp_group.group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
