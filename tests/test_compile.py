"""The operations under torch.compile and torch.export: same results, few graphs, same backend."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mla_index
from mla_index import Dcp, PrefillWorkspace, selector, torch_library
from mla_index.backends import torch as torch_backend
from mla_index.errors import BackendUnavailable
from mla_index.specs import INT32_MAX

# torch's own, raised as errors by this project's settings
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # 2.11 warms up so
]

SIZES = [(5, 7), (9, 11), (6, 11), (17, 8), (64, 30), (33, 5)]  # T, W: both change at once first
# `auto` on the CPU leaves nothing but torch, which is traced; a list with another is an operator.
TRACED, OPERATOR = "auto", ["cupy", "torch"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def problem(rows, columns, topk=6, dtype=torch.int32):
    """Requests, table and tokens with invalid ones of every kind, and the extremes of int32."""
    draw = torch.Generator().manual_seed(1000 * rows + columns)

    def integers(low, high, shape):
        return torch.randint(low, high, shape, generator=draw).to(dtype)

    req_id, table = integers(-1, 10, (rows,)), integers(-1, 30, (9, columns))
    tokens = integers(-1, columns * 4 + 3, (rows, topk))
    tokens[0, 0], tokens[1, 0], table[0, 0] = INT32_MAX, -INT32_MAX - 1, INT32_MAX
    return req_id, table, tokens


def same(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        assert (result is None) == (wanted is None)
        if wanted is not None:
            assert result.dtype == wanted.dtype
            assert torch.equal(result, wanted)


def compiled(function, compiler="aot_eager", **options):
    """The function compiled whole, and a counter of the graphs that it took."""
    counter = CompileCounterWithBackend(compiler)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def operators(counter):
    """The operators of this project in each graph."""
    return [
        [str(node.target) for node in graph.graph.nodes if "mla_index" in str(node.target)]
        for graph in counter.graphs
    ]


def plain(backend):
    return lambda r, b, t: mla_index.remap(r, b, t, block_size=4, backend=backend)


def everything(backend):
    def call(req_id, table, tokens):
        return mla_index.remap(
            req_id, table, tokens, block_size=4, block_stride_rows=5, num_slots=120,
            request_rows=table[1], token_limits=req_id * 7,
            workspace=PrefillWorkspace(req_id - 3, table[0], 1000, 3000), dcp=Dcp(2, 1, 3),
            compact=True, safe_lengths=True, pad=-7, out_dtype=torch.int64, backend=backend,
        )  # fmt: skip

    return call


def given_outputs(backend):
    def call(req_id, table, tokens):
        rows = tokens.shape[0]
        buffer = torch.full((rows + 3, 20), 9, dtype=torch.int64)
        counts = torch.full((rows + 1,), 8, dtype=torch.int32)
        result = mla_index.dcp_filter(
            req_id, table, tokens, Dcp(2, 0), block_size=4, out=buffer[1:-2, 3:9],
            counts_out=counts[1:], backend=backend,
        )  # fmt: skip
        return buffer, counts, result.slots, result.counts, result.lengths

    return call


def in_place(backend):
    def call(req_id, table, tokens):
        tokens = tokens.clone()
        slots = mla_index.remap(
            req_id, table, tokens, block_size=4, out=tokens, backend=backend
        ).slots
        return tokens, slots

    return call


def views(backend):
    """Offsets and strides of views made inside."""

    def call(req_id, table, tokens):
        table = (table.t() + 1).t()[1:, 2:]
        return mla_index.remap(
            req_id.flip(0), table, (tokens * 1)[:, 1:], block_size=4, compact=True, backend=backend
        )

    return call


def safe(backend):
    def call(req_id, table, tokens):
        slots = tokens.clone()
        out = torch.full_like(req_id, 5)
        lengths = mla_index.safe_lengths(slots, req_id, backend=backend)
        mla_index.safe_lengths(slots[:, 2:], req_id, out=out, backend=backend)
        return slots, lengths, out

    return call


needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++") or os.environ.get("CI")),
    reason="needs a C++ compiler: inductor on the CPU",
)
CALLS = [plain, everything, given_outputs, in_place, views, safe]


@pytest.mark.parametrize("backend", [TRACED, OPERATOR], ids=["traced", "operator"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_equals_eager_with_two_graphs_for_many_shapes(call, backend):
    function = call(backend)
    run, counter = compiled(function)
    for size in SIZES:
        same(run(*problem(*size)), function(*problem(*size)))
    assert counter.frame_count <= 2
    assert all(bool(names) == (backend == OPERATOR) for names in operators(counter))


@pytest.mark.parametrize("backend", [TRACED, OPERATOR], ids=["traced", "operator"])
def test_dynamic_from_the_start_is_one_graph(backend):
    function = everything(backend)
    run, counter = compiled(function, dynamic=True)
    for size in SIZES:
        same(run(*problem(*size)), function(*problem(*size)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", [TRACED, OPERATOR], ids=["traced", "operator"])
def test_scalars_and_widths_that_change_make_no_storm(backend):
    def function(req_id, table, tokens, stride, slots, dcp, workspace):
        return mla_index.remap(
            req_id, table, tokens, block_size=4, block_stride_rows=stride, num_slots=slots,
            dcp=dcp, workspace=workspace, backend=backend,
        )  # fmt: skip

    run, counter = compiled(function)
    for i in range(6):
        req_id, table, tokens = problem(5 + i, 8, topk=5 + 7 * i)
        workspace = PrefillWorkspace(req_id - 3, table[0], 100 + i, 400 + 2 * i)
        arguments = (req_id, table, tokens, 40 + i, 90 + i, Dcp(8, i, 2), workspace)
        same(run(*arguments), function(*arguments))
    assert counter.frame_count <= 4  # 0 and 1 are always special to the compiler: two ranks


@needs_compiler
@pytest.mark.parametrize("backend", [TRACED, OPERATOR], ids=["traced", "operator"])
def test_inductor(backend):
    """The real compiler, on the call with every argument, and on views with offsets."""
    for call in (everything(backend), views(backend)):
        run, _ = compiled(call, "inductor", dynamic=True)
        for size in SIZES[:2]:
            same(run(*problem(*size)), call(*problem(*size)))


@pytest.mark.parametrize(("rows", "topk"), [(0, 4), (4, 0), (1, 1)])
@pytest.mark.parametrize("backend", [TRACED, OPERATOR], ids=["traced", "operator"])
def test_empty_and_single(backend, rows, topk):
    def function(req_id, table, tokens):
        return mla_index.remap(
            req_id, table, tokens, block_size=4, compact=True, counts=True, backend=backend
        )

    run, _ = compiled(function)
    arguments = torch.zeros(rows).int(), torch.ones(1, 1).int(), torch.zeros(rows, topk).int()
    same(run(*arguments), function(*arguments))


traces_views = pytest.mark.skipif(
    not (torch_library._INDUCTOR_KEEPS_OFFSETS or os.environ.get("CI")),
    reason="flat_row_view breaks the graph before torch 2.13, see docs/compile.md",
)


@traces_views
def test_flat_row_view_is_a_view_of_any_number_of_blocks():
    def function(cache):
        view = mla_index.flat_row_view(cache[1:], 4)
        return *view, view.rows.sum()

    run, counter = compiled(function)
    for blocks in (3, 5, 9, 20):
        cache = torch.randn(blocks + 1, 6, 16)[1:, :5]
        rows, stride, total = run(cache)
        wanted_rows, wanted_stride, wanted_total = function(cache)
        assert stride == wanted_stride
        assert torch.equal(total, wanted_total)
        assert rows.data_ptr() == wanted_rows.data_ptr()
        assert (rows.shape, rows.stride()) == (wanted_rows.shape, wanted_rows.stride())
    assert counter.frame_count <= 2


@traces_views
@needs_compiler
def test_inductor_keeps_the_offset_of_a_view():
    def function(cache):
        return mla_index.flat_row_view(cache[1:, 1:5], 4).rows * 2

    run, _ = compiled(function, "inductor", dynamic=True)
    for cache in (torch.randn(5, 6, 16), torch.randn(9, 8, 16)[2:, 1:7]):
        assert torch.equal(run(cache), function(cache))


@needs_compiler
def test_a_compiler_that_loses_the_offset_is_kept_from_the_view(monkeypatch):
    monkeypatch.setattr(torch_library, "_INDUCTOR_KEEPS_OFFSETS", False)

    def function(cache):
        return mla_index.flat_row_view(cache[1:, 1:5], 4).rows * 2

    run = torch.compile(function)
    for cache in (torch.randn(5, 6, 16), torch.randn(9, 8, 16)[2:, 1:7]):
        assert torch.equal(run(cache), function(cache))
    torch.compiler.reset()  # the same code, which has its graphs already
    whole = torch.compile(function, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="lose the offset of a flat row view"):
        whole(torch.randn(5, 6, 16))


# --- which backend --------------------------------------------------------------------------------


class _Counting:
    """Torch's kernels under another name, counting launches."""

    name = "counting"
    contract_version = torch_backend.contract_version
    limits = torch_backend.limits

    def __init__(self):
        self.launches = 0

    def unavailable(self, device, *, probe):
        return None

    def unsupported(self, op, spec):
        return None

    def build(self, op, spec, device):
        kernel = torch_backend.build(op, spec, device)

        def launch(*tensors):
            self.launches += 1
            return kernel.launch(*tensors)

        return kernel._replace(launch=launch)


