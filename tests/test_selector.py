"""Precedence, lists, settings, reasons, kept verdicts."""

from __future__ import annotations

import contextvars
import inspect
import logging
import os
import threading
from contextlib import nullcontext

import pytest
import torch

import mla_index
from mla_index import registry, selector, verdicts
from mla_index.registry import CONTRACT_VERSION, Kernel, Limits

TABLE = torch.tensor([[7, 3]], dtype=torch.int32)
TOKENS = torch.tensor([[0, 64, -1]], dtype=torch.int32)
CPU = torch.device("cpu")
SPEC = mla_index.RemapSpec(block_size=64, topk=3, req_id=False)


class Recording:
    """A backend that counts what is asked of it and fills its output with a mark."""

    contract_version = CONTRACT_VERSION

    def __init__(self, name, mark=0, *, missing=None, refuses=None, limits=None, error=None):
        self.name, self.mark = name, mark
        self.missing, self.refuses, self.error = missing, refuses, error
        self.limits = limits or Limits(("remap", "safe_lengths"), ("cpu",))
        self.asked = self.built = self.warmed = 0

    def unavailable(self, device, *, probe):
        self.asked += 1
        return self.missing

    def unsupported(self, op, spec):
        return self.refuses

    def build(self, op, spec, device):
        self.built += 1
        return Kernel(self._launch, self._warm)

    def _warm(self):
        self.warmed += 1
        return 1

    def _launch(self, req_id, block_table, token_indices, out, *rest):
        if self.error:
            raise self.error
        out.fill_(self.mark)


def first_slot(**keywords):
    return int(mla_index.remap(None, TABLE, TOKENS, block_size=64, **keywords).slots[0, 0])


@pytest.fixture
def one():
    mla_index.register(backend := Recording("one", 101))
    return backend


@pytest.fixture
def two():
    mla_index.register(backend := Recording("two", 102))
    return backend


def test_auto_on_the_cpu_is_torch():
    assert first_slot() == 448
    assert mla_index.explain("remap", device="cpu").chosen == "torch"


def test_precedence(one, two, monkeypatch):
    assert first_slot() == 448
    monkeypatch.setenv("MLA_INDEX_BACKEND", "one")
    assert first_slot() == 448, "the environment is read once, at first use"
    mla_index.reload_environment()
    assert first_slot() == 101
    mla_index.set_default_backend("two")
    assert first_slot() == 102
    with mla_index.use_backend("one"):
        assert first_slot() == 101
        with mla_index.use_backend("two"):
            assert first_slot() == 102
            assert first_slot(backend="torch") == 448
        assert first_slot() == 101
    assert first_slot() == 102
    mla_index.set_default_backend(None)
    assert first_slot() == 101
    with mla_index.use_backend("auto"):
        assert first_slot() == 448


def test_each_source_is_named_in_the_explanation(one, monkeypatch):
    assert mla_index.explain("remap", device="cpu").source == "auto"
    monkeypatch.setenv("MLA_INDEX_BACKEND", "one")
    mla_index.reload_environment()
    assert mla_index.explain("remap", device="cpu").source == "MLA_INDEX_BACKEND"
    mla_index.set_default_backend("one")
    assert mla_index.explain("remap", device="cpu").source == "set_default_backend"
    with mla_index.use_backend("one"):
        assert mla_index.explain("remap", device="cpu").source == "use_backend"
        explanation = mla_index.explain("remap", device="cpu", backend="one")
    assert explanation.source == "the argument backend="
    assert explanation.chosen == "one"


@pytest.mark.parametrize("request_", [["cupy", "one"], ("cupy", "one"), ["cupy", "auto"]])
def test_a_list_moves_on_for_a_known_reason(one, request_):
    expected = 448 if request_[1] == "auto" else 101
    assert first_slot(backend=request_) == expected
    with mla_index.use_backend(request_):
        assert first_slot() == expected
    mla_index.set_default_backend(request_)
    assert first_slot() == expected


def test_a_list_in_the_environment(one, monkeypatch):
    monkeypatch.setenv("MLA_INDEX_BACKEND", " cupy , one,")
    mla_index.reload_environment()
    assert first_slot() == 101


def test_a_named_backend_that_cannot_run_is_an_error_with_the_cause_and_what_could(one):
    mla_index.register(Recording("broken", missing="its driver is too old"))
    with pytest.raises(mla_index.BackendUnavailable) as caught:
        first_slot(backend="broken")
    assert caught.value.reasons == {"broken": "its driver is too old"}
    for part in ("broken: its driver is too old", "the argument backend=", "Could run: "):
        assert part in str(caught.value)
    could = str(caught.value).split("Could run: ")[1]
    assert "one" in could
    assert "torch" in could
    assert "broken" not in could


