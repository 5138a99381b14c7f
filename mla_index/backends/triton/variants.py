"""Which kernels a configuration has: how each cuts a row, and what it is compiled for.

The tables of shapes are the only place where speed on a card decides; `docs/performance.md` has
the measurements. Nothing here needs a device, so tests compile the same variants for any target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from mla_index.backends.triton import kernels
from mla_index.specs import RemapSpec, SafeLengthsSpec

POINTER = {torch.int32: "*i32", torch.int64: "*i64"}
DIVISIBLE = [["tt.divisibility", 16]]
SAFE_LENGTHS_ROWS = 128
"""Rows a program of `safe_lengths`."""


class Shape(NamedTuple):
    """How a kernel cuts a row: see `kernels.remap` for the plans.

    Args:
        plan: `tile`, `walk` or `split`.
        tile: columns of a tile, a power of two.
        tail: the most columns that may be left over after whole tiles; `tile`: any number.
        warps: warps a program.
    """

    plan: str
    tile: int
    tail: int
    warps: int


class Shapes(NamedTuple):
    """The shapes for few rows or for many.

    Args:
        general: for every width.
        even: a faster one for the widths that leave over no more than its tail, if there is one.
    """

    general: Shape
    even: Shape | None = None


class Cut(NamedTuple):
    """The shapes of a configuration by the number of rows.

    With few rows multiprocessors are idle, and what counts is how long a single row takes.

    Args:
        few_rows: up to here `few` is taken, beyond it `many`.
        few, many: the shapes; the same where the number of rows decides nothing.
    """

    few_rows: int
    few: Shapes
    many: Shapes


def _always(shapes: Shapes) -> Cut:
    return Cut(0, shapes, shapes)


def _tile(width: int, warps: int) -> Shapes:
    """One tile a row; where the width is the row's, nothing is masked."""
    return Shapes(Shape("tile", width, width, warps), Shape("tile", width, 0, warps))


def _split(tile: int, warps: int) -> Shapes:
    return Shapes(Shape("split", tile, tile, warps), Shape("split", tile, 0, warps))


def _walk(tile: int, warps: int) -> Shapes:
    return Shapes(Shape("walk", tile, tile, warps), Shape("walk", tile, 128, warps))


PLAIN = {
    # width class: measured on an H200, as the ratio to a copy of the same bytes
    1024: Cut(128, Shapes(Shape("split", 512, 512, 4)), Shapes(Shape("split", 1024, 1024, 4))),
    2048: Cut(4096, Shapes(Shape("split", 1024, 1024, 8)), Shapes(Shape("split", 1024, 1024, 4))),
}
"""Without counts. Narrower rows are one tile; wider ones are cut as those of 1024."""

COMPACT = {
    512: _always(_tile(512, 4)),
    1024: Cut(2048, _tile(1024, 4), _tile(1024, 2)),
    2048: _always(_tile(2048, 4)),
    4096: Cut(
        128, Shapes(Shape("tile", 4096, 4096, 4), Shape("walk", 2048, 128, 4)), _walk(512, 4)
    ),
    8192: Cut(128, _split(2048, 4), _walk(512, 4)),
    16384: Cut(256, _split(4096, 4), _walk(2048, 4)),
}
"""Compacted. Narrower rows are one tile; wider ones are cut as those of 16384."""


def shapes(spec: RemapSpec) -> Cut:
    """The shapes of a configuration, by the operation and the width class."""
    width = max(spec.topk, 32)
    if spec.compact:
        if width < 512:
            return _always(_tile(width, _warps(width)))
        # A thread of a tile of 4096 has 32 entries: as 64-bit numbers, too many for its registers.
        small = spec.workspace or torch.int64 in (
            spec.token_dtype,
            spec.table_dtype,
            spec.slot_dtype,
        )
        return COMPACT[min(width, 8192 if small else 16384)]
    if spec.counts:
        tile = min(width, 4096)
        plan = "tile" if width <= tile else "walk"
        return _always(Shapes(Shape(plan, tile, tile, _warps(tile))))
    if width <= 512:
        return _always(Shapes(Shape("split", width, width, _warps(2 * width))))
    return PLAIN.get(width, PLAIN[1024])


