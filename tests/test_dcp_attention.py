"""The example of attention over several ranks: real processes, gloo, on the CPU.

The processes of a world are spawned once and go through every interleave.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import PROJECT
from torch.distributed.device_mesh import init_device_mesh

from mla_index import Dcp

SCRIPT = PROJECT / "examples" / "dcp_attention.py"
INTERLEAVES = (1, 16, 64)
ALONE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""What torchrun sets; absent, the script runs alone."""


def load_example():
    spec = importlib.util.spec_from_file_location("dcp_attention", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(monkeypatch):
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    yield load_example()
    del sys.modules["dcp_attention"]


# --- worlds of several processes ----------------------------------------------------------------


def rank_of_world(rank: int, size: int, folder: str) -> None:
    """What each process does; its findings go to a file of its own."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    example = load_example()
    reports = []
    for interleave in INTERLEAVES:
        options = example.parse(["--interleave", str(interleave), "--topk", "96", "--heads", "2"])
        reports.append(example.compare(options, torch.device("cpu")))
    found = {"reports": reports, "places": places(rank, size)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def places(rank: int, size: int) -> dict[str, object]:
    """What `Dcp` reads from groups and meshes of the whole world and of parts of it."""
    found: dict[str, object] = {"world": [*_place(Dcp.from_group())]}
    if size >= 4:
        odd = dist.new_group(list(range(1, size, 2)))
        if rank % 2:
            found["odd"] = [*_place(Dcp.from_group(odd, 16))]
        else:
            with pytest.raises(ValueError, match="must be one that this process is in"):
                Dcp.from_group(odd)
            found["odd"] = None
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "dcp"))
        found["dcp"] = [*_place(Dcp.from_mesh(mesh, "dcp", 64))]
        found["dp"] = [*_place(Dcp.from_mesh(mesh, -2))]
        found["part of the mesh"] = [*_place(Dcp.from_mesh(mesh["dcp"], interleave=3))]
        found["group of the mesh"] = [*_place(Dcp.from_group(mesh.get_group("dcp")))]
    return found


def _place(dcp: Dcp) -> tuple[int, int, int]:
    return dcp.size, dcp.rank, dcp.interleave


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_equal_to_one_process(size, tmp_path):
    mp.start_processes(rank_of_world, (size, str(tmp_path)), nprocs=size, start_method="spawn")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert all(one["reports"] == found[0]["reports"] for one in found), "the ranks disagree"
    for interleave, report in zip(INTERLEAVES, found[0]["reports"], strict=True):
        assert (report["ranks"], report["interleave"]) == (size, interleave)
        assert report["collectives"] == "gloo"
        assert set(report["errors"]) == {"decode", "prefill"}
        assert 0 < max(report["errors"].values()) <= 1e-5
        assert report["passed"]
        # Tokens of the shortest prompts all lie on one rank: the others have empty rows.
        assert min(report["prompts"]) == 1
        assert (0 < report["rows_empty_on_some_rank"] < report["rows"]) == (size > 1)
    for rank, one in enumerate(found):
        assert one["places"]["world"] == [size, rank, 1]
        if size >= 4:
            assert one["places"] == {
                "world": [size, rank, 1],
                "odd": [size // 2, rank // 2, 16] if rank % 2 else None,
                "dcp": [2, rank % 2, 64],
                "dp": [size // 2, rank // 2, 1],
                "part of the mesh": [2, rank % 2, 3],
                "group of the mesh": [2, rank % 2, 1],
            }


def test_under_torchrun(tmp_path):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "4", str(SCRIPT), "--json", str(report)),
        ],
        env={
            **{name: value for name, value in os.environ.items() if name not in ALONE},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(PROJECT),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["ranks"] == 4
    assert max(found["errors"].values()) <= 1e-5
    assert found["rows_empty_on_some_rank"] > 0
    share = found["rows_empty_on_some_rank"] / found["rows"]
    assert f"({share:.0%}) were empty on some rank" in done.stdout
    assert done.stdout.count("error") == 2, "rank 0 alone prints"
    assert done.stdout.strip().endswith("passed")


# --- alone, and what makes it fail --------------------------------------------------------------

SMALL = ("--topk", "32", "--heads", "1", "--requests", "3")


def test_alone(example, capsys):
    assert example.main(SMALL) == 0
    assert capsys.readouterr().out.strip().endswith("passed")
    assert not dist.is_initialized()


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_a_broken_bound_is_a_failure(example, capsys, monkeypatch, what):
    right = getattr(example, what)

    def slightly_off(*arguments):
        result = right(*arguments)
        attended = result[0] if what == "decode" else result
        attended.output[-1, -1, -1] += 1e-4
        return result

    monkeypatch.setattr(example, what, slightly_off)
    assert example.main(SMALL) == 1
    assert capsys.readouterr().out.strip().endswith("FAILED")


def test_nan_is_a_failure(example, monkeypatch):
    """NaN is larger than no bound, and a maximum over ranks may drop it."""
    right = example.prefill

    def with_nan(*arguments):
        attended = right(*arguments)
        attended.output[0, 0, 0] = torch.nan
        return attended

    monkeypatch.setattr(example, "prefill", with_nan)
    assert example.main(SMALL) == 1


def test_a_named_backend_is_used_or_refused(example):
    assert example.main([*SMALL, "--backend", "torch"]) == 0
    with pytest.raises(SystemExit, match="backend cupy: no backend for dcp_filter on cpu"):
        example.main([*SMALL, "--backend", "cupy"])
    assert not dist.is_initialized()


def test_more_ranks_than_devices(example, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="a device for each rank: 0 here"):
        example.main([*SMALL, "--device", "cuda"])


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--interleave", "0", "must be an integer of at least 1, got '0'"),
        ("--heads", "x", "must be an integer of at least 1, got 'x'"),
        ("--interleave", "2147483648", "must be at most 2147483647, got 2147483648"),
        ("--json", "no/such/folder.json", "there is no folder no/such"),
    ],
)
def test_wrong_options_are_refused(option, value, told, example, capsys):
    with pytest.raises(SystemExit):
        example.parse([option, value])
    assert f"argument {option}: {told}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK"])
def test_numbers_of_the_launcher_are_checked(name, example, monkeypatch):
    monkeypatch.setenv(name, "two")
    with pytest.raises(SystemExit, match=f"^{name} must be an integer, as torchrun sets it, got"):
        example.parse([]) if name == "WORLD_SIZE" else example.place_on_host()
