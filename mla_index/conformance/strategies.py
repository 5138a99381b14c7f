"""Generated inputs: values with garbage, dtypes, layouts and parameters, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from hypothesis import strategies as st

from mla_index.conformance.checks import Run
from mla_index.conformance.layouts import Layout
from mla_index.conformance.modes import I32, I64, ROW_TENSORS
from mla_index.conformance.oracle import Problem
from mla_index.specs import DTYPE_MAX

Draw: TypeAlias = Callable[[st.SearchStrategy[int]], int]

BLOCK_SIZES = (1, 3, 16, 64, 100)
DCP_SIZES = ((2, 1), (2, 48), (3, 5), (4, 16), (8, 64))
"""Few values for what kernels are compiled for, so that examples share kernels."""


def near(*points: int, dtype: torch.dtype) -> st.SearchStrategy[int]:
    """Integers of `dtype`: mostly around `points`, sometimes anything, its ends included."""
    top = DTYPE_MAX[dtype]
    around = [
        st.integers(max(-top - 1, point - 2), min(top, point + 2))
        for point in points
        if abs(point) <= top
    ]
    ends = st.sampled_from((-top - 1, -top, -1, -2, top - 1, top))
    return st.one_of(
        *around, *around, st.integers(0, max(points)), ends, st.integers(-top - 1, top)
    )


def layouts(columns: bool) -> st.SearchStrategy[Layout]:
    """Any layout; with `columns` False only such whose last stride is 1."""
    return st.builds(
        Layout,
        step=st.integers(1, 3) if columns else st.just(1),
        gap=st.integers(0, 5),
        offset=st.integers(0, 4),
        transposed=st.booleans() if columns else st.just(False),
    )


def _rows(
    values: st.SearchStrategy[int], rows: int, columns: int
) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(values, min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)


def _optional(draw: st.DrawFn, values: st.SearchStrategy[int], count: int) -> Sequence[int] | None:
    if not draw(st.booleans()):
        return None
    return draw(st.lists(values, min_size=count, max_size=count))


@st.composite
def remap_calls(draw: st.DrawFn) -> tuple[Problem, Run]:
    """A problem of `remap` or `dcp_filter`, and a way to put it."""
    rows, topk = draw(st.integers(0, 6)), draw(st.integers(0, 17))
    requests, width = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    dtypes = {
        name: draw(st.sampled_from((I32, I64)))
        for name in ("token_indices", "block_table", "out", *ROW_TENSORS)
    }
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    dcp = None
    if draw(st.booleans()):
        size, interleave = draw(st.sampled_from(DCP_SIZES))
        dcp = (size, draw(st.integers(0, size - 1)), interleave)
    size = dcp[0] if dcp else 1
    covered = width * block_size * size
    stride = draw(st.sampled_from((None, block_size, block_size + 1, 3904, 2**31 - 1)))
    ids = near(0, requests, dtype=dtypes["req_id"])
    starts = draw(st.integers(0, 3))
    workspace = draw(st.booleans())
    pad_top = DTYPE_MAX[dtypes["out"]]
    problem = Problem(
        tokens=draw(_rows(near(0, covered, dtype=dtypes["token_indices"]), rows, topk)),
        table=draw(_rows(near(0, 40, dtype=dtypes["block_table"]), requests, width)),
        req_id=_optional(draw, ids, rows),
        block_size=block_size,
        block_stride_rows=stride,
        request_rows=_optional(draw, near(0, requests, dtype=dtypes["request_rows"]), requests),
        token_limits=_optional(draw, near(0, covered, dtype=dtypes["token_limits"]), rows),
        ws_ids=draw(
            st.lists(near(0, starts, dtype=dtypes["ws_request_ids"]), min_size=rows, max_size=rows)
        )
        if workspace
        else None,
        ws_starts=draw(
            st.lists(near(0, 1000, dtype=dtypes["ws_starts"]), min_size=starts, max_size=starts)
        )
        if workspace
        else None,
        rank_stride=draw(st.sampled_from((0, 1, covered, 2**31, (2**63 - 1) // size))),
        ws_num_rows=draw(st.none() | st.integers(0, 2 * covered + 1)),
        dcp=dcp,
        num_slots=draw(st.none() | st.integers(0, 50 * block_size) | st.just(2**63 - 1)),
        pad=draw(st.just(-1) | st.sampled_from((0, 7, -9, pad_top, -pad_top - 1))),
        topk=topk,
        width=width,
    )
    return problem, draw(_runs(problem, dtypes))


@st.composite
def _runs(draw: st.DrawFn, problem: Problem, dtypes: dict[str, torch.dtype]) -> Run:
    rows, topk = problem.shape
    compact = draw(st.booleans())
    outputs = ["given", "allocated"]
    same = dtypes["out"] == dtypes["token_indices"]
    in_place = same and not compact and draw(st.booleans())
    if in_place:
        outputs = ["in_place"]
    look = {name: draw(layouts(columns=True)) for name in ("block_table", *ROW_TENSORS)}
    look["token_indices"] = draw(layouts(columns=not in_place))
    look["out"] = draw(layouts(columns=False))
    look |= {name: draw(layouts(columns=True)) for name in ("counts_out", "lengths_out")}
    return Run(
        op="remap" if problem.dcp is None else draw(st.sampled_from(("remap", "dcp_filter"))),
        compact=compact,
        counts=draw(st.booleans()),
        safe=compact and (topk > 0 or rows == 0) and draw(st.booleans()),
        dtypes=dtypes,
        layouts=look,
        outputs=draw(st.sampled_from(outputs)),
    )


@st.composite
def safe_calls(draw: st.DrawFn) -> tuple[list[list[int]], list[int], Run]:
    """A call of `safe_lengths`."""
    rows, topk = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    dtypes = {name: draw(st.sampled_from((I32, I64))) for name in ("slots", "counts")}
    slots = draw(_rows(st.integers(-1, 9), rows, topk))
    numbers = near(0, topk, dtype=dtypes["counts"])
    counts = draw(st.lists(numbers, min_size=rows, max_size=rows))
    look = {name: draw(layouts(columns=True)) for name in ("slots", "counts", "out")}
    outputs = draw(st.sampled_from(("given", "allocated")))
    return slots, counts, Run(dtypes=dtypes, layouts=look, outputs=outputs)
