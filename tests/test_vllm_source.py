"""Against vLLM's real sources, where `VLLM_SRC_FOR_TESTS` names the folder of an unpacked wheel.

Everything of vLLM but the modules under test is a stub; its kernels run in Triton's interpreter.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import PROJECT
from test_vllm_names import documented_sites

from mla_index.bench import asked, record
from mla_index.integrations import vllm as ours
from mla_index.integrations import vllm_forms, vllm_plugin

sys.path.insert(0, str(PROJECT / "benchmarks"))
compare_vllm = importlib.import_module("compare_vllm")
vllm_arguments = importlib.import_module("vllm_arguments")
vllm_equality = importlib.import_module("vllm_equality")
vllm_source = importlib.import_module("vllm_source")
vllm_timing = importlib.import_module("vllm_timing")
sys.path.remove(str(PROJECT / "benchmarks"))

SOURCE = os.environ.get("VLLM_SRC_FOR_TESTS")
MLA = "vllm.v1.attention.backends.mla"
SITES = (
    f"{MLA}.flashattn_mla_sparse",
    f"{MLA}.flashinfer_mla_sparse",
    f"{MLA}.flashinfer_mla_sparse_sm90",
    f"{MLA}.flashinfer_mla_sparse_sm120",
    f"{MLA}.flashmla_sparse",
    f"{MLA}.index_group",
    f"{MLA}.indexer",
    f"{MLA}.rocm_aiter_mla_sparse",
    f"{MLA}.xpu_mla_sparse",
    "vllm.model_executor.layers.attention.sparse_mla_attention",
    "vllm.models.dots3_note.nvidia.attention",
)
ROCM = f"{MLA}.rocm_aiter_mla_sparse"
CONVERT = vllm_forms.NEEDED


@pytest.fixture
def source():
    if SOURCE is None:
        pytest.skip(
            "VLLM_SRC_FOR_TESTS names no folder with vLLM's sources (an unpacked wheel); "
            "test_vllm_plugin.py has a stand-in"
        )
    return Path(SOURCE)


@pytest.fixture
def vllm(source):
    """vLLM's modules can be imported from their real sources."""
    pytest.importorskip("triton", reason="vLLM's kernels are defined with Triton")
    with vllm_source.unpacked(source, vllm_source.NEEDED + SITES):
        yield
        vllm_plugin.uninstall()


def held(module):
    """Which of the functions' names a module holds, and whether each is ours."""
    return {
        name: value.__code__ is function.__code__
        for name, function in vllm_forms.FUNCTIONS.items()
        if (value := vars(module).get(name)) is not None
    }


# --- what it looks like --------------------------------------------------------------------------


def test_signatures(vllm):
    module = importlib.import_module(vllm_source.SPARSE_UTILS)
    for name, function in vllm_forms.FUNCTIONS.items():
        mine = inspect.signature(function)
        real = inspect.signature(getattr(module, name))
        if name == "request_row_bounds":  # NumPy is not imported for the sake of an annotation
            assert list(mine.parameters) == list(real.parameters)
        else:
            assert mine == real


def test_it_fits(vllm, source):
    form = vllm_forms.form_of_source(vllm_forms.source_in(source).read_text())
    assert form == vllm_forms.form_of_module(importlib.import_module(vllm_source.SPARSE_UTILS))
    assert form.differences() == []
    assert set(form.parameters) == set(vllm_forms.FUNCTIONS)


def test_the_documented_call_sites_are_all(source):
    """Each call of one of the names, by file and line; the ROCm module's own function apart."""
    found = Counter()
    for file in (source / "vllm").rglob("*.py"):
        text = file.read_text()
        if not any(name in text for name in vllm_forms.FUNCTIONS) or file.stem == "sparse_utils":
            continue
        for node in ast.walk(ast.parse(text)):
            name = getattr(getattr(node, "func", None), "id", None)
            if name in vllm_forms.FUNCTIONS and (file.stem, name) != (ROCM.split(".")[-1], CONVERT):
                found[file.name, node.lineno] += 1
    assert set(found) == {(file, line) for file, line, _, _ in documented_sites()}


