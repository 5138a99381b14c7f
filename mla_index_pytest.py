"""Pytest's way into the conformance suite of mla_index.

Installed with the library, so it is loaded by every pytest run of every user: it stands outside the
package and imports nothing until one of its options is used, its variables are set, or the suite
itself is what is run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

SUITE = "mla_index.conformance"

OPTIONS: dict[str, tuple[str, Any, str, str]] = {
    # option: (environment variable, default, how often, help)
    "--mla-backend": (
        "MLA_CONFORMANCE_BACKEND",
        [],
        "append",
        "backend to test; repeat it or separate by commas (default: all that run on the device)",
    ),
    "--mla-device": ("MLA_CONFORMANCE_DEVICE", None, "store", "device to test on (default: cpu)"),
    "--mla-require": (
        "MLA_CONFORMANCE_REQUIRE",
        [],
        "append",
        "backend that must have run, in every operation that was collected for it",
    ),
    "--mla-scale": (
        "MLA_CONFORMANCE_SCALE",
        None,
        "store",
        "small or full (default: full on a device other than cpu)",
    ),
    "--mla-examples": (
        "MLA_CONFORMANCE_EXAMPLES",
        None,
        "store",
        "generated inputs per property (default: 30)",
    ),
    "--mla-json": ("MLA_CONFORMANCE_JSON", None, "store", "file for the results as JSON"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, and their variables in the help."""
    group = parser.getgroup("mla_index", "conformance of mla_index backends")
    for option, (variable, default, action, text) in OPTIONS.items():
        group.addoption(option, action=action, default=default, help=f"{text} [{variable}]")


def value(config: pytest.Config, option: str) -> object:
    """An option, else its environment variable, else its default."""
    variable, default, _, _ = OPTIONS[option]
    given = config.getoption(option)
    return given if given != default else os.environ.get(variable, default)


def names(config: pytest.Config, option: str) -> list[str]:
    """A repeatable option as a flat list: repeated or separated by commas."""
    given = value(config, option)
    parts = [given] if isinstance(given, str) else list(given)  # type: ignore[call-overload]
    return list(dict.fromkeys(n.strip() for part in parts for n in part.split(",") if n.strip()))


def _wanted(config: pytest.Config) -> bool:
    named = any(
        SUITE in argument or SUITE.replace(".", os.sep) in argument for argument in config.args
    )
    used = any(value(config, option) != OPTIONS[option][1] for option in OPTIONS)
    return named or used


def pytest_configure(config: pytest.Config) -> None:
    """Load what the suite needs, if it is wanted."""
    if _wanted(config):
        config.pluginmanager.import_plugin(f"{SUITE}.plugin")
