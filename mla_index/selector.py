"""Which backend serves a call, and why.

Precedence: the argument `backend=`, then `use_backend`, `set_default_backend`, `MLA_INDEX_BACKEND`,
and `auto`. Each takes one name or an ordered list. One name is an order: if that backend cannot
serve the call, the call fails and says why. A list and `auto` move on, but only for a reason known
before the call; an exception from a kernel always propagates.

A choice is made once for a configuration (operation, spec, device, request) and kept until the
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

from mla_index import registry, settings, verdicts
from mla_index.errors import (
    BackendError,
    BackendUnavailable,
    BackendUnsupported,
    NotWarm,
    UnknownBackend,
)
from mla_index.registry import Backend, Kernel
from mla_index.specs import Spec

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


# --- state: what is asked for, and what was chosen -----------------------------------------------

_override: ContextVar[tuple[str, ...] | None] = ContextVar("mla_index_backend", default=None)
_default: tuple[str, ...] | None = None
_settings: settings.Settings | None = None
_choices: dict[tuple[str, Spec, torch.device, tuple[str, ...] | None], Choice] = {}
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


def _after_fork() -> None:
    """Another thread of the parent may have held the lock; nobody in the child would release it."""
    global _blocks_lock
    _blocks_lock = threading.Lock()
    _forget_choices()


registry.on_change(_forget_choices)
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
    asked = names(backend)
    if asked == ("auto",):
        return None
    for name in asked:
        if name not in ("auto", *registry.names()):
            asks = f"{source} asks for {name!r}, but " if source else ""
            commas = " (an order of several is a list of names)" if "," in name else ""
            raise UnknownBackend(
                f"{asks}no backend is named {name!r}{commas}; "
                f"there are {', '.join(registry.names())}"
            )
    return asked


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


def requested(backend: Names) -> tuple[tuple[str, ...] | None, str]:
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


# --- the order ----------------------------------------------------------------------------------


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


def order_of(op: str, request: tuple[str, ...] | None, device: torch.device) -> tuple[str, ...]:
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
            order += order_of(op, None, device) if name == "auto" else [name]
    if op == "flat_row_view":
        order.append("torch")
    return tuple(dict.fromkeys(order))


# --- choosing -----------------------------------------------------------------------------------


def choose(op: str, spec: Spec, device: torch.device, backend: Names = "auto") -> Choice:
    """The backend for a configuration and its kernel, built if this is the first use.

    Raises:
        UnknownBackend: a name that no backend has.
        BackendUnavailable, BackendUnsupported: none of those asked for can serve the call; the
            message and `.reasons` say why for each, and what could run instead.
        NotWarm: the first use falls into a CUDA graph capture.
    """
    request, source = requested(backend)
    key = (registry.kernel_of(op), spec, device, request)
    choice = _choices.get(key)
    if choice is None:
        order = order_of(op, request, device)
        for name in order:
            registry.load(name)  # before the lock is taken: an import may lead anywhere
        refused: dict[str, BackendError] = {}
        with verdicts.lock:
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
        refusal = verdicts.refusal(name, op, spec, device, probe=True)
        if refusal is None:
            kernel = verdicts.kernel_for(name, registry.kernel_of(op), spec, device)
            return Choice(name, kernel, {other: str(error) for other, error in refused.items()})
        refused[name] = refusal
    return None


def _failure(
    op: str, spec: Spec, device: torch.device, refused: dict[str, BackendError], source: str
) -> BackendError:
    could = []
    for name in registry.names():
        with suppress(UnknownBackend, NotWarm):
            if name not in refused and verdicts.refusal(name, op, spec, device, probe=True) is None:
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
    return order_of(op, request, device) == ("torch",)
