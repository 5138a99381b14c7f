"""The torch backend: eager tensor operations, on any device type that torch has.

The fallback everywhere and the choice on the CPU. It needs nothing compiled, so it can always be
captured in a graph and traced by a compiler.
"""

from __future__ import annotations

from functools import partial

import torch

from mla_index.registry import CONTRACT_VERSION, Kernel, Limits
from mla_index.specs import RemapSpec, Spec
from mla_index.views import flat_row_view

name = "torch"
contract_version = CONTRACT_VERSION
limits = Limits(operations=("remap", "safe_lengths", "flat_row_view"), devices=None)


def unavailable(device: torch.device, *, probe: bool) -> str | None:
    """Whether this torch has the device at all."""
    if device.type in ("cpu", "meta"):
        return None
    module = getattr(torch, device.type, None)
    built = {
        "cuda": torch.version.cuda is not None or torch.version.hip is not None,
        "xpu": getattr(torch.version, "xpu", None) is not None,
        "mps": torch.backends.mps.is_built(),
    }
    if module is None or not built.get(device.type, True):
        return f"torch {torch.__version__} is built without {device.type}"
    if probe and hasattr(module, "is_available") and not module.is_available():
        return f"torch {torch.__version__} finds no {device.type} device"
    if probe and device.index is not None and device.index >= module.device_count():
        return f"there is no {device}: torch finds {module.device_count()} of that type"
    return None


def compiled_kernels() -> int:
    """None: eager operations come compiled with torch."""
    return 0


def unsupported(op: str, spec: Spec) -> str | None:
    """Nothing beyond `limits`."""
    return None


def build(op: str, spec: Spec, device: torch.device) -> Kernel:
    """Binds the configuration; there is nothing to compile."""
    from mla_index.backends.torch import kernels

    if isinstance(spec, RemapSpec):
        return Kernel(partial(kernels.remap, spec))
    return Kernel(kernels.safe_lengths if op == "safe_lengths" else flat_row_view)
