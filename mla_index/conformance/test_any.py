"""What no backend has a part in: `diagnose`, `request_row_bounds`, and the oracle's own laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mla_index
from mla_index.conformance import cases, oracle
from mla_index.conformance.checks import Run, place_inputs, spec_of
from mla_index.conformance.generate import random_problem
from mla_index.conformance.oracle import Problem
from mla_index.conformance.target import Failure
from mla_index.specs import DTYPE_MAX

PROBLEMS = cases.problems()


@pytest.mark.mla_op("diagnose")
@pytest.mark.parametrize("name", PROBLEMS)
def test_diagnose(device: torch.device, name: str) -> None:
    """The first reason of every entry, as the oracle finds it; all sum to T·K."""
    problem, run = PROBLEMS[name]
    tensors = place_inputs(problem, run, device)
    spec = spec_of(problem, run, tensors)
    views = {tensor: placed.view for tensor, placed in tensors.items()}
    workspace = None
    if problem.ws_ids is not None:
        workspace = mla_index.PrefillWorkspace(
            views["ws_request_ids"], views["ws_starts"], problem.rank_stride, problem.ws_num_rows
        )
    found = mla_index.diagnose(
        views.get("req_id"),
        views["block_table"],
        views["token_indices"],
        block_size=problem.block_size,
        block_stride_rows=problem.block_stride_rows,
        request_rows=views.get("request_rows"),
        token_limits=views.get("token_limits"),
        workspace=workspace,
        dcp=None if problem.dcp is None else mla_index.Dcp(*problem.dcp),
        num_slots=problem.num_slots,
        out_dtype=spec.slot_dtype,
    )
    expected = oracle.diagnose(problem, DTYPE_MAX[spec.slot_dtype])
    for reason, entries in expected.items():
        kind = mla_index.Reason[reason]
        if found.counts[kind] != len(entries):
            raise Failure(f"{name}: {found.counts[kind]} of {reason}, must be {len(entries)}")
        shown = list(found.examples[kind])
        if shown != entries[: len(shown)] or (entries and not shown):
            raise Failure(f"{name}: examples of {reason} are {shown}, must begin {entries[:5]}")
    total = problem.shape[0] * problem.shape[1]
    if found.valid != total - sum(map(len, expected.values())):
        raise Failure(f"{name}: {found.valid} valid entries")
    if str(found.valid) not in str(found):
        raise Failure(f"{name}: the table does not show the valid entries: {found}")


@pytest.mark.mla_op("request_row_bounds")
@pytest.mark.parametrize(
    "ids", [[3, 3, 5, 5, 5, 2], [7], [1, 2, 3], [4] * 9, [-1, -1, 0], [2**40, 5, 5]]
)
def test_request_row_bounds(ids: list[int]) -> None:
    """Bounds of the runs, from a list, a NumPy array and a tensor."""
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    expected = oracle.request_row_bounds(ids)
    for given in (ids, tuple(ids), np.array(ids), torch.tensor(ids), torch.tensor(ids * 2)[::2]):
        bounds = oracle.request_row_bounds(list(map(int, given)))
        if bounds is None:
            continue
        found = mla_index.request_row_bounds(given)
        if not isinstance(found, np.ndarray) or found.tolist() != bounds:
            raise Failure(f"{type(given).__name__} {ids}: {found}, must be {bounds}")
    if ids == [3, 3, 5, 5, 5, 2] and expected != [0, 2, 5, 6]:
        raise Failure(f"the oracle says {expected}")


@pytest.mark.mla_op("request_row_bounds")
@pytest.mark.parametrize(
    ("ids", "named"),
    [([], "(0,)"), ([0, 1, 0], "request 0 returns at row 2"), ([5, 5, 1, 2, 1], "request 1")],
)
def test_request_row_bounds_refuses(ids: list[int], named: str) -> None:
    """Nothing, and a request that returns; the message says which and where."""
    pytest.importorskip("numpy", reason="numpy is not installed")
    if oracle.request_row_bounds(ids) is not None:
        raise Failure("the oracle has bounds for it")
    try:
        mla_index.request_row_bounds(torch.tensor(ids, dtype=torch.int64))
    except ValueError as error:
        if named not in str(error):
            raise Failure(f"the message must name {named!r}, got: {error}") from None
    else:
        raise Failure("must be refused with ValueError, but passed")


@pytest.mark.mla_op("remap")
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (4, 16), (3, 5), (4, 128), (2, 48)])
def test_ranks_partition_the_selection(device: torch.device, size: int, interleave: int) -> None:
    """Every valid token is one rank's alone, in row order, at its place in that rank's table."""
    whole = random_problem(500, 6, 64, width=4 * size)
    covered = 4 * 64
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in range(size):
        share = replace(whole, dcp=(size, rank, interleave), table=[[1, 2, 3, 4]] * 5)
        tensors = place_inputs(share, Run(), device)
        views = {name: placed.view for name, placed in tensors.items()}
        result = mla_index.dcp_filter(
            views["req_id"],
            views["block_table"],
            views["token_indices"],
            mla_index.Dcp(size, rank, interleave),
            block_size=64,
            compact=False,
        )
        for t, row in enumerate(result.slots.tolist()):
            for k, slot in enumerate(row):
                if slot != -1:
                    found.setdefault((t, k), []).append((rank, slot - 64))
    for t, k in ((t, k) for t in range(6) for k in range(64)):
        owners = found.get((t, k), [])
        if owners != _owner(whole, t, k, size, interleave, covered):
            raise Failure(f"entry [{t}, {k}] is held by {owners}")


def _owner(
    problem: Problem, t: int, k: int, size: int, interleave: int, covered: int
) -> list[tuple[int, int]]:
    """(rank, place within the rank) by counting tokens one after another, not by a formula."""
    token = problem.tokens[t][k]
    request = (problem.req_id or [])[t]
    if token < 0 or not 0 <= request < 5 or token > size * covered * 2:
        return []
    held = [0] * size
    for before in range(token):
        held[before // interleave % size] += 1
    rank = token // interleave % size
    return [(rank, held[rank])] if held[rank] < covered else []