@pytest.fixture
def counting():
    backend = _Counting()
    mla_index.register(backend)
    return backend


def test_use_backend_around_the_call_holds_and_alternates_without_storm(counting):
    run, counter = compiled(plain("auto"))
    arguments = problem(5, 7)
    for call in range(1, 7):
        run(*arguments)
        with mla_index.use_backend("counting"), mla_index.use_backend("counting"):
            run(*arguments)
        assert counting.launches == call
        with mla_index.use_backend("counting"):
            run(*arguments)
            with mla_index.use_backend("torch"):
                run(*arguments)
        counting.launches = call
    assert counter.frame_count == 2
    with (
        mla_index.use_backend("cupy"),
        pytest.raises(BackendUnavailable, match="asked for by use_backend"),
    ):
        run(*arguments)


def test_use_backend_of_another_thread_changes_nothing_here(counting):
    run, _ = compiled(plain("auto"))
    arguments = problem(5, 7)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with mla_index.use_backend("counting"):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert inside.wait(30)
        assert selector.overridden()
        run(*arguments)
    finally:
        leave.set()
        thread.join()
    assert counting.launches == 0
    assert not selector.overridden()


@pytest.mark.parametrize("setting", ["default", "environment"])
def test_settings_changed_after_the_compilation_hold(setting, counting, monkeypatch):
    def choose(name):
        if setting == "default":
            mla_index.set_default_backend(name)
        else:
            monkeypatch.setenv("MLA_INDEX_BACKEND", name)
            mla_index.reload_environment()

    run, counter = compiled(plain("auto"))
    arguments = problem(5, 7)
    run(*arguments)
    choose("counting")
    run(*arguments)
    choose("torch")
    run(*arguments)
    assert counting.launches == 1
    assert [bool(names) for names in operators(counter)] == [False, True, False]