def test_unsupported_says_the_value_and_what_is_taken(one):
    only32 = Limits(("remap",), ("cpu",), (torch.int32,), max_topk=2048)
    mla_index.register(Recording("narrow", limits=only32))
    with pytest.raises(mla_index.BackendUnsupported, match=r"block_table of torch.int64.*int32"):
        mla_index.remap(None, TABLE.long(), TOKENS, block_size=64, backend="narrow")
    wide = torch.zeros((1, 2049), dtype=torch.int32)
    with pytest.raises(mla_index.BackendUnsupported, match=r"4096.*up to 2048"):
        mla_index.remap(None, TABLE, wide, block_size=64, backend="narrow")
    with pytest.raises(mla_index.BackendUnsupported, match="safe_lengths is not declared"):
        mla_index.safe_lengths(TABLE.clone(), TABLE[:, 0] * 0, backend="narrow")
    mla_index.register(Recording("picky", refuses="block_size 64 is not taken; it takes 1"))
    with pytest.raises(mla_index.BackendUnsupported, match="block_size 64 is not taken"):
        first_slot(backend="picky")


def test_when_a_whole_list_fails_every_reason_is_told_in_order():
    mla_index.register(Recording("broken", missing="no driver"))
    mla_index.register(Recording("picky", refuses="wrong moon"))
    with pytest.raises(mla_index.BackendUnsupported) as caught:
        first_slot(backend=["broken", "picky"])
    assert list(caught.value.reasons.items()) == [("broken", "no driver"), ("picky", "wrong moon")]


