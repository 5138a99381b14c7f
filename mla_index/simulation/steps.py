"""The steps of a simulation: fill a cache, attend on one rank, on a shard, without any paging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_index.diagnosis import Diagnosis, diagnose
from mla_index.operations import dcp_filter, flat_row_view, remap, safe_lengths
from mla_index.simulation.attention import Attended, attend, neutralise, room_for, sparse_attention
from mla_index.simulation.paged import BlockPlan, PagedCache, block_bytes
from mla_index.simulation.report import RankFacts
from mla_index.simulation.setting import BLOCK_SIZE, Setting
from mla_index.simulation.tokens import token_rows
from mla_index.simulation.workload import select


@dataclass(frozen=True)
class Share:
    """What one rank came to.

    Args:
        counts: valid entries of each row, int32 `[T]`.
        attended: its part of the attention, rows without an entry neutralised.
        facts: what there is to tell about it.
        disagreements: values in which fused safe lengths differ from separate ones.
    """

    counts: Tensor
    attended: Attended
    facts: RankFacts
    disagreements: int = 0


def fill_and_select(setting: Setting, plan: BlockPlan) -> tuple[PagedCache, Tensor]:
    """The cache of a rank that has every token, and the top-k of every row, int32 `[T, K]`."""
    config = setting.config
    cache = PagedCache(plan, setting.device)
    selection = []
    for request, rows, tokens in _tokens(setting, "fill the cache, select"):
        cache.write(request, tokens)
        selection.append(select(setting.workload, rows, tokens, config.topk, config.seed))
    return cache, torch.cat(selection)


def fill_shards(setting: Setting, plans: Sequence[BlockPlan]) -> list[PagedCache]:
    """The caches of several ranks, each with its tokens alone; together as large as the whole."""
    caches = [PagedCache(plan, setting.device) for plan in plans]
    for request, _, tokens in _tokens(setting, "fill the shards, all ranks"):
        for cache in caches:
            cache.write(request, tokens)
    return caches


def attend_on_one_rank(setting: Setting, cache: PagedCache, selection: Tensor) -> Share:
    """`remap` the selection, attend to the slots: the job without context parallelism."""
    workload, stages, backend = setting.workload, setting.stages, setting.config.backend
    rows, inputs = _inputs(setting, cache, selection)
    slots, counts, lengths = _outputs(selection)
    with stages.timed("remap"):
        remap(
            **inputs, compact=True, out=slots, counts_out=counts, lengths_out=lengths,
            backend=backend,
        )  # fmt: skip
    with stages.timed("attention over the cache"):
        attended = neutralise(sparse_attention(workload.queries, rows, slots, lengths), counts)
    return Share(counts, attended, _facts(cache, counts, diagnose(**inputs)))


def attend_on_shard(setting: Setting, cache: PagedCache, selection: Tensor) -> Share:
    """Keep this rank's share of the selection, attend to that alone.

    Safe lengths are made in both ways: in the launch of the filter, and in one of their own, for
    callers that have slots and counts already. The results must be the same.
    """
    workload, stages, backend = setting.workload, setting.stages, setting.config.backend
    rows, inputs = _inputs(setting, cache, selection)
    inputs["dcp"] = cache.plan.dcp
    slots, counts, lengths = fused = _outputs(selection)
    with stages.timed("dcp_filter with safe lengths, all ranks"):
        dcp_filter(**inputs, out=slots, counts_out=counts, lengths_out=lengths, backend=backend)
    separate = _outputs(selection)
    with stages.timed("dcp_filter, then safe_lengths, all ranks"):
        dcp_filter(**inputs, out=separate[0], counts_out=separate[1], backend=backend)
        safe_lengths(separate[0], separate[1], out=separate[2], backend=backend)
    with stages.timed("attention over the shards, all ranks"):
        attended = neutralise(sparse_attention(workload.queries, rows, slots, lengths), counts)
    disagreements = sum(
        int((one != other).sum()) for one, other in zip(fused, separate, strict=True)
    )
    return Share(counts, attended, _facts(cache, counts, diagnose(**inputs)), disagreements)


def attend_unpaged(setting: Setting, selection: Tensor) -> Attended:
    """The same attention straight from the tokens, made anew request by request, in float64."""
    queries = setting.workload.queries.double()
    found = room_for(queries)
    for _, rows, tokens in _tokens(setting, "attention over unpaged tokens"):
        for row in range(rows.start, rows.stop):
            selected = selection[row]
            part = attend(queries[row], tokens[selected[selected >= 0].long()].double())
            found.output[row], found.lse[row] = part
    return found


def _tokens(setting: Setting, stage: str) -> Iterator[tuple[int, slice, Tensor]]:
    """Each request, its query rows and its tokens' cache rows; timed and reported as a stage."""
    requests, stages = setting.workload.requests, setting.stages
    with stages.timed(stage):
        for request, rows in setting.workload.rows_by_request():
            tokens = token_rows(requests[request], seed=setting.config.seed)
            yield request, rows, tokens.to(setting.device)
            stages.step(stage)


def _inputs(
    setting: Setting, cache: PagedCache, selection: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """The cache as flat rows, and what `remap`, `dcp_filter` and `diagnose` take alike."""
    flat = flat_row_view(cache.kv, BLOCK_SIZE, backend=setting.config.backend)
    return flat.rows, {
        "req_id": setting.workload.req_id,
        "block_table": cache.plan.block_table(setting.device),
        "token_indices": selection,
        "block_size": BLOCK_SIZE,
        "block_stride_rows": flat.block_stride_rows,
        "token_limits": setting.workload.limits,
        "num_slots": len(flat.rows),
    }


def _outputs(selection: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers for slots, counts and lengths, as a server keeps them from step to step."""
    return (
        torch.empty_like(selection),
        selection.new_empty(len(selection)),
        selection.new_empty(len(selection)),
    )


def _facts(cache: PagedCache, counts: Tensor, diagnosis: Diagnosis) -> RankFacts:
    plan = cache.plan
    return RankFacts(
        rank=plan.dcp.rank,
        blocks=plan.entries - plan.saved,
        saved_blocks=plan.saved,
        block_bytes=block_bytes(plan),
        diagnosis=diagnosis,
        empty_rows=int((counts == 0).sum()),
    )
