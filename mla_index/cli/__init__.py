"""The command `mla-index`. Needs the extra `cli`; the library itself never imports this."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; says in one line what is missing without the extra `cli`."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"error: the command line needs {error.name}: pip install 'mla_index[cli]'",
            file=sys.stderr,
        )
        # The number of `exits.MISSING`, which cannot be imported without typer.
        raise SystemExit(3) from None
    from mla_index.cli.app import app

    app(prog_name="mla-index")
