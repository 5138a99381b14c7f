"""The vLLM plugin on a stand-in for vLLM: what it replaces, when, and that it gives it back."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import tomllib
import types

import pytest
import torch
import vllm_stand_in
from conftest import PROJECT
from vllm_stand_in import CALLERS, CONVERT, FILTER, KEY_FIELDS, MLA, SIGNATURES, SPARSE_UTILS, load

import mla_index
from mla_index import registry
from mla_index.integrations import vllm as ours
from mla_index.integrations import vllm_forms, vllm_plugin
from mla_index.registry import CONTRACT_VERSION, Kernel, Limits

ROCM = f"{MLA}.rocm_aiter_mla_sparse"


@pytest.fixture(autouse=True)
def _clean():
    """Nothing installed, nothing of vLLM imported, before and after."""
    path, finders = list(sys.path), list(sys.meta_path)
    vllm_stand_in.forget()
    yield
    vllm_plugin.uninstall()
    vllm_plugin._told.clear()
    vllm_stand_in.forget()
    sys.path[:] = path
    assert sys.meta_path == finders


@pytest.fixture
def vllm(tmp_path):
    """The stand-in of vLLM 0.33.0, to be imported."""
    sys.path.insert(0, str(vllm_stand_in.write(tmp_path)))
    return tmp_path


def is_ours(function, name=CONVERT):
    return function.__code__ is getattr(ours, name).__code__


def who(module):
    """Whose function a module calls."""
    return "ours" if is_ours(load(module).call()) else load(module).call()()


def theirs(function):
    return function.__code__.co_filename.endswith("sparse_utils.py")


# --- when ----------------------------------------------------------------------------------------


def test_nothing_happens_unless_asked(vllm, monkeypatch):
    for value in (None, "", "0"):
        if value is not None:
            monkeypatch.setenv("MLA_INDEX_VLLM", value)
        vllm_plugin.register()
        assert theirs(load(f"{MLA}.flashmla_sparse").call())
        assert not vllm_plugin.installed()


def test_a_setting_that_is_neither_0_nor_1_is_told(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_VLLM", "yes")
    with pytest.raises(ValueError, match="MLA_INDEX_VLLM must be 0 or 1, got 'yes'"):
        vllm_plugin.register()


def test_the_setting_is_known(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_VLLM", "1")
    mla_index.reload_environment()
    mla_index.explain("remap", device="cpu")  # an unknown variable would warn, which is an error


def test_imported_before(vllm, monkeypatch):
    monkeypatch.setenv("MLA_INDEX_VLLM", "1")
    for name in CALLERS:
        load(name)
    vllm_plugin.register()
    assert {who(name) for name in CALLERS} == {"ours"}
    assert is_ours(load(f"{MLA}.flashmla_sparse").call_filter(), FILTER)


def test_imported_after(vllm, monkeypatch):
    monkeypatch.setenv("MLA_INDEX_VLLM", "1")
    vllm_plugin.register()
    assert SPARSE_UTILS not in sys.modules
    assert [who(name) for name in CALLERS] == ["ours"] * len(CALLERS)
    assert is_ours(load(f"{MLA}.flashmla_sparse").call_filter(), FILTER)


@pytest.mark.parametrize("first", CALLERS)
def test_whichever_comes_first(vllm, first):
    """Also the one that is imported by `sparse_utils`, which it takes a name from."""
    vllm_plugin.install()
    load(first)
    assert who(first) == "ours"
    assert {who(name) for name in CALLERS} == {"ours"}


def test_every_function(vllm):
    vllm_plugin.install()
    module = load(SPARSE_UTILS)
    for name in SIGNATURES:
        assert is_ours(getattr(module, name), name)
        assert inspect.signature(getattr(module, name)) == inspect.signature(getattr(ours, name))


def test_another_function_of_the_same_name_stays(vllm):
    load(ROCM)
    vllm_plugin.install()
    load(SPARSE_UTILS)
    assert load(ROCM).call()(1, 2) == "ROCm"


def test_an_import_that_is_under_way(tmp_path):
    """The plugin is loaded by an import within `sparse_utils`; the next import is soon enough."""
    tail = f"import {MLA}.cyclic\nfrom mla_index.integrations import vllm_plugin\n"
    sys.path.insert(0, str(vllm_stand_in.write(tmp_path, tail=tail + "vllm_plugin.install()\n")))
    load(SPARSE_UTILS)
    load(f"{MLA}.flashmla_sparse")
    assert {who(name) for name in CALLERS} == {"ours"}


def test_reloading(vllm):
    vllm_plugin.install()
    module = load(SPARSE_UTILS)
    importlib.reload(module)
    assert is_ours(getattr(module, CONVERT))
    vllm_plugin.uninstall()
    assert theirs(getattr(module, CONVERT))


def test_finders_that_ask_the_others_do_not_ask_each_other(vllm):
    """As ours does, which is there twice where this package was imported twice."""
    second = vllm_plugin._Finder()
    vllm_plugin.install()
    sys.meta_path.insert(0, second)
    try:
        assert is_ours(getattr(load(SPARSE_UTILS), CONVERT))
    finally:
        sys.meta_path.remove(second)


def test_an_import_beside_that_of_vllm_does_not_wait_for_it_forever(vllm):
    """Imports hold the import system's lock while they ask our finder, and ours may be held."""
    result = run(
        """
        import faulthandler, sys, threading, types
        from mla_index.integrations import vllm_plugin
        from vllm_stand_in import SPARSE_UTILS, load
        vllm_plugin.install()
        for number in range(2000):  # as many modules as a server has: replacing takes its time
            module = types.ModuleType(f"module_{number}")
            vars(module).update({f"name_{n}": n for n in range(60)})
            sys.modules[module.__name__] = module
        faulthandler.dump_traceback_later(20, exit=True)
        done = threading.Event()
        def others():
            number = 0
            while not done.is_set():
                number += 1
                try: __import__(f"nothing_{number}")
                except ImportError: pass
        thread = threading.Thread(target=others, daemon=True)
        thread.start()
        load(SPARSE_UTILS)
        done.set()
        thread.join()
        print(vllm_plugin.installed())
        """,
        vllm,
    )
    assert result.stdout == "True\n", result.stderr


