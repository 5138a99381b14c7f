"""`mla-index demo`: the whole job on a serving trace, for a person to watch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mla_index.cli import devices, exits, files, tables
from mla_index.cli.lists import listed
from mla_index.cli.progress import PatientProgress
from mla_index.diagnosis import Reason
from mla_index.simulation.memory import shown
from mla_index.simulation.report import RankFacts, Report
from mla_index.simulation.run import simulate
from mla_index.simulation.setting import BLOCK_SIZE, Config
from mla_index.simulation.tokens import HEAD_DIM


def demo(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="A serving trace in JSON lines (timestamp, input_length, output_length, "
            "hash_ids); by default a small one that comes with the package."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="At most so many requests.")] = 64,
    topk: Annotated[int, typer.Option(help="K, the tokens selected for each query row.")] = 2048,
    dcp: Annotated[int, typer.Option(help="Ranks of decode context parallelism.")] = 4,
    interleave: Annotated[int, typer.Option(help="Adjacent tokens on one rank.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    rows: Annotated[int, typer.Option(help="Query rows of each request: 1 + drafted tokens.")] = 1,
    backend: Annotated[
        str, typer.Option(help="As in a call: a name, an ordered list with commas, or `auto`.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where the cache lives.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of contents, queries and block order.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help=files.PRINTED)] = False,
) -> None:
    """Do the whole job on a serving trace, and check it.

    Fills a paged MLA cache that shares prefixes, selects each query's top-k tokens, remaps them to
    cache rows, attends to those, and compares with attention straight from the unpaged tokens.
    Then the same under decode context parallelism: each rank filters its share, attends to its
    shard, and the parts are merged by log-sum-exp and compared with the single rank.

    **Examples**

    - `mla-index demo`
    - `mla-index demo --trace conversations.jsonl --requests 64 --dcp 8 --interleave 64`
    - `mla-index demo --backend triton --device cuda`
    """
    place = devices.parse(device)
    with exits.errors_as_exits():
        config = Config(
            trace=trace,
            requests=requests,
            topk=topk,
            dcp=dcp,
            interleave=interleave,
            heads=heads,
            rows=rows,
            seed=seed,
            backend=listed("--backend", [backend]),
            device=str(place),
        )
        with PatientProgress(Console(stderr=True)) as progress:
            report = simulate(config, progress)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        show(report, Console())
    if not report.passed:
        raise typer.Exit(exits.FAILED)


def show(report: Report, console: Console) -> None:
    """Print a report for a person."""
    for part in (
        _what(report),
        tables.backend_table(f"backends on {report.device}", report.explanations.values()),
        _entries(report, console),
        _times(report),
        _checks(report),
    ):
        console.print(part, "")
    verdict = "every bound holds" if report.passed else "a bound is broken"
    console.print(Text(verdict, style="bold green" if report.passed else "bold red"))


def _what(report: Report) -> Table:
    single, size = report.single, len(report.ranks)
    shards = [rank.blocks for rank in report.ranks]
    lengths = report.lengths
    table = tables.table("simulated", tables.names(), tables.text(), header=False)
    for name, text in {
        "trace": report.trace,
        "requests": f"{len(lengths):,} of {min(lengths):,} to {max(lengths):,} tokens, "
        f"{sum(lengths):,} in all",
        "queries": f"{report.rows:,} rows × {report.heads} heads, the top {report.topk:,} tokens "
        f"each; {report.short_rows:,} rows have fewer",
        "cache": f"{single.blocks:,} blocks of {BLOCK_SIZE} rows × {HEAD_DIM} float32, "
        f"{shown(single.blocks * single.block_bytes)}",
        "shared prefixes": _saved(single),
        "ranks": f"{size}, interleave {report.interleave}; "
        f"{min(shards):,} to {max(shards):,} blocks each",
        "empty rows": f"{report.rows_empty_somewhere:,} of {report.rows:,} rows "
        f"({report.rows_empty_somewhere / report.rows:.1%}) have no token on some rank",
    }.items():
        table.add_row(name, Text(text))
    return table


def _saved(rank: RankFacts) -> str:
    wanted = rank.blocks + rank.saved_blocks
    share = rank.saved_blocks / wanted
    return (
        f"{rank.saved_blocks:,} of {wanted:,} blocks ({share:.1%}) are an earlier request's too: "
        f"{shown(rank.saved_blocks * rank.block_bytes)} saved"
    )


def _entries(report: Report, console: Console) -> Table:
    """What became of the selected tokens; a column for each rank, or for their sum."""
    each = {f"rank {rank.rank}": [rank] for rank in report.ranks}
    table = _entries_of({"one rank": [report.single], **each})
    if tables.fits(table, console):
        return table
    return _entries_of({"one rank": [report.single], f"{len(each)} ranks": list(report.ranks)})


def _entries_of(columns: dict[str, list[RankFacts]]) -> Table:
    """Only reasons that occurred have a line."""
    lines = {
        "valid": [sum(rank.diagnosis.valid for rank in of) for of in columns.values()],
        **{
            reason.value: [
                sum(rank.diagnosis.counts[reason] for rank in of) for of in columns.values()
            ]
            for reason in Reason
        },
    }
    table = tables.table(
        "what became of the selection", tables.text("entries"), *map(tables.numbers, columns)
    )
    for name, counts in lines.items():
        if any(counts):
            table.add_row(name, *(f"{count:,}" for count in counts))
    empty = (sum(rank.empty_rows for rank in of) for of in columns.values())
    table.add_row("rows without any", *(f"{count:,}" for count in empty))
    return table


def _times(report: Report) -> Table:
    table = tables.table("time", tables.text("stage"), tables.numbers("ms"))
    for stage, seconds in report.seconds.items():
        table.add_row(stage, f"{seconds * 1e3:,.1f}")
    return table


def _checks(report: Report) -> Table:
    table = tables.table(
        "checks", tables.text(), tables.numbers("found"), tables.numbers("bound"), tables.names()
    )
    for check in report.checks:
        word, style = ("holds", "green") if check.passed else ("broken", "bold red")
        table.add_row(check.name, f"{check.value:.3g}", f"{check.bound:g}", Text(word, style=style))
    return table
