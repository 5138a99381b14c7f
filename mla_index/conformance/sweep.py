"""The definition, swept: each parameter over its whole range, one at a time and together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle

from mla_index.conformance.checks import Run, check_remap
from mla_index.conformance.generate import extreme_problem, random_problem
from mla_index.conformance.layouts import Layout
from mla_index.conformance.modes import (
    ALL_MODES,
    BIG_DTYPES,
    I32,
    I64,
    LOOKS,
    MIXES,
    MODES,
    ROW_TENSORS,
)
from mla_index.conformance.oracle import Problem
from mla_index.conformance.target import Job

FULL_WIDTHS = (1, 7, 512, 1536, 2048, 2051, 2176, 4224, 8192, 16384)
SMALL_WIDTHS = (1, 7, 31, 32, 33, 64, 133, 257)

DCP_SHAPES = (
    # size, interleave, block_size: dividing the block or not, larger than it, no powers of two
    (2, 1, 64),
    (8, 1, 1),
    (4, 64, 64),
    (4, 128, 64),
    (2, 48, 64),
    (3, 5, 7),
    (5, 3, 100),
    (7, 100, 64),
    (2, 2**20, 64),
)

FEATURES: dict[str, tuple[str, ...]] = {
    "no-req-id": ("no_req_id",),
    "request-rows": ("request_rows",),
    "rows-unmapped": ("no_req_id", "request_rows"),
    "token-limits": ("token_limits",),
    "workspace": ("workspace",),
    "everything": ("request_rows", "token_limits", "workspace"),
}

Recipe = Callable[[], Problem]


def _modes(
    name: str,
    tags: tuple[str, ...],
    problem: Problem | Recipe,
    modes: Mapping[str, Run] = MODES,
    **how: object,
) -> Iterator[Job]:
    """One job a mode; problems with dcp go through both operations."""
    known = problem.keywords if isinstance(problem, partial) else {}
    has_dcp = (problem.dcp if isinstance(problem, Problem) else known.get("dcp")) is not None
    for mode, run in modes.items():
        op = "dcp_filter" if has_dcp and mode in ("compact", "counts") else "remap"
        run = replace(run, op=op, **how)  # type: ignore[arg-type]
        yield Job(f"{name}:{mode}", op, (*tags, mode), partial(check_remap, problem, run, None))


def _pick(*names: str) -> dict[str, Run]:
    return {name: ALL_MODES[name] for name in names}


def widths(full: bool) -> Iterator[Job]:
    """Every width class and its borders, plain and compacted."""
    for i, topk in enumerate(FULL_WIDTHS if full else SMALL_WIDTHS):
        recipe = partial(random_problem, 100 + i, 4, topk, width=max(2, topk // 48))
        modes = _pick("plain", "compact", "safe") if i % 2 else _pick("plain", "counts", "safe")
        yield from _modes(f"width-{topk}", ("width", "tile", "compaction", "order"), recipe, modes)


def rows(full: bool) -> Iterator[Job]:
    """More rows than any block of threads."""
    for count in (2, 33, 257) if full else (2, 33):
        recipe = partial(random_problem, 200 + count, count, 133 if count < 257 else 512)
        modes = _pick("plain", "compact")
        yield from _modes(f"rows-{count}", ("rows", "tile", "row-guard"), recipe, modes)


def ranks() -> Iterator[Job]:
    """Decode context parallelism: first and last rank of every shape."""
    for i, (size, interleave, block_size) in enumerate(DCP_SHAPES):
        for rank in (0, size - 1):
            recipe = partial(
                random_problem,
                300 + i,
                4,
                37,
                dcp=(size, rank, interleave),
                block_size=block_size,
                width=9,
                num_blocks=20,
                features=("workspace",) if i % 3 == 2 else (),
            )
            name = f"dcp-{size}x{interleave}-block-{block_size}-rank-{rank}"
            modes = _pick("plain", "compact") if rank else _pick("counts", "safe")
            yield from _modes(name, ("owner", "local"), recipe, modes)


def blocks() -> Iterator[Job]:
    """Block sizes and strides up to the largest."""
    for i, (block_size, stride) in enumerate(
        (
            (1, None),
            (1, 7),
            (3, None),
            (3, 5),
            (64, 192),
            (64, 3904),
            (64, 2**31 - 1),
            (100, None),
            (100, 128),
            (2**31 - 1, None),
        )
    ):
        recipe = partial(
            random_problem,
            400 + i,
            4,
            37,
            block_size=block_size,
            block_stride_rows=stride,
            width=3 if block_size > 100 else 9,
        )
        name = f"block-{block_size}-stride-{stride or block_size}"
        tags = ("block-stride", "wrap") if stride else ("block-size",)
        yield from _modes(name, tags, recipe, _pick("plain", "compact"))


def pads() -> Iterator[Job]:
    """The marker, at the ends of the slots' dtype; the dummy slot stays 0."""
    for pad in (0, -7, 5, 2**31 - 1, -(2**31)):
        recipe = partial(random_problem, 500, 5, 37, pad=pad)
        yield from _modes(f"pad-{pad}", ("pad",), recipe, _pick("plain", "compact", "safe"))
    for pad in (2**63 - 1, -(2**63)):
        recipe = partial(random_problem, 501, 5, 37, pad=pad)
        how = {"dtypes": {"out": I64}}
        yield from _modes(f"pad-{pad}", ("pad",), recipe, _pick("plain", "safe"), **how)


