"""Which kernels a configuration has: how each cuts a row, and what it is compiled for.

The tables of shapes are the only place where speed on a card decides; `docs/performance.md` has
the measurements. Nothing here needs a device, so tests compile the same variants for any target.
"""

from __future__ import annotations

import sys
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


class Step(NamedTuple):
    """The shapes for calls of up to so many rows.

    With few rows multiprocessors are idle, and what counts is how long a single row takes.

    Args:
        most_rows: of the step.
        general: for every width.
        even: a faster one for the widths that leave over no more than its tail, if there is one.
    """

    most_rows: int
    general: Shape
    even: Shape | None = None


ANY = sys.maxsize
"""As many rows as there are."""


def _tile(rows: int, width: int, warps: int) -> Step:
    """One tile a row; where the width is the row's, nothing is masked."""
    return Step(rows, Shape("tile", width, width, warps), Shape("tile", width, 0, warps))


def _split(rows: int, tile: int, warps: int) -> Step:
    return Step(rows, Shape("split", tile, tile, warps), Shape("split", tile, 0, warps))


def _walk(rows: int, tile: int, warps: int) -> Step:
    return Step(rows, Shape("walk", tile, tile, warps), Shape("walk", tile, 128, warps))


def _pieces(rows: int, tile: int, warps: int) -> Step:
    """Pieces that need nothing of each other: a mask costs them little."""
    return Step(rows, Shape("split", tile, tile, warps))


PLAIN = {
    # width class: steps, measured on an H200
    1024: (_pieces(ANY, 512, 4),),
    2048: (_pieces(512, 512, 4), _pieces(4096, 1024, 8), _pieces(ANY, 1024, 4)),
    4096: (_pieces(1024, 512, 4), _pieces(ANY, 1024, 4)),
}
"""Without counts. Narrower rows are one tile; wider ones are cut as those of 4096."""

COMPACT = {
    512: (_tile(ANY, 512, 4),),
    1024: (_tile(1024, 1024, 4), _walk(ANY, 512, 2)),
    2048: (_tile(256, 2048, 4), _walk(1024, 1024, 4), _walk(ANY, 512, 2)),
    4096: (
        Step(32, Shape("split", 1024, 1024, 4), Shape("split", 2048, 0, 4)),
        _walk(256, 2048, 4), _walk(1024, 1024, 4), _walk(ANY, 512, 2),
    ),
    8192: (_split(32, 2048, 4), _walk(256, 2048, 4), _walk(ANY, 1024, 4)),
    16384: (
        _split(16, 2048, 4), _split(64, 4096, 4), _walk(512, 2048, 4), _walk(ANY, 1024, 4),
    ),
    32768: (_walk(512, 2048, 4), _walk(ANY, 1024, 4)),
}  # fmt: skip
"""Compacted. Narrower rows are one tile; wider ones are cut as those of 32768."""

COMPACT_WIDE = {
    512: (_tile(ANY, 512, 4),),
    1024: (_tile(ANY, 1024, 4),),
    2048: (_tile(256, 2048, 4), _walk(ANY, 1024, 4)),
    4096: (_split(32, 1024, 4), _walk(ANY, 1024, 4)),
    8192: (_split(64, 1024, 4), _walk(ANY, 1024, 4)),
    16384: (_walk(ANY, 1024, 4),),
}
"""The same with int64 tokens, table or slots: where a program walks 2048 columns, a thread's
registers do not hold 16 entries and the tokens of the next tile."""


def steps(spec: RemapSpec) -> tuple[Step, ...]:
    """The shapes of a configuration by the number of rows, from few to any."""
    width = max(spec.topk, 32)
    if spec.compact:
        wide = torch.int64 in (spec.token_dtype, spec.table_dtype, spec.slot_dtype)
        table = COMPACT_WIDE if wide else COMPACT
        return table[min(width, max(table))] if width >= 512 else _narrow(width, _warps(width))
    if spec.counts:
        tile = min(width, 4096)
        plan = "tile" if width <= tile else "walk"
        return (Step(ANY, Shape(plan, tile, tile, _warps(tile))),)
    return PLAIN[min(width, max(PLAIN))] if width > 512 else _narrow(width, _warps(2 * width))