def _warps(tile: int) -> int:
    """One warp for each 256 columns, 4 at most."""
    return max(1, min(tile // 256, 4))


@dataclass(frozen=True)
class Variant:
    """All that one compiled kernel depends on.

    Args:
        function: a kernel of `kernels`.
        signature: the Triton type of each parameter.
        constants: the values of the parameters of type `constexpr`.
        divisible: parameters that are multiples of 16.
        warps: warps a program.
    """

    function: Any
    signature: dict[str, str]
    constants: dict[str, object]
    divisible: tuple[str, ...]
    warps: int

    def source(self) -> Any:
        """What `triton.compile` takes, with `options`."""
        names = list(self.signature)
        return ASTSource(
            self.function,
            self.signature,
            {(names.index(name),): value for name, value in self.constants.items()},
            {(names.index(name),): DIVISIBLE for name in self.divisible},
        )

    def trailing(self) -> tuple[object, ...]:
        """The constants that stand after the arguments of a launch."""
        return tuple(value for name, value in self.constants.items() if name.isupper())

    def options(self) -> dict[str, int]:
        """The compile options."""
        return {"num_warps": self.warps, "enable_fp_fusion": False}


def _variant(
    function: Any,
    pointers: dict[str, str | None],
    constants: dict[str, object],
    divisible: tuple[str, ...],
    warps: int,
) -> Variant:
    """Parameters that are neither pointers nor constants are 64-bit integers."""
    signature = {}
    for name in function.arg_names:
        kind = pointers.get(name, "i64")
        signature[name] = "constexpr" if name in constants or kind is None else kind
    absent = {name: None for name, kind in pointers.items() if kind is None}
    return Variant(function, signature, {**constants, **absent}, divisible, warps)


ALIGNED = ("tokens", "slots", "token_row_stride", "slot_row_stride", "topk")
"""The parameters of `remap` that must be multiples of 16 for loads and stores of whole vectors."""


def vectors(spec: RemapSpec) -> bool:
    """Whether aligned rows are loaded and stored in vectors of 16 bytes.

    Compacted slots are stored one by one. With the tokens loaded so too, neighbours are in
    neighbouring lanes from the load to the store, and never have to change places between them.
    """
    return not spec.compact


def remap_variants(spec: RemapSpec) -> tuple[Variant, ...]:
    """Every kernel of a configuration: for few rows, then for many (unless they are the same),
    each for any strides, for dense rows, and for dense rows of an even width.
    """
    return tuple(
        remap_variant(spec, dense=dense, shape=shape)
        for size in dict.fromkeys(shapes(spec)[1:])
        for dense, shape in ((False, size.general), (True, size.general), (True, size.even))
        if shape is not None
    )


def remap_variant(spec: RemapSpec, *, dense: bool, shape: Shape) -> Variant:
    """One kernel of remap.

    Args:
        spec: the configuration.
        dense: the columns of tokens and table are adjacent numbers; and, where `vectors` says that
            it matters, rows start at multiples of 16 bytes and K is a multiple of 16.
        shape: how a row is cut.
    """
    words = POINTER[torch.int32]
    return _variant(
        kernels.remap,
        {
            "tokens": POINTER[spec.token_dtype],
            "table": POINTER[spec.table_dtype],
            "slots": POINTER[spec.slot_dtype],
            "counts": words if spec.counts else None,
            "lengths": words if spec.safe_lengths else None,
            "req_id": words if spec.req_id else None,
            "request_rows": words if spec.request_rows else None,
            "token_limits": words if spec.token_limits else None,
            "ws_request_ids": words if spec.workspace else None,
            "ws_starts": words if spec.workspace else None,
            "topk": "i32",
            "pieces": "i32",
            "wide": "i32",
            "rank": "i32",
            "block_stride_rows": "i32",
        },
        {
            "BLOCK_SIZE": spec.block_size,
            "DCP_SIZE": spec.dcp_size,
            "INTERLEAVE": spec.dcp_interleave,
            "COMPACT": spec.compact,
            "DENSE": dense,
            "PLAN": shape.plan,
            "TILE": shape.tile,
            "TAIL": shape.tail,
        },
        ALIGNED if dense and vectors(spec) else (),
        shape.warps,
    )


def safe_lengths_variant(spec: SafeLengthsSpec) -> Variant:
    """The one kernel of safe_lengths."""
    counts = POINTER[spec.count_dtype]
    return _variant(
        kernels.safe_lengths,
        {"slots": POINTER[spec.slot_dtype], "counts": counts, "lengths": counts},
        {"TILE": SAFE_LENGTHS_ROWS},
        (),
        max(SAFE_LENGTHS_ROWS // 32, 1),
    )
