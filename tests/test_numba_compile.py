"""Numba's kernels compile for every card, without a GPU, by the code that a first call runs.

Each pair of choices (of card, dtype, flag …) is compiled together at least once, from the text to
machine code.
"""

from __future__ import annotations

import inspect
import itertools
import os
import random
import re
from typing import Any

import pytest
import torch
from conftest import compiled_here

try:
    from mla_index.backends.numba import compile as compiler
    from mla_index.backends.numba import kernels
    from mla_index.backends.numba.arguments import Shape, remap_launcher
    from mla_index.backends.numba.target import in_simulator
except ImportError as error:
    if os.environ.get("CI"):
        raise
    pytest.skip(f"numba-cuda is not installed: {error}", allow_module_level=True)

from mla_index.specs import RemapSpec, SafeLengthsSpec

compiled_here("NUMBA_ENABLE_CUDASIM", os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "0")

INT32, INT64 = torch.int32, torch.int64
CARDS = [(8, 0), (9, 0), (10, 0), (12, 0)]
HOPPER = (9, 0)
WANTS: dict[str, dict[str, bool]] = {
    "slots": {},
    "counts": {"counts": True},
    "compact": {"compact": True},
}
TABLES = {
    "few": compiler.FEW_ROWS.values(),
    "many": compiler.MANY_ROWS.values(),
    "not counted": compiler.NOT_COUNTED.values(),
}
BLOCKS = {block.groups: block for block in TABLES["many"]}
FACTORS: dict[str, list[Any]] = {
    "card": CARDS,
    "wants": list(WANTS),
    "block": sorted({*TABLES["few"], *TABLES["many"], *TABLES["not counted"]}),
    "token_dtype": [INT32, INT64],
    "table_dtype": [INT32, INT64],
    "slot_dtype": [INT32, INT64],
    "block_size": [64, 1, 48],
    "dcp": [(1, 1), (8, 1), (3, 5)],
    "workspace": [False, True],
}


