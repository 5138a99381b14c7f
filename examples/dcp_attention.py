"""Sparse MLA attention under decode context parallelism, over torch.distributed.

Each rank holds its interleaved share of every request's cache, attends to its share of the global
top-k, and the ranks merge their outputs by log-sum-exp. Prefill rows read a workspace instead, into
which the ranks gather their shares. Both must equal attention by one process that has every token.

    python examples/dcp_attention.py                                           # one rank
    torchrun --standalone --nproc-per-node 4 examples/dcp_attention.py         # gloo, on the CPU
    torchrun --standalone --nproc-per-node 2 examples/dcp_attention.py --device cuda        # NCCL

Exits with 1, on every rank, if a result is off by more than `BOUND` on any rank.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mla_index
from mla_index.simulation.attention import Attended, attend, neutralise, sparse_attention
from mla_index.simulation.paged import PagedCache, plan_blocks, shard_length, shard_tokens
from mla_index.simulation.tokens import HEAD_DIM, LATENT, token_rows
from mla_index.simulation.trace import HASH_BLOCK, Request
from mla_index.simulation.workload import Workload, make_workload, select

CPU = torch.device("cpu")
BLOCK_SIZE = 64
BOUND = 1e-5
ROWS_PER_REQUEST = 2  # the last token and one drafted token, as in speculative decoding
PROMPTS = (1, 2, 37, 150, 700, 1300)  # of some, most ranks hold not a single token


@dataclass(frozen=True)
class Shard:
    """What one rank holds of the cache.

    Args:
        dcp: which tokens these are.
        rows: `[num_slots, HEAD_DIM]`, the paged cache as flat rows.
        block_stride_rows: rows from one block to the next, other layers' pages included.
        block_table: int32 `[R, W]`, this rank's own.
    """

    dcp: mla_index.Dcp
    rows: Tensor
    block_stride_rows: int
    block_table: Tensor


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the other ranks, compare, print on rank 0; the exit status."""
    options = parse(arguments)
    device = torch.device(options.device, place_on_host()) if options.device == "cuda" else CPU
    join("nccl" if device.type == "cuda" else "gloo", device)
    try:
        report = compare(options, device)
        if dist.get_rank() == 0:
            print(describe(report))
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except mla_index.BackendError as error:
        raise SystemExit(f"--backend {options.backend}: {error}") from error
    finally:
        dist.destroy_process_group()
    return 0 if report["passed"] else 1


def place_on_host() -> int:
    """This rank's number on its host, the number of its device, which becomes the current one."""
    number, devices = of_launcher("LOCAL_RANK", 0), torch.cuda.device_count()
    if number >= devices:
        raise SystemExit(f"--device cuda takes a device for each rank: {devices} here")
    torch.cuda.set_device(number)
    return number


def join(backend: str, device: torch.device) -> None:
    """The default group: the processes that torchrun started, else this process alone."""
    bound = device if device.type == "cuda" else None
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=bound)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound
        )


