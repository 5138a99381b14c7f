"""`mla-index info`: what is here, what it can do, and why not the rest."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mla_index.cli import devices, exits
from mla_index.cli.tables import backend_table
from mla_index.explanation import Explanation, explain
from mla_index.registry import OPERATIONS
from mla_index.settings import KNOWN
from mla_index.version import __version__

PACKAGES = (
    "torch", "triton", "pytorch-triton-rocm", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda",
    "numba", "numpy", "pytest", "hypothesis", "typer", "rich", "vllm",
)  # fmt: skip
"""Looked up in the metadata, not imported: an import may fail, or start a device."""


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show versions, devices, settings, and every backend × operation with the reason.

    For a first look at a machine, and for bug reports.

    **Examples**

    - `mla-index info`
    - `mla-index info --probe --device cuda:0`
    - `mla-index info --json | jq .versions`
    """
    places = [devices.parse(name) for name in device] if device else devices.built_for()
    # Without --probe, a device that this process has not started stays so.
    ask = True if probe else None
    with exits.errors_as_exits():
        answers = {
            str(place): [explain(op, device=place, probe=ask) for op in OPERATIONS]
            for place in places
        }
    facts: dict[str, dict[str, Any]] = {
        "versions": _versions(),
        "devices": {str(place): devices.facts(place, probe=probe) for place in places},
        "settings": {name: os.environ.get(name) for name in KNOWN},
    }
    if as_json:
        backends = {place: [answer.as_dict() for answer in of] for place, of in answers.items()}
        typer.echo(json.dumps({**facts, "backends": backends}, indent=2))
    else:
        _show(facts, answers)


def _versions() -> dict[str, str | None]:
    """Installed versions; None where a package is not installed."""
    found: dict[str, str | None] = {
        "mla_index": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch is built for": _torch_build(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _torch_build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"


def _show(facts: dict[str, dict[str, Any]], answers: dict[str, list[Explanation]]) -> None:
    console = Console()
    for heading, rows in facts.items():
        table = Table(title=heading, title_justify="left", box=None, show_header=False)
        for name, value in rows.items():
            shown = "; ".join(value) if isinstance(value, list) else value
            if heading == "settings":
                shown = f"{value!r}" if value is not None else f"not set ({KNOWN[name]})"
            table.add_row(Text(name), Text("not installed" if shown is None else shown))
        console.print(table, "")
    for place, of in answers.items():
        console.print(backend_table(f"backends on {place}", of), "")
