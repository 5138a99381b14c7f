"""What is timed: batches of query rows, uniform or out of a serving trace, and their selections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from mla_index.simulation.paged import plan_blocks
from mla_index.simulation.trace import Request
from mla_index.specs import Dcp, PrefillWorkspace

BLOCK_SIZE = 64
"""Tokens in a cache block."""
REQUESTS = 128
"""Requests of a uniform batch; of a decode step of a trace at most."""
CONTEXT = 32768
"""Tokens of each of them."""
EMPTY_SHARE = 0.1
"""Rows without a valid entry, in what `safe_lengths` is given."""
DECODE, PREFILL = "trace decode", "trace prefill"
"""Names of a trace's batches."""
VALID = 0.9
"""Share of a uniform batch's entries that are not -1."""
PREFILL_ROWS = 8192
"""Prompt tokens of a prefill chunk."""
MOST_SETS = 16
"""Sets of inputs that are walked in turn, at most."""
LAST_CACHE = 64 << 20
"""Bytes taken for the last cache where the device does not tell."""


@dataclass(frozen=True)
class Batch:
    """What all calls of a step share.

    Args:
        name: `uniform`, `trace decode` or `trace prefill`.
        req_id: int `[T]`, the request of each row.
        tables: by number of DCP ranks, the block table `[R, W]` of the rank that is measured.
        request_rows: int `[R]`, a permutation of the table's rows.
        token_limits: int `[T]`, the tokens that a row may see.
        workspace: every second row reads the gathered prefill workspace.
        valid: share of the entries that a row could have which are selected; the others are -1.
    """

    name: str
    req_id: Tensor
    tables: dict[int, Tensor]
    request_rows: Tensor
    token_limits: Tensor
    workspace: PrefillWorkspace
    valid: float

    @property
    def rows(self) -> int:
        """T."""
        return len(self.req_id)

    def part(self, start: int, stop: int) -> Batch:
        """The query rows `[start, stop)` alone."""
        workspace = replace(self.workspace, request_ids=self.workspace.request_ids[start:stop])
        return replace(
            self,
            req_id=self.req_id[start:stop],
            token_limits=self.token_limits[start:stop],
            workspace=workspace,
        )


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call: a batch, a selection, and outputs.

    Args:
        batch: what the calls of a step share.
        tokens: `[T, K]`, the selection.
        out: `[T, K]`, for slots.
        counts, lengths: int32 `[T]`.
        given_counts: int32 `[T]`, what `safe_lengths` is given; some are 0.
    """

    batch: Batch
    tokens: Tensor
    out: Tensor
    counts: Tensor
    lengths: Tensor
    given_counts: Tensor

    @property
    def moved(self) -> int:
        """Bytes of selection and slots, which every call reads and writes."""
        return 2 * self.tokens.nbytes

    @cached_property
    def valid(self) -> float:
        """Share of the entries that are not -1, as they are drawn; waits for the device."""
        topk = self.tokens.shape[1]
        seen = self.batch.token_limits.clamp(max=topk).double().mean().item() / topk
        return self.batch.valid * round(seen, 4)

    def part(self, start: int, stop: int) -> Inputs:
        """The rows `[start, stop)` of the inputs, with outputs of their own."""
        tokens = self.tokens[start:stop]
        return with_outputs(self.batch.part(start, stop), tokens, self.given_counts[start:stop])

    def blank(self) -> Inputs:
        """The same with outputs filled alike, so that what a call does not write compares equal."""
        for output in (self.out, self.counts, self.lengths):
            output.fill_(-7)
        return self


def with_outputs(batch: Batch, tokens: Tensor, given_counts: Tensor) -> Inputs:
    """Inputs with new outputs."""
    counts = torch.empty(len(tokens), dtype=torch.int32, device=tokens.device)
    return Inputs(
        batch, tokens, torch.empty_like(tokens), counts, torch.empty_like(counts), given_counts
    )


def measured_rank(ranks: int) -> int:
    """The rank whose share is measured: one in the middle."""
    return ranks // 2


def uniform_batch(
    rows: int,
    *,
    dcp: Iterable[int] = (),
    valid: float = VALID,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> Batch:
    """Rows of `REQUESTS` requests of `CONTEXT` tokens, in no order, over scattered blocks."""
    tables = {}
    for ranks in (1, *dcp):
        width = math.ceil(CONTEXT / (BLOCK_SIZE * ranks))
        blocks = torch.randperm(REQUESTS * width, device=device)
        tables[ranks] = blocks.view(REQUESTS, width).to(dtype)
    req_id = torch.randint(REQUESTS, (rows,), dtype=dtype, device=device)
    limits = torch.full((rows,), CONTEXT, dtype=torch.int32, device=device)
    return _batch("uniform", req_id, tables, limits, [CONTEXT] * REQUESTS, valid)


def decode_batch(
    requests: Sequence[Request],
    mtp: int,
    *,
    dcp: Iterable[int] = (),
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> Batch:
    """A decode step over the requests: `1 + mtp` rows each, which see up to the whole prompt."""
    rows = 1 + mtp
    lengths = torch.tensor([request.input_length for request in requests])
    missing = torch.arange(mtp, -1, -1)
    limits = (lengths[:, None] - missing).clamp_(min=1).flatten()
    req_id = torch.arange(len(requests)).repeat_interleave(rows)
    return _trace_batch(DECODE, requests, req_id, limits, dcp, dtype, device)


def prefill_batch(
    requests: Sequence[Request],
    *,
    rows: int = PREFILL_ROWS,
    dcp: Iterable[int] = (),
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> Batch:
    """The first `rows` prompt tokens in the order of arrival; each sees what precedes it."""
    taken, left = [], rows
    for request in requests:
        if left == 0:
            break
        taken.append((request, min(left, request.input_length)))
        left -= taken[-1][1]
    limits = torch.cat([torch.arange(1, count + 1) for _, count in taken])
    counts = torch.tensor([count for _, count in taken])
    req_id = torch.arange(len(taken)).repeat_interleave(counts)
    chosen = [request for request, _ in taken]
    return _trace_batch(PREFILL, chosen, req_id, limits, dcp, dtype, device)


def trace_batches(
    requests: Sequence[Request],
    rows: Iterable[int],
    mtp: int,
    *,
    dcp: Iterable[int] = (),
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> list[Batch]:
    """Decode steps of about so many rows (`decode_size`), and a prefill chunk."""
    sizes = sorted({decode_size(requests, count, mtp) for count in rows})
    batches = [
        decode_batch(requests[:size], mtp, dcp=dcp, dtype=dtype, device=device) for size in sizes
    ]
    few = list(islice(requests, REQUESTS))
    return [*batches, prefill_batch(few, dcp=dcp, dtype=dtype, device=device)]


def decode_size(requests: Sequence[Request], rows: int, mtp: int) -> int:
    """Requests of the decode step that comes nearest to so many rows, and has no more if it can."""
    return min(max(1, rows // (1 + mtp)), len(requests), REQUESTS)


def why_no_step(requests: Sequence[Request], rows: int, mtp: int) -> str | None:
    """Why no decode step has just so many rows, and how many are taken instead; or None."""
    each = 1 + mtp
    taken = decode_size(requests, rows, mtp) * each
    if rows == taken:
        return None
    has = f"{each} rows" if each > 1 else "1 row"
    if rows // each <= min(len(requests), REQUESTS):
        why = f"each request has {has}"
    elif len(requests) < REQUESTS:
        why = f"the trace has {len(requests)} requests of {has}"
    else:
        why = f"a decode step takes at most {REQUESTS} requests of {has}"
    return f"{why}, so T = {taken} instead"


def rotated(batch: Batch, topk: int) -> list[Inputs]:
    """Inputs of a batch, to be walked in turn.

    As many as exceed the device's last cache twice, up to `MOST_SETS`: what is larger than a
    fraction of the cache is then read from memory, and what is smaller from the cache, as in a
    decode step, where the indexer has just written it. One set on a CPU.
    """
    first = make_inputs(batch, topk)
    sets = 1
    if batch.req_id.device.type != "cpu":
        sets = min(MOST_SETS, math.ceil(2 * _last_cache(batch.req_id.device) / first.moved))
    return [first, *(make_inputs(batch, topk) for _ in range(sets - 1))]


def make_inputs(batch: Batch, topk: int) -> Inputs:
    """A random selection for a batch, never zeros, and outputs.

    A row that may see fewer than K tokens gets all of them, and -1 behind; of the others, as many
    are -1, anywhere, as the batch's share of valid entries leaves.
    """
    limits = batch.token_limits[:, None]
    shape = (batch.rows, topk)
    device, dtype = limits.device, batch.req_id.dtype
    # Drawn as integers: the float32 products of a fraction and a limit would be as large.
    tokens = torch.randint(2**31 - 1, shape, dtype=torch.int32, device=device)
    tokens.remainder_(limits)
    if int(batch.token_limits.min()) < topk:
        column = torch.arange(topk, dtype=torch.int32, device=device)
        everything = torch.where(column < limits, column, -1)
        tokens = torch.where(limits < topk, everything, tokens)
    if batch.valid < 1:
        absent = torch.randint(2**20, shape, dtype=torch.int32, device=device)
        tokens.masked_fill_(absent >= round(batch.valid * 2**20), -1)
    empty = torch.rand(batch.rows, device=device) < EMPTY_SHARE
    given = torch.randint(1, topk + 1, (batch.rows,), dtype=torch.int32, device=device)
    return with_outputs(batch, tokens.to(dtype), given.masked_fill_(empty, 0))


def _trace_batch(
    name: str,
    requests: Sequence[Request],
    req_id: Tensor,
    limits: Tensor,
    dcp: Iterable[int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Batch:
    tables = {}
    for ranks in (1, *dcp):
        plan = plan_blocks(requests, block_size=BLOCK_SIZE, dcp=Dcp(ranks, measured_rank(ranks)))
        tables[ranks] = plan.block_table(device).to(dtype)
    lengths = [request.input_length for request in requests]
    return _batch(
        name, req_id.to(device, dtype), tables, limits.to(device, torch.int32), lengths, 1.0
    )


def _batch(
    name: str,
    req_id: Tensor,
    tables: dict[int, Tensor],
    limits: Tensor,
    lengths: Sequence[int],
    valid: float,
) -> Batch:
    device = req_id.device
    ends = torch.tensor(lengths).cumsum(0)
    row = torch.arange(len(req_id), device=device)
    workspace = PrefillWorkspace(
        torch.where(row % 2 == 0, req_id, -1).to(torch.int32),
        (ends - torch.tensor(lengths)).to(device, torch.int32),
        rank_stride=int(ends[-1]),
    )
    request_rows = torch.randperm(len(lengths), device=device).to(torch.int32)
    return Batch(name, req_id, tables, request_rows, limits, workspace, valid)


def _last_cache(device: torch.device) -> int:
    if device.type != "cuda":
        return LAST_CACHE
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", LAST_CACHE))
