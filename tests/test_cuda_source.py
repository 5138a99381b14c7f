"""NVRTC compiles the CUDA C of the cupy backend for every architecture that counts, without a GPU.

The variants come from the backend's own function from spec to compile options, and cover every pair
of values of what a spec fixes. Warnings, spilled registers and local memory are failures.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from mla_index.backends.cupy.launch import (
    REMAP_EXTRA_FIELDS,
    REMAP_FIELDS,
    SAFE_LENGTHS_FIELDS,
)
from mla_index.backends.cupy.variants import (
    Variant,
    remap_variants,
    safe_lengths_variants,
)
from mla_index.specs import RemapSpec, SafeLengthsSpec

try:
    from cuda.bindings import nvrtc

    MISSING = ""
except ImportError as error:
    MISSING = f"NVRTC needs cuda-bindings and nvidia-cuda-nvrtc: {error}"

needs_nvrtc = pytest.mark.skipif(bool(MISSING) and not os.environ.get("CI"), reason=MISSING)
ARCHITECTURES = (80, 90, 100, 120)


class Compiled(NamedTuple):
    ptx: str
    log: str


def compile_for(architecture: int, variant: Variant) -> Compiled:
    """Down to machine code; a warning is an error, and so is a spilled register where the number
    of registers was chosen: on sm_90, for numbers of 32 bits.
    """
    assert not MISSING, MISSING
    options = [f"-arch=sm_{architecture}", "-Werror=all-warnings", *variant.options]
    bytes_of = [value for name, value in variant.defines if name.endswith("_BYTES")]
    if architecture == 90 and max(bytes_of) == 4:
        options.append("--ptxas-options=--warn-on-spills")
    name = f"{variant.function}.cu".encode()
    program = checked(nvrtc.nvrtcCreateProgram(variant.source.encode(), name, 0, [], []))
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, f"{variant}: {log}"
    ptx = text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    checked(nvrtc.nvrtcDestroyProgram(program))
    return Compiled(ptx, log)


def checked(answer: tuple[Any, ...]) -> Any:
    result, *value = answer
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, result
    return value[0] if value else None


def text(size: Any, get: Any, program: Any) -> str:
    buffer = b" " * checked(size(program))
    checked(get(program, buffer))
    return buffer.decode().rstrip("\0 ").strip()


# --- which variants -------------------------------------------------------------------------------

DTYPES = (torch.int32, torch.int64)
VALUES: dict[str, tuple[Any, ...]] = {
    "block_size": (64, 1, 60, 2**31 - 1),
    "topk": (2, 64, 256, 512, 2048, 4096, 16384),
    "token_dtype": DTYPES,
    "table_dtype": DTYPES,
    "slot_dtype": DTYPES,
    "dcp": ((1, 1), (8, 1), (2, 16), (3, 48)),
    "result": ("", "counts", "compact", "compact counts", "compact counts safe_lengths"),
    "req_id": (True, False),
    "request_rows": (False, True),
    "token_limits": (False, True),
    "workspace": (False, True),
}


def spec_of(choice: dict[str, Any]) -> RemapSpec:
    values = dict(choice)
    size, interleave = values.pop("dcp")
    flags = dict.fromkeys(values.pop("result").split(), True)
    return RemapSpec(dcp_size=size, dcp_interleave=interleave, **flags, **values)


@cache
def pairwise() -> tuple[RemapSpec, ...]:
    """Specs in which every value of every field meets every value of every other."""
    rng = random.Random(0)  # noqa: S311
    names = list(VALUES)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in VALUES[a]
        for y in VALUES[b]
    }
    specs = []
    while missing:
        best, most = {}, -1
        for _ in range(30):
            choice = {name: rng.choice(VALUES[name]) for name in names}
            choice.update(rng.choice(sorted(missing, key=repr)))
            new = len(missing & set(pairs(choice)))
            if new > most:
                best, most = choice, new
        missing -= set(pairs(best))
        specs.append(spec_of(best))
    return tuple(dict.fromkeys(specs))


def pairs(choice: dict[str, Any]) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    return itertools.combinations(((name, choice[name]) for name in VALUES), 2)


# --- tests ----------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_pair_of_choices_compiles_clean(architecture: int) -> None:
    variants = dict.fromkeys(
        variant for spec in pairwise() for variant in remap_variants(spec).values()
    ) | dict.fromkeys(
        variant
        for slot, count in itertools.product(DTYPES, repeat=2)
        for variant in safe_lengths_variants(SafeLengthsSpec(slot, count))
    )
    for variant in variants:
        compiled = compile_for(architecture, variant)
        assert not compiled.log, f"{variant}: {compiled.log}"
        assert not re.search(r"\.local\b", compiled.ptx), f"{variant}: local memory"
        defines = dict(variant.defines)
        if variant.function == "remap":
            assert_accesses(compiled.ptx, defines)


def assert_accesses(ptx: str, defines: dict[str, int]) -> None:
    """16 bytes at a time where the variant says so: tokens are read, slots are written."""
    reads = re.findall(r"ld\.global\S*\.v([24])\.\w(\d+)", ptx)
    writes = re.findall(r"st\.global\S*\.v([24])\.\w(\d+)", ptx)
    if defines["VECTOR"]:
        assert {int(n) * int(bits) for n, bits in (*reads, *writes)} == {128}, defines
        quads = defines["ITEMS"] // 4
        assert len(reads) >= quads * defines["TOKEN_BYTES"] // 4, defines
        assert len(writes) >= (1 if defines["COMPACT"] else quads) * defines["SLOT_BYTES"] // 4
    else:
        assert not reads, defines
        assert not writes, defines
    assert "atom" not in ptx
    assert "red.global" not in ptx


@needs_nvrtc
def test_ordinary_entries_need_no_long_arithmetic() -> None:
    """int32 throughout: for each entry one address is widened, and nothing else has 64 bits. Told
    by what more entries a thread add: the kernels of 128 and 256 columns differ in that alone.
    """
    few, more = (
        dict(remap_variants(RemapSpec(64, topk, compact=True, counts=True))[True, False].defines)
        for topk in (128, 256)
    )
    assert few | {"ITEMS": 8} == more
    assert few["ITEMS"] == 4

    def long_steps(topk: int) -> int:
        vector = remap_variants(RemapSpec(64, topk, compact=True, counts=True))[True, False]
        ptx = compile_for(90, vector).ptx
        assert not re.search(r"\b(div|rem)\.", ptx)
        return len(re.findall(r"\b(?!ld|st|mov|cvta|mul\.wide)[a-z.]+\.[sub]64\b", ptx))

    entries, vectors = 4, 1
    assert long_steps(256) - long_steps(128) <= entries + 4 * vectors


@needs_nvrtc
def test_a_warning_is_seen() -> None:
    """The check of the check: an unused variable, and registers that cannot do."""
    variant = remap_variants(RemapSpec(64, 512, compact=True))[True, False]
    with pytest.raises(AssertionError, match="was declared but never referenced"):
        compile_for(90, Planted(*variant, "__device__ void f() { int unused; }\n"))  # type: ignore[arg-type]
    assert "spilled" in compile_for(90, variant._replace(registers=16)).log


class Planted(NamedTuple):
    """A variant with more source."""

    function: str
    registers: int
    defines: tuple[tuple[str, int], ...]
    more: str

    @property
    def options(self) -> tuple[str, ...]:
        return Variant(*self[:3]).options

    @property
    def source(self) -> str:
        return Variant(*self[:3]).source + self.more


@pytest.mark.parametrize(
    ("function", "fields"),
    [("remap", REMAP_FIELDS + REMAP_EXTRA_FIELDS), ("safe_lengths", SAFE_LENGTHS_FIELDS)],
)
def test_the_packed_fields_are_those_of_the_struct(function: str, fields: str) -> None:
    """Same names, same order; `*` where the struct's field is unsigned."""
    source = Variant(function, 32, ()).source
    structs = dict(re.findall(r"^struct (\w+) \{\n(.*?)^\};", source, re.MULTILINE | re.DOTALL))

    def flatten(struct: str, prefix: str) -> Iterator[str]:
        for kind, name in re.findall(r"^\s*([\w ]+[\w*]) (\w+);", structs[struct], re.MULTILINE):
            if kind in structs:
                yield from flatten(kind, f"{name}.")
            else:
                yield f"{'*' if kind == 'uint64' else ''}{prefix}{name}"

    assert fields.split() == list(flatten("Params", ""))


def test_what_is_read_at_run_time_makes_no_variants() -> None:
    """One class of widths is one set of kernels, and wide classes share theirs."""
    assert remap_variants(RemapSpec(64, 2048)) == remap_variants(RemapSpec(64, 1025))
    assert remap_variants(RemapSpec(64, 1024)) == remap_variants(RemapSpec(64, 65536))
    for spec in pairwise():
        assert len(set(remap_variants(spec).values())) <= 3