# --- replacing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_call_site_is_served(vllm, when):
    if when == "after":
        vllm_plugin.install()
    modules = [importlib.import_module(name) for name in SITES]
    theirs = vars(importlib.import_module(ROCM))[CONVERT]
    if when == "before":
        assert not any(any(held(module).values()) for module in modules)
        vllm_plugin.install()
    for module in modules:
        served = held(module)
        assert served
        if module.__name__ == ROCM:
            assert not served.pop(CONVERT)
            assert vars(module)[CONVERT] is theirs
        assert all(served.values()), module.__name__
    vllm_plugin.uninstall()
    assert not any(any(held(module).values()) for module in modules)


def test_vllms_own_code_converts_with_ours(vllm, monkeypatch):
    """`SparseMLAIndexGroup` from its source: into its buffers, on a stream that is a stub."""
    vllm_plugin.install()
    module = importlib.import_module(f"{MLA}.index_group")
    monkeypatch.setattr(module, "current_stream", lambda: SimpleNamespace(wait_event=id))
    monkeypatch.setattr(module, "in_piecewise_cudagraph", lambda: False)

    class Stream:
        wait_event = wait_stream = staticmethod(id)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    logical = torch.full((3, 128), -1, dtype=torch.int32)
    logical[0, :3] = torch.tensor([64, -1, 0])
    group = module.SparseMLAIndexGroup(
        logical_topk_indices=logical,
        physical_topk_indices=torch.zeros((5, 128), dtype=torch.int32),
        valid_topk_counts=torch.zeros(5, dtype=torch.int32),
        side_stream=Stream(),
        logical_topk_ready=None,
        physical_topk_ready=SimpleNamespace(record=id),
        has_indexer=True,
    )
    metadata = SimpleNamespace(
        req_id_per_token=torch.zeros(4, dtype=torch.int32),
        block_table=torch.tensor([[7, -1]], dtype=torch.int32),  # vLLM would give -64
        block_size=64,
    )
    slots, counts = group.convert_logical_to_physical_topk(
        0, logical, metadata, block_stride_rows=None, return_valid_counts=True
    )
    assert slots[0, :3].tolist() == [448, -1, -1]
    assert counts.tolist() == [1, 0, 0]
    assert slots.data_ptr() == group.physical_topk_indices.data_ptr()


def test_vllms_own_warmup_warms_ours(vllm, monkeypatch):
    """Keys made by vLLM's `get_warmup_keys`, compiled by its `compile_many`."""
    warmed = []
    monkeypatch.setattr(
        vllm_plugin.warming, "warmup", lambda op, spec, *, device: warmed.append((op, spec))
    )
    vllm_plugin.install()
    module = importlib.import_module(vllm_source.SPARSE_UTILS)
    owner = getattr(module, vllm_forms.WARMUP_KERNEL)
    parallel = SimpleNamespace(
        decode_context_parallel_size=4,
        cp_kv_cache_interleave_size=16,
        prefill_context_parallel_size=2,
    )
    monkeypatch.setattr(module, "get_dcp_group", lambda: SimpleNamespace(rank_in_group=3))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=64),
        parallel_config=parallel,
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(index_topk=2048), max_model_len=4096
        ),
        attention_config=SimpleNamespace(hisparse_config=object()),
    )
    keys = owner.get_warmup_keys(config, block_stride_rows=192)
    owner.compile_many(keys)
    specs = [spec for op, spec in warmed if op == "remap"]
    assert len(specs) == len(keys) == 8
    assert {(s.dcp_size, s.dcp_interleave) for s in specs} == {(1, 1), (4, 16)}
    assert {s.block_size for s in specs} == {64}
    assert any(s.workspace and s.dcp_size == 4 and s.compact and s.counts for s in specs)
    assert any(s.request_rows and not s.counts for s in specs)


# --- the same results ----------------------------------------------------------------------------


