"""Reads from the names of a DeviceMesh's axes which ranks share a sequence, on which nodes, and which draw the same
samples."""

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

_SEQUENCE, _NODES = ("sp", "cp"), "sp_node"
_REPLICAS, _OF_ONE_REPLICA = ("dp", "dp_replicate", "dp_shard"), ("tp", "pp", "ep")
"""The names of a mesh's axes along which ranks share a sequence, in a node and over nodes; hold other samples; or share
a replica's work."""


class Shared(NamedTuple):
    """Which ranks share sequences."""

    groups: list[list[int]]
    """The ranks of each group, node by node."""
    axis: str | None
    """The axis whose process group is this rank's; "" of a mesh without names, and of a process group that was given;
    None if process groups are to be created."""
    per_node: int | None
    """The ranks of a group on each node, if the mesh tells."""
    replica: int | None
    """The index of this rank's replica; None if the mesh has no names."""
    replicas: int


def shared_along(mesh: DeviceMesh) -> Shared:
    """Returns how ranks share sequences in a mesh, or in the mesh of which it is a part. Raises ValueError unless the
    names of the axes tell."""
    whole = mesh._get_root_mesh()
    if (names := whole.mesh_dim_names) is None:
        if mesh.ndim != 1:
            raise ValueError(
                f"expected a DeviceMesh of one dimension, or with names, got {mesh.ndim} dimensions without names; "
                "name the axes of init_device_mesh(..., mesh_dim_names=...)"
            )
        return Shared([mesh.mesh.tolist()], "", None, None, 0)
    sizes, part = dict(zip(names, whole.shape, strict=True)), mesh.mesh_dim_names
    axis = _axis_of_sequences(sizes, part)
    nodes = [_NODES] if sizes.get(_NODES, 1) > 1 else []
    if nodes and _NODES not in part:
        raise ValueError(f'expected mesh["{_NODES}", "{axis}"], got {axis!r} alone, which is one node of a sequence')
    along, place, replicas = [*nodes, axis], 0, 1
    for name, index in zip(names, whole.get_coordinate(), strict=True):
        if name in _REPLICAS:
            place, replicas = place * sizes[name] + index, replicas * sizes[name]
    others = [i for i, name in enumerate(names) if name not in along]
    size, per_node = sizes[axis] * sizes.get(_NODES, 1), sizes[axis] if nodes else None
    groups = whole.mesh.permute(*others, *map(names.index, along)).reshape(-1, size).tolist()
    if any(ranks != sorted(ranks) for ranks in groups):  # the order that process groups have
        raise ValueError(f"expected {' before '.join(along)} in the mesh, with ranks in order, got {', '.join(names)}")
    return Shared(groups, None if nodes else axis, per_node, place, replicas)


def _axis_of_sequences(sizes: dict[str, int], part: tuple[str, ...]) -> str:
    """Returns the axis along which ranks share sequences, one of the `part` of a mesh with axes of these sizes."""
    known = (*_SEQUENCE, _NODES, *_REPLICAS, *_OF_ONE_REPLICA)
    large = [name for name in _SEQUENCE if sizes.get(name, 1) > 1]
    found = [name for name in part if name in _SEQUENCE]
    axis = next((name for name in found if name in large), next(iter(found), None))
    unknown = [name for name in sizes if name not in known]
    if len(large) > 1:
        raise ValueError(f"expected sequences along sp or cp, got both larger than 1, {sizes}; make one of them 1")
    if axis is None or axis not in sizes or unknown or [axis] != (large or [axis]):
        raise ValueError(
            f"expected {' or '.join(f'mesh[{name!r}]' for name in _SEQUENCE)} of a mesh whose other axes are called "
            f"{', '.join((_NODES, *_REPLICAS, *_OF_ONE_REPLICA))}, got {', '.join(map(repr, part))} of "
            f"{', '.join(sizes)}; name the axes of init_device_mesh(..., mesh_dim_names=...) so"
        )
    return axis
