"""The whole job once: trace to cache to selection to slots to attention, checked at the end.

First on one rank against attention over the unpaged tokens, then under decode context parallelism
against the single rank, unless one rank is all that is asked for. Every operation of the library
has a part in the two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from mla_index.explanation import Explanation, explain
from mla_index.simulation import steps
from mla_index.simulation.attention import Attended, merge
from mla_index.simulation.memory import refuse_too_large
from mla_index.simulation.paged import plan_blocks
from mla_index.simulation.report import Check, Report
from mla_index.simulation.setting import (
    BLOCK_SIZE,
    Config,
    Progress,
    Setting,
    Stages,
)
from mla_index.simulation.steps import Share
from mla_index.simulation.trace import read_trace
from mla_index.simulation.workload import make_workload
from mla_index.specs import Dcp, RemapSpec, SafeLengthsSpec, Spec
from mla_index.warming import warmup

BOUND = 1e-5
"""Largest error of float32 attention, both as relative L2 norm and as absolute difference."""

PASSES = 2
"""Times that all tokens are made: for the cache and for the unpaged attention; then the shards."""


def simulate(config: Config, progress: Progress | None = None) -> Report:
    """Run the job and report. A broken bound is in the report; what kept it from running raises.

    One cache (or the ranks' shards, which are as large together) and one request's tokens are in
    memory at a time.

    Raises:
        TraceError: the trace cannot be read.
        ConfigError: it would not fit the memory of the machine or the device.
        BackendUnavailable, BackendUnsupported: no backend can serve an operation.
    """
    requests = read_trace(config.trace, config.requests)
    device = config.place()
    stages = Stages(device, (PASSES + (config.dcp > 1)) * len(requests), progress)
    plan = plan_blocks(requests, block_size=BLOCK_SIZE, seed=config.seed)
    refuse_too_large(config, requests, [plan], device)  # before as many plans as there are ranks
    explanations = _choose(config, device, stages)
    shards = [
        plan_blocks(requests, block_size=BLOCK_SIZE, dcp=dcp, seed=config.seed)
        for dcp in (Dcp(config.dcp, rank, config.interleave) for rank in _ranks(config))
    ]
    if shards:
        refuse_too_large(config, requests, shards, device)
    workload = make_workload(
        requests,
        heads=config.heads,
        rows_per_request=config.rows,
        seed=config.seed,
        device=device,
    )
    setting = Setting(config, device, stages, workload)

    cache, selection = steps.fill_and_select(setting, plan)
    single = steps.attend_on_one_rank(setting, cache, selection)
    del cache  # before those of the ranks
    unpaged = steps.attend_unpaged(setting, selection)
    checks = _errors("one rank vs unpaged", single.attended, unpaged)
    shares: list[Share] = []
    if shards:
        for shard in steps.fill_shards(setting, shards):
            shares.append(steps.attend_on_shard(setting, shard, selection))
        with stages.timed("merge of the ranks"):
            merged = merge([share.attended for share in shares])
        checks += _errors(f"{config.dcp} ranks vs one", merged, single.attended)
        checks += _exact(single, shares)

    return Report(
        trace=str(config.trace or "the small trace of mla_index"),
        lengths=tuple(request.input_length for request in requests),
        rows=len(selection),
        topk=config.topk,
        heads=config.heads,
        short_rows=int((workload.limits < config.topk).sum()),
        interleave=config.interleave,
        device=str(device),
        explanations=explanations,
        single=single.facts,
        ranks=tuple(share.facts for share in shares),
        rows_empty_somewhere=_empty_somewhere(shares),
        seconds=stages.seconds,
        checks=tuple(checks),
    )


def _ranks(config: Config) -> range:
    """The ranks of the second part, which one alone does not need."""
    return range(config.dcp if config.dcp > 1 else 0)


def _choose(config: Config, device: torch.device, stages: Stages) -> dict[str, Explanation]:
    """Compile what the steps will call, and say for each operation who serves it and why."""
    whole = RemapSpec(
        BLOCK_SIZE, config.topk, compact=True, counts=True, token_limits=True, safe_lengths=True
    )
    share = replace(whole, dcp_size=config.dcp, dcp_interleave=config.interleave)
    of_ranks: tuple[tuple[str, Spec], ...] = (
        ("dcp_filter", replace(share, safe_lengths=False)),
        ("dcp_filter", share),
        ("safe_lengths", SafeLengthsSpec()),
    )
    specs: tuple[tuple[str, Spec], ...] = (
        ("remap", whole),
        *(of_ranks if config.dcp > 1 else ()),
        ("flat_row_view", None),
    )
    start = time.perf_counter()  # not `timed`, which waits for a device that may not be there
    for op, spec in specs:
        warmup(op, spec, device=device, backend=config.backend)
    stages.seconds["choose and compile"] = time.perf_counter() - start
    return {
        op: explain(op, device=device, spec=spec, backend=config.backend, probe=True)
        for op, spec in specs
    }


def _errors(what: str, result: Attended, expected: Attended) -> list[Check]:
    """How far a result is off, in its worst row and at its worst value; NaN shows in each."""
    output, wanted = result.output.double(), expected.output.double()
    difference = output - wanted
    lse = (result.lse.double() - expected.lse.double()).abs().max()
    relative = (difference.flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)).max()
    return [
        Check(f"{what}: relative L2 error, worst row", float(relative), BOUND),
        Check(f"{what}: max abs error", float(difference.abs().max()), BOUND),
        Check(f"{what}: max abs error of the LSE", float(lse), BOUND),
    ]


def _exact(single: Share, shares: Sequence[Share]) -> list[Check]:
    """What must agree to the last entry."""
    total = torch.stack([share.counts for share in shares]).sum(dim=0)
    lost = int((total - single.counts).abs().sum())
    differing = sum(share.disagreements for share in shares)
    return [
        Check("entries that the ranks lose or keep twice", lost, 0),
        Check("values where fused and separate safe lengths differ", differing, 0),
    ]


def _empty_somewhere(shares: Sequence[Share]) -> int:
    if not shares:
        return 0
    return int(torch.stack([share.counts == 0 for share in shares]).any(dim=0).sum())
