"""Selection under strangers' faults, threads and settings: reasons, never crashes or locks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from test_selector import SPEC, TABLE, TOKENS, Recording, first_slot

import mla_index
from mla_index import selector
from mla_index.registry import Kernel, Limits


class BrokenCheck(Recording):
    def unsupported(self, op, spec):
        return 1 / 0


def test_a_check_that_breaks_is_a_reason_wherever_it_is_asked():
    mla_index.register(BrokenCheck("broken"))
    with pytest.raises(mla_index.BackendUnsupported, match="its check failed: ZeroDivisionError"):
        first_slot(backend="broken")
    with pytest.raises(mla_index.BackendUnavailable, match="triton: "):
        first_slot(backend="triton")
    assert first_slot(backend=["broken", "torch"]) == 448
    rows = {r.name: r for r in mla_index.explain("remap", device="cpu", spec=SPEC).rows}
    assert rows["broken"].reason == "its check failed: ZeroDivisionError: division by zero"


@pytest.mark.parametrize("nothing", [None, "", False])
def test_no_reason_is_no_refusal(nothing):
    mla_index.register(Recording("plain", 5, missing=nothing, refuses=nothing))
    assert first_slot(backend="plain") == 5


def test_a_view_tries_no_device_of_a_backend_that_has_none():
    mla_index.register(backend := Recording("kernels"))
    mla_index.flat_row_view(torch.empty((3, 64, 8)), 64, backend="kernels")
    assert backend.asked == 0


def test_no_setting_that_breaks_stops_a_view(recwarn, monkeypatch):
    class BrokenView(Recording):
        def build(self, op, spec, device):
            raise OSError("no library")

    mla_index.register(BrokenView("views", limits=Limits(("flat_row_view",), ("cpu",))))
    cache = torch.empty((3, 64, 8))
    mla_index.set_default_backend("views")
    assert mla_index.flat_row_view(cache, 64).rows.shape == (192, 8)
    with mla_index.use_backend("views"):
        assert mla_index.flat_row_view(cache, 64).rows.shape == (192, 8)
    with pytest.raises(OSError, match="no library"):
        mla_index.flat_row_view(cache, 64, backend="views")
    monkeypatch.setenv("MLA_INDEX_TYPO", "1")  # a warning, and warnings are errors here
    mla_index.set_default_backend(None)
    mla_index.reload_environment()
    assert mla_index.flat_row_view(cache, 64).rows.shape == (192, 8)


@pytest.mark.parametrize(
    ("variable", "value"), [("MLA_INDEX_BACKEND", "garbage"), ("MLA_INDEX_BLOCK", "tritn")]
)
def test_an_error_of_a_setting_names_the_setting_at_every_call(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    mla_index.reload_environment()
    for _ in range(2):
        with pytest.raises(mla_index.UnknownBackend, match=f"^{variable} asks for '{value}'"):
            first_slot()


def test_auto_cannot_be_blocked(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_BLOCK", "auto")
    mla_index.reload_environment()
    with pytest.raises(mla_index.UnknownBackend, match="MLA_INDEX_BLOCK asks for 'auto'"):
        first_slot()


def test_a_default_whose_backend_went_is_named():
    mla_index.register(Recording("gone"))
    mla_index.set_default_backend("gone")
    mla_index.unregister("gone")
    with pytest.raises(mla_index.UnknownBackend, match="set_default_backend asks for 'gone'"):
        first_slot()


def test_a_name_twice_is_once():
    mla_index.register(Recording("one", 101))
    with mla_index.use_backend("one"):
        assert first_slot(backend=["auto", "auto"]) == 101


def test_devices_that_are_not_here_are_explained():
    with pytest.raises(ValueError, match="device must be a torch device, got 'foo'"):
        mla_index.explain("remap", device="foo")
    rows = {r.name: r for r in mla_index.explain("remap", device="xpu", backend="torch").rows}
    assert all(row.accepted is not True for row in rows.values())
    for device in ("hpu", "xpu", "mps"):
        explanation = mla_index.explain("remap", device=device, probe=True)
        assert explanation.chosen is None or torch.get_device_module(device).is_available()
    assert mla_index.warmup("remap", SPEC, device="meta") == "torch"


def test_registering_while_others_ask():
    """One thread registers and takes back, others explain: no error, and no name that stays."""
    stop, errors = threading.Event(), []

    def ask():
        while not stop.is_set():
            try:
                mla_index.explain("remap", device="cpu", spec=SPEC)
                first_slot()
            except Exception as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1.5
    while time.monotonic() < end and not errors:
        mla_index.register(Recording("fleeting"))
        mla_index.unregister("fleeting")
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_device_is_tried_once_however_many_ask():
    class Slow(Recording):
        def unavailable(self, device, *, probe):
            time.sleep(0.05)
            return super().unavailable(device, probe=probe)

    mla_index.register(slow := Slow("slow"))
    threads = [
        threading.Thread(target=mla_index.explain, args=("remap",), kwargs={"device": "cpu"})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slow.asked == 1


DEADLOCK = """
import sys, threading, time, types
import torch, mla_index
from mla_index import registry
from mla_index.registry import CONTRACT_VERSION, Kernel, Limits

