"""The torch backend: eager tensor operations, on any device type that torch has.

The fallback everywhere and the choice on the CPU. It needs nothing compiled, so it can always be
captured in a graph and traced by a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
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
        outputs = {"out": 3, "counts_out": 4, "lengths_out": 5}
        return Kernel(_writing(outputs, partial(kernels.remap, spec)))
    if op == "safe_lengths":
        return Kernel(_writing({"slots": 0, "out": 2}, kernels.safe_lengths))
    return Kernel(flat_row_view)


def _writing(outputs: dict[str, int], kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel, for which all outputs (by place) can be written, or none is.

    Torch's operations refuse what was made in inference mode outside of it, but one by one; kernels
    that write by address do not care.
    """

    def launch(*arguments: object) -> None:
        if not torch.is_inference_mode_enabled():
            for name, place in outputs.items():
                tensor = arguments[place]
                if isinstance(tensor, torch.Tensor) and tensor.is_inference():
                    raise ValueError(
                        f"{name} was made in inference mode, and torch writes it only there: "
                        "call within torch.inference_mode(), or make it outside"
                    )
        kernel(*arguments)

    return launch
