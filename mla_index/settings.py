"""The `MLA_INDEX_*` environment variables, read once at first use."""

from __future__ import annotations

import difflib
import os
import warnings
from dataclasses import dataclass

KNOWN = {
    "MLA_INDEX_BACKEND": "backend to use, or an ordered list separated by commas",
    "MLA_INDEX_BLOCK": "backends that `auto` must not choose, separated by commas",
    "MLA_INDEX_VLLM": "1: an installed vLLM uses these operations (its plugin mla_index); 0: not",
}


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; each a tuple of names as written, empty when unset."""

    backend: tuple[str, ...]
    block: tuple[str, ...]


def read() -> Settings:
    """The environment as it is now; an unknown `MLA_INDEX_*` variable is warned of."""
    for name in sorted(os.environ):
        if name.startswith("MLA_INDEX_") and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.0)
            warnings.warn(
                f"unknown environment variable {name}; did you mean {near[0]}? "
                f"There are {', '.join(KNOWN)}",
                RuntimeWarning,
                stacklevel=2,
            )
    return Settings(_names("MLA_INDEX_BACKEND"), _names("MLA_INDEX_BLOCK"))


def vllm() -> bool:
    """Whether `MLA_INDEX_VLLM` asks for the plugin.

    Raises:
        ValueError: it is set to something else than 0 or 1.
    """
    value = os.environ.get("MLA_INDEX_VLLM", "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"MLA_INDEX_VLLM must be 0 or 1, got {value!r}")
    return value == "1"


def _names(variable: str) -> tuple[str, ...]:
    parts = (part.strip() for part in os.environ.get(variable, "").split(","))
    return tuple(part for part in parts if part)
