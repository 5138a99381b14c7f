"""The triton backend: declared, not built yet."""

from __future__ import annotations

import torch

from mla_index.registry import CONTRACT_VERSION, Kernel, Limits
from mla_index.specs import Spec

name = "triton"
contract_version = CONTRACT_VERSION
limits = Limits(operations=("remap", "safe_lengths"), devices=("cuda",))
_NOT_BUILT = "not built yet in this version of mla_index"


def unavailable(device: torch.device, *, probe: bool) -> str | None:
    """It never runs: there are no kernels."""
    return _NOT_BUILT


def unsupported(op: str, spec: Spec) -> str | None:
    """Nothing to add to `limits`."""
    return None


def build(op: str, spec: Spec, device: torch.device) -> Kernel:
    """Refuses; `unavailable` has said why."""
    raise NotImplementedError(f"the triton backend is {_NOT_BUILT}")
