"""Which CUDA C a configuration compiles: a pure function from spec to source and options.

Nothing here imports CuPy, so that the sources can be compiled and inspected anywhere.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch

from mla_index.specs import RemapSpec, SafeLengthsSpec

BYTES = {torch.int32: 4, torch.int64: 8}
MAX_WARPS = 32
"""Of a thread block: 1,024 threads."""
PLAIN_WARPS = 8
"""The same where a row's threads need nothing from each other."""
MAX_PARTS = 65_535
"""Blocks of a row: what grid.y takes."""
FEW_ROWS = {1: 512, 8192: 256, 16384: 128}
"""Up to so many rows the fewest steps a row are fastest, beyond it small blocks, which overlap
better; by the smallest width class. Measured on an H200."""


class Variant(NamedTuple):
    """One kernel to compile. Equal variants are one kernel, whichever configurations lead to them.

    Args:
        function: name of the kernel, and of the `.cu` file that holds it.
        registers: the most that a thread may use; they decide how many rows are in flight.
        defines: the macros that the source asks for.
    """

    function: str
    registers: int
    defines: tuple[tuple[str, int], ...]

    @property
    def options(self) -> tuple[str, ...]:
        """For NVRTC. The architecture is for the one who compiles to add."""
        macros = (f"-D{name}={value}" for name, value in self.defines)
        return ("-std=c++17", f"--maxrregcount={self.registers}", *macros)

    @property
    def source(self) -> str:
        """The CUDA C."""
        return _source(self.function)


@cache
def _source(function: str) -> str:
    return files(__package__).joinpath(f"{function}.cu").read_text(encoding="ascii")


class Layout(NamedTuple):
    """How the columns of a row are dealt to threads; `remap.cu` says more.

    Args:
        items: entries that a thread handles in a tile.
        warp_rows: a row is one warp's, rather than a thread block's.
        one_tile: no row of this width class is wider than a tile.
        parted: a row may be the work of several thread blocks, which need nothing from each other.
        max_warps: of a thread block.
    """

    items: int
    warp_rows: bool
    one_tile: bool
    parted: bool
    max_warps: int

    @property
    def segment(self) -> int:
        """Columns of one warp in a tile."""
        return 32 * self.items


def few_rows(spec: RemapSpec) -> int:
    """The entry of `FEW_ROWS` for a configuration."""
    return FEW_ROWS[max(width for width in FEW_ROWS if width <= spec.topk)]


def layout(spec: RemapSpec, *, vector: bool, many: bool = False) -> Layout:
    """The layout of a configuration, from its width class and dtypes; measured on an H200.

    Vectors of 32 bits leave registers for more entries a thread. Where there are many rows, those
    of 2048 columns and more walk small tiles.
    """
    dtypes = (spec.token_dtype, spec.table_dtype, spec.slot_dtype)
    items = 8 if vector and torch.int64 not in dtypes else 4
    if spec.topk <= 32 * items:
        return Layout(max(4, spec.topk // 32), True, True, False, 1)
    if not (spec.compact or spec.counts):
        most = MAX_PARTS * PLAIN_WARPS * 32 * items
        return Layout(items, False, spec.topk <= most, True, PLAIN_WARPS)
    one_tile = spec.topk <= MAX_WARPS * 32 * items
    if (many and spec.topk >= 2048) or not (vector or one_tile):
        columns = 1024 if spec.topk <= 4096 else 2048
        return Layout(items, False, False, False, columns // (32 * items))
    return Layout(items, False, one_tile, False, MAX_WARPS)


def _registers(shape: Layout) -> int:
    """So few that the most rows are in flight, and none is spilled where all numbers have 32 bits.

    Measured on an H200. Without counts, calls with 4 entries a thread (int64 or any strides) are
    slower with more rows in flight than 56 registers allow.
    """
    if shape.warp_rows:
        return 48 if shape.items == 8 else 40
    return 56 if shape.parted and shape.items == 4 else 40


def remap_layouts(spec: RemapSpec) -> dict[tuple[bool, bool], Layout]:
    """The layouts of a configuration by (vector, many): see `layout`.

    Calls of any strides and alignment have one for all numbers of rows. No width of a class below
    4 is a multiple of 4, as vectors want it.
    """
    any_strides = layout(spec, vector=False)
    if spec.topk < 4:
        return {(False, many): any_strides for many in (False, True)}
    return {
        (vector, many): layout(spec, vector=True, many=many) if vector else any_strides
        for vector in (False, True)
        for many in (False, True)
    }


def remap_variants(spec: RemapSpec) -> dict[tuple[bool, bool], Variant]:
    """The kernels of a configuration by (vector, many); some may be the same."""
    return {
        kind: _remap_variant(spec, shape, vector=kind[0])
        for kind, shape in remap_layouts(spec).items()
    }


def _remap_variant(spec: RemapSpec, shape: Layout, *, vector: bool) -> Variant:
    defines = {
        "TOKEN_BYTES": BYTES[spec.token_dtype],
        "TABLE_BYTES": BYTES[spec.table_dtype],
        "SLOT_BYTES": BYTES[spec.slot_dtype],
        "BLOCK_SIZE": spec.block_size,
        "DCP_SIZE": spec.dcp_size,
        "DCP_INTERLEAVE": spec.dcp_interleave,
        "COMPACT": spec.compact,
        "COUNTS": spec.counts,
        "SAFE_LENGTHS": spec.safe_lengths,
        "REQ_ID": spec.req_id,
        "REQUEST_ROWS": spec.request_rows,
        "TOKEN_LIMITS": spec.token_limits,
        "WORKSPACE": spec.workspace,
        "ITEMS": shape.items,
        "WARP_ROWS": shape.warp_rows,
        "ONE_TILE": shape.one_tile,
        "VECTOR": vector,
    }
    macros = tuple((name, int(value)) for name, value in defines.items())
    return Variant("remap", _registers(shape), macros)


def safe_lengths_variants(spec: SafeLengthsSpec) -> tuple[Variant, ...]:
    """The one kernel of `safe_lengths`."""
    defines = (("SLOT_BYTES", BYTES[spec.slot_dtype]), ("COUNT_BYTES", BYTES[spec.count_dtype]))
    return (Variant("safe_lengths", 32, defines),)
