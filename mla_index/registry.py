"""The backends: what one must be, which there are, and how they are found.

A porter reads this file and no other: `Backend` is the whole contract. A backend is any object with
those fields and methods; the built-in ones are modules. It is offered by `register`, or by
an installed package through the entry-point group `mla_index.backends`::

    [project.entry-points."mla_index.backends"]
    mybackend = "my_package.backend"

Nothing here imports a kernel language or touches a device. Built-ins and plugins are imported when
they are first asked about, and a plugin that cannot be loaded becomes a reason, never a crash.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from mla_index.errors import InvalidBackend, UnknownBackend
from mla_index.specs import (
    INDEX_DTYPES,
    RemapSpec,
    SafeLengthsSpec,
    Spec,
    integer,
    width_class,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger("mla_index")

CONTRACT_VERSION = 1
"""Raised when the contract below changes in a way that an existing backend would not survive."""

OPERATIONS = ("remap", "dcp_filter", "safe_lengths", "flat_row_view")
"""The operations that a caller can ask about."""

ENTRY_POINT_GROUP = "mla_index.backends"

LAUNCH_PARAMETERS: dict[str, tuple[str, ...]] = {
    "remap": (
        "req_id",  # [T] or None
        "block_table",  # [R, W]
        "token_indices",  # [T, K]
        "out",  # [T, K], last stride 1 where K > 1; may be token_indices when not compact
        "counts",  # int32 [T], any stride but 0; None unless spec.counts
        "lengths",  # int32 [T], any stride but 0; None unless spec.safe_lengths
        "request_rows",  # [n] or None
        "token_limits",  # [T] or None
        "ws_request_ids",  # [T] or None
        "ws_starts",  # [P], None with ws_request_ids
        "rank",  # in [0, spec.dcp_size)
        "block_stride_rows",  # in [spec.block_size, 2**31 - 1]
        "rank_stride",  # >= 0, spec.dcp_size * rank_stride < 2**63
        "last_slot",  # the largest valid slot of a paged row, in [-1, max of spec.slot_dtype]
        "last_ws_row",  # the same for a workspace row
        "pad",  # fits spec.slot_dtype
    ),
    "safe_lengths": (
        "slots",  # [T, K], any strides but 0; column 0 is written where counts <= 0
        "counts",  # [T]
        "lengths",  # [T] of counts' dtype, any stride but 0
    ),
    "flat_row_view": ("kv_cache", "block_size"),
}
"""The kernels that a backend can declare, and what `Kernel.launch` is called with, positionally.

The caller has refused all that docs/errors.md lists: shapes, dtypes, devices, overlaps,
ranges of the scalars. T and K are at least 1; R, W, n and P may be 0. What it has not checked are
the values in the tensors: those may be anything. Any input may have any strides, 0 included. The
spec tells the dtypes of the three big tensors; `req_id`, `request_rows`, `token_limits` and the
workspace's are int32 or int64, each on its own. Each bound is inclusive and always given, and folds
in what the slot dtype can hold, so a kernel never has to ask whether there is one.
"""


class Kernel(NamedTuple):
    """What `Backend.build` returns: a launcher for one configuration on one device.

    Args:
        launch: the hot path, called with checked arguments and outputs that exist, as
            `LAUNCH_PARAMETERS[op]` lists them. It returns None (`flat_row_view` a `FlatRows`). It
            launches on torch's current stream of the tensors' device, read at each call, and leaves
            torch's current device as it found it.
        warm: compiles whatever a later launch of this configuration could need (every alignment
            and size class) and returns how many compiled kernels that makes. A backend that
            compiles nothing leaves it out.
    """

    launch: Callable[..., object]
    warm: Callable[[], int] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a backend takes, as data; turned into reasons by `beyond`.

    Args:
        operations: from `LAUNCH_PARAMETERS`.
        devices: torch device types, or `None` for any.
        dtypes: of `token_indices`, `block_table`, slots and counts, from int32 and int64.
        max_topk: the largest width class (a power of two), or `None`.
    """

    operations: tuple[str, ...]
    devices: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...] = INDEX_DTYPES
    max_topk: int | None = None

    def __post_init__(self) -> None:
        tuples = {"operations": str, "dtypes": torch.dtype}
        if self.devices is not None:
            tuples["devices"] = str
        for field, kind in tuples.items():
            value = getattr(self, field)
            if not isinstance(value, tuple) or not all(isinstance(item, kind) for item in value):
                raise TypeError(f"Limits.{field} must be a tuple of {kind.__name__}, got {value!r}")
        if self.max_topk is not None and width_class(integer(self.max_topk, "Limits.max_topk")) != (
            self.max_topk
        ):
            raise ValueError(f"Limits.max_topk must be a power of two, got {self.max_topk}")


