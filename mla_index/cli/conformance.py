"""`mla-index conformance`: the suite on backends, as a table and as a record."""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mla_index import registry
from mla_index.cli import devices, exits, files, screen, tables
from mla_index.cli.lists import listed
from mla_index.explanation import explain

COUNTS = ("passed", "failed", "skipped")
NEEDED = ("pytest", "hypothesis")
MOST_SHOWN = 5
"""Failures of a backend that are printed before the rest is counted."""
REFUSED = 4
"""How pytest ends when it does not take its arguments."""
ADDED_OPTIONS = "PYTEST_ADDOPTS"
STDERR = 2
"""The file descriptor."""
STYLES = {"passed": "green", "failed": "bold red", "did not run": "yellow"}


def conformance(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="A backend to test, which must run; several with commas, or the option several "
            "times. By default all that can run on the device."
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Every backend there is. On the CPU those for GPUs run in their interpreter or "
            "simulator; one that cannot run is reported and fails nothing.",
        ),
    ] = False,
    require: Annotated[
        list[str] | None,
        typer.Option(help="A backend that must run, beside those tested anyway; several likewise."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to test.")] = "cpu",
    scale: Annotated[
        str | None,
        typer.Option(help="`small` or `full`; by default small on the CPU, full elsewhere."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="EXPRESSION", help="Only tests whose names match, as for pytest -k."),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1, help="Processes that share the tests of a backend; more need pytest-xdist."
        ),
    ] = 1,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help=files.RECORDED)
    ] = None,
) -> None:
    """Check backends against the definition of the operations, bit for bit.

    Each backend runs in a process of its own. Needs the extra `test`.

    **Examples**

    - `mla-index conformance`
    - `mla-index conformance --all --require triton --device cuda --json results.json`
    - `mla-index conformance --backend mybackend --only fr05`
    """
    needed = (*NEEDED, "xdist") if workers > 1 else NEEDED
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise exits.stop(
            f"conformance needs {' and '.join(missing)}: pip install 'mla_index[test]'",
            exits.MISSING,
        )
    if scale not in (None, "small", "full"):
        raise exits.stop(f"--scale must be small or full, got {scale}", exits.USAGE)
    files.check("--json", as_json)
    from mla_index.conformance.run import as_text, run_suite

    named = listed("--backend", backend)
    required = list(dict.fromkeys([*named, *listed("--require", require)]))
    place = devices.parse(device)
    if place.type == "meta":
        raise exits.stop("--device meta: its tensors hold nothing to compare", exits.USAGE)
    to_stdout = as_json == files.STDOUT
    with exits.errors_as_exits():
        for name in required:
            registry.load(name)
        tested = _tested(required, every, bool(named), place)
        if not tested:
            raise exits.stop(
                f"no backend can run on {place}: `mla-index info --probe --device {place}` "
                "says why",
                exits.MISSING,
            )
        record = run_suite(
            tested,
            str(place),
            scale=scale,
            pytest_args=["-k", only] if only else [],
            workers=workers,
            output=STDERR if to_stdout else None,
        )
    _refuse_unmatched(record["backends"], only)
    show(record, screen.console(stderr=to_stdout))
    if as_json is not None:
        files.write("--json", as_json, as_text(record))
    raise typer.Exit(_verdict(record["backends"], required))


def show(record: dict[str, Any], console: Console) -> None:
    """Print a record for a person: the counts, why not all ran, what failed, and the verdicts."""
    backends = record["backends"]
    for table in (_counts(record), _skipped(backends)):
        if table.row_count:
            console.print(table, "")
    for name, result in backends.items():
        _say_failures(console, name, result)
    console.print(_verdicts(backends))


def _tested(required: list[str], every: bool, named: bool, device: torch.device) -> list[str]:
    """The backends that were named, all there are, or all that can run on the device."""
    if every:
        return list(registry.names())
    if named:
        return required
    rows = explain("remap", device=device, probe=True).rows
    able = [row.name for row in rows if row.accepted]
    return list(dict.fromkeys([*able, *required]))