def _narrow(width: int, warps: int) -> tuple[Step, ...]:
    return (_tile(ANY, width, warps),)


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
    kinds: dict[str, str | None],
    constants: dict[str, object],
    divisible: tuple[str, ...],
    warps: int,
) -> Variant:
    """A parameter without a kind is a 64-bit integer; one whose kind is None is absent."""
    signature = {}
    for name in function.arg_names:
        kind = kinds.get(name, "i64")
        signature[name] = "constexpr" if name in constants or kind is None else kind
    absent = {name: None for name, kind in kinds.items() if kind is None}
    return Variant(function, signature, {**constants, **absent}, divisible, warps)


SMALL_TENSORS = (
    "counts", "lengths", "req_id", "request_rows", "token_limits", "ws_request_ids", "ws_starts",
)  # fmt: skip
NARROW_NUMBERS = ("topk", "pieces", "pieces_shift", "wide", "rank", "block_stride_rows")
"""Parameters of `remap` that 32 bits hold."""
ALIGNED = ("tokens", "slots", "token_row_stride", "slot_row_stride", "topk")
"""The parameters of `remap` that must be multiples of 16 for loads and stores of whole vectors."""


def vectors(spec: RemapSpec) -> bool:
    """Whether aligned rows are loaded and stored in vectors of 16 bytes.

    Compacted slots are stored one by one. With the tokens loaded so too, neighbours are in
    neighbouring lanes from the load to the store, and never have to change places between them.
    """
    return not spec.compact


def remap_variants(spec: RemapSpec) -> tuple[Variant, ...]:
    """Every kernel of a configuration, once: in the order of `cuts`."""
    return tuple(remap_variant(spec, dense=dense, shape=shape) for dense, shape in cuts(spec))


def cuts(spec: RemapSpec) -> tuple[tuple[bool, Shape], ...]:
    """Dense or not, and the shape, of every kernel of a configuration.

    First the one for any strides, which is not worth one for each step.
    """
    found = {(False, steps(spec)[-1].general): None}
    for step in steps(spec):
        for shape in (step.general, step.even):
            if shape is not None:
                found[True, shape] = None
    return tuple(found)


def inverse(pieces: int) -> tuple[int, int]:
    """`(m, s)` such that `n // pieces == n * m >> s` for every n of 31 bits, in 64-bit arithmetic.

    T. Granlund, P. L. Montgomery: Division by invariant integers using multiplication, 1994,
    theorem 4.2: with l = ceil(log2(pieces)), m = 2**(31 + l) // pieces + 1 does; it has 32 bits.
    """
    shift = 31 + (pieces - 1).bit_length()
    return (1 << shift) // pieces + 1, shift


def remap_variant(spec: RemapSpec, *, dense: bool, shape: Shape) -> Variant:
    """One kernel of remap.

    Args:
        spec: the configuration.
        dense: the columns of tokens and table are adjacent numbers; and, where `vectors` says that
            it matters, rows start at multiples of 16 bytes and K is a multiple of 16.
        shape: how a row is cut.
    """
    words = POINTER[torch.int32]
    absent = {
        name: None
        for is_there, names in (
            (spec.counts, "counts count_stride"),
            (spec.safe_lengths, "lengths length_stride"),
            (spec.req_id, "req_id req_stride"),
            (spec.request_rows, "request_rows map_stride map_size"),
            (spec.token_limits, "token_limits limit_stride"),
            (spec.workspace, "ws_request_ids ws_starts ws_stride start_stride ws_size"),
            (spec.workspace, "rank_stride last_ws_row"),
            (spec.dcp_size > 1, "rank"),
            (not dense, "token_stride table_stride"),
            (shape.plan == "split", "pieces pieces_inverse pieces_shift"),
        )
        if not is_there
        for name in names.split()
    }
    return _variant(
        kernels.remap,
        {
            "tokens": POINTER[spec.token_dtype],
            "table": POINTER[spec.table_dtype],
            "slots": POINTER[spec.slot_dtype],
            **dict.fromkeys(SMALL_TENSORS, words),
            **dict.fromkeys(NARROW_NUMBERS, "i32"),
            **absent,
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
