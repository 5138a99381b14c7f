"""`mla-index explain`: who would serve one configuration, and why not the others."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from mla_index import explanation
from mla_index.cli import backends, devices, exits, files, screen
from mla_index.cli.lists import listed
from mla_index.cli.tables import Candidates
from mla_index.registry import OPERATIONS
from mla_index.specs import INDEX_DTYPES, RemapSpec, SafeLengthsSpec, Spec

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in INDEX_DTYPES}


def explain(
    op: Annotated[str, typer.Argument(metavar="OP", help=f"One of {', '.join(OPERATIONS)}.")],
    device: Annotated[str, typer.Option(help="Where the tensors would be.")] = "cpu",
    backend: Annotated[str, backends.OPTION] = "auto",
    topk: Annotated[int, typer.Option(help="K, the tokens selected for each row.")] = 2048,
    block_size: Annotated[int, typer.Option(help="Tokens in a cache block.")] = 64,
    dcp: Annotated[int, typer.Option(help="Ranks of decode context parallelism.")] = 1,
    interleave: Annotated[int, typer.Option(help="Adjacent tokens on one rank.")] = 1,
    compact: Annotated[bool, typer.Option("--compact", help="Valid slots first.")] = False,
    counts: Annotated[bool, typer.Option("--counts", help="Count the valid slots.")] = False,
    safe_lengths: Annotated[
        bool, typer.Option("--safe-lengths", help="Safe lengths in the same launch.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of every tensor: int32 or int64.")] = "int32",
    probe: Annotated[
        bool, typer.Option("--probe", help="Start the device for the answer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help=files.PRINTED)] = False,
) -> None:
    """Say which backend would serve a call, and why not each of the others.

    For the question "why does this not run on …?". The same as `mla_index.explain` in Python.

    **Examples**

    - `mla-index explain remap --device cuda --topk 16384`
    - `mla-index explain dcp_filter --dcp 8 --backend cupy,torch --device cuda --probe`
    """
    place = devices.parse(device)
    with exits.errors_as_exits():
        try:
            spec = _spec(
                op, block_size, topk, dtype, dcp, interleave, compact, counts, safe_lengths
            )
            answer = explanation.explain(
                op,
                device=place,
                spec=spec,
                backend=listed("--backend", [backend]),
                probe=True if probe else None,
            )
        except ValueError as error:
            raise exits.stop(str(error), exits.USAGE) from error
    if as_json:
        typer.echo(json.dumps(answer.as_dict(), indent=2))
    else:
        heading = Text(f"{op} on {answer.device}", style="italic")
        screen.console().print(Group(heading, Candidates(answer)))
    if answer.chosen is None:
        raise typer.Exit(exits.MISSING)


def _spec(
    op: str,
    block_size: int,
    topk: int,
    dtype: str,
    dcp: int,
    interleave: int,
    compact: bool,
    counts: bool,
    safe_lengths: bool,
) -> Spec:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    torch_dtype = DTYPES[dtype]
    if op == "safe_lengths":
        return SafeLengthsSpec(torch_dtype, torch_dtype)
    if op not in ("remap", "dcp_filter"):
        return None
    return RemapSpec(
        block_size,
        topk,
        token_dtype=torch_dtype,
        table_dtype=torch_dtype,
        slot_dtype=torch_dtype,
        dcp_size=dcp,
        dcp_interleave=interleave,
        compact=compact,
        counts=counts,
        safe_lengths=safe_lengths,
    )