def test_the_argument_wins_and_torch_alone_stays_in_the_open(counting):
    run, counter = compiled(plain("torch"))
    with mla_index.use_backend("counting"):
        run(*problem(5, 7))
    assert (counting.launches, operators(counter)) == (0, [[]])
    run, counter = compiled(plain("counting"))
    with mla_index.use_backend("torch"):
        run(*problem(5, 7))
    assert (counting.launches, operators(counter)) == (1, [["mla_index.remap"]])


def test_use_backend_inside_is_refused_and_breaks_the_graph_where_that_is_allowed(counting):
    def function(req_id, table, tokens):
        with mla_index.use_backend("counting"):
            return mla_index.remap(req_id, table, tokens, block_size=4)

    run, _ = compiled(function)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="use_backend cannot be entered"):
        run(*problem(5, 7))
    torch.compiler.reset()
    same(torch.compile(function, backend="aot_eager")(*problem(5, 7)), function(*problem(5, 7)))
    assert counting.launches == 2


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, r"block_size must be in \[1, 2147483647\], got 0"),
        ({"block_stride_rows": 3}, "block_stride_rows must be at least block_size = 4, got 3"),
        ({"safe_lengths": True}, "safe_lengths=True needs compact=True"),
        ({"counts": 1}, "counts must be a bool, got int"),
        ({"pad": 2**31}, "pad must fit the slots' dtype torch.int32"),
        ({"token_limits": torch.zeros(3).int()}, "token_limits and token_indices must cover"),
        ({"backend": "tritn"}, "no backend is named 'tritn'"),
        ({"compact": True, "out": "token_indices"}, "an output must not be an input"),
    ],
)
@pytest.mark.parametrize("backend", [TRACED, OPERATOR], ids=["traced", "operator"])
def test_bad_arguments_are_named(backend, change, message):
    def function(req_id, table, tokens):
        taken = {"block_size": 4, "backend": backend, **change}
        if "out" in taken:
            taken["out"] = tokens
        return mla_index.remap(req_id, table, tokens, **taken)

    run, _ = compiled(function)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        run(*problem(5, 7))


