"""The vLLM plugin: with `MLA_INDEX_VLLM=1`, vLLM's sparse backends use these operations.

vLLM calls `register`, the entry point of the group `vllm.general_plugins`, in every process that it
starts. Nothing happens there before it is asked for, and no device is ever touched.

What is replaced are function objects, not names: every module that holds one of vLLM's functions
gets ours in its place, whatever it calls it, and a different function of the same name stays (the
ROCm backend has one). A module that is imported later takes ours from vLLM's module as any other
name. If vLLM's module itself is imported later, its loader calls back when the import is done.

vLLM warms its kernels before it captures graphs: it makes a key for each configuration and calls
`compile(key)` on the object that owns the kernel. While we are in place that object warms our
kernel of the same configuration instead of its own, which nothing calls any more.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from mla_index import settings, warming
from mla_index.explanation import explain
from mla_index.integrations import vllm_forms
from mla_index.integrations.vllm_forms import FUNCTIONS, MODULE, WARMUP_KERNEL
from mla_index.specs import RemapSpec, SafeLengthsSpec

logger = logging.getLogger("vllm.mla_index")
"""Below vLLM's own logger, so that its line stands in the server's log."""


class _Told(NamedTuple):
    """What is to be logged; a warning once."""

    level: int
    text: str


_lock = threading.RLock()
"""Its holder imports nothing and logs nothing: an import may be waiting for it."""
_finder: _Finder | None = None
_pairs: list[tuple[object, object]] = []
"""Each of vLLM's functions that was replaced, and what stands in its place."""
_hooked: list[Any] = []
"""The kernel owners whose `compile` is ours."""
_left_alone: ModuleType | None = None
"""vLLM's module, if it did not fit: it is not looked at again at every import."""
_service = _Told(logging.INFO, "")
"""Which backend serves, as `install` finds; a warning where none does."""
_told: set[_Told] = set()


def _after_fork() -> None:
    """What the parent put in place is in place here too; its lock may be held by nobody."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def register() -> None:
    """What vLLM calls in each of its processes; installs if `MLA_INDEX_VLLM=1`.

    Raises:
        ValueError: `MLA_INDEX_VLLM` is neither 0 nor 1.
        UnknownBackend: as `install`.
    """
    if settings.vllm():
        install()


def install() -> None:
    """Put our functions in the place of vLLM's, now or as soon as vLLM's module is imported.

    Doing it again changes nothing. A vLLM whose functions are not those that were checked is left
    alone, with a warning that names the differences.

    Raises:
        UnknownBackend: a setting names a backend that there is not.
    """
    global _finder, _service
    _service = _who_serves()  # a setting that is wrong is told now, not at the first request
    with _lock:
        if _finder is None:
            _finder = _Finder()
            sys.meta_path.insert(0, _finder)
    _replace_if_imported()


def uninstall() -> None:
    """Put vLLM's own functions back in every module that has ours from `install`."""
    global _finder, _left_alone
    with _lock:
        if _finder is not None and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        _finder = _left_alone = None
        _swap({id(ours): theirs for theirs, ours in _pairs})
        _pairs.clear()
        for kernel in _hooked:
            if kernel.compile is warm:  # may have been put back by others
                del kernel.compile
        _hooked.clear()


def installed() -> bool:
    """Whether vLLM's functions are replaced in this process."""
    return bool(_pairs)


# --- when ---------------------------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find vLLM's module, and asks its loader to call back."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            if not _pairs:  # vLLM's import was under way when we were installed
                # The import system's own lock is held here. So no other lock is waited for: not
                # this module's, whose holder or the next import does it, and not a log's.
                _replace_if_imported(wait=False)
            return None
        for finder in _behind(self):
            spec: importlib.machinery.ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


def _behind(finder: _Finder) -> list[Any]:
    """The finders that come after one: those before it were asked, and may be asking it."""
    finders: list[Any] = list(sys.meta_path)
    return finders[finders.index(finder) + 1 :] if finder in finders else finders


class _Loader(importlib.abc.Loader):
    """Loads as the real one does, which the module then names as its own, and calls back."""

    def __init__(self, real: importlib.abc.Loader) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        global _left_alone
        module.__loader__ = self.real
        if module.__spec__ is not None:
            module.__spec__.loader = self.real
        self.real.exec_module(module)
        _left_alone = None  # what was imported again may be another
        _replace(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)  # what else a loader has: the source, the code


