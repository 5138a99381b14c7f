"""`mla-index bench`: how fast the backends are here, as tables, a record and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mla_index.bench import noise
from mla_index.bench import record as records
from mla_index.bench.asked import Answer, answers
from mla_index.bench.contenders import COMPOSITION, COPY, OPERATIONS
from mla_index.bench.plan import Plan
from mla_index.bench.record import Row
from mla_index.bench.run import run
from mla_index.bench.workloads import PREFILL_ROWS, REQUESTS, VALID
from mla_index.cli import devices, exits, files, screen, tables
from mla_index.cli.explain import DTYPES
from mla_index.cli.lists import listed
from mla_index.cli.progress import PatientProgress

MOST_SHOWN = 5
"""Reasons that are printed before the rest is counted."""
FEWEST_COLUMNS = 2
"""T that stand beside each other in a terminal of any width."""


def bench(
    op: Annotated[
        list[str] | None,
        typer.Option(
            help=f"An operation: {', '.join(OPERATIONS)}. Several with commas, or the option "
            "several times; by default all."
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="A backend, which must run; several with commas, or the option several times. By "
            "default all that can run on the device."
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="T,…",
            help="Query rows; by default 1 to 32768 in powers of 2. With --trace those of a decode "
            f"step, which takes at most {REQUESTS} requests: T up to {REQUESTS} * (1 + MTP), by "
            "default from one request up to that; other T are told as left out.",
        ),
    ] = None,
    topk: Annotated[
        str | None,
        typer.Option(
            metavar="K,…",
            help="Tokens selected for each row; by default 2048,512,2176,4224,16384. The first is "
            "measured first.",
        ),
    ] = None,
    dcp: Annotated[
        str | None,
        typer.Option(metavar="N,…", help="Ranks of which dcp_filter is one; by default 2,4,8."),
    ] = None,
    valid: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help=f"Share of entries that are not -1; by default {VALID}. Not with --trace: there a "
            "row has as many as it may see, up to K.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of selection, block table, request ids and slots: int32 or int64.")
    ] = "int32",
    device: Annotated[str, typer.Option(help="Where: cpu or cuda.")] = "cpu",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="A serving trace in JSON lines (as for `demo`): decode steps of T rows, of at "
            f"most {REQUESTS} requests, and a prefill chunk of {PREFILL_ROWS:,} rows, with its "
            "request lengths, block tables and shared prefixes, instead of uniform batches."
        ),
    ] = None,
    mtp: Annotated[
        int | None,
        typer.Option(
            help="With --trace alone: drafted tokens; a request has 1 + MTP rows. By default 1."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few shapes and operations: under a minute.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Begin no new shape after so long, and say what was left out. By default 240, "
            "with --quick 12 on the CPU and 40 elsewhere. What is measured once a run is on top: "
            "on a GPU some tens of seconds of compiling (not with --quick)."
        ),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help=files.RECORDED)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Draw time against T, and host cost. Needs matplotlib."),
    ] = None,
) -> None:
    """Measure the operations, beside a copy of the same bytes.

    Every result is compared with the torch backend's before it is timed. Time on a GPU is by replay
    of CUDA graphs over inputs that are walked in turn; time on the host by a loop that never waits.
    Random data; medians of contenders measured in turn; ~ marks those whose quartiles are too far
    apart to answer a target. Ctrl-C (or SIGTERM) ends it early: what was measured until then is
    shown and written all the same.

    **Examples**

    - `mla-index bench --quick`
    - `mla-index bench --device cuda --json bench.json --plot bench.png`
    - `mla-index bench --device cuda --op remap --op dcp_filter --backend triton --rows 1,64,4096`
    - `mla-index bench --device cuda --trace conversations.jsonl --mtp 3`
    """
    place = devices.parse(device)
    files.check("--json", as_json)
    if plot == files.STDOUT:
        raise exits.stop("--plot takes a file, got -", exits.USAGE)
    files.check("--plot", plot)
    if plot is not None and find_spec("matplotlib") is None:
        raise exits.stop("--plot needs matplotlib: pip install 'mla_index[plot]'", exits.MISSING)
    if dtype not in DTYPES:
        raise exits.stop(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}", exits.USAGE)
    if seconds is not None and not seconds >= 0:  # nor NaN
        raise exits.stop(f"--seconds must be at least 0, got {seconds}", exits.USAGE)
    if mtp is not None and trace is None:
        raise exits.stop("--mtp needs --trace: only its requests have drafted tokens", exits.USAGE)
    if valid is not None and trace is not None:
        told = "--valid goes without --trace: a trace's rows have as many entries as they may see"
        raise exits.stop(told, exits.USAGE)
    with exits.errors_as_exits():
        plan = Plan(
            operations=listed("--op", op) or None,
            backends=listed("--backend", backend) or None,
            rows=_numbers("--rows", rows),
            topk=_numbers("--topk", topk),
            dcp=_numbers("--dcp", dcp),
            valid=valid,
            dtype=DTYPES[dtype],
            device=place,
            trace=trace,
            mtp=1 if mtp is None else mtp,
            quick=quick,
            seconds=seconds,
        )
        with exits.interrupted_by_termination(), PatientProgress(Console(stderr=True)) as progress:
            found = run(plan, progress)
    show(found, screen.console(stderr=as_json == files.STDOUT))
    if as_json is not None:
        files.write("--json", as_json, records.as_text(found))
    timed = _timed(found)
    if plot is not None and timed:
        from mla_index.bench.plot import plot as draw

        picture = BytesIO()
        draw(found, picture)
        files.write("--plot", plot, picture.getvalue())
    if found["interrupted"]:
        raise exits.stop("interrupted: what was measured before is all there is", exits.INTERRUPTED)
    if found["wrong"]:
        raise typer.Exit(exits.FAILED)
    if not timed:
        undrawn = "" if plot is None else ", and nothing drawn"
        told = f"no time was measured{undrawn}: ask for more --seconds, or for smaller shapes"
        raise exits.stop(told, exits.USAGE)


def show(found: dict[str, Any], console: Console) -> None:
    """Print a record for a person."""
    table = records.Table(records.rows_of(found))
    for metric in ("gpu_us", "cpu_us"):
        rows = list(table.find(metric))
        for workload, topk in dict.fromkeys((row.workload, row.topk) for row in rows):
            own = [row for row in rows if (row.workload, row.topk) == (workload, topk)]
            title = f"{records.METRICS[metric]}: {workload}, K = {topk}"
            console.print(Text(title, style="italic"))
            for part in _times(own, console):
                console.print(part, "")
    facts = [row for row in table.rows if row.metric in ("host_us", "kernels", "peak_bytes")]
    if facts:
        console.print(_calls(facts), "")
    timed = _timed(found)  # without, no verdict: it would be about the rest of a run
    reached = [a for a in answers(found) if (a.reached is not None or a.unsteady) and timed]
    if reached:
        console.print(_targets(reached), "")
    if timed:
        console.print(Text(_legend(bool(reached))))
        console.print()
    if any(map(noise.is_wide, table.rows)):
        console.print(Text(noise.LEGEND))
    for warning in filter(None, (noise.unsteady(found), *noise.warnings(found))):
        console.print(Text(f"warning: {warning}", style="yellow"))
    _say(console, "left out", found["left_out"], "yellow")
    _say(console, "wrong, or failed", found["wrong"], "bold red")


def _timed(found: dict[str, Any]) -> bool:
    """Whether any shape was: what a call costs the host, and its memory, is measured apart."""
    return any(row.metric in ("gpu_us", "cpu_us") for row in records.rows_of(found))


def _legend(targets: bool) -> str:
    told = f"{COMPOSITION}: the same by torch's gather and where; {COPY}: moving the same bytes"
    asked = "; ask: what must be reached, stretch: what would be better still"
    return told + (asked if targets else "")


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise exits.stop(
            f"{option} must be integers with commas, got {text!r}", exits.USAGE
        ) from None


def _table(title: str, *headings: str) -> Table:
    first, *others = headings
    return tables.table(title, tables.text(first), *map(tables.numbers, others))


def _times(rows: Sequence[Row], console: Console) -> list[Table]:
    """A column for each T; of more than there is room for, in as few tables as it takes."""
    counts = sorted({row.rows for row in rows})
    parts: list[Table] = []
    for number in range(1, len(counts) + 1):
        size = max(FEWEST_COLUMNS, -(-len(counts) // number))
        parts = [
            _times_at(counts[start : start + size], rows) for start in range(0, len(counts), size)
        ]
        if size == FEWEST_COLUMNS or all(tables.fits(part, console) for part in parts):
            break
    return parts


def _times_at(counts: Sequence[int], rows: Sequence[Row]) -> Table:
    table = _table("", "T =", *map(str, counts))
    for who in dict.fromkeys((row.operation, row.dcp, row.provider) for row in rows):
        own = {r.rows: r for r in rows if (r.operation, r.dcp, r.provider) == who}
        name = who[0] if who[0] == COPY else f"{_operation(*who[:2])}, {who[2]}"
        table.add_row(name, *(_cell(own.get(count)) for count in counts))
    return table


def _calls(rows: Sequence[Row]) -> Table:
    """What does not depend on the shape."""
    metrics = [m for m in ("host_us", "kernels", "peak_bytes") if any(r.metric == m for r in rows)]
    words = {"host_us": "µs on the host", "kernels": "kernels", "peak_bytes": "memory, bytes"}
    table = _table("a call, outputs given", "", *(words[metric] for metric in metrics))
    for who in dict.fromkeys((row.operation, row.dcp, row.provider) for row in rows):
        own = {r.metric: r for r in rows if (r.operation, r.dcp, r.provider) == who}
        cells = (_cell(own.get(metric)) for metric in metrics)
        table.add_row(f"{_operation(*who[:2])}, {who[2]}", *cells)
    return table


def _targets(reached: Sequence[Answer]) -> Table:
    table = _table("targets, the worst value of each", "", "reached", "ask", "stretch")
    table.add_column(no_wrap=True)
    for answer in reached:
        target, point = answer.target, answer.reached
        bounds = (
            "–" if bound is None else f"{bound:.3g}" for bound in (target.ask, target.stretch)
        )
        table.add_row(
            Text(target.name),
            f"{point.value:.3g}" if point else "unsteady",
            *bounds,
            _verdict(answer),
        )
    return table


def _verdict(answer: Answer) -> Text:
    if answer.stretch_met:
        return Text("stretch met", style="bold green")
    if answer.ask_met is None:
        return Text("" if answer.stretch_met is None else "not reached", style="yellow")
    return Text("met", style="green") if answer.ask_met else Text("missed", style="bold red")


def _say(console: Console, title: str, lines: Sequence[str], style: str) -> None:
    if lines:
        console.print(Text(f"{title}: {len(lines)}", style=style))
        for line in lines[:MOST_SHOWN]:
            console.print(Padding.indent(Text(line), 2))
        if len(lines) > MOST_SHOWN:
            more = len(lines) - MOST_SHOWN
            console.print(Text(f"  and {more} more (in the record: --json FILE)"))


def _operation(name: str, ranks: int) -> str:
    return f"{name}, {ranks} ranks" if ranks > 1 else name


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    whole = not row.metric.endswith("_us") or row.value >= 100
    return "~" * noise.is_wide(row) + (f"{row.value:,.0f}" if whole else f"{row.value:.1f}")