def bounds() -> Iterator[Job]:
    """`num_slots`: none, one, in the middle of a block, around and beyond the dtype."""
    for bound in (0, 1, 64 * 11 + 13, 64 * 11 + 63, 64 * 11, 2**31, 2**62, 2**63 - 1):
        recipe = partial(random_problem, 600, 5, 37, num_slots=bound)
        yield from _modes(f"num-slots-{bound}", ("num-slots",), recipe, _pick("plain", "compact"))
    spread = partial(
        random_problem, 601, 5, 37, num_slots=192 * 11 + 13, block_stride_rows=192, num_blocks=14
    )
    yield from _modes("num-slots-with-stride", ("num-slots",), spread, _pick("plain", "compact"))
    # The slots' bound lies in a block that no int32 entry names: its offset must not count.
    for stride in (2**31 - 1, 2**20 + 1):
        top = Problem([[57, 0, 63, 121]], [[2**31 - 1, 2**31 - 2]], [0], block_stride_rows=stride)
        yield from _modes(
            f"largest-entry-stride-{stride}",
            ("num-slots", "wrap"),
            top,
            _pick("plain", "compact"),
            dtypes={"out": I64},
        )


def features() -> Iterator[Job]:
    """Every optional input alone and all together, with and without ranks."""
    mixes = cycle(MIXES.items())
    for i, (name, chosen) in enumerate(FEATURES.items()):
        for dcp in (None, (4, 1, 16)):
            recipe = partial(random_problem, 700 + i, 9, 37, features=chosen, dcp=dcp)
            tags = (*chosen, "row-guard") if "workspace" not in chosen else (*chosen, "workspace")
            label = f"{name}{'-dcp' if dcp else ''}"
            yield from _modes(label, tags, recipe, _pick("plain", "safe"))
            mix, dtypes = next(mixes)
            modes = _pick("compact")
            yield from _modes(f"{label}-{mix}", tags, recipe, modes, dtypes=dtypes)


def _everything(seed: int) -> Recipe:
    return partial(
        random_problem,
        seed,
        17,
        37,
        features=FEATURES["everything"],
        dcp=(4, 1, 16),
        num_slots=64 * 33 + 5,
        block_stride_rows=65,
    )


def dtypes() -> Iterator[Job]:
    """All dtypes of the three large tensors; each per-row tensor in int64 on its own."""
    for name, mix in BIG_DTYPES.items():
        yield from _modes(
            f"dtypes-{name}", ("dtype",), _everything(800), _pick("plain", "compact"), dtypes=mix
        )
    for tensor in ROW_TENSORS:
        yield from _modes(
            f"dtypes-i64-{tensor.replace('_', '-')}",
            ("dtype",),
            _everything(801),
            _pick("counts"),
            dtypes={tensor: I64},
        )


