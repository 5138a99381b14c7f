"""The numba backend: CUDA kernels in Python, compiled by Numba-CUDA (the package `numba-cuda`).

For stacks without Triton and CuPy. With `NUMBA_ENABLE_CUDASIM=1` set before Numba is imported, the
same kernels run in Numba's simulator on CPU tensors, slowly, when asked for by name.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

import torch

from mla_index.registry import CONTRACT_VERSION, Kernel, Limits
from mla_index.specs import RemapSpec, SafeLengthsSpec, Spec

name = "numba"
contract_version = CONTRACT_VERSION
limits = Limits(
    operations=("remap", "safe_lengths"),
    devices=("cuda", "cpu"),
    max_topk=2**30,  # columns are counted in 32 bits
)


def unavailable(device: torch.device, *, probe: bool) -> str | None:
    """Whether Numba-CUDA is installed for this device; with `probe`, whether a kernel runs."""
    missing = [package for package in ("numba", "numba_cuda") if not _installed(package)]
    if device.type not in ("cuda", "cpu"):
        return f"device type {device.type} is not served; it serves cuda"
    if device.type == "cpu" and not _simulator():
        return "runs on the CPU only in Numba's simulator, with NUMBA_ENABLE_CUDASIM=1 set"
    if device.type == "cuda" and torch.version.hip:
        return f"torch {torch.__version__} is built for ROCm; Numba-CUDA needs CUDA"
    if device.type == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if missing:
        packages = " and ".join(package.replace("_", "-") for package in missing)
        extra = f"numba-cuda{(torch.version.cuda or '13').partition('.')[0]}"
        return f"{packages} not installed (pip install 'mla_index[{extra}]')"
    if device.type == "cuda" and _simulator():
        return "Numba's simulator (NUMBA_ENABLE_CUDASIM=1) serves CPU tensors only"
    return _trial(device) if probe else None


def unsupported(op: str, spec: Spec) -> str | None:
    """Nothing to add to `limits`."""
    return None


def build(op: str, spec: Spec, device: torch.device) -> Kernel:
    """Compiles and loads the one kernel that serves the configuration."""
    if not isinstance(spec, RemapSpec | SafeLengthsSpec):
        raise TypeError(f"the spec of {op} must be a RemapSpec or SafeLengthsSpec, got {spec!r}")
    with warnings.catch_warnings():  # Numba's opinions of other packages, at its import
        warnings.simplefilter("ignore")
        from mla_index.backends.numba import launch, simulate

    return simulate.build(spec) if device.type == "cpu" else launch.build(spec, device)


def compiled_kernels() -> int:
    """Kernels compiled so far in this process."""
    compiler = sys.modules.get(f"{__name__}.compile")
    return 0 if compiler is None else compiler.compiled_kernels()


def _installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _simulator() -> bool:
    """Whether Numba runs its kernels in the simulator, or will once it is imported."""
    config = sys.modules.get("numba.cuda.core.config")
    if config is not None:
        return bool(config.ENABLE_CUDASIM)
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def _trial(device: torch.device) -> str | None:
    """Build and run the smallest kernel; an import that works says little of what a card runs."""
    try:
        launch = build("safe_lengths", SafeLengthsSpec(), device).launch
        slots = torch.tensor([[-1], [5]], dtype=torch.int32, device=device)
        counts = torch.tensor([0, 3], dtype=torch.int32, device=device)
        lengths = torch.zeros_like(counts)
        launch(slots, counts, lengths)
        found = slots.flatten().tolist() + lengths.tolist()
    except Exception as error:
        return f"a trial kernel failed: {_cause(error)}"
    return None if found == [0, 5, 1, 3] else f"a trial kernel gave {found}, not [0, 5, 1, 3]"


def _cause(error: BaseException) -> str:
    """The first error of a chain, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}"
