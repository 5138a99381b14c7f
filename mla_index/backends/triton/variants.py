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
    """The shapes of a configuration for few rows or for many.

    Args:
        general: for every width.
        even: a faster one for the widths that leave over no more than its tail, if there is one.
    """

    general: Shape
    even: Shape | None = None


FEW_ROWS = 128
"""Up to here multiprocessors are idle, and what counts is how long a single row takes."""


def shapes(spec: RemapSpec) -> tuple[Shapes, Shapes]:
    """The shapes for few rows and for many, by the operation and the width class."""
    width = max(spec.topk, 32)
    if not spec.compact and not spec.counts:
        few, many = min(width, 512), min(width, 1024)
        return (
            Shapes(Shape("split", few, few, _warps(few, 128))),
            Shapes(Shape("split", many, many, _warps(many, 256))),
        )
    if not spec.compact:
        tile = min(width, 4096)
        plan = "tile" if width <= tile else "walk"
        one = Shapes(Shape(plan, tile, tile, _warps(tile, 256)))
        return one, one
    if width <= 2048:
        warps = _warps(width, 256)
        one = Shapes(Shape("tile", width, width, warps), Shape("tile", width, 0, warps))
        return one, one
    even = Shape("walk", 2048, 128, 4)
    if width <= 4096:
        one = Shapes(Shape("tile", 4096, 4096, 4), even)
        return one, one
    return (
        Shapes(Shape("split", 2048, 2048, 4), Shape("split", 2048, 0, 4)),
        Shapes(Shape("walk", 2048, 2048, 4), even),
    )


def _warps(tile: int, lanes: int) -> int:
    return max(1, min(tile // lanes, 4))


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
        for size in dict.fromkeys(shapes(spec))
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
