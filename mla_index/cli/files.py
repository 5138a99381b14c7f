"""Files that a command writes: refused before the work where they cannot be, and written whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

import typer

from mla_index.cli import exits, streams

PRINTED = "Print JSON instead of tables. A switch: to keep it, redirect standard output (`> FILE`)."
"""Help of `--json` where a command answers a question."""
RECORDED = (
    "Write the record there, as JSON, beside the tables. `-` is standard output, and all else goes "
    "to standard error then."
)
"""Help of `--json` where a command makes a record, which takes a while."""

STDOUT = Path("-")
"""Instead of a file: standard output, and what is said to people goes to standard error."""

NO_NEW_FILE = (errno.EACCES, errno.EPERM, errno.EROFS)
"""What a folder says that takes no new file; one that is there may be writable all the same."""


def check(option: str, path: Path | None) -> None:
    """End the command if the file could not be written after it. Leaves what is there as it is.

    Raises:
        typer.Exit: it could not; said on standard error.
    """
    if path == STDOUT and streams.stdout_is_closed():
        raise exits.stop(f"{option} {path}: standard output is closed", exits.USAGE)
    if path is None or path == STDOUT:
        return
    if path.name == str(path) and path.name.startswith("-"):
        told = f"{option} takes a file, got {path}, which looks like an option (or write ./{path})"
        raise exits.stop(told, exits.USAGE)
    target = _target(path)
    try:
        if target.is_dir():
            raise exits.stop(f"{option} {path}: that is a folder", exits.USAGE)
        if not target.parent.is_dir():
            raise exits.stop(f"{option} {path}: there is no such folder", exits.USAGE)
        if target.is_file() or target.is_symlink():  # a link still: it leads to itself
            target.open("ab").close()
        elif not target.exists():  # neither a pipe nor a device
            new = _new_beside(target)
            new.close()
            Path(new.name).unlink()
    except OSError as error:
        raise exits.stop(f"{option} {path}: {error.strerror}", exits.USAGE) from error


def write(option: str, path: Path, content: str | bytes) -> None:
    """Write the file; one that is there stays as it is until the new one is complete.

    A symbolic link stays one, and what it leads to is written. Where the folder takes no new file,
    the one that is there is written in place.

    Raises:
        typer.Exit: it could not be written; said on standard error.
    """
    data = content.encode() if isinstance(content, str) else content
    target = _target(path)
    try:
        if path == STDOUT:
            typer.echo(data, nl=False)
        elif target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _write_whole(target, data)
    except BrokenPipeError:
        raise
    except OSError as error:
        told = f"{option} {path}: {error.strerror}; it was not written"
        raise exits.stop(told, exits.USAGE) from error


def _write_whole(target: Path, data: bytes) -> None:
    try:
        new = _new_beside(target)
    except OSError as error:
        if error.errno not in NO_NEW_FILE:
            raise
        target.write_bytes(data)
        return
    part = Path(new.name)
    try:
        with new:
            new.write(data)
        part.chmod(_mode(target))
        try:
            part.replace(target)
        except OSError:  # may be written and not replaced: a file that is mounted alone
            target.write_bytes(data)
    finally:
        part.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """The file that links lead to. Not by `Path.resolve`: it raises where they form a ring."""
    return Path(os.path.realpath(path))


def _new_beside(target: Path) -> IO[bytes]:
    """An open file with a name that nobody has, on the same file system."""
    return NamedTemporaryFile(dir=target.parent, prefix=".mla-index-", suffix=".part", delete=False)


def _mode(target: Path) -> int:
    """Permissions of the file, or those that a new one gets; a temporary file is its owner's."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
