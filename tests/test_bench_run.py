"""A run of the benchmark: what it covers, leaves out, and does with what is wrong."""

import contextlib
import subprocess
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla_index import simulation
from mla_index.bench import contenders as contenders_module
from mla_index.bench import importing, measure, warming
from mla_index.bench import run as run_module
from mla_index.bench.contenders import COMPOSITION, COPY
from mla_index.bench.plan import Plan, contenders, too_large, usable_backends
from mla_index.bench.record import METRICS, RecordError, Table, read, rows_of, write
from mla_index.bench.run import Run, _by_graphs, run
from mla_index.bench.workloads import make_inputs, uniform_batch, why_no_step
from mla_index.errors import BackendUnavailable, UnknownBackend
from mla_index.simulation.setting import ConfigError
from mla_index.simulation.trace import Request, read_trace

TINY = {
    "operations": ("remap", "dcp_filter", "flat_row_view"),
    "rows": (1, 4),
    "topk": (32, 7),
    "dcp": (2,),
    "quick": True,
    "seconds": 60.0,
}


@pytest.fixture(scope="module")
def record():
    return run(Plan(**TINY))


def test_every_contender_is_timed_at_every_shape(record):
    table = Table(rows_of(record))
    assert record["left_out"] == record["wrong"] == []
    assert record["interrupted"] is False
    for rows in (1, 4):
        for topk in (32, 7):
            shape = {"rows": rows, "topk": topk, "workload": "uniform", "dtype": "int32"}
            assert table.value("cpu_us", operation=COPY, **shape) > 0
            for provider in ("torch", COMPOSITION):
                who = {"provider": provider, **shape}
                assert table.value("cpu_us", operation="remap", **who) > 0
                assert table.value("cpu_us", operation="dcp_filter", dcp=2, **who) > 0
    assert not list(table.find("cpu_us", operation="flat_row_view"))
    assert table.value("host_us", operation="flat_row_view", provider="auto") > 0
    assert table.value("peak_bytes", operation="remap", provider="torch") > 0
    assert {row.metric for row in table.rows} <= set(METRICS)


def test_a_record_says_where_it_comes_from(record):
    assert record["kind"] == "bench"
    assert len(record["source_hash"]) == 64
    assert record["versions"]["torch"] == torch.__version__
    assert record["device"]["type"] == "cpu"
    assert record["plan"]["rows"] == [1, 4]


def test_a_record_survives_writing(record, tmp_path):
    path = tmp_path / "bench.json"
    write(record, path)
    assert read(path) == record
    assert path.read_text().count('"metric"') == len(record["rows"])


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 0, "rows": []}'])
def test_what_is_no_record_is_named(tmp_path, content):
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=r"bench\.json"):
        read(path)
    with pytest.raises(RecordError, match="cannot read"):
        read(tmp_path / "absent.json")


def test_a_trace_is_measured_instead():
    small = Path(simulation.__file__).parent / "small_trace.jsonl"
    plan = Plan(
        operations=("remap",), topk=(1024, 16), rows=(5, 2, 96), quick=True, trace=small, seconds=60
    )
    record = run(plan)
    timed = [row for row in rows_of(record) if row.metric == "cpu_us"]
    assert {(row.workload, row.rows) for row in timed} == {
        ("trace decode", 2), ("trace decode", 4), ("trace decode", 48), ("trace prefill", 8192),
    }  # fmt: skip
    assert record["left_out"] == [
        f"trace decode, T = {rows}, K = {topk}: {why}"
        for topk in (1024, 16)
        for rows, why in (
            (5, "each request has 2 rows, so T = 4 instead"),
            (96, "the trace has 24 requests of 2 rows, so T = 48 instead"),
        )
    ]
    assert record["plan"]["valid"] is None
    prompts = [seen + 1 for request in read_trace(small) for seen in range(request.input_length)]
    share = sum(min(1024, seen) for seen in prompts[:8192]) / 8192 / 1024
    valid = {(row.workload, row.rows, row.topk): row.valid for row in timed}
    assert valid["trace decode", 4, 16] == 1
    assert valid["trace prefill", 8192, 1024] == pytest.approx(share, abs=1e-4)
    assert share < 0.9


