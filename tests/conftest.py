"""What every test may use; each test leaves selection as it found it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mla_index
from mla_index import registry

PROJECT = Path(__file__).resolve().parent.parent
SHARED = PROJECT.parent / "shared"


def needed(package: str) -> Any:
    """A package that CI must have; elsewhere tests are skipped without it."""
    if os.environ.get("CI"):
        return importlib.import_module(package)
    return pytest.importorskip(package, reason=f"{package} is not installed")


def compiled_here(variable: str, compiles: bool) -> None:
    """Skip a module whose kernels an environment variable keeps from compiling; CI must compile."""
    if compiles:
        return
    if os.environ.get("CI"):
        raise RuntimeError(f"CI must run this module without {variable}")
    pytest.skip(f"{variable} is set: nothing is compiled", allow_module_level=True)


@pytest.fixture(autouse=True)
def _selection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of the developer's shell reaches a test, and none of a test's reaches the next."""
    monkeypatch.delenv("COLUMNS", raising=False)
    for name in [name for name in os.environ if name.startswith("MLA_INDEX_")]:
        monkeypatch.delenv(name)
    mla_index.set_default_backend(None)
    mla_index.reload_environment()
    known = set(registry.names())
    yield
    for name in set(registry.names()) - known:
        registry.unregister(name)
    mla_index.set_default_backend(None)
    monkeypatch.undo()
    mla_index.reload_environment()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the normative texts and the real trace, beside the checkout."""
    if not SHARED.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"CI needs the shared folder beside the checkout: {SHARED.name} is absent")
        pytest.skip("the shared folder beside the checkout is absent")
    return SHARED