def test_imports_by_threads(vllm):
    vllm_plugin.install()
    threads = [threading.Thread(target=load, args=(name,)) for name in CALLERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {who(name) for name in CALLERS} == {"ours"}


def test_its_loader_tells_what_the_real_one_tells(vllm):
    vllm_plugin.install()
    loader = importlib.util.find_spec(SPARSE_UTILS).loader
    assert f"def {CONVERT}(" in loader.get_source(SPARSE_UTILS)
    assert loader.get_code(SPARSE_UTILS).co_filename.endswith("sparse_utils.py")


def test_the_module_looks_as_if_nobody_had_meddled(vllm):
    vllm_plugin.install()
    module = load(SPARSE_UTILS)
    plain = importlib.util.spec_from_file_location("plain", module.__file__).loader
    assert type(module.__spec__.loader) is type(plain)
    assert type(module.__loader__) is type(plain)
    assert "CompileKey" in inspect.getsource(module)


def test_a_lazy_module_is_not_loaded(vllm):
    """`importlib.util.LazyLoader` loads at the first look at any attribute."""
    path = vllm / "lazy_neighbour.py"
    path.write_text("raise RuntimeError('loaded')\n")
    spec = importlib.util.spec_from_file_location("lazy_neighbour", path)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["lazy_neighbour"] = module
    try:
        spec.loader.exec_module(module)
        vllm_plugin.install()
        load(SPARSE_UTILS)
    finally:
        del sys.modules["lazy_neighbour"]
    assert who(f"{MLA}.index_group") == "ours"


def test_a_reference_by_name_finds_what_is_in_place(vllm):
    vllm_plugin.install()
    function = getattr(load(SPARSE_UTILS), CONVERT)
    assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301


# --- once, and back ------------------------------------------------------------------------------


def test_twice_is_once(vllm, caplog):
    caplog.set_level(logging.INFO)
    vllm_plugin.install()
    vllm_plugin.install()
    module = load(SPARSE_UTILS)
    function = getattr(module, CONVERT)
    vllm_plugin.install()
    assert getattr(module, CONVERT) is function
    assert len([r for r in caplog.records if r.name == "vllm.mla_index"]) == 1


def test_back_everywhere(vllm):
    before = load(f"{MLA}.flashmla_sparse")
    original = before.call()
    vllm_plugin.install()
    after = load(f"{MLA}.index_group")
    user = types.ModuleType("user_of_both")
    user.mine, user.replaced = getattr(ours, CONVERT), after.call()
    sys.modules["user_of_both"] = user
    try:
        vllm_plugin.uninstall()
        vllm_plugin.uninstall()
    finally:
        del sys.modules["user_of_both"]
    assert before.call() is original
    assert after.call() is original
    assert user.replaced is original
    assert user.mine is getattr(ours, CONVERT)  # imported from us on purpose
    assert not vllm_plugin.installed()
    assert theirs(load(f"{MLA}.cyclic").call())
    vllm_plugin.install()
    assert {who(name) for name in CALLERS} == {"ours"}


def test_back_after_others_put_vllms_back(vllm):
    """And it was installed again, so that the owner of the kernel was hooked twice."""
    module = load(SPARSE_UTILS)
    own = {name: getattr(module, name) for name in SIGNATURES}
    vllm_plugin.install()
    vars(module).update(own)
    vllm_plugin.install()
    assert is_ours(getattr(module, CONVERT))
    vllm_plugin.uninstall()
    assert {name: getattr(module, name) for name in SIGNATURES} == own
    assert "compile" not in vars(module._CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL)
    assert not vllm_plugin.installed()


def test_back_before_vllm_is_imported(vllm):
    vllm_plugin.install()
    vllm_plugin.uninstall()
    assert theirs(load(f"{MLA}.flashmla_sparse").call())


# --- what is said --------------------------------------------------------------------------------


def test_one_line_says_what_was_replaced_and_by_whom(vllm, caplog):
    caplog.set_level(logging.INFO)
    load(f"{MLA}.flashmla_sparse")
    mla_index.set_default_backend("torch")
    vllm_plugin.install()
    (line,) = [r.getMessage() for r in caplog.records if r.name == "vllm.mla_index"]
    for told in (*SIGNATURES, "in 3 modules", "by torch (by set_default_backend)", "warm-up asks"):
        assert told in line


def test_no_backend_that_could_serve_is_a_warning(vllm, caplog, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    mla_index.set_default_backend("cupy")
    vllm_plugin.install()
    load(SPARSE_UTILS)
    (line,) = [r for r in caplog.records if r.name == "vllm.mla_index"]
    assert line.levelno == logging.WARNING
    assert "on cpu by no backend (by set_default_backend)" in line.getMessage()


def test_a_backend_that_there_is_not_is_told_at_once(vllm, monkeypatch):
    monkeypatch.setenv("MLA_INDEX_BACKEND", "tritn")
    mla_index.reload_environment()
    with pytest.raises(mla_index.UnknownBackend, match="tritn"):
        vllm_plugin.install()
    assert theirs(load(f"{MLA}.flashmla_sparse").call())


def parameters(name, old, new):
    assert old in SIGNATURES[name]
    return {"changed": {name: SIGNATURES[name].replace(old, new)}}


OTHER = {
    "a new parameter": (
        parameters(CONVERT, ", idx_mapping=None", ", idx_mapping=None, scale=1"),
        f"{CONVERT} has the unknown parameter scale",
    ),
    "no block stride": (
        parameters(FILTER, " BLOCK_STRIDE_ROWS=None,", ""),
        f"{FILTER} has no parameter BLOCK_STRIDE_ROWS",
    ),
    "another default": (
        parameters(CONVERT, "BLOCK_N=128", "BLOCK_N=256"),
        f"{CONVERT} has BLOCK_N=256, not BLOCK_N=128",
    ),
    "another kind of default": (
        parameters(CONVERT, "dcp_rank=0", "dcp_rank=False"),
        f"{CONVERT} has dcp_rank=False, not dcp_rank=0",
    ),
    "another order": (
        parameters(FILTER, "dcp_size, dcp_rank", "dcp_rank, dcp_size"),
        f"{FILTER} takes its parameters in another order",
    ),
    "by keyword": (
        parameters("flat_kv_row_view", "kv_cache, ", "kv_cache, *, "),
        "flat_kv_row_view takes block_size as keyword-only",
    ),
    "no function": ({"changed": {CONVERT: None}, "tail": ""}, f"has no {CONVERT}"),
    "other keys": (
        {"fields": tuple(f for f in KEY_FIELDS if f != "dcp_interleave")},
        "have no dcp_interleave",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER)
def test_another_vllm_is_left_alone(case, tmp_path, caplog):
    how, difference = OTHER[case]
    sys.path.insert(0, str(vllm_stand_in.write(tmp_path, **how)))
    vllm_plugin.install()
    module = load(SPARSE_UTILS)
    vllm_plugin.install()
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert difference in warning.getMessage()
    assert "0.33.0" in warning.getMessage()
    for name in SIGNATURES:
        assert not hasattr(module, name) or theirs(getattr(module, name))
    source = vllm_forms.source_in(tmp_path).read_text()
    assert vllm_forms.form_of_source(source) == vllm_forms.form_of_module(module)


def test_a_vllm_that_was_left_alone_is_looked_at_again_when_it_is_imported_again_only(
    tmp_path, monkeypatch
):
    how, _ = OTHER["another default"]
    sys.path.insert(0, str(vllm_stand_in.write(tmp_path, **how)))
    vllm_plugin.install()
    module = load(SPARSE_UTILS)
    looks = []
    look = vllm_forms.form_of_module
    monkeypatch.setattr(vllm_forms, "form_of_module", lambda m: looks.append(m) or look(m))
    for number in range(3):
        importlib.util.find_spec(f"nothing_{number}")
    vllm_plugin.install()
    assert looks == []
    vllm_stand_in.write(tmp_path)
    importlib.invalidate_caches()
    shutil.rmtree(vllm_forms.source_in(tmp_path).parent / "__pycache__", ignore_errors=True)
    importlib.reload(module)
    assert len(looks) == 1
    assert is_ours(getattr(module, CONVERT))


def test_a_name_that_is_no_function_is_neither_replaced_nor_replaces(tmp_path):
    """What stands for a missing function is often None, and every module has that."""
    tail = "request_row_bounds = None\n"
    folder = vllm_stand_in.write(tmp_path, changed={"request_row_bounds": None}, tail=tail)
    sys.path.insert(0, str(folder))
    vllm_plugin.install()
    module = load(SPARSE_UTILS)
    assert is_ours(getattr(module, CONVERT))
    assert module.request_row_bounds is None
    assert vllm_plugin.__dict__["_left_alone"] is None


def test_a_function_that_does_not_tell_its_parameters_is_a_difference(tmp_path, caplog):
    folder = vllm_stand_in.write(tmp_path, tail="flat_kv_row_view = getattr\n")
    sys.path.insert(0, str(folder))
    vllm_plugin.install()
    assert theirs(getattr(load(SPARSE_UTILS), CONVERT))
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "flat_kv_row_view does not tell its parameters" in warning.getMessage()


def test_the_older_form_is_replaced(tmp_path, caplog):
    """Without `idx_mapping`, with fewer functions and no warm-up."""
    caplog.set_level(logging.INFO)
    older = {CONVERT: SIGNATURES[CONVERT].removesuffix(", idx_mapping=None")}
    missing = {"prepare_sparse_mla_safe_lengths": None, "request_row_bounds": None}
    folder = vllm_stand_in.write(tmp_path, changed={**older, **missing}, fields=None)
    sys.path.insert(0, str(folder))
    vllm_plugin.install()
    module = load(SPARSE_UTILS)
    assert is_ours(getattr(module, CONVERT))
    assert is_ours(module.flat_kv_row_view, "flat_kv_row_view")
    assert not hasattr(module, "request_row_bounds")
    (line,) = [r.getMessage() for r in caplog.records if r.name == "vllm.mla_index"]
    assert "compiled at their first use" in line
    vllm_plugin.uninstall()
    source = vllm_forms.source_in(tmp_path).read_text()
    assert vllm_forms.form_of_source(source) == vllm_forms.form_of_module(module)
    assert not vllm_forms.form_of_source(source).differences()


# --- warm-up -------------------------------------------------------------------------------------


class Recorder:
    """A backend for the CPU that notes what it is asked to build and to warm."""

    name = "recorder"
    contract_version = CONTRACT_VERSION
    limits = Limits(("remap", "safe_lengths"), ("cpu", "cuda"))

    def __init__(self):
        self.built, self.warmed = [], []

    def unavailable(self, device, *, probe):
        return None

    def unsupported(self, op, spec):
        return None

    def build(self, op, spec, device):
        self.built.append((op, spec))
        launch = registry.load("torch").build(op, spec, device).launch
        return Kernel(launch, lambda: self.warmed.append((op, spec)) or 1)


KEYS = {
    "plain": {},
    "counted": {"count_valid": True, "compact_to_front": True},
    "numbers for flags": {"count_valid": 1, "compact_to_front": 1},
    "mapping": {"count_valid": True, "compact_to_front": True, "has_idx_mapping": True},
    "workspace": {"count_valid": True, "compact_to_front": True, "has_prefill_workspace": True},
    "ranks": {
        "count_valid": True, "compact_to_front": True,
        "dcp_size": 4, "dcp_rank": 3, "dcp_interleave": 16,
    },
}  # fmt: skip


def calls_of(key, functions, tokens):
    """The call that vLLM makes with the configuration of a key."""
    rows = torch.zeros(2, dtype=torch.int32)
    table = torch.ones((1, 2), dtype=torch.int32)
    common = {
        "BLOCK_SIZE": 64,
        "NUM_TOPK_TOKENS": 2048,
        "return_valid_counts": "count_valid" in key,
    }
    if "dcp_size" in key:
        return getattr(functions, FILTER)(rows, table, tokens, 4, 3, 16, **common)
    if "has_idx_mapping" in key:
        common["idx_mapping"] = rows
    if "has_prefill_workspace" in key:
        common |= {
            "HAS_PREFILL_WORKSPACE": True,
            "prefill_workspace_request_ids": rows,
            "prefill_workspace_starts": rows,
        }
    return getattr(functions, CONVERT)(rows, table, tokens, **common)


@pytest.mark.parametrize("kind", KEYS)
def test_vllms_warmup_warms_what_is_then_called(kind, vllm, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    recorder = Recorder()
    mla_index.register(recorder)
    mla_index.set_default_backend("recorder")
    vllm_plugin.install()
    module = load(SPARSE_UTILS)
    owner = module._CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL
    plain = {
        "block_size": 64, "num_topk_tokens": 2048, "count_valid": False, "compact_to_front": False,
        "dcp_size": 1, "dcp_rank": 0, "dcp_interleave": 1, "has_prefill_workspace": False,
        "has_idx_mapping": False,
    }  # fmt: skip
    owner.compile_many([owner.CompileKey(**{**plain, **KEYS[kind]})])
    assert owner.compiled == []  # vLLM's kernel would never be called
    assert [op for op, _ in recorder.warmed] == ["remap", "safe_lengths"]
    warmed = list(recorder.built)
    tokens = torch.zeros((2, 2048), dtype=torch.int32)
    got = calls_of(KEYS[kind], module, tokens)
    if isinstance(got, tuple):
        module.prepare_sparse_mla_safe_lengths(*got)
    assert recorder.built == warmed
    vllm_plugin.uninstall()
    owner.compile_many(["key"])
    assert owner.compiled == ["key"]


def test_an_owner_that_takes_no_other_compile_is_left_to_itself(tmp_path, caplog):
    """The functions are replaced all the same, and an import of vLLM does not fail for it."""
    caplog.set_level(logging.INFO)
    tail = (
        "class Fixed(ConvertKernel):\n"
        "    def __setattr__(self, name, value): raise AttributeError(name)\n"
        "    def __init__(self): pass\n"
        "_CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL = Fixed()\n"
    )
    sys.path.insert(0, str(vllm_stand_in.write(tmp_path, tail=tail)))
    vllm_plugin.install()
    assert is_ours(getattr(load(SPARSE_UTILS), CONVERT))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "vllm.mla_index"]
    assert "compiled at their first use" in line


# --- processes and packaging ---------------------------------------------------------------------


def run(code, folder):
    environment = {"PYTHONPATH": f"{PROJECT}:{folder}:{PROJECT / 'tests'}", "MLA_INDEX_VLLM": "1"}
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )


def test_forked_workers(vllm):
    """A worker has the parent's state, and what it does with it is its own affair."""
    result = run(
        """
        import os, sys
        from mla_index.integrations import vllm_plugin
        from vllm_stand_in import CALLERS, CONVERT, MLA, load
        def replaced(name): return load(name).call().__code__.co_filename.endswith("vllm.py")
        vllm_plugin.register()
        load(CALLERS[0])
        with vllm_plugin._lock:  # held by somebody while forking
            child = os.fork()
        if child == 0:
            vllm_plugin.register()
            fine = all(map(replaced, CALLERS))
            vllm_plugin.uninstall()
            os._exit(0 if fine and not any(map(replaced, CALLERS)) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert all(map(replaced, CALLERS))
        print("fine")
        """,
        vllm,
    )
    assert result.stdout == "fine\n", result.stderr


def test_a_worker_forked_in_the_middle_gives_all_back(vllm):
    result = run(
        """
        import os, threading
        from mla_index.integrations import vllm_plugin
        from vllm_stand_in import CALLERS, CONVERT, SPARSE_UTILS, load
        module = load(SPARSE_UTILS)
        for name in CALLERS: load(name)
        def theirs(): return getattr(module, CONVERT).__code__.co_filename.endswith("utils.py")
        swap, middle, go_on = vllm_plugin._swap, threading.Event(), threading.Event()
        def slowly(replacements):
            held = swap(replacements)
            if threading.current_thread() is not threading.main_thread():
                middle.set()
                go_on.wait()
            return held
        vllm_plugin._swap = slowly
        thread = threading.Thread(target=vllm_plugin.register)
        thread.start()
        middle.wait()
        if not (child := os.fork()):
            vllm_plugin.register()
            installed = not theirs()
            vllm_plugin.uninstall()
            os._exit(0 if installed and theirs() else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        go_on.set()
        thread.join()
        vllm_plugin.uninstall()
        print(status, theirs())
        """,
        vllm,
    )
    assert result.stdout == "0 True\n", result.stderr


def test_spawned_workers(vllm):
    result = run(
        """
        import multiprocessing
        from mla_index.integrations import vllm_plugin
        from vllm_stand_in import CALLERS, load
        def work(_):
            vllm_plugin.register()
            return [load(n).call().__code__.co_filename.endswith("vllm.py") for n in CALLERS]
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [0]) == [[True] * len(CALLERS)])
        """,
        vllm,
    )
    assert result.stdout == "True\n", result.stderr


def test_the_plugin_starts_no_device(vllm):
    result = run(
        """
        import torch
        from mla_index.integrations import vllm_plugin
        from vllm_stand_in import CALLERS, load
        vllm_plugin.register()
        for name in CALLERS: load(name)
        print(vllm_plugin.installed(), torch.cuda.is_initialized())
        """,
        vllm,
    )
    assert result.stdout == "True False\n", result.stderr


def test_the_entry_point():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["vllm.general_plugins"]
    assert list(points) == ["mla_index"]
    module, _, function = points["mla_index"].partition(":")
    assert getattr(importlib.import_module(module), function) is vllm_plugin.register
