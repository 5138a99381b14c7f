"""Faults that people met in the field, as small inputs with their right values.

Each stands for a kind of fault. The values are written down, not computed, so that they check the
oracle too. Rows may be widened with -1 to the width under test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle

import torch

from mla_index.conformance.checks import Literal, Run, check_remap
from mla_index.conformance.layouts import Layout
from mla_index.conformance.modes import I32, I64, LOOKS, MIXES, MODES
from mla_index.conformance.oracle import Problem
from mla_index.conformance.target import Job


@dataclass(frozen=True, slots=True)
class Report:
    """A report: the input, its right values, and what the input is about.

    Args:
        dtypes: where the report depends on them; then it is not run in other mixes.
        layouts: the layout that the report is about.
        widths: None: as it is and widened; else only as it is.
    """

    id: str
    tags: tuple[str, ...]
    problem: Problem
    literal: Literal
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    widened: bool = True


def _wide_table(topk: int) -> Report:
    tokens = [99, 100, 5000, *((7 * k) % 103 for k in range(topk - 3))]
    slots = [tok + 7 if tok < 100 else -1 for tok in tokens]
    return Report(
        f"fr06-table-end-k{topk}",
        ("table-width",),
        Problem([tokens], [list(range(7, 107))], [0], block_size=1),
        Literal([slots], [sum(slot >= 0 for slot in slots)]),
        widened=False,
    )


_DCP_20 = [[0, 64, 128, 192, 512]]
_DCP_21 = [[47, 48, 96, 97, 112]]
_WORKSPACE = {"table": [[0]], "req_id": [0], "ws_ids": [0], "ws_starts": [10], "rank_stride": 100}

REPORTS: tuple[Report, ...] = (
    Report(
        "fr01-table-view",
        ("row-pitch", "table-width", "row-guard"),
        Problem([[128, 64, 0, -1]] * 2, [[5, 6]], [0, 1]),
        Literal([[-1, 384, 320, -1], [-1] * 4], [2, 0], [[384, 320], []]),
        layouts={"block_table": Layout(gap=6)},
    ),
    Report(
        "fr02-padding-row",
        ("row-guard",),
        Problem([[0, 64]] * 2, [[5, 6]], [-1, 0]),
        Literal([[-1, -1], [320, 384]], [0, 2]),
        layouts={"block_table": Layout(gap=6)},
    ),
    Report(
        "fr03-uninitialised-tokens",
        ("table-width", "negative-token"),
        Problem([[2139062143, -2147483648, -1, 0]], [[7, 3]], [0]),
        Literal([[-1, -1, -1, 448]], [1]),
    ),
    Report(
        "fr05-unallocated-block",
        ("unallocated", "counts"),
        Problem([[0, 64]], [[7, -1]], [0]),
        Literal([[448, -1]], [1]),
    ),
    _wide_table(64),
    _wide_table(2051),
    Report(
        "fr07-no-rows",
        ("empty",),
        Problem([], [[1, 2]], [], topk=2048),
        Literal([], []),
        widened=False,
    ),
    Report(
        "fr09-stale-row-map",
        ("row-guard",),
        Problem([[0], [1], [2], [0], [1], [2]], [[4], [9]], [0, 1, 2, 3, 4, 5]),
        Literal([[256], [577], [-1], [-1], [-1], [-1]], [1, 1, 0, 0, 0, 0]),
    ),
    Report(
        "fr10-inner-padding",
        ("compaction", "order", "negative-token"),
        Problem([[3, -1, -1, 70, -1, 1]], [[2, 5]], [0]),
        Literal([[131, -1, -1, 326, -1, 129]], [3], [[131, 326, 129]]),
    ),
    Report(
        "fr11-large-as-invalid",
        ("table-width",),
        Problem([[2147480000, 0]], [[7]], [0]),
        Literal([[-1, 448]], [1]),
    ),
    Report(
        "fr13-four-in-a-row",
        ("compaction", "prefix-sum"),
        Problem([[0, 1, 2, 3]], [[9]], [0]),
        Literal([[576, 577, 578, 579]], [4], [[576, 577, 578, 579]]),
    ),
    Report(
        "fr14-empty-rank",
        ("owner", "empty-row"),
        Problem([[0, 1, 2, 63], [192, 1, 255, 63]], [[10]], [0, 0], dcp=(4, 3, 64)),
        Literal([[-1] * 4, [640, -1, 703, -1]], [0, 2]),
        layouts={"out": Layout(gap=3)},
    ),
    Report(
        "fr17-interleave-1",
        ("owner", "local"),
        Problem([[0, 1, 2, 3]], [[10]], [0], dcp=(2, 1, 1)),
        Literal([[-1, 640, -1, 641]], [2]),
    ),
    Report(
        "fr18-workspace-ranks",
        ("workspace", "workspace-ranks"),
        Problem([[1, 64]], **_WORKSPACE, dcp=(4, 0, 64)),  # type: ignore[arg-type]
        Literal([[11, 110]], [2]),
    ),
    Report(
        "fr19-workspace-interleave-1",
        ("workspace", "workspace-ranks", "local"),
        Problem([[0, 1, 2, 3]], **_WORKSPACE, dcp=(2, 0, 1)),  # type: ignore[arg-type]
        Literal([[10, 110, 11, 111]], [4]),
    ),
    *(
        Report(
            f"fr20-interleave-above-block-rank{rank}",
            ("owner", "local", "table-width"),
            Problem(_DCP_20, [[10, 20]], [0], dcp=(4, rank, 128)),
            Literal([slots], [sum(slot >= 0 for slot in slots)]),
        )
        for rank, slots in enumerate(
            ([640, 1280, -1, -1, -1], [-1, -1, 640, 1280, -1], [-1] * 5, [-1] * 5)
        )
    ),
    *(
        Report(
            f"fr21-interleave-48-rank{rank}",
            ("owner", "local"),
            Problem(_DCP_21, [[10, 20]], [0], dcp=(2, rank, 48)),
            Literal([slots], [sum(slot >= 0 for slot in slots)]),
        )
        for rank, slots in enumerate(([687, -1, 688, 689, 1280], [-1, 640, -1, -1, -1]))
    ),
    Report(
        "fr22-slot-beyond-int32",
        ("wrap", "counts"),
        Problem([[0, 64]], [[550073, 1]], [0], block_stride_rows=3904),
        Literal([[-1, 3904]], [1]),
        dtypes={"out": I32},
    ),
    Report(
        "fr22-slot-in-int64",
        ("wrap", "out-dtype"),
        Problem([[0, 64]], [[550073, 1]], [0], block_stride_rows=3904),
        Literal([[550073 * 3904, 3904]], [2]),
        dtypes={"out": I64},
    ),
    Report(
        "fr23-block-stride",
        ("block-stride",),
        Problem([[0, 63, 64]], [[2, 0]], [0], block_stride_rows=192),
        Literal([[384, 447, 0]], [3]),
    ),
    Report(
        "fr26c-int64-tokens",
        ("table-width", "wrap"),
        Problem([[2**32, 2**40 + 5, 5]], [[1, 2]], [0]),
        Literal([[-1, -1, 69]], [1]),
        dtypes={"token_indices": I64, "out": I32},
    ),
    Report(
        "fr26c-entry-2-33",
        ("wrap",),
        Problem([[0, 64]], [[2**33, 1]], [0]),
        Literal([[-1, 64]], [1]),
        dtypes={"block_table": I64, "out": I32},
    ),
    Report(
        "fr26c-entry-2-62",
        ("wrap",),
        Problem([[0, 4]], [[2**62, 1]], [0], block_size=4, block_stride_rows=4),
        Literal([[-1, 4]], [1]),
        dtypes={"block_table": I64, "out": I64},
    ),
    Report(
        "fr26d-last-int32-slot",
        ("wrap",),
        Problem([[63, 127, 64]], [[33554431, 33554432]], [0], block_stride_rows=64),
        Literal([[2147483647, -1, -1]], [1]),
        dtypes={"out": I32},
    ),
    Report(
        "fr26e-negative-start",
        ("workspace", "wrap"),
        Problem([[0, 7]], [[0]], [0], ws_ids=[0], ws_starts=[-5]),
        Literal([[-1, 2]], [1]),
    ),
)


def widen(problem: Problem, topk: int) -> Problem:
    """The problem with -1 up to the width `topk`."""
    return replace(problem, tokens=[[*row, *[-1] * (topk - len(row))] for row in problem.tokens])


def jobs(full: bool) -> Iterator[Job]:
    """Each report in each mode: as it is in int32, and widened in other dtypes and layouts."""
    mixes, looks = cycle(MIXES.items()), cycle(LOOKS.items())
    for report in REPORTS:
        modes = dict(MODES) if report.problem.shape[0] else {m: MODES[m] for m in ("plain", "safe")}
        for mode, run in modes.items():
            run = replace(run, dtypes=report.dtypes, layouts=report.layouts)
            # dcp_filter is remap with other defaults: the reports about ranks run through it too.
            through_filter = report.problem.dcp is not None and mode in ("compact", "counts")
            run = replace(run, op="dcp_filter" if through_filter else "remap")
            yield _job(f"{report.id}:{mode}", mode, report, report.problem, run)
            mix, dtypes = ("own", report.dtypes) if report.dtypes else next(mixes)
            look, layouts = ("own", report.layouts) if report.layouts else next(looks)
            other = replace(run, dtypes=dtypes, layouts=layouts, outputs="allocated")
            if report.widened:
                problem = widen(report.problem, 2048 if full else 133)
                wide = replace(other, outputs="given")
                yield _job(f"{report.id}:{mode}:wide:{mix}:{look}", mode, report, problem, wide)
            else:
                yield _job(f"{report.id}:{mode}:{mix}:{look}", mode, report, report.problem, other)


def _job(name: str, mode: str, report: Report, problem: Problem, run: Run) -> Job:
    check = partial(check_remap, problem, run, report.literal)
    return Job(name, run.op, (*report.tags, mode), check)
