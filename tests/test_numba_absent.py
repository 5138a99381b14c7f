"""Machines on which Numba-CUDA does not work: what `explain` says, and what `auto` does instead.

Each machine is made in a process of its own by modules on the path that stand in for Numba;
nothing of ours is replaced.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

SIMULATOR = {"NUMBA_ENABLE_CUDASIM": "1"}


def without(*packages: str) -> dict[str, str]:
    """An importer that knows no such packages, as where they were never installed."""
    return {
        "sitecustomize.py": f"""
            import importlib.machinery, sys

            class Without(importlib.machinery.PathFinder):
                @classmethod
                def find_spec(cls, name, path=None, target=None):
                    if name.partition(".")[0] in {packages!r}:
                        return None
                    return super().find_spec(name, path, target)

            at = sys.meta_path.index(importlib.machinery.PathFinder)
            sys.meta_path[at] = Without
        """
    }


NEW_NUMPY = {
    "numba/__init__.py": """
        raise ImportError("Numba needs NumPy 2.3 or less. Got NumPy 2.4.")
    """,
    "numba_cuda/__init__.py": "",
}

# Everything imports; the first kernel is where it breaks, on the card and in the simulator.
NO_NVVM = {
    "numba/__init__.py": """
        class types:
            void = CPointer = staticmethod(lambda *args: args)
            int32 = int64 = uint32 = uint64 = int
    """,
    "numba_cuda/__init__.py": "",
    "numba_cuda/numba/cuda/__init__.py": """
        def _broken():
            try:
                raise OSError("libnvvm.so: cannot open shared object file")
            except OSError as cause:
                raise RuntimeError("NVVM cannot be used:\\nsee the manual") from cause

        def jit(function=None, **options):
            if function is None:
                return lambda function: function
            _broken()

        def compile(*args, **options):
            _broken()
    """,
    "numba_cuda/numba/cuda/extending.py": "intrinsic = lambda function: function",
}
# A build of torch with CUDA, as far as it matters before a kernel runs.
CUDA_TORCH = """
    import torch

    torch.version.cuda = "13.0"
    torch.cuda.get_device_capability = lambda device: (9, 0)
    torch.cuda.is_current_stream_capturing = lambda: False
"""

ASK = """
    import json, sys, warnings
    import torch
    import mla_index

    filters = list(warnings.filters)

    def row(device, **probe):
        rows = mla_index.explain("remap", device=device, **probe).as_dict()["candidates"]
        return next(row for row in rows if row["name"] == "numba")

    table, tokens = torch.tensor([[7]]), torch.tensor([[1, -1]])
    slots = mla_index.remap(torch.tensor([0]), table, tokens, block_size=64).slots
    chosen = mla_index.explain("remap", device="cpu").chosen
    try:
        mla_index.remap(None, table, tokens, block_size=64, backend="numba")
        named = None
    except mla_index.BackendUnavailable as error:
        named = str(error)
    unprobed = row("cuda:0", probe=False)
    print(json.dumps({
        "cpu": row("cpu"), "unprobed": unprobed, "cuda": row("cuda:0", probe=True),
        "slots": slots.tolist(), "chosen": chosen, "named": named,
        "filters": filters == list(warnings.filters),
        "initialised": torch.cuda.is_initialized(),
    }))
"""


def machine(
    folder: Path, files: dict[str, str], torch_is: str = "", **settings: str
) -> dict[str, Any]:
    """What mla_index answers in a process that finds these files first."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLA_INDEX_", "NUMBA_"))
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(torch_is) + textwrap.dedent(ASK)],
        env={**environment, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["slots"] == [[449, -1]]
    assert answer["chosen"] == "torch"
    assert answer["filters"]
    assert not answer["initialised"]
    return answer


@pytest.mark.parametrize(
    ("absent", "cause"),
    [
        (("numba", "numba_cuda"), "numba and numba-cuda not installed"),
        (("numba",), "numba not installed"),
        (("numba_cuda",), "numba-cuda not installed"),
    ],
    ids=["both", "numba", "numba-cuda"],
)
def test_the_missing_package_is_named(tmp_path: Path, absent: tuple[str, ...], cause: str) -> None:
    answer = machine(tmp_path, without(*absent), CUDA_TORCH, **SIMULATOR)
    for device in ("cpu", "unprobed", "cuda"):
        assert answer[device]["accepted"] is False
        assert answer[device]["reason"].startswith(cause)
    assert cause in answer["named"]


def test_an_import_that_fails_is_named(tmp_path: Path) -> None:
    cause = "ImportError: Numba needs NumPy 2.3 or less. Got NumPy 2.4."
    simulated = machine(tmp_path, NEW_NUMPY, **SIMULATOR)
    assert cause in simulated["cpu"]["reason"]
    assert cause in simulated["named"]
    assert cause in machine(tmp_path, NEW_NUMPY, CUDA_TORCH)["cuda"]["reason"]


def test_a_first_kernel_that_does_not_compile_is_named_by_its_root(tmp_path: Path) -> None:
    """The packages import; that is not enough."""
    cause = "a trial kernel failed: OSError: libnvvm.so: cannot open shared object file"
    simulated = machine(tmp_path, NO_NVVM, **SIMULATOR)
    assert simulated["cpu"]["reason"] == cause
    assert cause in simulated["named"]
    card = machine(tmp_path, NO_NVVM, CUDA_TORCH)
    assert card["cuda"]["reason"] == cause
    assert "trial" not in card["unprobed"]["reason"]


def test_torch_without_cuda_is_the_reason_wherever_numba_would_run(tmp_path: Path) -> None:
    answer = machine(tmp_path, {}, "import torch; torch.version.cuda = None")
    for device in ("unprobed", "cuda"):
        assert "is built without CUDA" in answer[device]["reason"]


def test_torch_for_rocm_is_the_reason(tmp_path: Path) -> None:
    answer = machine(tmp_path, {}, "import torch; torch.version.hip = '7.1'")
    assert "is built for ROCm" in answer["cuda"]["reason"]


# --- with the real packages ---------------------------------------------------------------------


@pytest.fixture
def _numba() -> None:
    missing = [name for name in ("numba", "numba_cuda") if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"CI needs {', '.join(missing)}")
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


@pytest.mark.usefixtures("_numba")
def test_a_card_without_a_driver_is_named(tmp_path: Path) -> None:
    """Numba compiles without one; loading what it compiled is where the driver is missed."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a CUDA driver")
    answer = machine(tmp_path, {}, CUDA_TORCH)
    assert answer["cuda"]["accepted"] is False
    assert answer["cuda"]["reason"].startswith("a trial kernel failed: ")
    assert "driver" in answer["cuda"]["reason"]
    assert "\n" not in answer["cuda"]["reason"]


@pytest.mark.usefixtures("_numba")
def test_on_the_cpu_the_simulator_is_for_those_who_name_it(tmp_path: Path) -> None:
    off = machine(tmp_path, {})
    assert "NUMBA_ENABLE_CUDASIM=1" in off["cpu"]["reason"]
    assert "NUMBA_ENABLE_CUDASIM=1" in off["named"]
    on = machine(tmp_path, {}, CUDA_TORCH, **SIMULATOR)
    assert on["cpu"]["accepted"] is True
    assert "auto does not ask for it" in on["cpu"]["reason"]
    assert on["named"] is None
    assert "simulator (NUMBA_ENABLE_CUDASIM=1) serves CPU tensors only" in on["cuda"]["reason"]