class Backend(Protocol):
    """The contract, in three steps. An object or a module with these names is a backend.

    One more function may be there: `compiled_kernels() -> int`, kernels compiled so far in this
    process. With it, the conformance suite shows that nothing is compiled after `Kernel.warm`.
    """

    @property
    def name(self) -> str:
        """Lower-case letters, digits, `_` and `-`; what users write. Not `auto`."""

    @property
    def contract_version(self) -> int:
        """The `CONTRACT_VERSION` that it was written for."""

    @property
    def limits(self) -> Limits:
        """What it takes, as data."""

    def unavailable(self, device: torch.device, *, probe: bool) -> str | None:
        """Step 1. Why it cannot run on this device, or None.

        Usable, not importable: with `probe` a trivial kernel must have compiled and run. Without,
        only what can be told without initialising a device in this process (the caller may be about
        to fork): a missing library, a device of another vendor. Asked once a process and device.
        """

    def unsupported(self, op: str, spec: Spec) -> str | None:
        """Step 2. Why it does not take this configuration, beyond what `limits` says, or None.

        A reason gives the value and what would be taken.
        """

    def build(self, op: str, spec: Spec, device: torch.device) -> Kernel:
        """Step 3. A launcher for this configuration; called once for it, under a lock.

        `op` is a key of `LAUNCH_PARAMETERS`: `remap` for `dcp_filter` too.
        """


def kernel_of(op: str) -> str:
    """The kernel that serves an operation: `remap`'s serves `dcp_filter` too."""
    return "remap" if op == "dcp_filter" else op


def undeclared(limits: Limits, kernel: str) -> str | None:
    """Why a kernel is not to be had at all, or None."""
    if kernel in limits.operations:
        return None
    return f"operation {kernel} is not declared; it serves {', '.join(limits.operations)}"


def beyond(limits: Limits, device: torch.device, spec: Spec) -> str | None:
    """Why `limits` exclude this device or configuration, or None: value, then what is taken."""
    if limits.devices is not None and device.type not in limits.devices:
        return f"device type {device.type} is not served; it serves {', '.join(limits.devices)}"
    if isinstance(spec, RemapSpec):
        if limits.max_topk is not None and spec.topk > limits.max_topk:
            return f"K of the class {spec.topk} is too wide; it takes K up to {limits.max_topk}"
        dtypes = {
            "token_indices": spec.token_dtype,
            "block_table": spec.table_dtype,
            "slots": spec.slot_dtype,
        }
    elif isinstance(spec, SafeLengthsSpec):
        dtypes = {"slots": spec.slot_dtype, "counts": spec.count_dtype}
    else:
        dtypes = {}
    for name, dtype in dtypes.items():
        if dtype not in limits.dtypes:
            taken = ", ".join(map(str, limits.dtypes))
            return f"{name} of {dtype} are not taken; it takes {taken}"
    return None


# --- which there are ---------------------------------------------------------------------------

BUILT_IN = ("triton", "cupy", "numba", "torch")

_lock = threading.RLock()
_loaded: dict[str, Backend] = {}
_entry_points: dict[str, EntryPoint | InvalidBackend] | None = None
_observers: list[Callable[[], None]] = []


def names() -> tuple[str, ...]:
    """Every name that `load` takes: built-in ones, then registered and installed ones."""
    with _lock:
        return tuple(dict.fromkeys((*BUILT_IN, *sorted({*_loaded, *_plugins()} - {*BUILT_IN}))))


def load(name: str) -> Backend:
    """The backend of this name, imported on first use.

    A plugin that does not load or does not keep the contract comes back as a stand-in whose
    `unavailable` says why.

    Raises:
        UnknownBackend: no backend has this name.
    """
    with _lock:
        backend = _loaded.get(name)
        point = _plugins().get(name)
    if backend is not None:
        return backend
    # Imported without the lock: what is imported may itself register, or be waited for elsewhere.
    if name in BUILT_IN:
        backend = importlib.import_module(f"mla_index.backends.{name}")
    elif point is not None:
        backend = _load_plugin(name, point)
    else:
        raise UnknownBackend(f"no backend is named {name!r}; there are {', '.join(names())}")
    with _lock:
        return _loaded.setdefault(name, backend)


def register(backend: Backend) -> None:
    """Offer `backend` under its name, for this process.

    Raises:
        InvalidBackend: it does not keep the contract; the message lists each point.
        ValueError: the name is taken.
    """
    faults = contract_faults(backend)
    if faults:
        what = getattr(backend, "__name__", type(backend).__name__)
        raise InvalidBackend(f"{what} is no backend: {'; '.join(faults)}")
    with _lock:
        if backend.name in BUILT_IN or backend.name in _plugins():
            raise ValueError(f"{backend.name!r} is the name of a built-in or installed backend")
        if backend.name in _loaded:
            raise ValueError(f"a backend named {backend.name!r} exists; unregister it first")
        _loaded[backend.name] = backend
    _notify()


def unregister(name: str) -> None:
    """Take back what `register` offered. Built-in and installed backends stay.

    Raises:
        UnknownBackend: nothing was registered under this name.
    """
    with _lock:
        if name in BUILT_IN or name in _plugins() or name not in _loaded:
            raise UnknownBackend(f"{name!r} was not registered in this process")
        del _loaded[name]
    _notify()


def on_change(observer: Callable[[], None]) -> None:
    """Call `observer` after each change of the registry."""
    _observers.append(observer)