# --- export and the operators themselves ----------------------------------------------------------


class _Filter(torch.nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.backend = backend

    def forward(self, req_id, table, tokens, starts):
        workspace = PrefillWorkspace(req_id - 2, starts, 50)
        result = mla_index.dcp_filter(
            req_id, table, tokens, Dcp(2, 1), block_size=4, safe_lengths=True,
            workspace=workspace, backend=self.backend,
        )  # fmt: skip
        return tuple(result)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("backend", [TRACED, OPERATOR], ids=["traced", "operator"])
def test_export_saved_and_loaded(backend, strict):
    rows, columns = torch.export.Dim("T", min=2, max=4096), torch.export.Dim("W", min=2, max=4096)
    module, starts = _Filter(backend), torch.arange(9)
    program = torch.export.export(
        module, (*problem(5, 7), starts),
        dynamic_shapes=({0: rows}, {1: columns}, {0: rows}, None), strict=strict,
    )  # fmt: skip
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).run_decompositions()
    for size in SIZES[:3]:
        arguments = (*problem(*size), starts)
        same(loaded.module()(*arguments), module(*arguments))
    found = any("mla_index" in str(node.target) for node in program.graph.nodes)
    assert found == (backend == OPERATOR)


@pytest.mark.parametrize("backend", [TRACED, OPERATOR], ids=["traced", "operator"])
def test_inference_mode(backend):
    function = everything(backend)
    run, _ = compiled(function)
    with torch.inference_mode():
        same(run(*problem(5, 7)), function(*problem(5, 7)))


@pytest.mark.parametrize("op", ["remap", "dcp_filter"])
@pytest.mark.parametrize("wanted", ["slots", "counts", "lengths"])
def test_opcheck_of_remap(op, wanted):
    req_id, table, tokens = problem(5, 7)
    counts, lengths = torch.empty(5).int(), torch.empty(5).int()
    outputs = {"slots": (None, None), "counts": (counts, None), "lengths": (counts, lengths)}
    report = torch.library.opcheck(
        getattr(torch.ops.mla_index, op).default,
        (req_id, table, tokens, torch.empty_like(tokens), *outputs[wanted], table[1], None,
         req_id - 3, table[0]),
        {"block_size": 4, "block_stride_rows": 5, "dcp_size": 2, "dcp_rank": 1,
         "dcp_interleave": 1, "rank_stride": 10, "num_slots": None, "ws_rows": 400, "pad": -1,
         "compact": True, "backend": ["auto"]},
    )  # fmt: skip
    assert set(report.values()) == {"SUCCESS"}


def test_opcheck_of_safe_lengths():
    _, _, tokens = problem(5, 7)
    counts = torch.tensor([0, 1, -1, 0, 4])
    report = torch.library.opcheck(
        torch.ops.mla_index.safe_lengths.default,
        (tokens, counts, torch.empty_like(counts)),
        {"backend": ["torch"]},
    )
    assert set(report.values()) == {"SUCCESS"}


def test_operators_are_those_of_the_schemas():
    assert set(torch_library.SCHEMAS) == {"remap", "dcp_filter", "safe_lengths"}
    for op, schema in torch_library.SCHEMAS.items():
        written = str(getattr(torch.ops.mla_index, op).default._schema).split("::")[1]
        assert written.replace(" ", "") == (op + schema).replace(" ", "")


def test_eager_calls_never_import_the_operators():
    code = (
        "import sys, torch, mla_index as m; t = torch.zeros(2, 2).int();"
        "m.remap(None, t, t, block_size=1); m.safe_lengths(t, t[0].clone());"
        "m.flat_row_view(torch.zeros(1, 1, 1), 1);"
        "sys.exit('mla_index.torch_library' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: CUDA graphs")
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_reduce_overhead(backend):
    """CUDA graphs of the compiler's own; replays see new contents of the inputs."""

    def function(req_id, table, tokens):
        result = mla_index.remap(
            req_id, table, tokens, block_size=4, compact=True, safe_lengths=True, backend=backend
        )
        return result.slots + 0, result.counts + 0, result.lengths + 0

    run = torch.compile(function, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for seed in range(5):
        arguments = [tensor.cuda() for tensor in problem(64, 30)]
        arguments[2].add_(seed)
        same([result.clone() for result in run(*arguments)], function(*arguments))