def _refuse_unmatched(backends: dict[str, dict[str, Any]], only: str | None) -> None:
    """End the command where there is nothing to show: pytest took no argument, or found no test."""
    given = _given_to_pytest(only)
    if given and all(result["exit_status"] == REFUSED for result in backends.values()):
        raise exits.stop(f"pytest does not take {given}; what it says is above", exits.USAGE)
    reported = [result for result in backends.values() if "scale" in result]
    if only and reported and not any(result["results"] for result in backends.values()):
        raise exits.stop(f"--only {only!r} matches no test", exits.USAGE)


def _verdict(backends: dict[str, dict[str, Any]], required: list[str]) -> int:
    """A failure counts first; then a backend that had to run and did not, or none that did."""
    states = {name: result["status"] for name, result in backends.items()}
    if "failed" in states.values():
        return exits.FAILED
    absent = [name for name in required if states[name] == "did not run"]
    if absent or "passed" not in states.values():
        raise exits.stop(
            f"{', '.join(absent or states) or 'no backend'} had to run and did not", exits.MISSING
        )
    return 0


def _given_to_pytest(only: str | None) -> str:
    """What of the user's it was given: one exit code stands for whatever it does not take."""
    options = os.environ.get(ADDED_OPTIONS)
    given = [f"--only {only!r} as an expression for its -k"] if only else []
    return " or ".join([*given, *([f"{ADDED_OPTIONS}={options!r}"] if options else ())])


def _counts(record: dict[str, Any]) -> Table:
    table = tables.table(
        f"conformance on {record['device']}", tables.names("backend"), tables.names("operation"),
        *map(tables.numbers, COUNTS),
    )  # fmt: skip
    above = None
    for of, operation, *counts in _results(record["backends"]):
        table.add_row("" if of == above else of, operation, *(f"{count:,}" for count in counts))
        above = of
    return table


def _results(backends: dict[str, dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Backend, operation and counts, once each.

    Each backend's own first; then what ran beside every one and has no part in any.
    """
    own: list[tuple[Any, ...]] = []
    beside: list[tuple[Any, ...]] = []
    for name, result in backends.items():
        for line in result["results"]:
            found = (line["backend"], line["operation"], *(line[key] for key in COUNTS))
            (own if line["backend"] == name else beside).append(found)
    return list(dict.fromkeys([*own, *beside]))


def _skipped(backends: dict[str, dict[str, Any]]) -> Table:
    """Why tests were skipped; a reason that several operations share is told once."""
    table = tables.table(
        "why skipped", tables.names("backend"), tables.numbers("tests"), tables.text("why")
    )
    for name, result in backends.items():
        reasons: Counter[str] = Counter()
        for line in result["results"]:
            reasons.update(line["skip_reasons"])
        for number, (reason, count) in enumerate(reasons.most_common()):
            table.add_row("" if number else name, f"{count:,}", Text(reason))
    return table


def _say_failures(console: Console, name: str, result: dict[str, Any]) -> None:
    """Tests and commands on lines of their own, whatever their length: they are to be copied."""
    failures = {
        test: failure for line in result["results"] for test, failure in line["failures"].items()
    }
    if not failures:
        return
    console.print(Text(f"{name}: {len(failures)} failed", style=STYLES["failed"]))
    for test, failure in list(failures.items())[:MOST_SHOWN]:
        console.print(Text(f"  {test}"), soft_wrap=True)
        first = failure["message"].strip().partition("\n")[0]
        console.print(Padding.indent(Text(first), 4))
    if len(failures) > MOST_SHOWN:
        more = len(failures) - MOST_SHOWN
        console.print(Text(f"  and {more} more (in the record: --json FILE)"))
    console.print(Text("to run the first of them again:"))
    console.print(Text(next(iter(failures.values()))["rerun"]), soft_wrap=True)
    console.print()


def _verdicts(backends: dict[str, dict[str, Any]]) -> Table:
    table = tables.table("verdict", tables.names(), tables.names(), tables.text(), header=False)
    for name, result in backends.items():
        state = Text(result["status"], style=STYLES[result["status"]])
        table.add_row(name, state, Text("; ".join(result["problems"])))
    return table
