"""What is installed here, for records and reports: the versions of packages and of the driver."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

from mla_index.version import __version__

PACKAGES = (
    "torch", "triton", "pytorch-triton-rocm", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda",
    "numba", "numpy", "pytest", "hypothesis", "typer", "rich", "vllm",
)  # fmt: skip
"""Looked up in the metadata, not imported: an import may fail, or start a device."""


def versions() -> dict[str, str]:
    """Versions of this package, of Python, and of those of `PACKAGES` that are installed."""
    found = {
        "mla_index": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def nvidia_driver() -> str | None:
    """The version that `nvidia-smi` tells of the driver; None where it tells none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(told.stdout.split()), None)
