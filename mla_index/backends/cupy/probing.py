"""Whether CuPy works here, not merely whether it imports."""

from __future__ import annotations

from collections.abc import Callable

import torch


def failure(device: torch.device) -> str | None:
    """The first step that fails, in CuPy's or the driver's own words, or None.

    Compiles and runs the smallest kernel of this backend, and waits for its result.
    """
    steps: tuple[tuple[str, Callable[[torch.device], None]], ...] = (
        ("CuPy is installed but does not import", _import),
        ("CuPy gets no answer from the CUDA driver", _driver),
        ("CuPy finds no NVRTC, the CUDA runtime compiler", _nvrtc),
        ("a trivial kernel does not compile and run", _kernel),
    )
    for what, step in steps:
        try:
            step(device)
        except (Exception, SystemExit) as error:  # a library that fails to load may raise anything
            return f"{what}: {type(error).__name__}: {str(error).strip()}"
    return None


def _import(device: torch.device) -> None:
    import cupy  # noqa: F401


def _driver(device: torch.device) -> None:
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if (device.index or 0) >= count:
        raise RuntimeError(f"it sees {count} devices, and {device} is not among them")


def _nvrtc(device: torch.device) -> None:
    import cupy

    cupy.cuda.nvrtc.getVersion()


def _kernel(device: torch.device) -> None:
    from mla_index.backends import cupy as backend
    from mla_index.specs import SafeLengthsSpec

    slots = torch.tensor([[5], [6]], dtype=torch.int32, device=device)
    counts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    lengths = torch.zeros_like(counts)
    backend.build("safe_lengths", SafeLengthsSpec(), counts.device).launch(slots, counts, lengths)
    got = (slots.flatten().tolist(), lengths.tolist())
    if got != ([0, 6], [1, 1]):
        raise RuntimeError(f"it ran and gave {got} instead of ([0, 6], [1, 1])")
