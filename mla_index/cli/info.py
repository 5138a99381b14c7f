"""`mla-index info`: what is here, what it can do, and why not the rest."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

from mla_index import installed, registry, settings
from mla_index.cli import devices, exits, files, screen, tables
from mla_index.errors import UnknownBackend
from mla_index.explanation import Explanation, explain
from mla_index.registry import OPERATIONS


def info(
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="Ask about this device, as torch writes it; may be given several times. "
            "By default the CPU and whatever torch is built for.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Start the devices and let every backend compile and run a trivial kernel. "
            "Without, no device is touched, and what only it could tell is `not tried`.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help=files.PRINTED)] = False,
) -> None:
    """Show versions, devices, settings, and every backend × operation with the reason.

    For a first look at a machine, and for bug reports. With a wrong `MLA_INDEX_*` setting all of
    this is shown as well, and then what is wrong: exit code 2, and in JSON under `errors`.

    **Examples**

    - `mla-index info`
    - `mla-index info --probe --device cuda:0`
    - `mla-index info --json | jq .versions`
    """
    places = [devices.parse(name) for name in device] if device else devices.built_for()
    # Without --probe, a device that this process has not started stays so.
    answers, wrong = _answers(places, True if probe else None)
    facts: dict[str, dict[str, Any]] = {
        "versions": _versions(),
        "devices": {str(place): devices.facts(place, probe=probe) for place in places},
        "settings": _settings(),
    }
    if as_json:
        backends = {place: [answer.as_dict() for answer in of] for place, of in answers.items()}
        typer.echo(json.dumps({**facts, "backends": backends, "errors": wrong}, indent=2))
    else:
        _show(facts, answers)
    if wrong:
        raise exits.stop("; ".join(wrong), exits.USAGE)


def _answers(
    places: list[torch.device], probe: bool | None
) -> tuple[dict[str, list[Explanation]], list[str]]:
    """For each device who serves each operation, and which settings are wrong.

    With a wrong setting nobody is chosen, and what each backend can do is told all the same.
    """
    wrong: list[str] = []

    def answer(op: str, place: torch.device) -> Explanation:
        try:
            return explain(op, device=place, probe=probe)
        except UnknownBackend as error:  # nobody has asked for a backend but a setting
            wrong.append(str(error))
            told = explain(op, device=place, probe=probe, backend=registry.names())
            return replace(told, chosen=None, source="a setting that is wrong")

    answers = {str(place): [answer(op, place) for op in OPERATIONS] for place in places}
    try:
        settings.vllm()
    except ValueError as error:
        wrong.append(str(error))
    return answers, list(dict.fromkeys(wrong))


def _settings() -> dict[str, str | None]:
    """What is set; what has no meaning, too."""
    strange = sorted(name for name in os.environ if name.startswith("MLA_INDEX_"))
    return {name: os.environ.get(name) for name in (*settings.KNOWN, *strange)}


def _versions() -> dict[str, str | None]:
    """Installed versions; None where a package is not installed."""
    told = {"torch is built for": _torch_build(), **installed.versions()}
    names = ("mla_index", "python", "platform", "torch is built for", *installed.PACKAGES)
    return {name: told.get(name) for name in names}


def _torch_build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"


def _show(facts: dict[str, dict[str, Any]], answers: dict[str, list[Explanation]]) -> None:
    console = screen.console()
    for heading, rows in facts.items():
        table = tables.table(heading, tables.names(), tables.text(), header=False)
        for name, value in rows.items():
            shown = "; ".join(value) if isinstance(value, list) else value
            if heading == "settings":
                shown = _setting(name, value)
            table.add_row(Text(name), Text("not installed" if shown is None else shown))
        console.print(table, "")
    for place, of in answers.items():
        console.print(tables.backend_table(f"backends on {place}", of), "")


def _setting(name: str, value: str | None) -> str:
    meaning = settings.KNOWN.get(name)
    if value is None:
        return f"not set ({meaning})"
    return repr(value) if meaning else f"{value!r} (no such setting)"
