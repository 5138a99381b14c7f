"""Triton's kernels compile for every target, without a GPU.

The signatures are those that a launch uses. Each pair of choices (of target, dtype, plan, flag …)
is compiled together at least once.
"""

from __future__ import annotations

import itertools
import random
import re
import subprocess
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import compiled_here, needed

from mla_index.specs import RemapSpec, SafeLengthsSpec

triton = needed("triton")
variants = needed("mla_index.backends.triton.variants")

compiled_here("TRITON_INTERPRET", isinstance(variants.kernels.remap, triton.JITFunction))

from triton.backends.compiler import GPUTarget  # noqa: E402 (after the question for triton)

INT32, INT64 = torch.int32, torch.int64
HOPPER = GPUTarget("cuda", 90, 32)
TARGETS = [
    *(GPUTarget("cuda", capability, 32) for capability in (80, 90, 100, 120)),
    *(GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")),
    GPUTarget("hip", "gfx1100", 32),
]
WANTS = {
    "slots": {},
    "counts": {"counts": True},
    "compact": {"compact": True},
    "compact+counts": {"compact": True, "counts": True},
    "compact+lengths": {"compact": True, "safe_lengths": True},
}
FACTORS: dict[str, list[Any]] = {
    "target": TARGETS,
    "wants": list(WANTS),
    "topk": [7, 512, 2048, 4096, 16384],
    "variant": list(range(9)),  # modulo the number that a configuration has
    "token_dtype": [INT32, INT64],
    "table_dtype": [INT32, INT64],
    "slot_dtype": [INT32, INT64],
    "block_size": [64, 1, 48],
    "dcp": [(1, 1), (8, 1), (3, 5)],
    "req_id": [True, False],
    "request_rows": [False, True],
    "token_limits": [False, True],
    "workspace": [False, True],
}


def covering(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Rows that hold every pair of values of two factors at least once (greedily few)."""
    names = list(factors)
    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }

    def pairs(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    rng, rows = random.Random(0), []  # noqa: S311 (the same set in every run)
    while left:
        a, i, b, j = min(left)
        candidates = []
        for _ in range(40):
            row = {name: rng.randrange(len(factors[name])) for name in names}
            candidates.append(row | {a: i, b: j})
        best = max(candidates, key=lambda row: len(pairs(row) & left))
        left -= pairs(best)
        rows.append({name: factors[name][best[name]] for name in names})
    return rows


ROWS = covering(FACTORS)


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compile, rather than find what an earlier run has compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(variant: Any, target: Any) -> Any:
    return triton.compile(variant.source(), target=target, options=variant.options())


def spec_of(row: dict[str, Any]) -> RemapSpec:
    size, interleave = row["dcp"]
    fixed = ("token_dtype", "table_dtype", "slot_dtype", "block_size")
    given = ("req_id", "request_rows", "token_limits", "workspace")
    return RemapSpec(
        topk=row["topk"],
        dcp_size=size,
        dcp_interleave=interleave,
        **WANTS[row["wants"]],
        **{name: row[name] for name in (*fixed, *given)},
    )


def test_the_covering_set_covers_every_pair() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        wanted = set(itertools.product(map(str, FACTORS[a]), map(str, FACTORS[b])))
        assert {(str(row[a]), str(row[b])) for row in ROWS} == wanted


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_remap_compiles(index: int) -> None:
    row = ROWS[index]
    kernels = variants.remap_variants(spec_of(row))
    kernel = compiled(kernels[row["variant"] % len(kernels)], row["target"])
    assert kernel.asm[{"cuda": "cubin", "hip": "hsaco"}[row["target"].backend]]


@pytest.mark.parametrize("topk", variants.COMPACT)
def test_every_shape_compiles_for_amd(topk: int) -> None:
    """Of each width class; the covering set takes but a few of a configuration's kernels there."""
    target = GPUTarget("hip", "gfx942", 64)
    for variant in variants.remap_variants(RemapSpec(64, topk, compact=True, counts=True)):
        assert compiled(variant, target).asm["hsaco"]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.arch))
@pytest.mark.parametrize("counts", [INT32, INT64], ids=["int32", "int64"])
def test_safe_lengths_compiles(target: Any, counts: torch.dtype) -> None:
    kernel = compiled(variants.safe_lengths_variant(SafeLengthsSpec(INT64, counts)), target)
    assert kernel.asm[{"cuda": "cubin", "hip": "hsaco"}[target.backend]]


# --- what the code looks like on sm_90 ----------------------------------------------------------


