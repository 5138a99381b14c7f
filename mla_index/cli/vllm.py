"""`mla-index vllm`: does the installed vLLM fit the plugin, and is the plugin asked for."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from mla_index import settings
from mla_index.cli import exits, files
from mla_index.integrations import vllm_forms

ENTRY_POINT_GROUP = "vllm.general_plugins"


def vllm(
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="End with exit code 1 if vLLM does not fit, 3 if it is absent."
        ),
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(help="Look at an unpacked vLLM in this folder, not at the installed one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=files.PRINTED)] = False,
) -> None:
    """Say whether vLLM's sparse MLA functions are those that the plugin replaces.

    vLLM's source is read, not imported, and no device is touched. With `MLA_INDEX_VLLM=1` the
    plugin `mla_index` replaces the functions of a vLLM that fits, and leaves any other alone.

    **Examples**

    - `mla-index vllm --check`
    - `mla-index vllm --check --source ./unpacked-wheel`
    - `mla-index vllm --json | jq .differences`
    """
    facts = _facts(source)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _show(facts)
    if check and facts["fits"] is not True:
        raise typer.Exit(exits.MISSING if facts["fits"] is None else exits.FAILED)


def _facts(folder: Path | None) -> dict[str, Any]:
    """What was found; `fits` is None where there is no vLLM."""
    try:
        asked = settings.vllm()
    except ValueError as error:
        raise exits.stop(str(error), exits.USAGE) from error
    facts: dict[str, Any] = {
        "vllm": None,
        "checked": vllm_forms.CHECKED,
        "fits": None,
        "differences": [],
        "replaced": [],
        "warmup": False,
        "MLA_INDEX_VLLM": asked,
        "plugin installed": any(
            point.name == "mla_index" for point in entry_points(group=ENTRY_POINT_GROUP)
        ),
    }
    if folder is None:
        found = vllm_forms.installed()
        if found is None:
            return facts
        facts["vllm"], file = found
    else:
        facts["vllm"], file = f"in {folder}", vllm_forms.source_in(folder)
    try:
        text = file.read_text(encoding="utf-8")
        form = vllm_forms.form_of_source(text)
    except OSError as error:
        if folder is not None:
            told = f"--source {folder}: {error.filename}: {error.strerror}"
            raise exits.stop(told, exits.USAGE) from error
        facts |= {"fits": False, "differences": [f"it has no {vllm_forms.MODULE}"]}
        return facts
    except (SyntaxError, ValueError) as error:  # cut off, or no text at all
        return facts | {"fits": False, "differences": [f"{file} is not Python: {error}"]}
    differences = form.differences()
    return facts | {
        "fits": not differences,
        "differences": differences,
        "replaced": [name for name in vllm_forms.FUNCTIONS if name in form.parameters],
        "warmup": form.key_fields is not None,
    }


def _show(facts: dict[str, Any]) -> None:
    if facts["fits"] is None:
        typer.echo("vLLM is not installed")
    elif facts["fits"]:
        asked = facts["warmup"]
        warmed = "warmed as vLLM's warm-up asks" if asked else "compiled at their first use"
        typer.echo(f"vLLM {facts['vllm']} fits; kernels are {warmed}; the plugin replaces")
        for name in facts["replaced"]:
            typer.echo(f"  {name}")
    else:
        typer.echo(
            f"vLLM {facts['vllm']} does not fit and is left alone (checked: {facts['checked']})"
        )
        for difference in facts["differences"]:
            typer.echo(f"  {difference}")
    typer.echo(
        "MLA_INDEX_VLLM=1 is set: the plugin is switched on"
        if facts["MLA_INDEX_VLLM"]
        else "MLA_INDEX_VLLM is not 1: the plugin does nothing"
    )
    if not facts["plugin installed"]:
        typer.echo("the entry point of the plugin is not installed: install mla_index again")
