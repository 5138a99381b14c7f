"""What backends have answered: the three steps of the contract, each taken once and kept.

A verdict says why a backend does not serve a configuration; a kernel is what it built for one that
it serves. Both are kept until the registry changes (those of built-in backends longer than that)
or the process forks.
"""

from __future__ import annotations

import os
import threading

import torch

from mla_index import registry
from mla_index.errors import BackendError, BackendUnavailable, BackendUnsupported, NotWarm
from mla_index.registry import Backend, Kernel
from mla_index.specs import Spec, shown

lock = threading.RLock()
"""Held while a backend is asked or builds. A fork replaces it: take `verdicts.lock`, keep none."""

_kernels: dict[tuple[str, str, Spec, torch.device], Kernel] = {}
_unavailable: dict[tuple[str, torch.device], str | None] = {}
_generation = 0  # raised whenever an answer that is being given may already be out of date


def forget_kernels() -> None:
    """Let each kernel be built again where it is next chosen; a choice that was made keeps its."""
    _kernels.clear()


def _registry_changed() -> None:
    """A name may now mean another backend; what built-in ones have built and found out stays."""
    global _generation
    _generation += 1
    for built in list(_kernels):
        if built[0] not in registry.BUILT_IN:
            _kernels.pop(built, None)
    for asked in list(_unavailable):
        if asked[0] not in registry.BUILT_IN:
            _unavailable.pop(asked, None)


def _after_fork() -> None:
    """A child has no right to its parent's kernels and verdicts (the device is lost to it)."""
    global lock, _generation
    lock = threading.RLock()
    _generation += 1
    _kernels.clear()
    _unavailable.clear()


registry.on_change(_registry_changed)
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_fork)


def refusal(
    name: str, op: str, spec: Spec, device: torch.device, *, probe: bool
) -> BackendError | None:
    """Why the backend of this name does not serve the configuration, or None.

    Args:
        name: a backend's.
        op: an operation.
        spec: its configuration; without one, only what does not depend on it is answered.
        device: where the tensors are.
        probe: whether the device may be initialised for the answer.

    Raises:
        UnknownBackend: no backend has this name.
        NotWarm: the device would have to be tried inside a CUDA graph capture.
    """
    backend = registry.load(name)
    kernel = registry.kernel_of(op)
    reason = registry.undeclared(backend.limits, kernel)
    if reason is None:  # a device is not tried for what is not offered
        reason = _unavailability(backend, device, probe)
        if reason is not None:
            return BackendUnavailable(reason)
        try:
            reason = registry.beyond(backend.limits, device, spec)
            if reason is None and spec is not None:
                reason = backend.unsupported(kernel, spec) or None
        except (Exception, SystemExit) as error:
            reason = _broken_check(error)
    return None if reason is None else BackendUnsupported(reason)


def tried(name: str, device: torch.device) -> bool:
    """Whether the backend has been tried on the device, so that its verdict is the whole truth."""
    return (name, device) in _unavailable


def _unavailability(backend: Backend, device: torch.device, probe: bool) -> str | None:
    """Step 1. Kept only when probed: without, the answer says less."""
    key = (backend.name, device)
    with lock:
        if key in _unavailable:
            return _unavailable[key]
        if probe:
            _refuse_in_capture(f"backend {backend.name}", "op, spec", device)
        generation = _generation
        try:
            reason = backend.unavailable(device, probe=probe) or None
        except (Exception, SystemExit) as error:
            reason = _broken_check(error)
        if probe and generation == _generation:
            _unavailable[key] = reason
        return reason


def _broken_check(error: BaseException) -> str:
    """A check that breaks is a backend that cannot run."""
    return f"its check failed: {type(error).__name__}: {error}"


def kernel_for(name: str, op: str, spec: Spec, device: torch.device) -> Kernel:
    """Step 3, once for a configuration, whichever requests lead to it; the caller holds `lock`.

    A kernel whose backend went away while it was being built is returned, but not kept: its name
    may belong to another by now.

    Raises:
        InvalidBackend: what the backend built does not keep the contract.
        NotWarm: this first use falls into a CUDA graph capture.
    """
    key = (name, op, spec, device)
    kernel = _kernels.get(key)
    if kernel is None:
        _refuse_in_capture(op, f"{op!r}, {shown(spec)}", device)
        generation = _generation
        backend = registry.load(name)
        kernel = registry.check_kernel(backend, op, backend.build(op, spec, device))
        if generation == _generation:
            _kernels[key] = kernel
    return kernel


def _refuse_in_capture(what: str, arguments: str, device: torch.device) -> None:
    """Building may synchronise or load modules, which would break the capture: say so instead."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise NotWarm(
            f"first use of {what} on {device} for this configuration inside a CUDA graph capture: "
            f"call mla_index.warmup({arguments}, device={str(device)!r}) before the capture"
        )