def layouts() -> Iterator[Job]:
    """Strides, pitches, odd starts, expanded inputs, outputs inside larger buffers, in place."""
    for name, look in LOOKS.items():
        tags = ("strides", name)
        modes = _pick("plain", "safe")
        yield from _modes(f"layout-{name}", tags, _everything(900), modes, layouts=look)
        yield from _modes(
            f"layout-{name}-i64", tags, _everything(901), _pick("compact"), layouts=look,
            dtypes=MIXES["i64-all"],
        )  # fmt: skip
    yield from _expanded()
    for name in ("dense", "pitched", "odd-pointers"):
        look = LOOKS.get(name, {})
        for dcp in (None, (2, 1, 3)):
            recipe = partial(random_problem, 902, 5, 64, dcp=dcp)
            yield from _modes(
                f"in-place-{name}{'-dcp' if dcp else ''}",
                ("in-place", "strides"),
                recipe,
                _pick("plain", "counts"),
                layouts=look,
                outputs="in_place",
            )
    recipe = partial(random_problem, 903, 5, 64)
    yield from _modes("allocated", ("allocated",), recipe, outputs="allocated")


def _expanded() -> Iterator[Job]:
    """Inputs with stride 0: one row for all, one column for all, one id for all."""
    base, big = random_problem(904, 5, 37), ("token_indices", "block_table")
    same_row = replace(base, tokens=[base.tokens[1]] * 5, table=[base.table[1]] * 5)
    same_column = replace(
        base, tokens=[[row[0]] * 37 for row in base.tokens], table=[[r[0]] * 6 for r in base.table]
    )
    one_id = replace(
        base,
        req_id=[2] * 5,
        request_rows=[1] * 4,
        token_limits=[200] * 5,
        ws_ids=[-1] * 5,
        ws_starts=[3, 3],
    )
    for name, problem, look in (
        ("rows", same_row, dict.fromkeys(big, Layout(expanded=(0,)))),
        ("columns", same_column, dict.fromkeys(big, Layout(expanded=(1,)))),
        ("ids", one_id, dict.fromkeys(ROW_TENSORS, Layout(expanded=(0,)))),
    ):
        modes = _pick("plain", "compact")
        yield from _modes(
            f"layout-expanded-{name}", ("strides", "expanded"), problem, modes, layouts=look
        )


def pointers(full: bool) -> Iterator[Job]:
    """Metadata and rows sliced at odd offsets: every alignment is right."""
    for topk in (2048, 2051) if full else (64, 67):
        recipe = partial(random_problem, 1000 + topk, 3, topk, width=9)
        for k in range(5):
            look = {
                name: Layout(offset=k) for name in ("token_indices", "out", "req_id", "counts_out")
            }
            modes = _pick("counts", "compact")
            name = f"fr28-offset-{k}-width-{topk}"
            yield from _modes(name, ("alignment", "strides"), recipe, modes, layouts=look)


def limits() -> Iterator[Job]:
    """The edge of each row's limit, and limits at the ends of their dtype."""
    problem = Problem(
        tokens=[[4, 5, 6, 63, 64, 127]] * 8,
        table=[[7, 3]],
        req_id=[0] * 8,
        token_limits=[5, 6, 0, -1, 64, 65, 2**31 - 1, -(2**31)],
    )
    modes, tags = _pick("plain", "safe"), ("token_limits",)
    yield from _modes("token-limits-edge", tags, problem, modes)
    wide = replace(problem, token_limits=[5, 2**32, 2**32 + 5, -(2**32), 64, 65, 2**62, -(2**63)])
    yield from _modes("token-limits-int64", tags, wide, modes)


def ids() -> Iterator[Job]:
    """Ids and rows beyond 32 bits are out of range, not cut to what would be in range."""
    problem = Problem(
        tokens=[[0, 64, 70]] * 6,
        table=[[7, 3], [5, 6]],
        req_id=[0, 2**32, 2**32 + 1, -(2**32), 1, 2**62],
    )
    mapped = replace(problem, req_id=[0, 1, 2, 3, 4, 2**33], request_rows=[1, 2**32, -(2**32), 0])
    gathered = replace(problem, ws_ids=[0, 2**32, -(2**32), -1, 1, 2**40], ws_starts=[9, 500])
    for name, case in {"req-id": problem, "request-rows": mapped, "workspace": gathered}.items():
        tags = ("row-guard", "wrap")
        yield from _modes(f"ids-beyond-int32-{name}", tags, case, _pick("plain", "safe"))