def test_an_exception_from_a_kernel_propagates_and_nothing_else_is_tried(one):
    mla_index.register(Recording("faulty", error=RuntimeError("device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        first_slot(backend=["faulty", "one"])


def test_an_availability_check_that_raises_is_a_reason():
    class Crashing(Recording):
        def unavailable(self, device, *, probe):
            raise OSError("libfoo.so: cannot open")

    mla_index.register(Crashing("crashing"))
    with pytest.raises(mla_index.BackendUnavailable, match=r"OSError: libfoo\.so: cannot open"):
        first_slot(backend="crashing")
    assert first_slot(backend=["crashing", "torch"]) == 448


@pytest.mark.parametrize("how", ["argument", "use", "default", "backend", "block"])
def test_an_unknown_name_is_an_error_that_lists_the_valid_ones(how, monkeypatch):
    monkeypatch.setenv(f"MLA_INDEX_{how.upper()}", "tritn")
    mla_index.reload_environment()
    ask = {
        "argument": lambda: first_slot(backend="tritn"),
        "use": lambda: mla_index.use_backend("tritn").__enter__(),
        "default": lambda: mla_index.set_default_backend(["torch", "tritn"]),
        "backend": first_slot,
        "block": first_slot,
    }[how]
    with pytest.raises(mla_index.UnknownBackend, match=r"'tritn'.*triton, cupy, numba, torch"):
        ask()


def test_names_in_one_string_are_told_apart_from_a_list():
    with pytest.raises(mla_index.UnknownBackend, match="order of several is a list of names"):
        first_slot(backend="cupy,torch")


@pytest.mark.parametrize(
    ("backend", "error"), [([], ValueError), (None, TypeError), (3, TypeError), ([3], TypeError)]
)
def test_something_that_is_no_name(backend, error):
    with pytest.raises(error, match="backend must be"):
        first_slot(backend=backend)


def test_block_removes_names_from_auto_only(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_BLOCK", "torch")
    mla_index.reload_environment()
    with pytest.raises(mla_index.BackendUnavailable, match="MLA_INDEX_BLOCK removes every one"):
        first_slot()
    assert first_slot(backend="torch") == 448
    rows = {row.name: row for row in mla_index.explain("remap", device="cpu").rows}
    assert rows["torch"].accepted
    assert rows["torch"].reason == "MLA_INDEX_BLOCK removes it from auto; can run"


@pytest.mark.parametrize(
    ("backend", "told"),
    [("auto", {"cupy", "torch"}), (["numba", "auto"], {"cupy", "torch"}),
     (["torch", "auto"], {"cupy"}), ("numba", set())],
)  # fmt: skip
def test_explain_says_first_what_is_blocked(monkeypatch, backend, told):
    """Of those that `auto` would have tried here, and that are not asked for by name as well."""
    monkeypatch.setenv("MLA_INDEX_BLOCK", "torch,cupy")
    mla_index.reload_environment()
    rows = mla_index.explain("remap", device="cuda", backend=backend).rows
    removed = "MLA_INDEX_BLOCK removes it from auto; "
    assert {row.name for row in rows if row.reason.startswith(removed)} == told
    for row in rows:  # its own reason stays behind it
        if row.name in told:
            assert row.reason.removeprefix(removed)
        else:
            assert "MLA_INDEX_BLOCK" not in row.reason


def test_what_auto_would_not_try_is_not_said_to_be_blocked(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_BLOCK", "triton")
    mla_index.reload_environment()
    rows = {row.name: row.reason for row in mla_index.explain("remap", device="cpu").rows}
    assert "MLA_INDEX_BLOCK" not in rows["triton"]


def test_an_unknown_variable_warns_once_with_the_nearest_name(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_BACKENDS", "torch")
    mla_index.reload_environment()
    with pytest.warns(RuntimeWarning, match="MLA_INDEX_BACKENDS; did you mean MLA_INDEX_BACKEND"):
        first_slot()
    first_slot()
    first_slot(pad=-2)


def test_auto_orders_by_device_type(monkeypatch):
    order = selector.auto_order
    assert order(torch.device("cuda", 0)) == ("triton", "cupy", "numba", "torch")
    assert order(torch.device("xpu", 0)) == ("triton", "torch")
    mla_index.register(Recording("npu", limits=Limits(("remap",), ("privateuseone",))))
    mla_index.register(Recording("any", limits=Limits(("remap",), None)))
    assert order(torch.device("privateuseone", 0)) == ("triton", "npu", "torch")
    assert order(torch.device("cuda", 0)) == ("triton", "cupy", "numba", "torch")
    assert order(CPU) == ("torch",)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert order(torch.device("cuda", 0)) == ("triton", "torch")


def test_asked_and_built_once_a_configuration(one):
    for pad in range(5):
        first_slot(backend="one", pad=pad)
    mla_index.remap(None, TABLE[:, :1], TOKENS.repeat(9, 1), block_size=64, backend="one")
    with mla_index.use_backend("one"):
        first_slot()
    mla_index.dcp_filter(
        None, TABLE, TOKENS, mla_index.Dcp(1, 0), block_size=64, backend="one",
        compact=False, counts=False,
    )  # fmt: skip
    assert (one.asked, one.built) == (1, 1)
    first_slot(backend="one", compact=True)
    assert (one.asked, one.built) == (1, 2)


def test_warmup_builds_warms_and_names(one):
    assert mla_index.warmup("remap", SPEC, device="cpu", backend="one") == "one"
    assert (one.built, one.warmed) == (1, 1)
    first_slot(backend="one")
    assert one.built == 1
    assert mla_index.warmup("dcp_filter", SPEC, device="cpu") == "torch"
    assert mla_index.warmup("flat_row_view", None, device="cpu") == "torch"
    with pytest.raises(TypeError, match=r"spec of safe_lengths must be SafeLengthsSpec"):
        mla_index.warmup("safe_lengths", SPEC, device="cpu")
    with pytest.raises(TypeError, match="needs a spec"):
        mla_index.warmup("remap", None, device="cpu")
    with pytest.raises(ValueError, match=r"op must be one of remap, .* got 'remapp'"):
        mla_index.warmup("remapp", SPEC, device="cpu")


def test_empty_calls_check_but_ask_and_build_nothing(one):
    empty = torch.empty((0, 2048), dtype=torch.int32)
    result = mla_index.remap(None, TABLE, empty, block_size=64, counts=True, backend="one")
    assert result.slots.shape == (0, 2048)
    assert result.counts.shape == (0,)
    assert (one.asked, one.built) == (0, 0)
    with pytest.raises(mla_index.UnknownBackend):
        mla_index.remap(None, TABLE, empty, block_size=64, backend="nobody")


def test_overrides_stay_in_their_context(one):
    entered, leave, seen = threading.Event(), threading.Event(), []

    def inside():
        with mla_index.use_backend("one"):
            entered.set()
            leave.wait(10)
            seen.append(first_slot())

    thread = threading.Thread(target=inside)
    thread.start()
    assert entered.wait(10)
    assert first_slot() == 448
    context = contextvars.copy_context()
    leave.set()
    thread.join()
    assert seen == [101]
    assert context.run(first_slot) == 448


def test_many_threads_build_one_kernel(one):
    barrier, slots = threading.Barrier(8), []

    def call():
        barrier.wait(10)
        slots.append(first_slot(backend="one"))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slots == [101] * 8
    assert (one.asked, one.built) == (1, 1)


def test_a_forked_child_asks_and_builds_anew_even_while_the_lock_is_held(one):
    first_slot(backend="one")
    held, release = threading.Event(), threading.Event()

    def hold():
        with verdicts.lock, registry._lock:
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover (in the child)
        try:
            one.asked = one.built = 0
            message = f"{first_slot(backend='one')} {one.asked} {one.built}"
        except BaseException as error:
            message = repr(error)
        os.write(writer, message.encode())
        os._exit(0)
    release.set()
    thread.join()
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.read() == "101 1 1"
    os.waitpid(child, 0)


def test_one_log_line_at_first_use_with_what_was_skipped(one, caplog, monkeypatch):
    monkeypatch.setattr(selector, "_logged", set())
    caplog.set_level(logging.INFO, logger="mla_index")
    for _ in range(3):
        first_slot(backend=["cupy", "one"])
        first_slot(backend=["cupy", "one"], compact=True)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("remap on cpu runs on one (skipped cupy: ")


def test_no_setting_makes_the_view_fail(monkeypatch):
    cache = torch.empty((3, 64, 576))
    for value in ("cupy", "nobody", "numba,triton"):
        monkeypatch.setenv("MLA_INDEX_BACKEND", value)
        monkeypatch.setenv("MLA_INDEX_BLOCK", "torch")
        mla_index.reload_environment()
        assert mla_index.flat_row_view(cache, 64).rows.shape == (192, 576)
    assert mla_index.flat_row_view(cache, 64, backend="cupy").block_stride_rows == 64
    with pytest.raises(mla_index.UnknownBackend):
        mla_index.flat_row_view(cache, 64, backend="nobody")


def test_a_backend_may_bring_its_own_view():
    class Viewing(Recording):
        def build(self, op, spec, device):
            return Kernel(lambda kv_cache, block_size: "its own")

    mla_index.register(Viewing("viewing", limits=Limits(("flat_row_view",), ("cpu",))))
    cache = torch.empty((3, 64, 576))
    assert mla_index.flat_row_view(cache, 64, backend="viewing") == "its own"
    assert mla_index.flat_row_view(cache, 64).rows.shape == (192, 576)


def test_explain_lists_every_backend_and_reads_as_a_table(one):
    explanation = mla_index.explain("remap", device="cpu", spec=SPEC)
    assert {row.name for row in explanation.rows} == {"torch", "triton", "cupy", "numba", "one"}
    assert all(row.reason for row in explanation.rows if row.name != "torch")
    text = str(explanation).splitlines()
    assert text[0] == "remap on cpu: torch (by auto)"
    assert text[1].startswith("-> torch")
    told = explanation.as_dict()
    assert told["chosen"] == "torch"
    assert {candidate["name"]: candidate["accepted"] for candidate in told["candidates"]} == {
        "torch": True, "triton": False, "cupy": False, "numba": False, "one": True,
    }  # fmt: skip


def test_explain_for_a_device_that_is_not_here_initialises_nothing():
    explanation = mla_index.explain("remap", device="cuda")
    assert not torch.cuda.is_initialized()
    for row in explanation.rows:
        assert row.accepted is not True or torch.cuda.is_available()
        assert row.accepted is True or row.reason


def test_the_seed_case_of_an_ignored_variable(monkeypatch):
    """Field report 34: the variable is used, or an error says why not."""
    monkeypatch.setenv("MLA_INDEX_BACKEND", "cupy")
    mla_index.reload_environment()
    with pytest.raises(mla_index.BackendUnavailable) as caught:
        first_slot()
    assert "cupy: " in str(caught.value)
    assert "MLA_INDEX_BACKEND" in str(caught.value)
    assert "Could run: torch" in str(caught.value)


def test_explain_does_not_try_a_device_in_a_graph_capture(monkeypatch):
    """As its documentation says; without a probe it answers."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(mla_index.NotWarm, match="inside a CUDA graph capture"):
        mla_index.explain("remap", device="cuda:7", probe=True)
    assert mla_index.explain("remap", device="cuda:7", probe=False).rows
    assert "NotWarm: " in inspect.getdoc(mla_index.explain)
