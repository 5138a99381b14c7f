"""The cupy backend: CUDA C, compiled by NVRTC through CuPy, for NVIDIA devices.

For stacks without a working Triton. CuPy compiles and loads; launching is by the addresses of
torch's tensors on torch's stream, so that nothing is wrapped, copied or synchronised.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from mla_index.registry import CONTRACT_VERSION, Kernel, Limits
from mla_index.specs import RemapSpec, SafeLengthsSpec, Spec

name = "cupy"
contract_version = CONTRACT_VERSION
limits = Limits(
    operations=("remap", "safe_lengths"),
    devices=("cuda",),
    max_topk=2**30,  # columns are counted in 32 bits
)


def unavailable(device: torch.device, *, probe: bool) -> str | None:
    """Whether CuPy is there, and with `probe` whether a kernel compiles, runs and is right."""
    served = device.type == "cuda"
    reasons = [] if served else [f"device type {device.type} is not served; it serves cuda"]
    reasons += _missing()
    if reasons or not probe:
        return "; ".join(reasons) or None
    from mla_index.backends.cupy import probing

    return probing.failure(device)


def _missing() -> list[str]:
    """What this machine lacks, as far as it can be told without touching a device."""
    if torch.version.hip:
        return [f"torch {torch.__version__} is built for ROCm; NVRTC compiles for NVIDIA devices"]
    missing = []
    if torch.version.cuda is None:
        missing.append(f"torch {torch.__version__} is built without CUDA")
    if find_spec("cupy") is None:
        major = (torch.version.cuda or "").partition(".")[0]
        package = f"cupy-cuda{major}x" if major else "cupy-cuda12x or cupy-cuda13x"
        missing.append(f"CuPy is not installed (the package is {package})")
    return missing


def unsupported(op: str, spec: Spec) -> str | None:
    """Nothing beyond `limits`."""
    return None


def build(op: str, spec: Spec, device: torch.device) -> Kernel:
    """Binds the configuration; its kernels are compiled by `warm` or by the first launch."""
    from mla_index.backends.cupy.launch import remap_kernel, safe_lengths_kernel
    from mla_index.backends.cupy.runtime import cupy_runtime

    if isinstance(spec, RemapSpec):
        return remap_kernel(spec, device, cupy_runtime())
    if isinstance(spec, SafeLengthsSpec):
        return safe_lengths_kernel(spec, device, cupy_runtime())
    raise TypeError(f"cupy builds {', '.join(limits.operations)}, got {op!r} with {spec!r}")


def compiled_kernels() -> int:
    """How many kernels this process has compiled or loaded so far."""
    from mla_index.backends.cupy import runtime

    return runtime.compiled_kernels()