def workspaces() -> Iterator[Job]:
    """Workspace rows: bounds, strides up to the limit, bad ids, starts at the ends of int64."""
    base = Problem(
        tokens=[[0, 17, 63, 64, 127, 81, -1, 300]] * 6,
        table=[[1, 2], [3, -1]],
        req_id=[0, 9, -1, 0, 0, 1],
        ws_ids=[0, 1, 2, -1, 3, -(2**31)],
        ws_starts=[0, 100, -60],
        rank_stride=1000,
        dcp=(4, 1, 16),
    )
    for name, change in {
        "paged-neighbours": {},
        "num-rows-0": {"ws_num_rows": 0},
        "num-rows-edge": {"ws_num_rows": 132},
        "num-rows-2-62": {"ws_num_rows": 2**62},
        "rank-stride-0": {"rank_stride": 0},
        "rank-stride-limit": {"rank_stride": (2**63 - 1) // 4},
        "rank-stride-int32": {"rank_stride": 2**31 // 3},
        "starts-top": {"ws_starts": [2**63 - 1, 2**31 - 17, -(2**63)]},
        "num-slots-apart": {"num_slots": 70, "ws_num_rows": 3000},
        "no-ranks": {"dcp": None, "rank_stride": 5},
    }.items():
        problem = replace(base, **change)  # type: ignore[arg-type]
        tags = ("workspace", "workspace-ranks", "wrap")
        yield from _modes(f"workspace-{name}", tags, problem, _pick("plain", "safe"))
        yield from _modes(
            f"workspace-{name}-i64", tags, problem, _pick("compact"), dtypes={"out": I64}
        )


def empties() -> Iterator[Job]:
    """Nothing in one or several dimensions; no kernel runs where there is nothing to write."""
    one = Problem([[0, 70, -1]] * 2, [[1, 2]], [0, 0])
    full = replace(one, ws_ids=[0, -1], ws_starts=[4], request_rows=[0])
    for name, problem, modes in (
        ("t0", replace(one, tokens=[], req_id=[], topk=5), tuple(MODES)),
        ("k0", replace(one, tokens=[[], []]), ("plain", "counts", "compact")),
        ("t0-k0", replace(one, tokens=[], req_id=[], topk=0), tuple(MODES)),
        ("r0", replace(one, table=[], width=2), tuple(MODES)),
        ("w0", replace(one, table=[[], []]), tuple(MODES)),
        ("r0-w0", replace(one, table=[]), tuple(MODES)),
        ("n0", replace(one, request_rows=[]), tuple(MODES)),
        ("p0", replace(full, ws_starts=[]), tuple(MODES)),
        ("r0-workspace", replace(full, table=[], width=2), tuple(MODES)),
        ("w0-workspace", replace(full, table=[[]]), tuple(MODES)),
        ("all-0", replace(full, table=[], ws_starts=[], request_rows=[]), tuple(MODES)),
        ("t0-workspace", replace(full, tokens=[], req_id=[], ws_ids=[], topk=4), ("safe",)),
    ):
        yield from _modes(f"empty-{name}", ("empty",), problem, _pick(*modes))


def extremes() -> Iterator[Job]:
    """The ends of int32 and int64 in every tensor at once."""
    for bits, mix in ((32, {}), (64, MIXES["i64-all"]), (64, {**MIXES["i64-all"], "out": I32})):
        for dcp in (None, (3, 2, 7), (2**15, 1, 2**15)):
            problem = extreme_problem(bits, bits, dcp=dcp)
            out = "out64" if mix.get("out") == I64 else "out32"
            name = f"extreme-int{bits}-{out}-dcp{dcp[0] if dcp else 1}"
            tags = ("extreme", "wrap", "negative-token", "row-guard")
            yield from _modes(name, tags, problem, _pick("plain", "safe"), dtypes=mix)


def jobs(full: bool) -> Iterator[Job]:
    """The whole sweep."""
    yield from widths(full)
    yield from rows(full)
    yield from ranks()
    yield from blocks()
    yield from pads()
    yield from bounds()
    yield from features()
    yield from dtypes()
    yield from layouts()
    yield from pointers(full)
    yield from limits()
    yield from ids()
    yield from workspaces()
    yield from empties()
    yield from extremes()
