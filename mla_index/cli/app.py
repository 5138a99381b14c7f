"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from mla_index.cli import bench, conformance, demo, exits, explain, info, vllm
from mla_index.version import __version__

app = typer.Typer(
    name="mla-index",
    help="Index operations of sparse MLA over a paged KV cache: what runs here, and does it right."
    "\n\nNew here? `mla-index demo` does the whole job on a small serving trace; `mla-index info` "
    "shows which backends this machine has, and is what to paste into a bug report."
    "\n\nFor scripts: where a command answers a question (`info`, `explain`, `demo`, `vllm`), "
    "`--json` is a switch, and JSON is printed instead of tables; where it makes a record "
    "(`bench`, `conformance`), `--json FILE` writes it beside the tables, and `-` is standard "
    "output.",
    epilog=exits.HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"mla-index {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


for command in (
    info.info, explain.explain, demo.demo, bench.bench, conformance.conformance, vllm.vllm
):  # fmt: skip
    app.command(epilog=exits.HELP)(command)