def compare(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Decode and prefill over all ranks against one process; the same report on every rank."""
    dcp = mla_index.Dcp.from_group(interleave=options.interleave)
    requests = [
        Request(0, length, 1, (number,) * -(-length // HASH_BLOCK))
        for number, length in enumerate(islice(cycle(PROMPTS), options.requests))
    ]
    workload = make_workload(
        requests, heads=options.heads, rows_per_request=ROWS_PER_REQUEST, device=device
    )
    shard = fill_shard(workload, dcp, device)
    selection = agree_on_topk(workload, options.topk, device)
    expected = attend_in_one_process(workload, selection, device)

    chosen = warm(options, dcp, device)
    decoded, counts = decode(workload, selection, shard, options.backend)
    prefilled = prefill(workload, selection, shard, options.backend)

    empty = (counts == 0).int()
    dist.all_reduce(empty, dist.ReduceOp.MAX)
    errors = {
        "decode": largest_on_any_rank(error(decoded, expected), device),
        "prefill": largest_on_any_rank(error(prefilled, expected), device),
    }
    return {
        "ranks": dcp.size,
        "interleave": dcp.interleave,
        "collectives": dist.get_backend(),
        "device": device.type,
        "backend": chosen,
        "prompts": [request.input_length for request in requests],
        "rows": len(selection),
        "topk": options.topk,
        "heads": options.heads,
        "rows_empty_on_some_rank": int(empty.sum()),
        "errors": errors,
        "bound": BOUND,
        "passed": max(errors.values()) <= BOUND,
    }


# --- what the ranks hold, and what they all know ------------------------------------------------


def fill_shard(workload: Workload, dcp: mla_index.Dcp, device: torch.device) -> Shard:
    """This rank's tokens in a paged cache that shares its memory with another layer's."""
    plan = plan_blocks(workload.requests, block_size=BLOCK_SIZE, dcp=dcp)
    cache = PagedCache(plan, device)
    for request, _, tokens in unpaged(workload, device):
        cache.write(request, tokens)
    flat = mla_index.flat_row_view(cache.kv, BLOCK_SIZE)
    # As wide on every rank as on rank 0, which has the longest share: a workspace row may name any
    # rank's token, and a token whose block lies beyond the table's width is invalid.
    longest = max(shard_length(r.input_length, on_rank_0(dcp)) for r in workload.requests)
    table = plan.block_table(device)
    missing = -(-longest // BLOCK_SIZE) - table.shape[1]
    table = torch.nn.functional.pad(table, (0, missing), value=-1)
    return Shard(dcp, flat.rows, flat.block_stride_rows, table)


def agree_on_topk(workload: Workload, topk: int, device: torch.device) -> Tensor:
    """The global top-k, int32 `[T, K]`, rank 0's: ties and rounding must not part the ranks."""
    selection = torch.empty(len(workload.req_id), topk, dtype=torch.int32, device=device)
    if dist.get_rank() == 0:
        for _, rows, tokens in unpaged(workload, device):
            selection[rows] = select(workload, rows, tokens, topk, seed=0)
    dist.broadcast(selection, src=0)
    return selection


def attend_in_one_process(workload: Workload, selection: Tensor, device: torch.device) -> Attended:
    """What must come out: rank 0 attends to the unpaged tokens, in float64, and tells the others.

    No part of it goes through a page, a slot or a workspace.
    """
    rows, heads, _ = workload.queries.shape
    output = torch.empty(rows, heads, LATENT, dtype=torch.float64, device=device)
    lse = torch.empty(rows, heads, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:
        for _, its_rows, tokens in unpaged(workload, device):
            for t in range(its_rows.start, its_rows.stop):
                selected = tokens[selection[t][selection[t] >= 0].long()]
                output[t], lse[t] = attend(workload.queries[t].double(), selected.double())
    dist.broadcast(output, src=0)
    dist.broadcast(lse, src=0)
    return Attended(output, lse)


def unpaged(workload: Workload, device: torch.device) -> Iterator[tuple[int, slice, Tensor]]:
    """Each request, its query rows, and the cache rows of all its tokens, made anew."""
    for request, rows in workload.rows_by_request():
        yield request, rows, token_rows(workload.requests[request]).to(device)


def on_rank_0(dcp: mla_index.Dcp) -> mla_index.Dcp:
    """Rank 0 holds at least as many tokens of every request as any other rank."""
    return mla_index.Dcp(dcp.size, 0, dcp.interleave)


# --- decode -------------------------------------------------------------------------------------


def warm(options: argparse.Namespace, dcp: mla_index.Dcp, device: torch.device) -> str:
    """Compile what decode and prefill call, as before a graph capture; the backend that serves."""
    names = set()
    for workspace in (False, True):
        spec = mla_index.RemapSpec(
            BLOCK_SIZE,
            options.topk,
            dcp_size=dcp.size,
            dcp_interleave=dcp.interleave,
            compact=True,
            safe_lengths=True,
            token_limits=True,
            workspace=workspace,
        )
        names.add(mla_index.warmup("dcp_filter", spec, device=device, backend=options.backend))
    return ", ".join(sorted(names))


def decode(
    workload: Workload, selection: Tensor, shard: Shard, backend: str
) -> tuple[Attended, Tensor]:
    """Attention over all ranks' shards, the same on every rank, and this rank's counts `[T]`."""
    slots, counts, lengths = mla_index.dcp_filter(
        workload.req_id,
        shard.block_table,
        selection,
        shard.dcp,
        block_size=BLOCK_SIZE,
        block_stride_rows=shard.block_stride_rows,
        token_limits=workload.limits,
        num_slots=len(shard.rows),
        safe_lengths=True,
        backend=backend,
    )
    # Where this rank holds nothing of a row, the kernel has read slot 0: here a row of NaN. The
    # raw count tells, and the row gets no output and no weight; 0 * NaN would be NaN again.
    part = neutralise(sparse_attention(workload.queries, shard.rows, slots, lengths), counts)
    return merge_over_ranks(part), counts


def merge_over_ranks(part: Attended) -> Attended:
    """All ranks' parts, each weighted by `exp(lse)`: one gather of `[T, H]`, one sum of outputs."""
    lses = [torch.empty_like(part.lse) for _ in range(dist.get_world_size())]
    dist.all_gather(lses, part.lse)
    total = torch.stack(lses).logsumexp(dim=0)
    # A row that is empty everywhere has a total of minus infinity, and minus it would be NaN.
    weight = torch.exp(part.lse - torch.where(total.isneginf(), 0.0, total))
    output = weight[..., None] * part.output
    dist.all_reduce(output)
    return Attended(output, total)


# --- prefill ------------------------------------------------------------------------------------


def prefill(workload: Workload, selection: Tensor, shard: Shard, backend: str) -> Attended:
    """The same rows over the gathered workspace, where every rank finds every token."""
    workspace, starts, rank_stride = gather_workspace(workload, shard, backend)
    slots, counts, lengths = mla_index.remap(
        workload.req_id,
        shard.block_table,
        selection,
        block_size=BLOCK_SIZE,
        dcp=shard.dcp,
        workspace=mla_index.PrefillWorkspace(
            workload.req_id,  # every row is a workspace row here; -1 would read the paged cache
            starts,
            rank_stride=rank_stride,
            num_rows=len(workspace),
        ),
        token_limits=workload.limits,
        compact=True,
        safe_lengths=True,
        backend=backend,
    )
    return neutralise(sparse_attention(workload.queries, workspace, slots, lengths), counts)


def gather_workspace(workload: Workload, shard: Shard, backend: str) -> tuple[Tensor, Tensor, int]:
    """All ranks' shards, rank after rank, unpaged: `[size * rank_stride, HEAD_DIM]`.

    Returns it with the first row of each request within a rank's part, and the rows of a part.
    Every rank's part has the places of rank 0's, so that one list of starts serves all.
    """
    room = [shard_length(r.input_length, on_rank_0(shard.dcp)) for r in workload.requests]
    rank_stride = sum(room)
    starts = torch.tensor([0, *room[:-1]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    device = shard.rows.device
    part = torch.full((rank_stride, HEAD_DIM), torch.nan, device=device)  # unused places show
    for request, start in enumerate(starts.tolist()):
        # The slots of all tokens that this rank holds: the same operation finds them.
        own = shard_tokens(workload.requests[request].input_length, shard.dcp)
        slots = mla_index.remap(
            None,
            shard.block_table[request : request + 1],
            own[None].to(device),
            block_size=BLOCK_SIZE,
            block_stride_rows=shard.block_stride_rows,
            dcp=shard.dcp,
            backend=backend,
        ).slots[0]
        part[start : start + len(own)] = shard.rows[slots]
    workspace = torch.empty(shard.dcp.size, rank_stride, HEAD_DIM, device=device)
    dist.all_gather(list(workspace.unbind()), part)
    return workspace.flatten(0, 1), starts.to(device), rank_stride


# --- comparing ----------------------------------------------------------------------------------


def error(result: Attended, expected: Attended) -> float:
    """The largest of: relative L2 error of a row, absolute error, absolute error of the LSE."""
    difference = result.output.double() - expected.output
    relative = difference.flatten(1).norm(dim=1) / expected.output.flatten(1).norm(dim=1)
    lse = result.lse.double() - expected.lse
    found = torch.stack([relative.max(), difference.abs().max(), lse.abs().max()])
    return float("inf") if bool(found.isnan().any()) else float(found.max())


def largest_on_any_rank(value: float, device: torch.device) -> float:
    """So that all ranks come to the same verdict."""
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def describe(report: dict[str, Any]) -> str:
    """The report for people."""
    rows, empty = report["rows"], report["rows_empty_on_some_rank"]
    return "\n".join(
        [
            "ranks {ranks}, interleave {interleave}, collectives {collectives}, device {device}, "
            "backend {backend}".format(**report),
            f"{empty} of {rows} rows ({empty / rows:.0%}) were empty on some rank",
            *(
                f"{what}: error {value:.1e}, bound {report['bound']:.0e}"
                for what, value in report["errors"].items()
            ),
            "passed" if report["passed"] else "FAILED",
        ]
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default, text in (
        ("--interleave", 1, "adjacent tokens that stay on one rank"),
        ("--requests", 6, "requests of the batch"),
        ("--topk", 512, "tokens selected for each row"),
        ("--heads", 4, "query heads"),
    ):
        parser.add_argument(option, type=positive, default=default, help=f"{text} ({default})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", default="auto", help="of mla_index, a name (auto)")
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"argument --json: there is no folder {options.json.parent}")
    most = (2**31 - 1) // max(of_launcher("WORLD_SIZE", 1), 1)
    if options.interleave > most:
        parser.error(f"argument --interleave: must be at most {most}, got {options.interleave}")
    return options


def of_launcher(name: str, alone: int) -> int:
    """A number that torchrun has put into the environment, or what it is without torchrun."""
    text = os.environ.get(name, str(alone))
    if not text.isdecimal():
        raise SystemExit(f"{name} must be an integer, as torchrun sets it, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