class Slow:
    name, contract_version = "slow", CONTRACT_VERSION
    limits = Limits(("remap",), ("cpu",))
    def unavailable(self, device, *, probe):
        started.set()
        time.sleep(1)
        return "no"
    def unsupported(self, op, spec): return None
    def build(self, op, spec, device): return Kernel(lambda *a: None)

class Point:
    name, value = "plugin", "plugin_module"
    def load(self):  # what an import of a package does that sets a default at its top
        started.wait(5)
        mla_index.set_default_backend("torch")
        return Slow()

started = threading.Event()
registry._plugins()["plugin"] = Point()
mla_index.register(Slow())
table = torch.zeros((1, 1), dtype=torch.int32)
def call():
    mla_index.remap(None, table, table, block_size=64, backend=["slow", "torch"])
threads = [threading.Thread(target=call, daemon=True),
           threading.Thread(target=mla_index.explain, args=("remap",), kwargs={"device": "cpu"},
                            daemon=True)]
for thread in threads: thread.start()
for thread in threads: thread.join(20)
sys.exit(any(thread.is_alive() for thread in threads))
"""


def test_a_plugin_whose_import_changes_settings_locks_nobody_out():
    done = subprocess.run(
        [sys.executable, "-c", DEADLOCK], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_choice_that_was_out_of_date_when_made_is_not_kept():
    """While a backend is being built another is made the default: the next call asks anew."""

    class Meddling(Recording):
        def build(self, op, spec, device):
            mla_index.set_default_backend("torch")
            return Kernel(self._launch)

    mla_index.register(Meddling("meddling", 7))
    assert first_slot(backend="meddling") == 7
    assert all(key[3] != ("meddling",) for key in selector._choices)


def test_a_kernel_whose_backend_went_while_it_was_built_is_not_kept():
    """While `first` builds, `second` takes its name: it must not be served `first`'s kernel."""
    second = Recording("name", 2)

    class Replaced(Recording):
        def build(self, op, spec, device):
            mla_index.unregister("name")
            mla_index.register(second)
            return super().build(op, spec, device)

    mla_index.register(Replaced("name", 1))
    assert first_slot(backend="name") == 1
    assert first_slot(backend="name") == 2
    assert second.built == 1


def test_what_only_looks_like_our_types_is_refused_warm_or_cold():
    from types import SimpleNamespace

    twin = SimpleNamespace(size=2, interleave=1, rank=5)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"dcp must be a mla_index.Dcp, got SimpleNamespace"):
            mla_index.remap(None, TABLE, TOKENS, block_size=64, dcp=twin)
        mla_index.remap(None, TABLE, TOKENS, block_size=64, dcp=mla_index.Dcp(2, 0))
    ids = torch.zeros(1, dtype=torch.int32)
    twin = SimpleNamespace(request_ids=ids, starts=ids, rank_stride=-5, num_rows=None)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"workspace must be a mla_index.PrefillWorkspace"):
            mla_index.remap(None, TABLE, TOKENS, block_size=64, workspace=twin)
        mla_index.remap(
            None, TABLE, TOKENS, block_size=64, workspace=mla_index.PrefillWorkspace(ids, ids)
        )