def covering(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Rows that hold every pair of values of two factors at least once (greedily few)."""
    pairs_of_names = list(itertools.combinations(factors, 2))
    rng, rows = random.Random(0), []  # noqa: S311 (the same set in every run)
    left = {(a, x, b, y) for a, b in pairs_of_names for x in factors[a] for y in factors[b]}

    def pairs(row: dict[str, Any]) -> set[Any]:
        return {(a, row[a], b, row[b]) for a, b in pairs_of_names}

    while left:
        a, x, b, y = min(left, key=str)
        drawn = [{n: rng.choice(values) for n, values in factors.items()} for _ in range(40)]
        best = max((row | {a: x, b: y} for row in drawn), key=lambda row: len(pairs(row) & left))
        left -= pairs(best)
        rows.append(best)
    return rows


ROWS = covering(FACTORS)


def config_of(row: dict[str, Any]) -> kernels.RemapConfig:
    size, interleave = row["dcp"]
    names = ("token_dtype", "table_dtype", "slot_dtype", "block_size", "workspace")
    spec = RemapSpec(
        topk=2048,
        dcp_size=size,
        dcp_interleave=interleave,
        **WANTS[row["wants"]],
        **{name: row[name] for name in names},
    )
    return compiler.remap_config(spec, row["block"])


def plain(groups: int = 2, **changes: Any) -> kernels.RemapConfig:
    return compiler.remap_config(RemapSpec(64, 2048), BLOCKS[groups])._replace(**changes)


def check_machine_code(code: compiler.Compiled, threads: int) -> None:
    """A cubin, whose registers hold everything and leave so many threads room on the card."""
    assert code.code.startswith(b"\x7fELF"), code.log
    found = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", code.log
    )
    assert found is not None, code.log
    assert found.groups() == ("0", "0", "0")
    registers = re.search(r"Used (\d+) registers", code.log)
    assert registers is not None, code.log
    assert int(registers[1]) <= 65_536 // threads


def test_the_covering_set_covers_every_pair() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(FACTORS[a], FACTORS[b]))


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_remap_compiles(index: int) -> None:
    config = config_of(ROWS[index])
    threads = 32 * config.warps * config.resident
    check_machine_code(compiler.compiled(config, ROWS[index]["card"]), threads)


@pytest.mark.parametrize("wants", list(WANTS))
def test_the_usual_kernel_for_many_rows_compiles(wants: str) -> None:
    """int32 throughout: it shall leave the most registers to other blocks."""
    spec = RemapSpec(64, 2048, **WANTS[wants])
    config = compiler.remap_config(spec, compiler.remap_block(spec, many=True))
    threads = 32 * config.warps * config.resident
    check_machine_code(compiler.compiled(config, HOPPER), threads)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    "spec", [SafeLengthsSpec(INT32, INT32), SafeLengthsSpec(INT64, INT32)], ids=["32-32", "64-32"]
)
def test_safe_lengths_compiles(card: tuple[int, int], spec: SafeLengthsSpec) -> None:
    check_machine_code(compiler.compiled(spec, card), compiler.SAFE_LENGTHS_THREADS)


# --- what the code looks like on sm_90 ----------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_rows_move_in_vectors_of_16_bytes(compact: bool) -> None:
    config = plain(compact=compact, counts=compact)
    _, ptx = compiler.to_ptx(config, HOPPER)
    # A load for each group of a lane: in the path without edges, if the compiler makes two.
    assert len(re.findall(r"ld\.global\.v4\.[bu]32", ptx)) >= config.groups
    assert re.search(r"st\.global\.v4\.[bu]32", ptx)
    assert ".local" not in ptx
    # `out` may be the tokens themselves, which rules out loads that expect no writes.
    assert ".nc" not in ptx
    assert ("ld.shared.v4" in ptx) is compact


def test_the_address_of_the_shared_array_is_worked_out_once() -> None:
    """Else ptxas does so before every store, which takes four instructions."""
    for groups in (1, 2, 4):
        _, ptx = compiler.to_ptx(plain(compact=True, counts=True, groups=groups), HOPPER)
        array = re.search(r"\.extern \.shared .* (\w+)\[\];", ptx)
        assert array is not None
        assert len(re.findall(rf"mov\.u\d+\s+%\w+, {array[1]};", ptx)) == 1
        assert len(re.findall(r"st\.shared\.u32", ptx)) >= 4 * groups


def test_a_lane_has_every_read_of_the_table_under_way_at_once() -> None:
    """The loops over a lane's entries are unrolled: a read of the table for each of them.

    Each is one multiplication of entry and stride, in 32 bits to 64.
    """
    for groups in (1, 2, 4):
        _, ptx = compiler.to_ptx(plain(groups=groups), HOPPER)
        assert len(re.findall(r"mul\.wide\.s32", ptx)) == 4 * groups


def test_nothing_becomes_a_float() -> None:
    """Numba makes a float of a signed and an unsigned 64-bit integer."""
    config = config_of(
        {
            "wants": "compact", "token_dtype": INT64, "table_dtype": INT64, "slot_dtype": INT64,
            "block_size": 48, "dcp": (3, 5), "workspace": True, "block": BLOCKS[2],
        }
    )  # fmt: skip
    _, ptx = compiler.to_ptx(config, HOPPER)
    assert not re.search(r"\.f(32|64)\b", ptx)


# --- what holds of the text ---------------------------------------------------------------------


def test_the_parameters_are_those_of_the_text() -> None:
    kernel = kernels.remap_kernel(plain(), in_simulator())
    assert tuple(inspect.signature(kernel).parameters) == kernels.REMAP_PARAMETERS
    kernel = kernels.safe_lengths_kernel(in_simulator(), "int32")
    assert tuple(inspect.signature(kernel).parameters) == kernels.SAFE_LENGTHS_PARAMETERS


def test_every_launch_fits_a_block() -> None:
    """Threads and shared memory of every kernel at every width, and tiles that hold the row."""
    for slot, groups, compact in itertools.product(("int32", "int64"), (1, 2, 4), (False, True)):
        config = plain(slot=slot, groups=groups, compact=compact, counts=compact)
        shape = Shape(config, 32)
        for topk in (1, 7, 512, 2048, 2051, 4224, 8192, 16384, 2**20 + 1):
            blocks, threads, shared = shape(topk)
            tile = threads * 4 * groups
            assert 32 <= threads <= 32 * config.warps <= 1024
            assert shared <= 48 * 1024
            assert not compact or shared >= (tile + 32 + 3) * (8 if slot == "int64" else 4)
            assert blocks == (1 if compact else -(-topk // tile))


def test_more_rows_than_a_grid_takes_are_refused() -> None:
    def never(*_: object) -> None:
        raise AssertionError("launched")

    launch_remap = remap_launcher(RemapSpec(64, 1), never, never, never)
    rows = torch.zeros((1, 1), dtype=INT32).expand(2**31, 1)
    with pytest.raises(ValueError, match="numba launches up to 2147483647 rows a call, got 21474"):
        launch_remap(
            None, rows[:1], rows, rows, None, None, None, None, None, None, 0, 64, 0, 9, 9, -1
        )


def test_configurations_share_kernels() -> None:
    """What only says which of a row's numbers are given multiplies no kernels."""
    flags = ("req_id", "request_rows", "token_limits", "safe_lengths")
    specs = [
        RemapSpec(64, 2048, compact=True, **dict(zip(flags, given, strict=True)))
        for given in itertools.product([False, True], repeat=len(flags))
    ]
    assert len({compiler.remap_config(spec, BLOCKS[2]) for spec in specs}) == 1


def test_compiling_leaves_the_warning_filters_alone() -> None:
    import warnings

    before = list(warnings.filters)
    compiler.to_ptx(SafeLengthsSpec(), HOPPER)
    assert list(warnings.filters) == before
