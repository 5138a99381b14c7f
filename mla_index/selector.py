"""Which backend serves a call, and why.

Precedence: the argument `backend=`, then `use_backend`, `set_default_backend`, `MLA_INDEX_BACKEND`,
and `auto`. Each takes one name or an ordered list. One name is an order: if that backend cannot
serve the call, the call fails and says why. A list and `auto` move on, but only for a reason known
before the call; an exception from a kernel always propagates.

A verdict is reached once for a configuration (operation, spec, device, request) and kept until the
registry, the default or the environment changes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias

import torch

from mla_index import registry, settings
from mla_index.errors import (
    BackendError,
    BackendUnavailable,
    BackendUnsupported,
    NotWarm,
    UnknownBackend,
)
from mla_index.explanation import Candidate, Explanation
from mla_index.registry import Backend, Kernel
from mla_index.specs import RemapSpec, SafeLengthsSpec, Spec, shown

logger = logging.getLogger("mla_index")

Names: TypeAlias = str | list[str] | tuple[str, ...]
"""One backend name, an ordered list of names, or `auto`."""

AUTO_ORDER = {
    "cpu": ("torch",),
    "cuda": ("triton", "cupy", "numba", "torch"),
    "hip": ("triton", "torch"),  # a ROCm build of torch calls its devices cuda
}
"""What `auto` tries, by device type; see `auto_order` for every other device type."""


class Choice(NamedTuple):
    """A backend that was chosen for a configuration, its kernel, and who was passed over."""

    backend: str
    kernel: Kernel
    skipped: dict[str, str]


class Launch(NamedTuple):
    """A launch that `record_launches` saw: whose kernel, and for what."""

    backend: str
    op: str
    spec: Spec


# --- state: what is asked for, and what was found -----------------------------------------------

_lock = threading.RLock()
_override: ContextVar[tuple[str, ...] | None] = ContextVar("mla_index_backend", default=None)
_default: tuple[str, ...] | None = None
_settings: settings.Settings | None = None
_choices: dict[tuple[str, Spec, torch.device, tuple[str, ...] | None], Choice] = {}
_kernels: dict[tuple[str, str, Spec, torch.device], Kernel] = {}
_unavailable: dict[tuple[str, torch.device], str | None] = {}
_logged: set[tuple[str, str, str]] = set()
_listeners: list[Callable[[], None]] = []
_generation = 0  # raised whenever a choice that is being made may already be out of date
_launches: list[Launch] | None = None
_blocks_lock = threading.Lock()
_blocks = 0  # of `use_backend`, that any thread is in
_overridden = False  # whether there are: a compiler guards by this bool, not by their number


override = _override.get
"""The names that `use_backend` has put in force in this context, or None; asked at every call."""


def on_change(listener: Callable[[], None]) -> None:
    """Call `listener` whenever the same call may have to be served by another backend."""
    _listeners.append(listener)


def _forget_choices() -> None:
    """Without the lock: its holder may be waiting for the very import that led here."""
    global _generation
    _generation += 1
    _choices.clear()
    _tell_listeners()


def _tell_listeners() -> None:
    for listener in _listeners:
        listener()


def _registry_changed() -> None:
    """A name may now mean another backend; what built-in ones have built and found out stays."""
    for kernel in list(_kernels):
        if kernel[0] not in registry.BUILT_IN:
            _kernels.pop(kernel, None)
    for verdict in list(_unavailable):
        if verdict[0] not in registry.BUILT_IN:
            _unavailable.pop(verdict, None)
    _forget_choices()


def _after_fork() -> None:
    """A child has no right to its parent's kernels and verdicts (the device is lost to it)."""
    global _lock, _blocks_lock
    _lock, _blocks_lock = threading.RLock(), threading.Lock()
    _kernels.clear()
    _unavailable.clear()
    _forget_choices()


registry.on_change(_registry_changed)
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_fork)


def set_default_backend(backend: Names | None) -> None:
    """Use `backend` (one name or an ordered list) in this process wherever nothing nearer is said.

    `None` or `"auto"` takes the default back.

    Raises:
        UnknownBackend: a name that no backend has.
    """
    global _default
    _default = None if backend is None else _request(backend)
    _forget_choices()