def compare(source, *arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(PROJECT)}
    script = str(PROJECT / "benchmarks" / "compare_vllm.py")
    return subprocess.run(
        [sys.executable, script, "--vllm-src", str(source), "--device", "cpu", *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_equal_on_random_inputs(source):
    pytest.importorskip("triton", reason="vLLM's kernels are defined with Triton")
    result = compare(source, "--equality", "64", "--kinds", "32", "--processes", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "64 inputs, 0 unequal" in result.stdout


def test_a_comparison_as_it_is_timed(source, tmp_path):
    pytest.importorskip("triton", reason="vLLM's kernels are defined with Triton")
    file = tmp_path / "record.json"
    shape = ("--rows", "2", "--topk", "128", "--dcp", "2")
    result = compare(source, *shape, "--json", str(file))
    assert result.returncode == 0, result.stdout + result.stderr
    assert '"kind": "compare_vllm"' in file.read_text()


# --- the comparison itself, without vLLM ---------------------------------------------------------


def equal(theirs, **changes):
    given = {
        "number": 48, "kinds": 16, "widths": (128, 4224), "rows": 4,
        "device": torch.device("cpu"), "seed": 1, **changes,
    }  # fmt: skip
    return vllm_equality.run(theirs, ours, **given)


def with_fault(name, spoil):
    """Our functions as a module, one of them with a fault."""
    functions = {other: getattr(ours, other) for other in vllm_forms.FUNCTIONS}
    right = functions[name]
    functions[name] = lambda *args, **keywords: spoil(right(*args, **keywords))
    return SimpleNamespace(**functions)


def test_the_comparison_passes_equals():
    found = equal(SimpleNamespace(**vllm_forms.FUNCTIONS))
    assert found["unequal"] == []
    assert set(found["by_mode"]) == set(vllm_equality.MODES)
    assert sum(found["by_mode"].values()) == 48


def one_slot(got):
    (got[0] if isinstance(got, tuple) else got)[-1, -1] += 1
    return got


def one_count(got):
    if isinstance(got, tuple):
        got[1][0] += 1
    return got


FAULTS = {
    "slot": (CONVERT, one_slot),
    "count": (CONVERT, one_count),
    "filtered": ("triton_filter_and_convert_dcp_index", one_slot),
    "length": ("prepare_sparse_mla_safe_lengths", lambda lengths: lengths + 1),
    "stride": ("flat_kv_row_view", lambda view: (view[0], view[1] + 1)),
    "bounds": ("request_row_bounds", lambda bounds: bounds + 1),
    "order": (
        CONVERT,
        lambda got: (got[0].sort(dim=1).values, got[1]) if isinstance(got, tuple) else got,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees(fault):
    assert equal(with_fault(*FAULTS[fault]))["unequal"]


def test_shares_of_the_inputs_are_all_of_them():
    spoiled = with_fault(CONVERT, one_slot)
    whole = equal(spoiled)
    shares = [equal(spoiled, share=(part, 2)) for part in range(2)]
    assert sum((Counter(share["by_mode"]) for share in shares), Counter()) == whole["by_mode"]
    assert all(set(share["by_mode"]) == set(vllm_equality.MODES) for share in shares)
    unequal = [told for share in shares for told in share["unequal"]]
    assert sorted(unequal) == sorted(whole["unequal"])
    assert whole["unequal"]


# --- time on the host, without vLLM --------------------------------------------------------------

ALLOCATE_ALWAYS = {"dcp_filter", "safe_lengths"}
LAUNCH_NOTHING = {"flat_row_view", "request_row_bounds"}


def on_the_host(theirs, seconds=60.0):
    deadline = time.monotonic() + seconds
    state = vllm_timing.Comparison(theirs, "0.0", "torch", torch.device("cpu"), deadline)
    arguments = SimpleNamespace(
        operations=("remap", "remap_counts", "dcp_filter", "request_rows", "safe_lengths"),
        dcp=(2,), host_topk=(128,), host_rounds=2, host_calls=1, seconds=seconds,
    )  # fmt: skip
    timed = vllm_timing.on_the_host(state, arguments)
    assert len(timed) == len({row.operation for row in state.rows})
    return state


def test_like_is_timed_beside_like():
    state = on_the_host(SimpleNamespace(**vllm_forms.FUNCTIONS))
    assert state.wrong == state.left_out == []
    providers = {}
    for row in state.rows:
        assert (row.metric, row.value > 0) == ("host_us", True)
        providers.setdefault(row.operation, set()).add(row.provider)
    given = {"vllm 0.0", "auto", "auto by vLLM's names"}
    allocated = {f"{name}, outputs allocated" for name in given}
    for operation in ("remap", "remap_counts", "request_rows"):
        assert providers.pop(operation) == given | allocated
    for operation in ALLOCATE_ALWAYS:
        assert providers.pop(operation) == {"auto"} | allocated
    for operation in LAUNCH_NOTHING:
        assert providers.pop(operation) == allocated
    assert providers == {}
    read = record.rows_of({"rows": [row.as_dict() for row in state.rows]})
    points = list(asked.names_over_native(lambda row: row.value)(record.Table(read)))
    assert len(points) == 3 * 2 + len(ALLOCATE_ALWAYS) + len(LAUNCH_NOTHING)


def test_how_the_host_was_timed_is_recorded_where_it_was(tmp_path):
    file = tmp_path / "record.json"
    timed = on_the_host(SimpleNamespace(**vllm_forms.FUNCTIONS))
    late = on_the_host(SimpleNamespace(**vllm_forms.FUNCTIONS), seconds=-1)
    arguments = vllm_arguments.parse(["--json", str(file), "--host-rounds", "3"])
    compare_vllm.write(timed, {}, 1.0, arguments)
    assert record.read(file)["host_method"].startswith("in 3 rounds; ")
    compare_vllm.write(late, {}, 1.0, arguments)
    assert "host_method" not in record.read(file)


@pytest.mark.parametrize(
    ("fault", "operations"),
    [
        ("slot", {"remap", "remap_counts", "request_rows"}),
        ("count", {"remap_counts", "request_rows"}),
        ("filtered", {"dcp_filter"}),
        ("length", {"safe_lengths"}),
        ("stride", {"flat_row_view"}),
        ("bounds", {"request_row_bounds"}),
    ],
)
def test_what_is_not_equal_is_not_timed(fault, operations):
    state = on_the_host(with_fault(*FAULTS[fault]))
    assert {told.partition(",")[0] for told in state.wrong} == operations
    assert operations.isdisjoint(row.operation for row in state.rows)
    assert len({row.operation for row in state.rows}) == 7 - len(operations)


def test_what_breaks_is_told_and_takes_nothing_else_away():
    functions = dict(vllm_forms.FUNCTIONS)
    del functions["prepare_sparse_mla_safe_lengths"]

    def broken(*_):
        raise RuntimeError("out of memory")

    state = on_the_host(SimpleNamespace(**functions, prepare_sparse_mla_safe_lengths=broken))
    assert state.wrong == ["safe_lengths, dcp 1, T = 32, K = 128: RuntimeError: out of memory"]
    assert len({row.operation for row in state.rows}) == 6


def test_when_the_seconds_are_over_the_rest_is_left_out():
    state = on_the_host(SimpleNamespace(**vllm_forms.FUNCTIONS), seconds=-1.0)
    assert len(state.left_out) == 7
    assert state.rows == state.wrong == []


def test_only_racing_programs_may_change_the_order():
    assert [vllm_equality.ordered(k, True) for k in (128, 2176, 4096, 4224, 16384)] == [
        True, True, True, False, True,
    ]  # fmt: skip
    assert vllm_equality.ordered(4224, False)
    one, other = torch.tensor([[1, 2, -1]]), torch.tensor([[2, 1, -1]])
    vllm_equality.check_equal(one, other, "slots", in_order=False)
    with pytest.raises(vllm_equality.Unequal, match="2 of 3 values differ"):
        vllm_equality.check_equal(one, other, "slots")
    with pytest.raises(vllm_equality.Unequal, match="1 of 3 values differ"):
        vllm_equality.check_equal(one, torch.tensor([[2, 2, -1]]), "slots", in_order=False)


class Timed:
    """Stands for a graph that takes the next of some times at each replay."""

    def __init__(self, *times):
        self.times, self.samples = times, []

    def replay(self):
        self.samples.append(self.times[len(self.samples) % len(self.times)])


@pytest.mark.parametrize(("times", "more"), [((2.0, 2.1), False), ((2.0, 2.4), True)])
def test_times_that_vary_are_taken_more_often_of_all(times, more):
    graphs = [Timed(1.0), Timed(*times)]
    found = vllm_timing.settled_times(graphs, lambda: False)
    replays = vllm_timing.ROUNDS + more * vllm_timing.MORE_ROUNDS
    assert [len(graph.samples) for graph in graphs] == [replays] * 2
    assert found[0].median == 1.0
    assert found[1].low in times