def _replace_if_imported(*, wait: bool = True) -> None:
    module = sys.modules.get(MODULE)
    under_way = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if module is not None and module is not _left_alone and not under_way:
        _replace(module, wait=wait)


# --- what ---------------------------------------------------------------------------------------


def _replace(module: ModuleType, *, wait: bool = True) -> None:
    """Replace the functions of vLLM's module wherever they are held, and hook its warm-up."""
    if not _lock.acquire(blocking=wait):
        return
    try:
        told = None if _finder is None else _replaced(module)
    finally:
        _lock.release()
    if told is not None and told not in _told:
        if told.level == logging.WARNING:
            _told.add(told)
        if wait:
            logger.log(*told)
        else:
            threading.Thread(target=logger.log, args=told, daemon=True).start()


def _replaced(module: ModuleType) -> _Told | None:
    """What was done; None where nothing was to do. The caller holds the lock."""
    global _left_alone
    form = vllm_forms.form_of_module(module)
    theirs = {name: getattr(module, name) for name in form.parameters}
    ours = {id(replacement) for _, replacement in _pairs}
    if any(id(function) in ours for function in theirs.values()):
        return None
    differences = form.differences()
    if differences:
        _left_alone = module
        return _Told(
            logging.WARNING,
            f"mla_index leaves this vLLM alone, which is not as {vllm_forms.CHECKED}, "
            f"the one that was checked: {'; '.join(differences)}",
        )
    pairs = [(function, _twin(name)) for name, function in theirs.items()]
    _pairs.extend(pairs)  # first: what is forked in the middle must know what to give back
    held = _swap({id(function): twin for function, twin in pairs})
    how = "warmed as vLLM's warm-up asks" if _hook_warmup(module) else "compiled at their first use"
    return _Told(
        _service.level,
        f"mla_index replaces {', '.join(theirs)} in {held} modules; {_service.text}; "
        f"its kernels are {how}",
    )


def _twin(name: str) -> FunctionType:
    """A function of our code that is nobody else's object, so that it can be found and taken back.

    It passes for vLLM's: a reference by module and name leads to what is in place there.
    """
    mine = FUNCTIONS[name]
    assert isinstance(mine, FunctionType)  # noqa: S101 - for the type checker
    twin = FunctionType(mine.__code__, mine.__globals__, name, mine.__defaults__, mine.__closure__)
    functools.update_wrapper(twin, mine)
    twin.__module__ = MODULE
    return twin


def _swap(replacements: Mapping[int, object]) -> int:
    """Replace objects by identity in the namespace of every module; returns in how many."""
    changed = 0
    for module in list(sys.modules.values()):
        try:
            # Not `vars`: a lazy module would load itself to answer.
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        found = [name for name, value in list(namespace.items()) if id(value) in replacements]
        for name in found:
            namespace[name] = replacements[id(namespace[name])]
        changed += bool(found)
    return changed


def _who_serves() -> _Told:
    """Which backend, as far as it can be told without touching a device."""
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    device = accelerator or torch.device("cpu")
    answer = explain("remap", device=device, probe=False)
    text = f"on {device.type} by {answer.chosen or 'no backend'} (by {answer.source})"
    return _Told(logging.INFO if answer.chosen else logging.WARNING, text)


# --- warm-up ------------------------------------------------------------------------------------


def _hook_warmup(module: ModuleType) -> bool:
    """Let vLLM's warm-up warm our kernels; False where there is none, or it takes no other."""
    kernel = getattr(module, WARMUP_KERNEL, None)
    if kernel is None:
        return False
    try:
        kernel.compile = warm
    except AttributeError:
        return False
    _hooked.append(kernel)
    return True


def warm(compile_key: Any) -> None:
    """Compile our kernels for the configuration of one of vLLM's keys, on the current device.

    Args:
        compile_key: has the fields of `vllm_forms.WARMUP_FIELDS`.

    Raises:
        BackendError: as `mla_index.warmup`.
    """
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    spec = RemapSpec(
        block_size=compile_key.block_size,
        topk=compile_key.num_topk_tokens,
        dcp_size=compile_key.dcp_size,
        dcp_interleave=compile_key.dcp_interleave,
        compact=bool(compile_key.compact_to_front),
        counts=bool(compile_key.count_valid),
        request_rows=bool(getattr(compile_key, "has_idx_mapping", False)),
        workspace=bool(compile_key.has_prefill_workspace),
    )
    warming.warmup("remap", spec, device=device)
    warming.warmup("safe_lengths", SafeLengthsSpec(), device=device)