@contextmanager
def use_backend(backend: Names) -> Iterator[None]:
    """Use `backend` (one name or an ordered list) inside the `with` block, in this context only.

    Other threads and tasks are not touched. `"auto"` lets `auto` choose whatever is set outside.

    Raises:
        UnknownBackend: a name that no backend has.
        RuntimeError: entered in code that is being compiled or exported.
    """
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        raise RuntimeError(
            "use_backend cannot be entered in compiled code: enter it around the call of the "
            "compiled function, or give the operation its argument backend="
        )
    token = _override.set(_request(backend) or ("auto",))
    _count_block(1)
    try:
        yield
    finally:
        _count_block(-1)
        _override.reset(token)


def _count_block(step: int) -> None:
    global _blocks, _overridden
    with _blocks_lock:
        _blocks += step
        _overridden = _blocks > 0


def reload_environment() -> None:
    """Read `MLA_INDEX_*` again; otherwise they are read once, at first use."""
    global _settings
    _settings = None
    _forget_choices()


def _environment() -> settings.Settings:
    """As read at first use. Its names are checked where they are used, at each use."""
    global _settings
    found = _settings
    if found is None:
        found = _settings = settings.read()
    return found


def _request(backend: Names, source: str | None = None) -> tuple[str, ...] | None:
    """The names as a checked tuple; None for `auto`. An error names the source, if it is given."""
    requested = names(backend)
    if requested == ("auto",):
        return None
    for name in requested:
        if name not in ("auto", *registry.names()):
            asks = f"{source} asks for {name!r}, but " if source else ""
            raise UnknownBackend(
                f"{asks}no backend is named {name!r}; there are {', '.join(registry.names())}"
            )
    return requested


def names(backend: Names) -> tuple[str, ...]:
    """The names as a tuple.

    Raises:
        ValueError, TypeError: an empty list, or something else than names.
    """
    if isinstance(backend, str):
        return (backend,)
    if not isinstance(backend, (list, tuple)) or not all(isinstance(n, str) for n in backend):
        raise TypeError(f"backend must be a name or an ordered list of names, got {backend!r}")
    if not backend:
        raise ValueError("backend must be a name or a non-empty list of names, got an empty one")
    return tuple(dict.fromkeys(backend))


def check_names(backend: Names) -> None:
    """Raise `UnknownBackend` for a name that no backend has."""
    _request(backend)


def _requested(backend: Names) -> tuple[tuple[str, ...] | None, str]:
    """The names asked for (None: auto) and who asked for them, by precedence."""
    argument = _request(backend)
    if argument is not None:
        return argument, "the argument backend="
    override = _override.get()
    if override is not None:
        return _request(override, "use_backend"), "use_backend"
    if _default is not None:
        return _request(_default, "set_default_backend"), "set_default_backend"
    environment = _environment().backend
    if environment:
        named = _request(environment, "MLA_INDEX_BACKEND")
        if named is not None:
            return named, "MLA_INDEX_BACKEND"
    return None, "auto"


# --- the order, and the reasons -----------------------------------------------------------------


def auto_order(device: torch.device) -> tuple[str, ...]:
    """What `auto` tries on this device, in order, before `MLA_INDEX_BLOCK` removes names.

    On a device type other than cpu and cuda: Triton where its driver targets that device, then the
    installed backends that declare the device type, then torch.
    """
    kind = "hip" if device.type == "cuda" and torch.version.hip else device.type
    if kind in AUTO_ORDER:
        return AUTO_ORDER[kind]
    strangers = [b.name for b in _strangers() if device.type in (b.limits.devices or ())]
    return ("triton", *strangers, "torch")


def _strangers() -> Iterator[Backend]:
    """The backends that are not built in; one may go while another thread looks."""
    for name in registry.names():
        if name not in registry.BUILT_IN:
            with suppress(UnknownBackend):
                yield registry.load(name)


def _order(op: str, request: tuple[str, ...] | None, device: torch.device) -> tuple[str, ...]:
    """The names to try. The view ends at torch's, which serves every backend without its own."""
    if request is None:
        blocked = _environment().block
        if "auto" in blocked:
            raise UnknownBackend("MLA_INDEX_BLOCK asks for 'auto', which is no backend")
        if blocked:
            _request(blocked, "MLA_INDEX_BLOCK")
        order = [name for name in auto_order(device) if name not in blocked]
    else:
        order = []
        for name in request:
            order += _order(op, None, device) if name == "auto" else [name]
    if op == "flat_row_view":
        order.append("torch")
    return tuple(dict.fromkeys(order))


