"""Problems from a seed: every kind of row and entry that a serving process meets, and garbage."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from mla_index.conformance.oracle import Problem

GARBAGE = (-1, -2, -64, -(2**31), 2**31 - 1, 2139062143)
"""Tokens and ids that uninitialised memory holds; all fit int32."""


def random_problem(
    seed: int,
    rows: int,
    topk: int,
    *,
    requests: int = 5,
    width: int = 6,
    block_size: int = 64,
    block_stride_rows: int | None = None,
    num_blocks: int = 40,
    dcp: tuple[int, int, int] | None = None,
    features: Sequence[str] = (),
    num_slots: int | None = None,
    pad: int = -1,
) -> Problem:
    """A problem whose entries are mostly valid, with every kind of invalid one among them.

    The first row is full of padding, the second has none; of the others a tenth is invalid.

    `rows`, `topk`, `requests` and `width` are T, K, R and W; `features` are from `no_req_id`,
    `request_rows`, `token_limits` and `workspace`.
    """
    random = Random(seed)  # noqa: S311 (test data)
    size = dcp[0] if dcp else 1
    # Tokens up to a little beyond the last one that the table covers.
    covered = width * block_size * size
    beyond = max(1, covered + covered // 8)

    def token(t: int) -> int:
        if t == 0 and rows > 2:
            return -1
        draw = random.random()
        if t == 1 or draw > 0.1:
            return random.randrange(max(1, covered))
        return random.randrange(beyond) if draw > 0.06 else random.choice(GARBAGE)

    def ids(count: int) -> list[int]:
        """Mostly in `[0, count)`; a few outside."""
        return [
            random.randrange(count) if count and (t < 2 or random.random() > 0.15) else stale
            for t, stale in zip(range(rows), _stale(random, count, rows), strict=True)
        ]

    limits = (beyond, beyond, covered, covered // 2, 7, 0, -3)
    mapped = "request_rows" in features
    workspace = "workspace" in features
    return Problem(
        tokens=[[token(t) for _ in range(topk)] for t in range(rows)],
        table=[
            [random.randrange(num_blocks) if random.random() > 0.05 else -1 for _ in range(width)]
            for _ in range(requests)
        ],
        req_id=None if "no_req_id" in features else ids(requests + 2 if mapped else requests),
        block_size=block_size,
        block_stride_rows=block_stride_rows,
        request_rows=[*random.sample(range(requests), requests), -1, requests] if mapped else None,
        token_limits=[random.choice(limits) for _ in range(rows)]
        if "token_limits" in features
        else None,
        ws_ids=[random.choice((-1, -1, -1, -7, 0, 1, 2, 3, 2**31 - 1)) for _ in range(rows)]
        if workspace
        else None,
        ws_starts=[0, covered, -9] if workspace else None,
        rank_stride=3 * covered if workspace else 0,
        ws_num_rows=size * 3 * covered - covered // 3 if workspace else None,
        dcp=dcp,
        num_slots=num_slots,
        pad=pad,
        topk=topk,
        width=width,
    )


def _stale(random: Random, count: int, rows: int) -> list[int]:
    return [random.choice((-1, count, count + 7, *GARBAGE)) for _ in range(rows)]


def extreme_problem(seed: int, bits: int, *, dcp: tuple[int, int, int] | None = None) -> Problem:
    """Nothing but the ends of the dtype and their neighbours, in every tensor and scalar."""
    random = Random(seed)  # noqa: S311 (test data)
    top = 2 ** (bits - 1) - 1
    ends = (-top - 1, -top, -1, 0, 1, 2, 63, 64, top - 64, top - 1, top)
    size = dcp[0] if dcp else 1

    def draw(count: int, more: Sequence[int] = ()) -> list[int]:
        return [random.choice((*ends, *more)) for _ in range(count)]

    small = (0, 1, 2, 3)
    return Problem(
        tokens=[draw(33, (0, 1, 64, 65, 127, 128)) for _ in range(12)],
        table=[draw(3, (2**25 - 1, 2**25, 5)) for _ in range(4)],
        req_id=draw(12, small),
        request_rows=draw(4, small * 4),
        token_limits=[top] * 6 + draw(6),
        ws_ids=draw(12, (-1, -1, 0, 1, 2)),
        ws_starts=draw(3),
        rank_stride=(2**63 - 1) // size if bits == 64 else 2**31 - 1,
        block_stride_rows=random.choice((64, 4096, 2**31 - 1)),
        dcp=dcp,
    )
