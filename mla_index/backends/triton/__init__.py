"""The triton backend: the production backend on CUDA, and on every device that Triton targets.

Importing this declares it; Triton itself is imported by the first question about it. On the CPU it
runs in Triton's interpreter, when TRITON_INTERPRET=1 is set before that and it is asked for by
name; that is for tests, not for work.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

import torch

from mla_index.registry import CONTRACT_VERSION, Kernel, Limits
from mla_index.specs import RemapSpec, SafeLengthsSpec, Spec

name = "triton"
contract_version = CONTRACT_VERSION
limits = Limits(operations=("remap", "safe_lengths"), devices=None, max_topk=2**30)

_LAUNCH = "mla_index.backends.triton.launch"


def unavailable(device: torch.device, *, probe: bool) -> str | None:
    """Why Triton cannot run on this device; with `probe`, a kernel is compiled, run and checked."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        triton: Any = importlib.import_module("triton")
    except Exception as error:  # an import may raise anything
        return f"triton is installed, but cannot be imported: {_causes(error)}"
    if device.type == "meta":
        return "meta tensors hold no data"
    if device.type == "cpu" and not _interpreted():
        return "on cpu it runs in Triton's interpreter only, and TRITON_INTERPRET=1 is not set"
    if device.type != "cpu" and _interpreted():
        return f"TRITON_INTERPRET is set: the interpreter serves cpu, not {device.type}"
    reasons = [_no_device(device)]
    if probe:
        if device.type != "cpu":
            reasons.append(_no_driver(triton, device))
        if not any(reasons):
            reasons.append(_no_result(device))
    return "; ".join(filter(None, reasons)) or None


def unsupported(op: str, spec: Spec) -> str | None:
    """Nothing beyond `limits`."""
    return None


def build(op: str, spec: Spec, device: torch.device) -> Kernel:
    """Binds the configuration; kernels are compiled by the first launch or by `Kernel.warm`."""
    from mla_index.backends.triton import launch

    if isinstance(spec, RemapSpec):
        return launch.remap(spec, device)
    if isinstance(spec, SafeLengthsSpec):
        return launch.safe_lengths(spec, device)
    raise NotImplementedError(f"the triton backend has no {op}")


def compiled_kernels() -> int:
    """Kernels compiled, or read from Triton's cache on disk, so far in this process."""
    launch: Any = sys.modules.get(_LAUNCH)
    return 0 if launch is None else int(launch.compiled_kernels())


def _interpreted() -> bool:
    """Whether kernels run in the interpreter; settled when they are defined."""
    launch: Any = sys.modules.get(_LAUNCH)
    if launch is not None:
        return bool(launch.INTERPRETED)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _no_device(device: torch.device) -> str | None:
    """Whether this torch has the device type at all; asks no driver."""
    built = {
        "cuda": torch.version.cuda is not None or torch.version.hip is not None,
        "cpu": True,
        "xpu": getattr(torch.version, "xpu", None) is not None,
    }.get(device.type, hasattr(torch, device.type))
    return None if built else f"torch {torch.__version__} is built without {device.type}"


def _no_driver(triton: Any, device: torch.device) -> str | None:
    """Whether Triton's driver starts and drives this type of device."""
    try:
        target = triton.runtime.driver.active.get_active_torch_device()
    except Exception as error:  # drivers are plugins, and raise what they like
        return f"triton {triton.__version__} has no driver that starts: {_causes(error)}"
    if target.type != device.type:
        return f"the driver of triton {triton.__version__} drives {target.type}, not {device.type}"
    return None


def _no_result(device: torch.device) -> str | None:
    """Whether a small kernel compiles, runs and gives the right result."""
    try:
        kernel = build("safe_lengths", SafeLengthsSpec(), device)
        slots = torch.tensor([[-1], [5]], dtype=torch.int32, device=device)
        counts = torch.tensor([0, 7], dtype=torch.int32, device=device)
        lengths = torch.empty_like(counts)
        kernel.launch(slots, counts, lengths)
        result = (slots.flatten().tolist(), lengths.tolist())
    except Exception as error:  # compilers and drivers raise what they like
        return f"a small kernel failed: {_causes(error)}"
    return None if result == ([0, 5], [1, 7]) else f"a small kernel gave a wrong result: {result}"


def _causes(error: BaseException | None) -> str:
    """An error and what it came from, down to the root."""
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ", caused by ".join(texts)
