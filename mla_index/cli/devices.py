"""Devices as people name them."""

from __future__ import annotations

import torch

from mla_index.cli import exits


def parse(name: str) -> torch.device:
    """The device of this name.

    Raises:
        typer.Exit: torch has no such device type, or the number is none; said on standard error.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise exits.stop(f"--device {name}: {first}", exits.USAGE) from None
    if device.type not in ("cpu", "meta") and not hasattr(torch, device.type):
        raise exits.stop(f"--device {name}: torch.{device.type} is not installed", exits.USAGE)
    return device


def built_for() -> list[torch.device]:
    """The CPU and the accelerators that this torch was built for, without starting any."""
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    return [torch.device("cpu"), *([accelerator] if accelerator is not None else [])]


def facts(device: torch.device, *, probe: bool) -> list[str]:
    """What there is of a device type; with `probe`, asked of the devices themselves."""
    if device.type == "cpu":
        return [f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"]
    if not probe:
        return ["not asked (use --probe)"]
    module = getattr(torch, device.type, None)
    if module is None or not module.is_available():
        return ["torch finds none"]
    model = getattr(module, "get_device_name", str)
    return [f"{device.type}:{index} {model(index)}" for index in range(module.device_count())]
