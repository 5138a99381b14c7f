"""Cases about size: row counts beyond grid limits, repeated wide compaction, 64-bit addresses.

At full scale they need a real device; the small forms keep the shape of each for interpreters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import mla_index
from mla_index.conformance import oracle
from mla_index.conformance.checks import CANARY, Run, check_remap, differences, spec_of
from mla_index.conformance.generate import random_problem
from mla_index.conformance.layouts import Placed
from mla_index.conformance.oracle import Problem
from mla_index.conformance.target import Failure, Job, NotTaken, Target
from mla_index.specs import SafeLengthsSpec

FAR = 2**31 - 8
"""Elements from one row to the next; the third row begins beyond 2**32."""

PATIENCE = 60.0
"""Seconds to wait for memory that other processes hold ..."""
_in_vain: set[torch.device] = set()
"""... but not again on a device whose memory nobody gave back: a server may stay there."""

_MODES = {"plain": Run(), "compact": Run(compact=True, counts=True)}


def jobs(full: bool) -> Iterator[Job]:
    """All of them."""
    yield from _many_rows(full)
    yield from _repeated(full)
    for mode, run in _MODES.items():
        many = partial(check_many_elements, run)
        yield Job(f"fr26-many-elements:{mode}", "remap", ("row-offset", "rows"), many)
        far = partial(check_far_rows, run)
        yield Job(f"fr26b-far-rows:{mode}", "remap", ("row-offset", "strides"), far)
    yield Job("fr26b-far-slots", "safe_lengths", ("row-offset", "strides"), check_far_slots)


def _many_rows(full: bool) -> Iterator[Job]:
    count = 65_536 if full else 33
    problem = Problem(
        tokens=[[t % 130] for t in range(count)],
        table=[[1, 2], [-1, 4], [5, 6]],
        req_id=[t % 4 for t in range(count)],
    )
    for mode, run in _MODES.items():
        check = partial(check_remap, problem, run, None)
        yield Job(f"fr08-many-rows:{mode}", "remap", ("rows",), check)


def _repeated(full: bool) -> Iterator[Job]:
    """The order within a row is part of the contract: the same bits every time."""
    for topk in (4224, 8192, 16384) if full else (133,):
        for op, dcp in (("remap", None), ("dcp_filter", (4, 2, 16))):
            recipe = partial(random_problem, topk, 33, topk, width=max(9, topk // 40), dcp=dcp)
            run = replace(_MODES["compact"], op=op, repeats=100 if full else 5)
            check = partial(check_remap, recipe, run, None)
            yield Job(f"fr12-repeated-{topk}:{op}", op, ("compaction", "order"), check)


def check_many_elements(run: Run, target: Target) -> None:
    """More than 2**31 elements; every row is one of twenty, so that all can be compared."""
    rows, topk = (1_048_577, 2048) if target.full else (33, 133)
    if target.full and target.device.type == "cpu":
        raise NotTaken("18 GB of memory are only taken on a device")
    four = random_problem(26, 4, topk, width=topk // 40)
    five = [0, 1, 2, -1, 7]
    problem = replace(
        four,
        tokens=[four.tokens[t % 4] for t in range(20)],
        req_id=[five[t % 5] for t in range(20)],
    )
    target.choose("remap", spec_of(problem, run, _small(problem)))
    answer = oracle.remap(problem, compact=run.compact)
    device = target.device
    tokens = torch.tensor(problem.tokens, dtype=torch.int32, device=device)
    req_id = torch.tensor(problem.req_id, dtype=torch.int32, device=device)
    repeats = -(-rows // 20)
    big = _or_not_taken(partial(tokens.repeat, repeats, 1), device)[:rows]
    out = _or_not_taken(partial(torch.full_like, big, CANARY[torch.int32]), device)
    result = mla_index.remap(
        req_id.repeat(repeats)[:rows],
        torch.tensor(problem.table, dtype=torch.int32, device=device),
        big,
        block_size=problem.block_size,
        compact=run.compact,
        counts=run.counts,
        out=out,
        backend=target.backend,
    )
    expected = torch.tensor(answer.slots, dtype=torch.int32, device=device)
    last = rows - rows % 20
    differences("the last rows", out[last:].cpu(), expected[: rows - last].cpu())
    for start in range(0, last, 20 * 2048):
        part = out[start : min(start + 20 * 2048, last)].view(-1, 20, topk)
        if not bool((part == expected).all()):
            row = int((part != expected).any(-1).flatten().nonzero()[0, 0])
            raise Failure(f"out differs in row {start + row}")
    if result.counts is not None:
        counts = torch.tensor(answer.counts, dtype=torch.int32).repeat(repeats)[:rows]
        differences("counts", result.counts.cpu(), counts)


def _small(problem: Problem) -> dict[str, Placed]:
    """Stand-ins that tell `spec_of` the dtypes."""
    empty = torch.empty(0, dtype=torch.int32)
    return dict.fromkeys(("token_indices", "block_table"), Placed(empty, empty))


def check_far_rows(run: Run, target: Target) -> None:
    """Rows `FAR` elements apart in memory that is never touched otherwise: 64-bit offsets."""
    problem = Problem(
        [[0, 64, -1, 5], [1, 130, 65, 2], [-1, 3, 127, 128]], [[9, 4], [-1, 6], [8, 7]], [2, 0, 1]
    )
    target.choose("remap", spec_of(problem, run, _small(problem)))
    answer = oracle.remap(problem, compact=run.compact)
    inputs, outputs = (_far_buffer(target.device) for _ in range(2))
    tokens = inputs.as_strided((3, 4), (FAR, 1), 0)
    table = inputs.as_strided((3, 2), (FAR, 1), 4)
    req_id = inputs.as_strided((3,), (FAR,), 6)
    out = outputs.as_strided((3, 4), (FAR, 1), 0)
    counts = outputs.as_strided((3,), (FAR,), 5)
    for view, values in (
        (tokens, problem.tokens),
        (table, problem.table),
        (req_id, problem.req_id),
    ):
        view.copy_(torch.tensor(values, dtype=torch.int32))
    out.fill_(CANARY[torch.int32])
    mla_index.remap(
        req_id,
        table,
        tokens,
        block_size=64,
        compact=run.compact,
        out=out,
        counts_out=counts if run.counts else None,
        backend=target.backend,
    )
    differences("out", out.cpu(), torch.tensor(answer.slots, dtype=torch.int32))
    if run.counts:
        differences("counts", counts.cpu(), torch.tensor(answer.counts, dtype=torch.int32))


def check_far_slots(target: Target) -> None:
    """The same for `safe_lengths`."""
    target.choose("safe_lengths", SafeLengthsSpec())
    buffer = _far_buffer(target.device)
    slots = buffer.as_strided((3, 2), (FAR, 1), 0)
    counts = buffer.as_strided((3,), (FAR,), 3)
    out = buffer.as_strided((3,), (FAR,), 5)
    rows, numbers = [[4, 5], [6, 7], [8, 9]], [2, 0, -1]
    slots.copy_(torch.tensor(rows, dtype=torch.int32))
    counts.copy_(torch.tensor(numbers, dtype=torch.int32))
    mla_index.safe_lengths(slots, counts, out=out, backend=target.backend)
    expected, lengths = oracle.safe_lengths(rows, numbers)
    differences("slots", slots.cpu(), torch.tensor(expected, dtype=torch.int32))
    differences("lengths", out.cpu(), torch.tensor(lengths, dtype=torch.int32))


def _far_buffer(device: torch.device) -> Tensor:
    return _or_not_taken(partial(torch.empty, 2**32, dtype=torch.int32, device=device), device)


def _or_not_taken(allocate: Callable[[], Tensor], device: torch.device) -> Tensor:
    """The tensor, or the reason why this machine cannot hold it.

    What other processes hold of the device, like another backend's suite, is waited for.
    """
    # A kernel's fault of before, which shows late, is no lack of memory.
    lacks: tuple[type[Exception], ...] = (torch.OutOfMemoryError, MemoryError)
    if device.type != "cuda":  # elsewhere nothing finer is raised
        lacks = (RuntimeError, MemoryError)
    until = time.monotonic() + (0 if device in _in_vain else PATIENCE)
    while True:
        try:
            return allocate()
        except lacks as error:
            if time.monotonic() >= until or not _shared(device):
                _in_vain.add(device)
                # What follows in CUDA's message is every process that holds some of it.
                reason = str(error).splitlines()[0].partition(" GPU ")[0]
                raise NotTaken(f"no memory for it: {reason}") from None
        time.sleep(0.5)


def _shared(device: torch.device) -> bool:
    """Whether other processes hold much of a device's memory."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) > total / 4
