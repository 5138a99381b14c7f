"""`mla-index demo`: the whole job on a serving trace, for a person to watch."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mla_index.cli import backends, devices, exits, files, screen, tables
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
    requests: Annotated[
        int, typer.Option(help="At most so many requests; the trace of the package has 24.")
    ] = 64,
    topk: Annotated[int, typer.Option(help="K, the tokens selected for each query row.")] = 2048,
    dcp: Annotated[
        int, typer.Option(help="Ranks of decode context parallelism; 1 leaves that part out.")
    ] = 4,
    interleave: Annotated[int, typer.Option(help="Adjacent tokens on one rank.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    rows: Annotated[int, typer.Option(help="Query rows of each request: 1 + drafted tokens.")] = 1,
    backend: Annotated[str, backends.OPTION] = "auto",
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
        show(report, screen.console())
    if not report.passed:
        raise typer.Exit(exits.FAILED)


def show(report: Report, console: Console) -> None:
    """Print a report for a person."""
    for part in (
        Text(_served(report)),
        _what(report),
        _entries(report, console),
        _times(report),
        _checks(report),
    ):
        console.print(part)
        console.print()
    verdict = "every bound holds" if report.passed else "a bound is broken"
    console.print(Text(verdict, style="bold green" if report.passed else "bold red"))


def _served(report: Report) -> str:
    """Who did the work, in a line; why not the others is another command's answer."""
    groups = [(ops, answer.chosen) for ops, answer in tables.alike(report.explanations.values())]
    chosen: dict[str | None, list[str]] = {}
    for ops, name in groups:
        chosen.setdefault(name, []).extend(ops)
    ran = ", ".join(f"{', '.join(ops)} on {name}" for name, ops in chosen.items())
    if len(chosen) == 1:
        ran = f"on {next(iter(chosen))}"
    source = report.explanations["remap"].source
    place = "" if report.device == "cpu" else f" --device {report.device} --probe"
    return f"runs {ran} (by {source}); why not the others: mla-index explain remap{place}"


def _what(report: Report) -> Table:
    single, lengths = report.single, report.lengths
    table = tables.table("the job", tables.names(), tables.text(), header=False)
    facts = {
        "trace": report.trace,
        "requests": _requests(lengths),
        "queries": f"{_several(report.rows, 'row')} × {_several(report.heads, 'head')}, the top "
        f"{_several(report.topk, 'token')} each; {_several(report.short_rows, 'row')} "
        f"{_have(report.short_rows)} fewer",
        "cache": f"{_several(single.blocks, 'block')} of {BLOCK_SIZE} rows × {HEAD_DIM} float32, "
        f"{shown(single.blocks * single.block_bytes)}",
        "shared prefixes": _saved(single),
    }
    for name, text in (facts | _of_ranks(report)).items():
        table.add_row(name, Text(text))
    return table


def _requests(lengths: Collection[int]) -> str:
    told = f"{len(lengths):,} of {_span(lengths, 'token')}"
    if len(lengths) == 1:
        return told
    each = " each" if len(set(lengths)) == 1 else ""
    return f"{told}{each}, {sum(lengths):,} in all"


def _of_ranks(report: Report) -> dict[str, str]:
    if not report.ranks:
        return {}
    blocks = [rank.blocks for rank in report.ranks]
    empty = report.rows_empty_somewhere
    return {
        "ranks": f"{len(blocks)}, interleave {report.interleave}; {_span(blocks, 'block')} each",
        "empty rows": f"{empty:,} of {_several(report.rows, 'row')} ({empty / report.rows:.1%}) "
        f"{_have(empty)} no token on some rank",
    }


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _span(counts: Collection[int], what: str) -> str:
    """From the smallest to the largest; where they are equal, once."""
    low, high = min(counts), max(counts)
    return _several(high, what) if low == high else f"{low:,} to {_several(high, what)}"


def _saved(rank: RankFacts) -> str:
    wanted = rank.blocks + rank.saved_blocks
    share = rank.saved_blocks / wanted
    return (
        f"{rank.saved_blocks:,} of {_several(wanted, 'block')} ({share:.1%}) "
        f"{'is' if rank.saved_blocks == 1 else 'are'} an earlier request's too: "
        f"{shown(rank.saved_blocks * rank.block_bytes)} saved"
    )


def _entries(report: Report, console: Console) -> Table:
    """What became of the selected tokens; a column for each rank, or for their sum."""
    each = {f"rank {rank.rank}": [rank] for rank in report.ranks}
    table = _entries_of({"one rank": [report.single], **each})
    if not each or tables.fits(table, console):
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
    table = tables.table("entries of the selection", tables.text(), *map(tables.numbers, columns))
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