def test_aligned_rows_move_in_vectors_of_16_bytes() -> None:
    general, dense, *_ = variants.remap_variants(RemapSpec(64, 2048))
    ptx = compiled(dense, HOPPER).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert ".v4.b32" not in compiled(general, HOPPER).asm["ptx"]


def test_int32_needs_no_64_bit_arithmetic_for_an_entry() -> None:
    """The number of 64-bit multiplications does not grow with the tile: none is an entry's."""
    spec = RemapSpec(64, 2048)
    narrow, wide = (
        compiled(
            variants.remap_variant(spec, dense=True, shape=variants.Shape("split", tile, tile, 4)),
            HOPPER,
        ).asm["ptx"]
        for tile in (512, 2048)
    )
    products = [len(re.findall(r"mul\.lo\.s64", ptx)) for ptx in (narrow, wide)]
    assert products[0] == products[1] > 0


def test_compaction_never_moves_entries_between_threads() -> None:
    """Shared memory holds the sums of a scan, 128 words at most, and no word of each entry."""
    for variant in variants.remap_variants(RemapSpec(64, 2048, compact=True, counts=True)):
        assert compiled(variant, HOPPER).metadata.shared <= 512


SPECS = {
    "slots": RemapSpec(64, 2048),
    "counts": RemapSpec(64, 2048, compact=True, counts=True),
    "wide": RemapSpec(64, 16384, dcp_size=8, dcp_interleave=64, compact=True, safe_lengths=True),
    "everything": RemapSpec(
        48, 16384, INT64, INT64, INT64, 3, 5, compact=True, safe_lengths=True,
        request_rows=True, token_limits=True, workspace=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_no_register_spills(name: str, tmp_path: Any) -> None:
    tool = triton.knobs.nvidia.cuobjdump.path
    for variant in variants.remap_variants(SPECS[name]):
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(compiled(variant, HOPPER).asm["cubin"])
        usage = subprocess.run(
            [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
        )
        found = re.search(r"STACK:(\d+).* LOCAL:(\d+)", usage.stdout + usage.stderr)
        assert found is not None
        assert found.groups() == ("0", "0"), variant.constants


# --- how many kernels there are -----------------------------------------------------------------


@pytest.mark.parametrize("wants", WANTS)
@pytest.mark.parametrize("topk", FACTORS["topk"])
def test_a_configuration_has_few_kernels(wants: str, topk: int) -> None:
    kernels = variants.remap_variants(RemapSpec(64, topk, **WANTS[wants]))
    assert len(kernels) == len({str(kernel) for kernel in kernels}) <= 9


@pytest.mark.parametrize(("topk", "rows"), [(1, 2**31), (16384, 2**27)])
def test_more_programs_than_a_grid_takes_are_refused(topk: int, rows: int) -> None:
    launch = needed("mla_index.backends.triton.launch")
    cuts = launch._Cuts(RemapSpec(64, topk))
    cuts.numbers(True, rows // 32, topk, 512, 64, 2**31 - 1)
    with pytest.raises(ValueError, match=f"up to 2147483647 programs a call, and {rows} rows of"):
        cuts.numbers(True, rows, topk, 512, 64, 2**31 - 1)


class Compiled:
    """Stands for a compiled kernel: `kernel[grid](…)` is Triton's own way, which calls hooks."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream: self.launches.append(("triton's", grid, arguments))

    def run(self, *arguments: object) -> None:
        self.launches.append(("direct", arguments[:3], arguments[4:]))


def test_a_profiler_that_listens_sees_every_launch() -> None:
    """Directly while nobody listens; else by Triton's own launcher, which tells the hooks."""
    launch = needed("mla_index.backends.triton.launch")
    kernel = Compiled()
    launcher = object.__new__(launch.Launcher)
    launcher.device, launcher.index, launcher.several = torch.device("cpu"), 0, False
    launcher.current_stream = lambda _: 7
    launcher.module = type("Module", (), {"device": lambda _: nullcontext()})
    launcher.ready = [launch.Ready(kernel, kernel.run, (), ("constant",))]
    hooks = triton.knobs.runtime.launch_enter_hook

    def heard(_: object) -> None:
        """Never called: the kernel is a stand-in."""

    launcher(0, 3, ("argument",))
    hooks.add(heard)
    try:
        launcher(0, 3, ("argument",))
    finally:
        hooks.remove(heard)
    launcher(0, 3, ("argument",))
    who = [(way, grid) for way, grid, _ in kernel.launches]
    assert who == [("direct", (3, 1, 1)), ("triton's", (3, 1, 1)), ("direct", (3, 1, 1))]
    assert {arguments for *_, arguments in kernel.launches} == {("argument", "constant")}