def _unavailability(backend: Backend, device: torch.device, probe: bool) -> str | None:
    """Step 1 of the contract. Kept only when probed: without, the answer says less."""
    key = (backend.name, device)
    with _lock:
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


def _refusal(
    name: str, op: str, spec: Spec, device: torch.device, *, probe: bool
) -> BackendError | None:
    """Why the backend of this name does not serve the configuration, or None."""
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


# --- choosing -----------------------------------------------------------------------------------


def choose(op: str, spec: Spec, device: torch.device, backend: Names = "auto") -> Choice:
    """The backend for a configuration and its kernel, built if this is the first use.

    Raises:
        UnknownBackend: a name that no backend has.
        BackendUnavailable, BackendUnsupported: none of those asked for can serve the call; the
            message and `.reasons` say why for each, and what could run instead.
        NotWarm: the first use falls into a CUDA graph capture.
    """
    request, source = _requested(backend)
    key = (registry.kernel_of(op), spec, device, request)
    choice = _choices.get(key)
    if choice is None:
        order = _order(op, request, device)
        for name in order:
            registry.load(name)  # before the lock is taken: an import may lead anywhere
        refused: dict[str, BackendError] = {}
        with _lock:
            choice = _choices.get(key)
            if choice is None:
                generation = _generation
                choice = _resolve(order, op, spec, device, refused)
                if choice is not None and generation == _generation:
                    _choices[key] = choice
        if choice is None:
            raise _failure(op, spec, device, refused, source)
    _log_first_use(op, device, choice)
    return choice if _launches is None else _recorded(op, spec, choice, _launches)


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """List every launch made inside the block, by this process: the proof of which backend ran.

    For tests. Calls in the block are slower; outside it nothing is left of it.
    """
    global _launches
    launches: list[Launch] = []
    outer, _launches = _launches, launches
    try:
        _tell_listeners()
        yield launches
    finally:
        _launches = outer
        _tell_listeners()


def _recorded(op: str, spec: Spec, choice: Choice, launches: list[Launch]) -> Choice:
    def launch(*tensors: object) -> object:
        launches.append(Launch(choice.backend, op, spec))
        return choice.kernel.launch(*tensors)

    return choice._replace(kernel=choice.kernel._replace(launch=launch))


def _resolve(
    order: tuple[str, ...],
    op: str,
    spec: Spec,
    device: torch.device,
    refused: dict[str, BackendError],
) -> Choice | None:
    """The first in the order that serves the configuration; why not the others, in `refused`."""
    for name in order:
        refusal = _refusal(name, op, spec, device, probe=True)
        if refusal is None:
            skipped = {name: str(error) for name, error in refused.items()}
            return Choice(name, _kernel(name, registry.kernel_of(op), spec, device), skipped)
        refused[name] = refusal
    return None


def _kernel(name: str, op: str, spec: Spec, device: torch.device) -> Kernel:
    """Step 3, once for a configuration, whichever requests lead to it."""
    key = (name, op, spec, device)
    kernel = _kernels.get(key)
    if kernel is None:
        _refuse_in_capture(op, f"{op!r}, {shown(spec)}", device)
        backend = registry.load(name)
        kernel = registry.check_kernel(backend, op, backend.build(op, spec, device))
        _kernels[key] = kernel
    return kernel


def _failure(
    op: str, spec: Spec, device: torch.device, refused: dict[str, BackendError], source: str
) -> BackendError:
    could = []
    for name in registry.names():
        with suppress(UnknownBackend, NotWarm):
            if name not in refused and _refusal(name, op, spec, device, probe=True) is None:
                could.append(name)
    reasons = {name: str(error) for name, error in refused.items()}
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    message = (
        f"no backend for {op} on {device} (asked for by {source}): "
        f"{told or 'MLA_INDEX_BLOCK removes every one'}. Could run: {', '.join(could) or 'none'}"
    )
    if all(isinstance(error, BackendUnavailable) for error in refused.values()):
        return BackendUnavailable(message, reasons)
    return BackendUnsupported(message, reasons)


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


def _log_first_use(op: str, device: torch.device, choice: Choice) -> None:
    key = (op, str(device), choice.backend)
    if key not in _logged:
        _logged.add(key)
        skipped = "; ".join(f"{name}: {reason}" for name, reason in choice.skipped.items())
        logger.info(
            "%s on %s runs on %s%s",
            op,
            device,
            choice.backend,
            f" (skipped {skipped})" if skipped else "",
        )