@pytest.mark.parametrize(
    ("quick", "mtp", "rows"),
    [(False, 0, (1, 2, 4, 8, 16, 32, 64, 128)), (True, 2, (3, 48, 384))],
)
def test_by_default_a_trace_is_asked_for_steps_that_it_can_have(quick, mtp, rows):
    plan = Plan(trace=Path("any.jsonl"), quick=quick, mtp=mtp)
    assert plan.rows == rows
    line = Request(0.0, 600, 1, (1, 2))
    assert [why_no_step([line] * 128, count, mtp) for count in rows] == [None] * len(rows)


def test_when_the_time_is_over_the_rest_is_left_out():
    found = run(Plan(**{**TINY, "seconds": 0.0}))
    assert len(found["left_out"]) == 4
    assert found["left_out"][0] == "uniform, T = 1, K = 32: stopped after 0 s"
    assert not list(Table(rows_of(found)).find("cpu_us"))


def test_what_was_measured_before_an_interruption_is_kept(monkeypatch):
    real, begun = run_module._time_shape, []

    def timed_once(state, batch, topk):
        if begun:
            raise KeyboardInterrupt
        begun.append(topk)
        real(state, batch, topk)

    monkeypatch.setattr(run_module, "_time_shape", timed_once)
    found = run(Plan(**TINY))
    assert found["interrupted"] is True
    assert found["left_out"] == ["what was to follow: interrupted"]
    assert {(row.rows, row.topk) for row in Table(rows_of(found)).find("cpu_us")} == {(1, 32)}
    assert not list(Table(rows_of(found)).find("import_ms"))


def test_large_shapes_are_left_out_with_the_reason():
    plan = Plan(quick=True)
    assert too_large(plan, 1, 2048) is None
    assert "at most 8388608 is measured on cpu" in too_large(plan, 32768, 2048)


def test_a_wrong_result_is_told_and_not_timed(monkeypatch):
    monkeypatch.setattr("mla_index.bench.contenders.compose", lambda *a: a[3].fill_(3))
    found = run(Plan(**{**TINY, "operations": ("remap",), "rows": (4,), "topk": (32,)}))
    table = Table(rows_of(found))
    assert any("remap on composition: Differs: out is not" in told for told in found["wrong"])
    assert not list(table.find("cpu_us", provider=COMPOSITION))
    assert list(table.find("cpu_us", provider="torch", operation="remap"))


def test_what_breaks_leaves_the_others_their_times(monkeypatch):
    def broken(*arguments):
        raise OSError("gone")

    monkeypatch.setattr("mla_index.bench.contenders.compose", broken)
    found = run(Plan(**{**TINY, "operations": ("remap",), "rows": (4,), "topk": (32,)}))
    assert any("OSError: gone" in told for told in found["wrong"])
    assert list(Table(rows_of(found)).find("cpu_us", provider="torch", operation="remap"))


def test_what_breaks_on_the_host_leaves_the_others_their_times(monkeypatch):
    def breaks():
        raise RuntimeError("once too often")

    def bind(operation, provider, inputs, dcp):
        return breaks if provider == "auto" else contenders_module.bind(
            operation, provider, inputs, dcp
        )  # fmt: skip

    monkeypatch.setattr(run_module, "bind", bind)
    found = run(Plan(operations=("flat_row_view",), quick=True, seconds=0.0))
    table = Table(rows_of(found))
    assert table.value("host_us", operation="flat_row_view", provider="torch") > 0
    assert table.value("host_us", operation="flat_row_view", provider="auto") is None
    assert found["wrong"] == [
        "flat_row_view of 1 ranks on the host: RuntimeError: once too often",
        "flat_row_view on auto on the host: RuntimeError: once too often",
    ]


