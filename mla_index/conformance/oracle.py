"""What the operations compute, in plain loops over Python integers: slow, exact, without torch.

Written from the definition alone and sharing no code with the library, so that the two can only
agree by both being right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

INT32_MAX = 2**31 - 1

REASONS = (
    "PADDING",
    "BEYOND_LIMIT",
    "BEYOND_TABLE",
    "BAD_WORKSPACE_ID",
    "OTHER_RANK",
    "BAD_REQUEST_ROW",
    "NOT_ALLOCATED",
    "OUT_OF_BOUNDS",
)
"""Why an entry can be invalid, in the order of the steps."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The inputs of `remap` as nested sequences of Python integers.

    Args:
        tokens: `[T][K]`.
        table: `[R][W]`.
        req_id: `[T]` or None.
        topk, width: K and W, for a problem without rows to tell them by.
        dcp: (size, rank, interleave).
        ws_ids, ws_starts: the prefill workspace, both or none.
    """

    tokens: Sequence[Sequence[int]]
    table: Sequence[Sequence[int]]
    req_id: Sequence[int] | None
    block_size: int = 64
    block_stride_rows: int | None = None
    request_rows: Sequence[int] | None = None
    token_limits: Sequence[int] | None = None
    ws_ids: Sequence[int] | None = None
    ws_starts: Sequence[int] | None = None
    rank_stride: int = 0
    ws_num_rows: int | None = None
    dcp: tuple[int, int, int] | None = None
    num_slots: int | None = None
    pad: int = -1
    topk: int | None = None
    width: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """T and K."""
        return len(self.tokens), len(self.tokens[0]) if self.tokens else self.topk or 0

    @property
    def table_shape(self) -> tuple[int, int]:
        """R and W."""
        return len(self.table), len(self.table[0]) if self.table else self.width or 0


class Entry(NamedTuple):
    """One entry: its slot, or the reason why it has none."""

    slot: int | None
    reason: str | None


class Answer(NamedTuple):
    """What `remap` must return for the rows that were asked for."""

    slots: list[list[int]]
    counts: list[int]
    lengths: list[int]


def entry(problem: Problem, t: int, k: int, slot_max: int) -> Entry:
    """Row `t`, column `k`, step by step; `slot_max` is what the slots' dtype holds."""
    p = problem
    size, rank, interleave = p.dcp or (1, 0, 1)
    rows, width = p.table_shape
    token = p.tokens[t][k]
    if token < 0:
        return Entry(None, "PADDING")
    if p.token_limits is not None and token >= p.token_limits[t]:
        return Entry(None, "BEYOND_LIMIT")
    owner = (token // interleave) % size
    local = (token // (size * interleave)) * interleave + token % interleave
    block, offset = local // p.block_size, local % p.block_size
    if block >= width:
        return Entry(None, "BEYOND_TABLE")
    if p.ws_ids is not None and p.ws_starts is not None and p.ws_ids[t] >= 0:
        request = p.ws_ids[t]
        if request >= len(p.ws_starts):
            return Entry(None, "BAD_WORKSPACE_ID")
        return _bounded(
            owner * p.rank_stride + p.ws_starts[request] + local, p.ws_num_rows, slot_max
        )
    if owner != rank:
        return Entry(None, "OTHER_RANK")
    row = t if p.req_id is None else p.req_id[t]
    if p.request_rows is not None:
        if not 0 <= row < len(p.request_rows):
            return Entry(None, "BAD_REQUEST_ROW")
        row = p.request_rows[row]
    if not 0 <= row < rows:
        return Entry(None, "BAD_REQUEST_ROW")
    number = p.table[row][block]
    if number < 0:
        return Entry(None, "NOT_ALLOCATED")
    stride = p.block_size if p.block_stride_rows is None else p.block_stride_rows
    return _bounded(number * stride + offset, p.num_slots, slot_max)


def _bounded(slot: int, bound: int | None, slot_max: int) -> Entry:
    if slot < 0 or slot > slot_max or (bound is not None and slot >= bound):
        return Entry(None, "OUT_OF_BOUNDS")
    return Entry(slot, None)


def remap(
    problem: Problem,
    *,
    compact: bool = False,
    safe_lengths: bool = False,
    slot_max: int = INT32_MAX,
    rows: Iterable[int] | None = None,
) -> Answer:
    """The answer for `rows` (all by default), in their order."""
    total, topk = problem.shape
    answer = Answer([], [], [])
    for t in range(total) if rows is None else rows:
        found = [entry(problem, t, k, slot_max).slot for k in range(topk)]
        valid = [slot for slot in found if slot is not None]
        if compact:
            row = valid + [problem.pad] * (topk - len(valid))
        else:
            row = [problem.pad if slot is None else slot for slot in found]
        if safe_lengths and not valid:
            row[0] = 0
        answer.slots.append(row)
        answer.counts.append(len(valid))
        answer.lengths.append(max(len(valid), 1))
    return answer


def diagnose(problem: Problem, slot_max: int = INT32_MAX) -> dict[str, list[tuple[int, int, int]]]:
    """Every invalid entry as (row, column, token) by its reason, in order."""
    total, topk = problem.shape
    found: dict[str, list[tuple[int, int, int]]] = {reason: [] for reason in REASONS}
    for t in range(total):
        for k in range(topk):
            reason = entry(problem, t, k, slot_max).reason
            if reason is not None:
                found[reason].append((t, k, problem.tokens[t][k]))
    return found


def safe_lengths(
    slots: Sequence[Sequence[int]], counts: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """The slots with their dummies, and the lengths."""
    rows = [
        [0, *row[1:]] if count <= 0 else list(row) for row, count in zip(slots, counts, strict=True)
    ]
    return rows, [max(count, 1) for count in counts]


def flat_rows(
    shape: tuple[int, int, int], strides: tuple[int, int, int], block_size: int
) -> tuple[int, int] | None:
    """(number of rows, block stride in rows) of a paged cache, or None where it has no flat view.

    Strides count elements.
    """
    blocks, rows, dim = shape
    if dim == 0 or not 1 <= block_size <= rows:
        return None
    if blocks == 0:
        return 0, rows
    if (dim > 1 and strides[2] != 1) or (rows > 1 and strides[1] != dim):
        return None
    if blocks == 1:
        return block_size, rows
    if strides[0] % dim or strides[0] < block_size * dim:
        return None
    return (blocks - 1) * (strides[0] // dim) + block_size, strides[0] // dim


def request_row_bounds(ids: Sequence[int]) -> list[int] | None:
    """Bounds of the runs of equal ids, or None where a request returns or there is no row."""
    bounds, seen = [0], set()
    for i, request in enumerate(ids):
        if i == 0 or request != ids[i - 1]:
            if request in seen:
                return None
            seen.add(request)
            bounds += [i] if i else []
    return [*bounds, len(ids)] if ids else None
