"""What can be asked ahead of a call: about an operation, a spec of it, a device by its name."""

from __future__ import annotations

import torch

from mla_index import registry
from mla_index.specs import RemapSpec, SafeLengthsSpec, Spec


def check(op: str, spec: Spec) -> None:
    """Refuse an unknown operation with a ValueError, another operation's spec with a TypeError."""
    if op not in registry.OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(registry.OPERATIONS)}, got {op!r}")
    kind = {"remap": RemapSpec, "safe_lengths": SafeLengthsSpec}.get(registry.kernel_of(op))
    if spec is not None and (kind is None or not isinstance(spec, kind)):
        wanted = kind.__name__ if kind else "None"
        raise TypeError(f"the spec of {op} must be {wanted}, got {type(spec).__name__}")


def named_device(device: torch.device | str) -> torch.device:
    """The device of this name, with an index only if the name has one."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch device, got {device!r}: {error}") from None


def initialised(device: torch.device) -> bool:
    """Whether asking the device initialises nothing in this process any more."""
    if device.type in ("cpu", "meta"):
        return True
    known = getattr(getattr(torch, device.type, None), "is_initialized", None)
    return known is not None and bool(known())


def with_index(device: torch.device) -> torch.device:
    """The device that a tensor made on `device` would report."""
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if device.index is not None:
        return device
    module = getattr(torch, device.type, None)
    available = getattr(module, "is_available", None)
    if module is None or (available is not None and not available()):
        return torch.device(device.type, 0)
    return torch.device(device.type, module.current_device())