def test_a_device_that_is_too_small_is_no_failure():
    def hungry():
        raise torch.OutOfMemoryError("no room")

    state = Run(Plan(quick=True), ("torch",), deadline=0.0)
    assert not state.attempt("remap", hungry)
    assert state.wrong == []
    assert state.left_out == ["remap: the device's memory is too small"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"operations": ("abacus",)}, "op must be one of remap"),
        ({"rows": (0,)}, "rows must be at least 1, got 0"),
        ({"topk": (0,)}, "topk must be at least 1, got 0"),
        ({"dcp": (1,)}, "dcp must be at least 2, got 1"),
        ({"dcp": (2**31,)}, "Dcp.size"),
        ({"valid": 0.0}, "valid must be above 0"),
        ({"valid": 0.9, "trace": Path("any.jsonl")}, "valid must be None with a trace, got 0.9"),
        ({"mtp": -1}, "mtp must be at least 0"),
        ({"mtp": -1, "trace": Path("any.jsonl")}, "mtp must be at least 0"),
        ({"dtype": torch.int8}, "dtype must be torch.int32"),
        ({"device": torch.device("meta")}, "device must be one of cpu, cuda, got meta"),
    ],
    ids=str,
)
def test_a_plan_is_checked(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Plan(**wrong)


def test_backends_must_exist_and_run():
    with pytest.raises(UnknownBackend):
        Plan(backends=("abacus",))
    with pytest.raises(BackendUnavailable, match="cupy cannot run on cpu"):
        usable_backends(Plan(backends=("cupy",)))


def test_contenders_of_a_kernel_backend_have_no_composition_beside():
    plan = Plan(operations=("remap", "flat_row_view"), quick=True)
    everyone = {str(who) for who in contenders(plan, ("triton",), on_device=False)}
    assert everyone == {"remap on triton", "flat_row_view on triton"}
    assert {str(who) for who in contenders(plan, ("triton", "torch"), on_device=True)} == {
        "remap on triton", "remap on torch", "remap on composition",
    }  # fmt: skip


# --- measuring -----------------------------------------------------------------------------------


def test_host_time_is_that_of_a_call():
    def call():
        total = 0
        for number in range(2000):
            total += number

    (one,) = measure.host_times([call], torch.device("cpu"), number=20, rounds=3)
    assert 5 < one.median < 100_000
    assert one.low <= one.median <= one.high


def test_contenders_on_the_host_are_called_in_turn_in_changing_order(monkeypatch):
    class Timer:
        """Stands for torch's: calls once, and takes as long as the clock says."""

        def __init__(self, _, globals, timer):  # noqa: A002
            self.call = globals["call"]

        def timeit(self, number):
            assert number == 7
            self.call()
            return SimpleNamespace(median=len(called) * 1e-6)

    called = []
    monkeypatch.setattr(measure, "Timer", Timer)
    calls = [lambda name=name: called.append(name) for name in "abc"]
    found = measure.host_times(calls, torch.device("cpu"), number=7, rounds=6)
    rounds = ["".join(called[start : start + 3]) for start in range(0, 18, 3)]
    assert rounds == ["abc", "cba", "bca", "acb", "cab", "bac"]
    assert [sample.median for sample in found] == [pytest.approx(9.5)] * 3
    assert (found[0].low, found[0].high) == (pytest.approx(6.75), pytest.approx(13.0))


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_on_the_host_each_contender_stands_at_every_place_equally_often(count):
    turns = [measure._order(count, turn) for turn in range(2 * count)]
    for place in zip(*turns, strict=True):
        assert sorted(place) == sorted([*range(count)] * 2)
    for forwards, backwards in zip(turns[::2], turns[1::2], strict=True):
        assert forwards == backwards[::-1]


def test_launches_are_told_apart_by_the_marker():
    names = ["remap", "spin_kernel(long)", "fill", "remap", "at::spin_kernel", "spin_kernel"]
    assert measure.counted(names, measure.MARKER) == [1, 2, 0]
    assert measure.counted([], measure.MARKER) == []


def test_peak_memory_counts_what_is_held_together():
    source = torch.zeros(1000, dtype=torch.int32)
    assert measure.peak_bytes(lambda: source.clone(), torch.device("cpu")) == 4000
    one_after_the_other = lambda: [source.clone() is None for _ in range(3)]  # noqa: E731
    assert measure.peak_bytes(one_after_the_other, torch.device("cpu")) == 4000
    together = lambda: [source.clone() for _ in range(3)]  # noqa: E731
    assert measure.peak_bytes(together, torch.device("cpu")) == 12000
    assert measure.peak_bytes(lambda: source.add_(1), torch.device("cpu")) < 100


def test_launches_fill_a_graph_and_use_every_input():
    assert measure.launches_for(16 << 10, 16) == measure.MOST_LAUNCHES
    assert measure.launches_for(128 << 20, 1) == 9
    assert measure.launches_for(128 << 20, 12) == 12
    assert measure.launches_for(8 << 30, 1) == measure.FEWEST_LAUNCHES


class Device:
    """Stands for a CUDA device on which each captured call takes 2 µs when replayed."""

    def __init__(self):
        self.now = 0.0
        self.waits = 0

    def fake(self, monkeypatch):
        device = self

        class Graph:
            calls = None

            def capture_begin(self, pool):
                self.calls = device.capturing = []

            def capture_end(self):
                device.capturing = None

            def replay(self):
                device.now += 2e-3 * len(self.calls)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now

            def synchronize(self):
                device.waits += 1

            def elapsed_time(self, other):
                return other.at - self.at

        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda it: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        return device


def test_a_graph_walks_the_inputs_and_waits_once(monkeypatch):
    device = Device().fake(monkeypatch)
    calls = [lambda number=number: device.capturing.append(number) for number in range(3)]
    graph = measure.Graph(calls, 8, None, replays=4)
    assert graph._graph.calls == [0, 1, 2, 0, 1, 2, 0, 1]
    graph.replay()
    assert graph.samples == pytest.approx([2.0] * 4)
    assert device.waits == 1


def test_graphs_are_replayed_in_turn_until_it_is_late(monkeypatch):
    Device().fake(monkeypatch)
    order = []
    graphs = [measure.Graph([lambda: None], 0, None, 1) for _ in range(2)]
    for name, graph in zip("ab", graphs, strict=True):
        monkeypatch.setattr(graph, "replay", lambda n=name: order.append(n))
        graph.samples = [1.0, 3.0]
    late = iter([False, True])
    found = measure.graph_times(graphs, 5, lambda: next(late))
    assert order == ["a", "b", "a", "b"]
    assert found[0] == measure.Sample(2.0, 1.5, 2.5)


def test_a_shape_is_timed_by_graphs(monkeypatch):
    device = Device().fake(monkeypatch)
    monkeypatch.setattr(
        "mla_index.bench.run.bind", lambda *a: lambda: device.capturing.append(a[1])
    )
    monkeypatch.setattr(
        "mla_index.bench.run.bind_copy", lambda inputs: lambda: device.capturing.append(COPY)
    )
    plan = Plan(operations=("remap",), quick=True)
    state = Run(plan, ("triton", "torch"), deadline=float("inf"))
    ready = list(contenders(plan, state.backends, on_device=True))
    _by_graphs(state, ready, [make_inputs(uniform_batch(2), 16)] * 3)
    found = {(row.operation, row.provider): row.value for row in state.rows}
    assert found == pytest.approx(
        {
            (COPY, "torch"): 2.0,
            ("remap", "triton"): 2.0,
            ("remap", "torch"): 2.0,
            ("remap", COMPOSITION): 2.0,
        }
    )
    assert state.wrong == []


# --- what is measured once a process -------------------------------------------------------------


def test_the_import_brings_no_kernel_package_along_and_is_from_bytecode(monkeypatch):
    def run(command, **options):
        folder = Path(command[-1])
        compiled.append({path.stem.partition(".")[0] for path in folder.rglob("mla_index/*.pyc")})
        return real(command, **options)

    real, compiled = subprocess.run, []
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(importing.subprocess, "run", run)
    rows = {row.metric: row for row in importing.cost(processes=1)}
    before, measured = compiled
    assert before == set()
    assert {"__init__", "operations", "specs"} <= measured
    assert rows["imported_kernel_packages"].value == 0, rows["imported_kernel_packages"].note
    assert rows["import_ms"].value > 0


def test_compiling_after_warmup_is_counted(monkeypatch):
    from mla_index.backends import torch as backend

    count = iter([10, 12, 20, 20, 30, 31, 40, 40])
    monkeypatch.setattr(backend, "compiled_kernels", lambda: next(count))
    monkeypatch.setattr(warming, "MOST_ROWS", 40)
    rows = list(warming.after_warmup("torch", torch.device("cpu"), 4))
    compiled = {"remap": 2, "remap_counts": 0, "dcp_filter": 1, "workspace": 0}
    assert {row.operation: row.value for row in rows} == compiled
    assert {row.note for row in rows} == {"4 random calls, T up to 40"}


def test_calls_after_warmup_are_of_every_number_of_rows_that_backends_tell_apart(monkeypatch):
    """Beyond the largest step of triton's, cupy's and numba's tables, and between all of them."""
    steps = (32, 256, 512, 1024, 4096)
    seen = {2048: Counter(), 2051: Counter()}

    def remap(req_id, table, tokens, **_):
        rows, topk = tokens.shape
        seen[topk][bisect_left(steps, rows)] += 1

    monkeypatch.setattr(warming, "remap", remap)
    assert len(list(warming.after_warmup("torch", torch.device("cpu")))) == 4
    for found in seen.values():
        assert sorted(found) == list(range(len(steps) + 1))
        assert min(found.values()) >= 20
