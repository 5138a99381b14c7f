"""What torch.distributed says about this process: how many ranks, and which one it is.

Imported by `Dcp.from_group` and `Dcp.from_mesh` when they are called, never by `import mla_index`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class Place(NamedTuple):
    """A process among others: `rank` of `size`."""

    size: int
    rank: int


def of_group(group: dist.ProcessGroup | None) -> Place:
    """This process in a group; None is the default group of all processes."""
    if not dist.is_available():
        raise RuntimeError("this torch is built without torch.distributed")
    outside: object = dist.GroupMember.NON_GROUP_MEMBER  # what `new_group` gives to the others
    if group is outside:
        raise ValueError("group must be one that this process is in, got NON_GROUP_MEMBER")
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed has no default group yet: call "
                "torch.distributed.init_process_group first, or pass a group"
            )
        return Place(dist.get_world_size(), dist.get_rank())
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}"
        )
    return Place(group.size(), group.rank())


def of_mesh(mesh: DeviceMesh, mesh_dim: str | int | None) -> Place:
    """This process along one dimension of a mesh; None for the only one."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    dim = _dimension(mesh, mesh_dim)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"mesh must hold this process, got {mesh}, which does not")
    return Place(mesh.size(dim), coordinate[dim])


def _dimension(mesh: DeviceMesh, mesh_dim: str | int | None) -> int:
    """The dimension as a number."""
    names = mesh.mesh_dim_names or ()
    if mesh_dim is None:
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh_dim must be given for a mesh of {mesh.ndim} dimensions, got None"
            )
        return 0
    if isinstance(mesh_dim, str):
        if mesh_dim not in names:
            raise ValueError(
                f"mesh_dim must be one of the mesh's dimensions "
                f"({', '.join(names) or 'they have no names'}), got {mesh_dim!r}"
            )
        return names.index(mesh_dim)
    if not -mesh.ndim <= mesh_dim < mesh.ndim:
        raise ValueError(f"mesh_dim must be in [{-mesh.ndim}, {mesh.ndim}), got {mesh_dim}")
    return mesh_dim % mesh.ndim
