"""Which kernels a result was obtained with: a hash of the sources that decide it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import mla_index

SOURCES = (
    "backends",
    "checks.py",
    "operations.py",
    "overlap.py",
    "registry.py",
    "selector.py",
    "specs.py",
    "verdicts.py",
    "views.py",
)
"""Kernel and launch sources, relative to the package."""


def source_files() -> list[Path]:
    """Every file that `source_hash` covers, in its order."""
    root = Path(mla_index.__file__).parent
    found: list[Path] = []
    for name in SOURCES:
        path = root / name
        inside = path.rglob("*") if path.is_dir() else [path]
        found += [p for p in inside if p.suffix in (".py", ".cu", ".cuh", ".h")]
    return sorted(found)


def source_hash() -> str:
    """SHA-256 over the names and contents of the kernel and launch sources."""
    root = Path(mla_index.__file__).parent
    digest = hashlib.sha256()
    for path in source_files():
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
