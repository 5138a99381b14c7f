"""Calls on one CUDA device while another is current, and what they leave on that other one.

Contexts stay as long as their process, so this is a process of its own, in which nothing else has
touched a device::

    python -m mla_index.conformance.untouched triton 1

prints, as JSON, what the current device had before the calls and after them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import mla_index
from mla_index.conformance.scenes import CONFIGURATIONS, scene
from mla_index.conformance.target import Target


def traces(device: int) -> dict[str, Any]:
    """What this process has on a device. By the driver's word: asking makes nothing there."""
    return {
        "context": torch._C._cuda_hasPrimaryContext(device),  # type: ignore[attr-defined]
        "bytes": torch.cuda.memory_reserved(device),
    }


def call_everything(backend: str, index: int) -> dict[str, Any]:
    """Choose, compile and call on device `index`, with every result checked.

    Returns `current` (the device that is current throughout), and its traces `before` and `after`.

    Raises:
        Failure: a result is wrong, or the current device has changed.
    """
    device = torch.device("cuda", index)
    torch.zeros(1, device=device)  # what torch itself does at its start is not the calls' doing
    current = torch.cuda.current_device()
    found: dict[str, Any] = {"current": current, "before": traces(current)}
    target = Target(backend, device, full=True)
    for name in CONFIGURATIONS:
        one = scene(target, name)
        mla_index.warmup(one.run.op, one.spec, device=device, backend=backend)
        one.call(backend)
        one.verify()
    slots = torch.full((70, 5), 9, dtype=torch.int32, device=device)
    mla_index.safe_lengths(slots, torch.zeros_like(slots[:, 0]), backend=backend)
    torch.cuda.synchronize(device)
    return found | {"after": traces(current), "current after": torch.cuda.current_device()}


if __name__ == "__main__":
    print(json.dumps(call_everything(sys.argv[1], int(sys.argv[2]))))
