"""`mla-index conformance`: the suite on backends, as a table and as a record."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mla_index import registry
from mla_index.cli import devices, exits
from mla_index.explanation import explain

COUNTS = ("passed", "failed", "skipped")
NEEDED = ("pytest", "hypothesis")
STYLES = {"passed": "green", "failed": "bold red", "did not run": "yellow"}


def conformance(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="A backend to test, which must run; may be given several times. By default all "
            "that can run on the device."
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
        typer.Option(
            help="A backend that must run, beside those tested anyway; may be given several times."
        ),
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
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record there.")
    ] = None,
) -> None:
    """Check backends against the definition of the operations, bit for bit.

    Each backend runs in a process of its own. Needs the extra `test`.

    **Examples**

    - `mla-index conformance`
    - `mla-index conformance --all --require triton --device cuda --json results.json`
    - `mla-index conformance --backend mybackend --only fr05`
    """
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise exits.stop(
            f"conformance needs {' and '.join(missing)}: pip install 'mla_index[test]'",
            exits.MISSING,
        )
    if scale not in (None, "small", "full"):
        raise exits.stop(f"--scale must be small or full, got {scale}", exits.USAGE)
    if as_json is not None and not as_json.absolute().parent.is_dir():
        raise exits.stop(f"--json {as_json}: there is no such folder", exits.USAGE)
    from mla_index.conformance.run import run_suite

    required = list(dict.fromkeys([*(backend or []), *(require or [])]))
    place = devices.parse(device)
    with exits.errors_as_exits():
        for name in required:
            registry.load(name)
        tested = _tested(required, every, bool(backend), place)
        if not tested:
            raise exits.stop(
                f"no backend can run on {place}; `mla-index info --probe` says why", exits.MISSING
            )
        record = run_suite(
            tested,
            str(place),
            json_path=as_json,
            scale=scale,
            pytest_args=["-k", only] if only else [],
            workers=workers,
        )
    Console().print(_table(record))
    if only and all(not result["results"] for result in record["backends"].values()):
        raise exits.stop(f"--only {only!r} matches no test", exits.USAGE)
    raise typer.Exit(_verdict(record["backends"], required))


def _tested(required: list[str], every: bool, named: bool, device: torch.device) -> list[str]:
    """The backends that were named, all there are, or all that can run on the device."""
    if every:
        return list(registry.names())
    if named:
        return required
    rows = explain("remap", device=device, probe=True).rows
    able = [row.name for row in rows if row.accepted]
    return list(dict.fromkeys([*able, *required]))


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


def _table(record: dict[str, Any]) -> Table:
    table = Table(
        title=f"conformance on {record['device']}", title_justify="left", box=None,
        padding=(0, 2, 0, 0), pad_edge=False,
    )  # fmt: skip
    for heading in ("backend", "operation", "", *COUNTS, "why"):
        justify: Literal["left", "right"] = "right" if heading in COUNTS else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for name, result in record["backends"].items():
        state = Text(result["status"], style=STYLES[result["status"]])
        lines = result["results"]
        if not lines:
            table.add_row(name, "", state, "", "", "", Text("; ".join(result["problems"])))
        for number, line in enumerate(lines):
            why = "; ".join(f"{count} × {text}" for text, count in line["skip_reasons"].items())
            counts = (str(line[key]) for key in COUNTS)
            first = (name, line["operation"], state) if number == 0 else ("", line["operation"], "")
            table.add_row(*first, *counts, Text(why))
    return table