def _notify() -> None:
    for observer in _observers:
        observer()


def _after_fork() -> None:
    """Another thread of the parent may have held the lock; nobody in the child would release it."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_fork)


# --- the contract, checked ----------------------------------------------------------------------

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # method: (positional arguments it is called with, keywords)
    "unavailable": (("device",), ("probe",)),
    "unsupported": (("op", "spec"), ()),
    "build": (("op", "spec", "device"), ()),
}


def contract_faults(backend: object) -> list[str]:
    """Each way in which an object does not keep the contract; empty when it does."""
    faults = []
    name = getattr(backend, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "auto":
        faults.append(f"name must match {_NAME.pattern} and not be 'auto', got {name!r}")
    version = getattr(backend, "contract_version", None)
    if type(version) is not int or version != CONTRACT_VERSION:
        faults.append(f"contract_version must be {CONTRACT_VERSION}, got {version!r}")
    faults += _limit_faults(getattr(backend, "limits", None))
    for method, (positional, keywords) in _CALLS.items():
        fault = _call_fault(getattr(backend, method, None), positional, keywords)
        if fault:
            faults.append(f"{method}{fault}")
    return faults


def _limit_faults(limits: object) -> list[str]:
    if not isinstance(limits, Limits):
        return [f"limits must be a mla_index.registry.Limits, got {type(limits).__name__}"]
    faults = [
        f"limits.operations names {op!r}; there are {', '.join(LAUNCH_PARAMETERS)}"
        for op in limits.operations
        if op not in LAUNCH_PARAMETERS
    ]
    if not limits.operations:
        faults.append("limits.operations is empty")
    if not set(limits.dtypes) <= set(INDEX_DTYPES):
        faults.append(f"limits.dtypes must be among {INDEX_DTYPES}, got {limits.dtypes}")
    return faults


def _call_fault(function: object, positional: Iterable[str], keywords: Iterable[str]) -> str | None:
    """Why `function` cannot be called so, or None. A C function without a signature passes."""
    if not callable(function):
        return f" must be callable, got {type(function).__name__}"
    try:
        signature = inspect.signature(function)
    except ValueError:
        return None
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        called = ", ".join([*positional, *(f"{keyword}=…" for keyword in keywords)])
        return f"{signature} cannot be called as ({called}): {error}"
    return None


def check_kernel(backend: Backend, op: str, kernel: object) -> Kernel:
    """What `build` returned, if it keeps the contract, else `InvalidBackend`."""
    if not isinstance(kernel, Kernel):
        raise InvalidBackend(
            f"backend {backend.name}: build must return a mla_index.registry.Kernel, "
            f"got {type(kernel).__name__}"
        )
    fault = _call_fault(kernel.launch, LAUNCH_PARAMETERS[op], ())
    if fault:
        raise InvalidBackend(f"backend {backend.name}: the launcher of {op}{fault}")
    if kernel.warm is not None and not callable(kernel.warm):
        raise InvalidBackend(f"backend {backend.name}: Kernel.warm must be callable or None")
    return kernel


# --- plugins ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Broken:
    """Stands for a plugin that did not load: never available, and says why."""

    name: str
    reason: str
    contract_version: int = CONTRACT_VERSION
    limits: Limits = Limits(tuple(LAUNCH_PARAMETERS), None)

    def unavailable(self, device: torch.device, *, probe: bool) -> str | None:
        return self.reason

    def unsupported(self, op: str, spec: Spec) -> str | None:
        return None

    def build(self, op: str, spec: Spec, device: torch.device) -> Kernel:
        raise InvalidBackend(self.reason)


def _plugins() -> dict[str, EntryPoint | InvalidBackend]:
    """Installed entry points by name; the metadata is read once, nothing of theirs is imported."""
    global _entry_points
    if _entry_points is None:
        from importlib.metadata import entry_points  # 20 ms that only a first use pays

        found: dict[str, EntryPoint | InvalidBackend] = {}
        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
            if point.name in BUILT_IN:
                logger.warning(
                    "the installed backend %s is ignored: %r is the name of a built-in one",
                    point.value,
                    point.name,
                )
                continue
            first = found.get(point.name)
            if first is None:
                found[point.name] = point
            elif getattr(first, "value", None) != point.value:
                found[point.name] = InvalidBackend(
                    f"several installed packages offer a backend named {point.name!r}"
                )
        _entry_points = found
    return _entry_points


def _load_plugin(name: str, point: EntryPoint | InvalidBackend) -> Backend:
    if isinstance(point, InvalidBackend):
        return _Broken(name, str(point))
    try:
        backend = point.load()
        faults = contract_faults(backend)
        if not faults and backend.name != name:
            faults = [f"name is {backend.name!r}, but the entry point is called {name!r}"]
    except (Exception, SystemExit) as error:  # a stranger's import may raise anything
        return _Broken(
            name, f"plugin {point.value} failed to load: {type(error).__name__}: {error}"
        )
    if faults:
        return _Broken(
            name, f"plugin {point.value} does not keep the contract: {'; '.join(faults)}"
        )
    return backend  # type: ignore[no-any-return]
