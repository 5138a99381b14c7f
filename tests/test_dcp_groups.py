"""`Dcp` from process groups and device meshes, in one process: errors, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mla_index import Dcp


@pytest.fixture
def world():
    """A default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_default_group(world):
    assert Dcp.from_group() == Dcp(1, 0, 1)
    assert Dcp.from_group(interleave=16) == Dcp.from_group(world, 16) == Dcp(1, 0, 16)


def test_a_group_that_is_not_the_default_one():
    """Made without `init_process_group`, as servers with several worlds do."""
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert not dist.is_initialized()
    assert Dcp.from_group(group, interleave=4) == Dcp(1, 0, 4)


@pytest.mark.parametrize("name", [None, "dcp", 0, -1])
def test_mesh_of_one_dimension(world, name):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dcp",))
    assert Dcp.from_mesh(mesh, name, interleave=64) == Dcp(1, 0, 64)


def test_not_initialised():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group first"):
        Dcp.from_group()


def test_process_outside_the_group(world):
    with pytest.raises(ValueError, match="group must be one that this process is in"):
        Dcp.from_group(dist.GroupMember.NON_GROUP_MEMBER)


def test_process_outside_the_mesh(world):
    mesh = DeviceMesh("cpu", [1], mesh_dim_names=("dcp",), _init_backend=False)
    with pytest.raises(ValueError, match="mesh must hold this process"):
        Dcp.from_mesh(mesh, "dcp")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (None, ValueError, "mesh_dim must be given for a mesh of 2 dimensions"),
        ("pp", ValueError, r"one of the mesh's dimensions \(dp, dcp\), got 'pp'"),
        (2, ValueError, r"mesh_dim must be in \[-2, 2\), got 2"),
        (-3, ValueError, r"mesh_dim must be in \[-2, 2\), got -3"),
        (1.0, TypeError, "mesh_dim must be an integer"),
        (True, TypeError, "mesh_dim must be an integer"),
    ],
)
def test_dimension_that_the_mesh_has_not(world, name, error, message):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "dcp"))
    with pytest.raises(error, match=message):
        Dcp.from_mesh(mesh, name)


def test_mesh_without_names(world):
    mesh = init_device_mesh("cpu", (1,))
    assert Dcp.from_mesh(mesh) == Dcp(1, 0)
    with pytest.raises(ValueError, match="they have no names"):
        Dcp.from_mesh(mesh, "dcp")


def test_wrong_types(world):
    with pytest.raises(
        TypeError, match=r"group must be a torch\.distributed\.ProcessGroup or None"
    ):
        Dcp.from_group("dcp")
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got str"):
        Dcp.from_mesh("dcp")


def test_the_interleave_is_checked(world):
    with pytest.raises(ValueError, match=r"Dcp.interleave must be at least 1, got 0"):
        Dcp.from_group(world, 0)


def test_importing_the_library_imports_nothing_for_it():
    code = (
        "import sys, torch; before = set(sys.modules); import mla_index; "
        "print([m for m in set(sys.modules) - before if 'distributed' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
