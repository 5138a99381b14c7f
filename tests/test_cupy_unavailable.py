"""What the cupy backend says where it cannot run, told by processes of their own.

What is missing is made missing by modules on the path that stand in for CuPy, or by what this
machine lacks; nothing of mla_index is replaced.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
ASK = """
import torch
from mla_index.backends import cupy
{prepare}
print(cupy.unavailable(torch.device("cuda", 0), probe={probe}))
"""
# A CPU build of torch says so before CuPy is looked at; these words of torch's make it go on.
CUDA_TORCH = "torch.version.cuda, torch.version.hip = '13.0', None"
DRIVER_FAILS = """
class CUDARuntimeError(RuntimeError):
    pass

class runtime:
    @staticmethod
    def getDeviceCount():
        raise CUDARuntimeError("cudaErrorInsufficientDriver: driver version is insufficient")

class cuda:
    runtime = runtime
"""
NVRTC_FAILS = """
class cuda:
    class runtime:
        getDeviceCount = staticmethod(lambda: 1)

    class nvrtc:
        @staticmethod
        def getVersion():
            raise OSError("libnvrtc.so.13: cannot open shared object file")
"""


def python(code: str, *path: Path, **environment: str) -> str:
    """What a fresh interpreter prints; MLA_INDEX_* only as given."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLA_INDEX_")}
    paths = os.pathsep.join(map(str, (*path, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=inherited | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ask(path: Path, *, probe: bool, prepare: str = CUDA_TORCH) -> str:
    return python(ASK.format(prepare=prepare, probe=probe), path)


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder for a module that stands in for CuPy."""
    return tmp_path


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is installed here")
@pytest.mark.parametrize("probe", [False, True])
def test_no_cupy(stub: Path, probe: bool) -> None:
    told = ask(stub, probe=probe)
    assert told == "CuPy is not installed (the package is cupy-cuda13x)"


def test_cupy_does_not_import(stub: Path) -> None:
    (stub / "cupy.py").write_text("raise ImportError('libcuda.so.1: no such file')")
    assert ask(stub, probe=False) == "None"
    assert ask(stub, probe=True) == (
        "CuPy is installed but does not import: ImportError: libcuda.so.1: no such file"
    )


def test_the_driver_does_not_answer(stub: Path) -> None:
    (stub / "cupy.py").write_text(DRIVER_FAILS)
    assert ask(stub, probe=False) == "None"
    assert ask(stub, probe=True) == (
        "CuPy gets no answer from the CUDA driver: CUDARuntimeError: "
        "cudaErrorInsufficientDriver: driver version is insufficient"
    )


def test_no_nvrtc(stub: Path) -> None:
    (stub / "cupy.py").write_text(NVRTC_FAILS)
    assert ask(stub, probe=True) == (
        "CuPy finds no NVRTC, the CUDA runtime compiler: OSError: "
        "libnvrtc.so.13: cannot open shared object file"
    )


def test_a_card_that_cupy_does_not_see(stub: Path) -> None:
    (stub / "cupy.py").write_text(NVRTC_FAILS.replace("lambda: 1", "lambda: 0"))
    assert "it sees 0 devices, and cuda:0 is not among them" in ask(stub, probe=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_a_kernel_that_does_not_run(stub: Path) -> None:
    """Everything of CuPy answers; torch has no device to put a tensor on."""
    works = NVRTC_FAILS.replace("raise OSError", "return str")
    (stub / "cupy.py").write_text(works)
    told = ask(stub, probe=True)
    assert told.startswith("a trivial kernel does not compile and run: ")
    assert "CUDA" in told


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        ("torch.version.cuda, torch.version.hip = None, '6.4'", "is built for ROCm"),
        ("torch.version.cuda, torch.version.hip = None, None", "is built without CUDA"),
    ],
)
def test_another_torch(stub: Path, prepare: str, told: str) -> None:
    """Said without importing CuPy: the one on the path would print."""
    (stub / "cupy.py").write_text("print('imported')")
    for probe in (False, True):
        answer = ask(stub, probe=probe, prepare=prepare)
        assert told in answer
        assert "imported" not in answer


def test_not_on_other_devices() -> None:
    code = """
    import torch
    from mla_index.backends import cupy
    print(cupy.unavailable(torch.device("cpu"), probe=True))
    """
    told = python(code)
    assert told.startswith("device type cpu is not served; it serves cuda")
    if torch.version.cuda is None:  # and what a device would need is said at once
        assert "is built without CUDA" in told


def test_asked_for_by_the_environment(stub: Path) -> None:
    """The error says what is missing and what could run."""
    code = """
    import torch, mla_index
    table, tokens = torch.zeros((1, 1), dtype=torch.int32), torch.zeros((1, 4), dtype=torch.int32)
    try:
        mla_index.remap(None, table, tokens, block_size=64)
    except mla_index.BackendUnavailable as error:
        print(error)
        print(error.reasons)
    """
    told = python(code, MLA_INDEX_BACKEND="cupy")
    assert "asked for by MLA_INDEX_BACKEND" in told
    assert "cupy: device type cpu is not served; it serves cuda" in told
    assert "Could run: torch" in told
    assert "{'cupy': " in told


def test_declaring_imports_nothing_and_touches_no_device(stub: Path) -> None:
    (stub / "cupy.py").write_text("raise SystemExit('imported')")
    code = """
    import torch
    from mla_index.backends import cupy
    torch.version.cuda, torch.version.hip = "13.0", None
    print(cupy.unavailable(torch.device("cuda"), probe=False), torch.cuda.is_initialized())
    import sys
    print("cupy" in sys.modules, cupy.compiled_kernels())
    """
    assert python(code, stub).split() == ["None", "False", "False", "0"]
