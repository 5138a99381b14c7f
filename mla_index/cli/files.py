"""Files that a command writes: refused before the work where they cannot be, and written whole."""

from __future__ import annotations

from pathlib import Path

import typer

from mla_index.cli import exits

PRINTED = "Print JSON instead of tables. A switch: to keep it, redirect standard output (`> FILE`)."
"""Help of `--json` where a command answers a question."""
RECORDED = (
    "Write the record there, as JSON, beside the tables. `-` is standard output, and all else goes "
    "to standard error then."
)
"""Help of `--json` where a command makes a record, which takes a while."""

STDOUT = Path("-")
"""Instead of a file: standard output, and what is said to people goes to standard error."""


def check(option: str, path: Path | None) -> None:
    """End the command if the file could not be written after it.

    Raises:
        typer.Exit: it could not; said on standard error.
    """
    if path is None or path == STDOUT:
        return
    if path.name == str(path) and path.name.startswith("-"):
        told = f"{option} takes a file, got {path}, which looks like an option (or write ./{path})"
        raise exits.stop(told, exits.USAGE)
    if path.is_dir():
        raise exits.stop(f"{option} {path}: that is a folder", exits.USAGE)
    if not path.absolute().parent.is_dir():
        raise exits.stop(f"{option} {path}: there is no such folder", exits.USAGE)
    if path.exists() and not path.is_file():  # a pipe, a device
        return
    part = _part(path)
    try:
        part.touch()
        part.unlink()
    except OSError as error:
        raise exits.stop(f"{option} {path}: {error.strerror}", exits.USAGE) from error


def write(option: str, path: Path, content: str | bytes) -> None:
    """Write the file; one that is there stays as it is until the new one is complete.

    Raises:
        typer.Exit: it could not be written; said on standard error.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path == STDOUT:
            typer.echo(data, nl=False)
        elif path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            _write_whole(path, data)
    except BrokenPipeError:
        raise
    except OSError as error:
        told = f"{option} {path}: {error.strerror}; it was not written"
        raise exits.stop(told, exits.USAGE) from error


def _write_whole(path: Path, data: bytes) -> None:
    part = _part(path)
    try:
        part.write_bytes(data)
        try:
            part.replace(path)
        except OSError:  # may be written and not replaced: a file that is mounted alone
            path.write_bytes(data)
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")
