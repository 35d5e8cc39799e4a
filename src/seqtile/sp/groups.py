"""Groups of ranks that hold the shards of the same sequences, and their collectives."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_SEQUENCE, _REPLICAS, _OF_ONE_REPLICA = ("sp", "cp"), ("dp", "dp_replicate", "dp_shard"), ("tp", "pp", "ep")
"""The names of a mesh's axes along which ranks share a sequence, hold other samples, or share a replica's work."""


@dataclass(frozen=True)
class SequenceParallel:
    """One rank's view of a group of ranks that hold the shards of the same sequences."""

    group: dist.ProcessGroup | None
    """The process group of its ranks; None in `ALONE`."""
    rank: int
    """This rank's index in the group. It holds the tokens [rank * S, (rank + 1) * S) of a sequence, S per rank."""
    size: int
    """The number of ranks in the group."""
    data_parallel_rank: int
    """The index of the group's replica, the rank for a sampler; without named axes that of the group."""
    data_parallel_size: int
    """The number of replicas, for a sampler."""
    before: Callable[[], object] = field(default=lambda: None, compare=False, repr=False)
    """Called before each collective of a forward or a backward."""

    def started(self) -> dist.ProcessGroup | None:
        """Returns the process group, for a collective that starts now."""
        self.before()
        return self.group

    def __deepcopy__(self, memo: dict) -> "SequenceParallel":
        return self  # a copy of a model is sharded over the same ranks


ALONE = SequenceParallel(None, 0, 1, 0, 1)
"""A single process without torch.distributed."""


def initialize(
    sequence_parallel_size: int | None = None, *, group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None
) -> SequenceParallel:
    """Creates or wraps the groups for sequence parallelism. torch.distributed must be initialised, and every rank must
    call this. Give exactly one argument.

    Args:
        sequence_parallel_size: creates groups of this many neighbouring ranks each.
        group: an existing group that contains this rank.
        mesh: a one-dimensional DeviceMesh, whose group is used. In a mesh with named axes this is `mesh["sp"]` or
            `mesh["cp"]`; the axes dp, dp_replicate and dp_shard count replicas, and ranks along tp, pp and ep belong to
            one replica, so they draw the same samples.

    Runs two collectives. Under NCCL, call `torch.cuda.set_device` before. Raises ValueError if torch.distributed is not
    initialised, if not exactly one of the three is given, if the size does not divide the number of ranks, if the mesh
    has an axis of another name, or if NCCL finds that ranks use the same CUDA device.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised: start the script by torchrun, init_process_group first")
    if sum(given is not None for given in (sequence_parallel_size, group, mesh)) != 1:
        raise ValueError("expected exactly one of sequence_parallel_size, group and mesh")
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(f'expected a DeviceMesh of one dimension, got {mesh.ndim}; pass a part of it, mesh["sp"]')
    replica = None if mesh is None else _replica_of(mesh)
    world, size = dist.get_world_size(), sequence_parallel_size
    if size is not None and (not isinstance(size, int) or size < 1 or world % size):
        raise ValueError(f"sequence_parallel_size is {size!r}, expected a divisor of the {world} ranks")
    if mesh is not None:
        group = mesh.get_group()
    elif size is not None:
        group, _ = dist.new_subgroups(size)
    first_ranks: list = [None] * world
    try:
        dist.all_gather_object(first_ranks, min(dist.get_process_group_ranks(group)))
    except dist.DistBackendError as error:
        said = [line for line in str(error).splitlines() if "Duplicate GPU" in line]
        if not said:
            raise
        raise ValueError(
            f"expected each rank of a node on its own CUDA device, got cuda:{torch.cuda.current_device()} ({said[0]}); "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before sp.initialize'
        ) from error
    groups = sorted(set(first_ranks))
    place, replicas = replica or (groups.index(first_ranks[dist.get_rank()]), len(groups))
    return SequenceParallel(group, dist.get_rank(group), dist.get_world_size(group), place, replicas)


def _replica_of(mesh: DeviceMesh) -> tuple[int, int] | None:
    """Returns the index of this rank's replica and the number of replicas, from the names of the axes of the mesh of
    which `mesh` is a part; None without names. Raises ValueError for a name that does not tell what its ranks share."""
    whole = mesh._get_root_mesh()
    if (names := whole.mesh_dim_names) is None:
        return None
    (own,), place, replicas = mesh.mesh_dim_names, 0, 1
    unknown = [name for name in names if name not in (own, *_REPLICAS, *_OF_ONE_REPLICA)]
    if own not in _SEQUENCE or own not in names or unknown:
        raise ValueError(
            f"expected mesh[{' or mesh['.join(map(repr, _SEQUENCE))}] of a mesh whose other axes are called "
            f"{', '.join((*_REPLICAS, *_OF_ONE_REPLICA))}, got {own!r} of {', '.join(names)}; name the axes of "
            "init_device_mesh(..., mesh_dim_names=...) so"
        )
    for name, index, size in zip(names, whole.get_coordinate(), whole.shape, strict=True):
        if name in _REPLICAS:
            place, replicas = place * size + index, replicas * size
    return place, replicas


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