# --- for a compiler, which guards its code by the plain values that it reads ----------------------


def overridden() -> bool:
    """Whether any thread is in a `use_backend` block; a context variable cannot be guarded."""
    return _overridden


def in_force() -> tuple[tuple[str, ...] | None, tuple[str, ...], tuple[str, ...]]:
    """What the choice depends on besides the argument and `use_backend`."""
    environment = _settings or _environment()
    return _default, environment.backend, environment.block


def only_torch(op: str, device: torch.device, backend: Names) -> bool:
    """Whether what is asked for, `use_backend` aside, leaves nothing but torch for any spec."""
    request = _request(backend) or _default or _environment().backend or None
    return _order(op, request, device) == ("torch",)


# --- questions ----------------------------------------------------------------------------------


def warmup(op: str, spec: Spec, *, device: torch.device | str, backend: Names = "auto") -> str:
    """Choose and compile ahead, so that no later call of this configuration compiles anything.

    Args:
        op: an operation from `mla_index.OPERATIONS`.
        spec: a `RemapSpec` for remap and dcp_filter, a `SafeLengthsSpec` for safe_lengths, None
            for flat_row_view.
        device: where the tensors will be; without an index, the current device of that type.
        backend: as for the operations.

    Returns:
        The name of the backend that was chosen.

    Raises:
        ValueError, TypeError: an unknown operation, a spec of another operation.
        As `choose`: when no backend can serve it.
    """
    _check_question(op, spec)
    if spec is None and op != "flat_row_view":
        raise TypeError(f"warmup of {op} needs a spec, got None")
    choice = choose(op, spec, _with_index(_device(device)), backend)
    if choice.kernel.warm is not None:
        choice.kernel.warm()
    return choice.backend


def explain(
    op: str,
    *,
    device: torch.device | str,
    spec: Spec = None,
    backend: Names = "auto",
    probe: bool | None = None,
) -> Explanation:
    """Which backend would serve an operation on a device, and why not each of the others.

    Args:
        op: an operation from `mla_index.OPERATIONS`.
        device: where the tensors would be.
        spec: the configuration; without one, only what does not depend on it is answered.
        backend: as for the operations.
        probe: whether a device may be initialised for the answer. By default only if this process
            has initialised it already, so that a process may ask and then fork.

    Raises:
        ValueError, TypeError: an unknown operation, a spec of another operation.
        UnknownBackend: a name that no backend has.
    """
    _check_question(op, spec)
    request, source = _requested(backend)
    place = _device(device)
    if probe is None:
        probe = _initialised(place)
    if probe:
        place = _with_index(place)
    order = _order(op, request, place)
    rows = []
    for name in dict.fromkeys((*order, *registry.names())):
        try:
            refusal = _refusal(name, op, spec, place, probe=probe)
        except UnknownBackend:  # another thread has taken it back
            continue
        tried = probe or (name, place) in _unavailable
        if refusal is not None:
            rows.append(Candidate(name, False, str(refusal)))
        elif not tried:
            rows.append(Candidate(name, None, "not tried: that needs the device; a call tries it"))
        elif name not in order:
            rows.append(Candidate(name, True, f"can run, but {source} does not ask for it"))
        else:
            rows.append(Candidate(name, True, ""))
    chosen = next((r.name for r in rows if r.name in order and r.accepted is not False), None)
    return Explanation(op, place, spec, source, tuple(rows), chosen)


def _check_question(op: str, spec: Spec) -> None:
    if op not in registry.OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(registry.OPERATIONS)}, got {op!r}")
    kind = {"remap": RemapSpec, "safe_lengths": SafeLengthsSpec}.get(registry.kernel_of(op))
    if spec is not None and (kind is None or not isinstance(spec, kind)):
        wanted = kind.__name__ if kind else "None"
        raise TypeError(f"the spec of {op} must be {wanted}, got {type(spec).__name__}")


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch device, got {device!r}: {error}") from None


def _initialised(device: torch.device) -> bool:
    """Whether asking the device initialises nothing in this process any more."""
    if device.type in ("cpu", "meta"):
        return True
    known = getattr(getattr(torch, device.type, None), "is_initialized", None)
    return known is not None and bool(known())


def _with_index(device: torch.device) -> torch.device:
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
