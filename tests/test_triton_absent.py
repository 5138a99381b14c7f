"""Machines on which Triton does not work: what `explain` says, and what `auto` does instead.

Each machine is made in a process of its own by a module on the path that stands in for Triton;
nothing of ours is replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import needed

MISSING = {
    # An importer that knows no triton, as on a machine where it was never installed.
    "sitecustomize.py": """
        import importlib.machinery, sys

        class Without(importlib.machinery.PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name.partition(".")[0] == "triton":
                    return None
                return super().find_spec(name, path, target)

        at = sys.meta_path.index(importlib.machinery.PathFinder)
        sys.meta_path[at] = Without
    """
}
BROKEN = {
    "triton/__init__.py": """
        try:
            raise OSError("libtriton.so: undefined symbol: strange")
        except OSError as cause:
            raise ImportError("triton cannot be used") from cause
    """
}
DRIVERLESS = {
    "triton/__init__.py": "__version__ = '9.9'\nfrom triton import runtime",
    "triton/runtime.py": """
        class driver:
            class Config:
                @property
                def active(self):
                    raise RuntimeError("0 active drivers") from OSError("libcuda.so.1 is absent")
        driver = driver.Config()
    """,
}
OTHER_DEVICE = {
    "triton/__init__.py": "__version__ = '9.9'\nfrom triton import runtime",
    "triton/runtime.py": """
        import torch

        class driver:
            class active:
                @staticmethod
                def get_active_torch_device():
                    return torch.device("xpu", 0)
    """,
}

ASK = """
    import json, sys
    import torch
    import mla_index

    def row(device, **probe):
        rows = mla_index.explain("remap", device=device, **probe).as_dict()["candidates"]
        return next(row for row in rows if row["name"] == "triton")

    slots = mla_index.remap(
        torch.tensor([0]), torch.tensor([[7]]), torch.tensor([[1, -1]]), block_size=64
    ).slots
    try:
        mla_index.remap(
            None, torch.tensor([[7]]), torch.tensor([[1]]), block_size=64, backend="triton"
        )
        named = None
    except mla_index.BackendUnavailable as error:
        named = str(error)
    print(json.dumps({
        "cpu": row("cpu"),
        "unprobed": row("cuda:0", probe=False),
        "cuda": row("cuda:0", probe=True),
        "slots": slots.tolist(), "named": named,
    }))
"""


def machine(folder: Path, files: dict[str, str], **settings: str) -> dict[str, Any]:
    """What mla_index answers in a process that finds these files first."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLA_INDEX_", "TRITON_"))
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ASK)],
        env={**environment, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        pytest.param(MISSING, "triton is not installed", id="missing"),
        pytest.param(BROKEN, "libtriton.so: undefined symbol: strange", id="broken"),
    ],
)
def test_without_triton_auto_goes_on_and_the_cause_is_named(
    tmp_path: Path, files: dict[str, str], cause: str
) -> None:
    answer = machine(tmp_path, files)
    assert answer["slots"] == [[449, -1]]
    for device in ("cpu", "unprobed", "cuda"):
        assert answer[device]["accepted"] is False
        assert cause in answer[device]["reason"]
    assert cause in answer["named"]


def test_a_driver_that_does_not_start_is_named_down_to_the_root(tmp_path: Path) -> None:
    answer = machine(tmp_path, DRIVERLESS)
    assert answer["slots"] == [[449, -1]]
    assert answer["cuda"]["accepted"] is False
    assert (
        "triton 9.9 has no driver that starts: RuntimeError: 0 active drivers"
        in (answer["cuda"]["reason"])
    )
    assert "caused by OSError: libcuda.so.1 is absent" in answer["cuda"]["reason"]


def test_no_driver_is_asked_without_a_probe(tmp_path: Path) -> None:
    answer = machine(tmp_path, DRIVERLESS)
    assert "driver" not in answer["unprobed"]["reason"]


def test_a_driver_of_another_device_type_is_refused(tmp_path: Path) -> None:
    answer = machine(tmp_path, OTHER_DEVICE)
    assert "the driver of triton 9.9 drives xpu, not cuda" in answer["cuda"]["reason"]


def test_on_the_cpu_the_interpreter_is_for_those_who_name_it(tmp_path: Path) -> None:
    needed("triton")
    off = machine(tmp_path, {})
    assert "TRITON_INTERPRET=1 is not set" in off["cpu"]["reason"]
    assert "TRITON_INTERPRET=1 is not set" in off["named"]
    on = machine(tmp_path, {}, TRITON_INTERPRET="1")
    assert on["cpu"]["accepted"] is True
    assert "auto does not ask for it" in on["cpu"]["reason"]
    assert on["named"] is None
    assert "the interpreter serves cpu, not cuda" in on["cuda"]["reason"]
