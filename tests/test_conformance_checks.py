"""The suite's own tools: what finds faults must find them, and what is expected must be right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planted_faults import ReferenceBackend

import mla_index
from mla_index import selector
from mla_index.conformance import cases, field_reports, oracle, scale_jobs, source, sweep
from mla_index.conformance.checks import (
    CANARY,
    Literal,
    Run,
    check_buffer,
    check_remap,
    check_unchanged,
    differences,
    expect_launches,
    place_inputs,
    prepare,
)
from mla_index.conformance.layouts import DENSE, MARGIN, Layout, place
from mla_index.conformance.oracle import Problem
from mla_index.conformance.target import Failure, Job, NotTaken, Target

CPU = torch.device("cpu")
TORCH = Target("torch", CPU)
SMALL = Problem([[0, 64, -1]], [[7, -1]], [0])


def placed(layout=DENSE, values=((1, 2, 3), (4, 5, 6))):
    return place(values, (2, 3), torch.int32, CPU, layout, fill=9)


# --- the oracle, against values written down by hand ---------------------------------------------


@pytest.mark.parametrize("report", field_reports.REPORTS, ids=lambda report: report.id)
def test_oracle_agrees_with_the_reports(report):
    slot_max = 2**63 - 1 if report.dtypes.get("out") == torch.int64 else 2**31 - 1
    answer = oracle.remap(report.problem, slot_max=slot_max)
    assert answer.slots == [list(row) for row in report.literal.slots]
    assert answer.counts == list(report.literal.counts)
    if report.literal.compacted is not None:
        compacted = oracle.remap(report.problem, compact=True, slot_max=slot_max).slots
        topk = report.problem.shape[1]
        assert compacted == [[*r, *[-1] * (topk - len(r))] for r in report.literal.compacted]


def test_oracle_of_some_rows_is_the_same():
    problem = cases.problems()["rows-33"][0]
    whole, some = oracle.remap(problem), oracle.remap(problem, rows=(32, 5))
    assert some.slots == [whole.slots[32], whole.slots[5]]
    assert some.counts == [whole.counts[32], whole.counts[5]]


def test_oracle_of_safe_lengths():
    assert oracle.safe_lengths([[-1, -1], [5, -1]], [0, 1]) == ([[0, -1], [5, -1]], [1, 1])
    assert oracle.safe_lengths([[8], [9], [7]], [-1, 0, 3])[1] == [1, 1, 3]


def test_oracle_of_bounds():
    assert oracle.request_row_bounds([3, 3, 5, 5, 5, 2]) == [0, 2, 5, 6]
    assert oracle.request_row_bounds([0, 1, 0]) is None
    assert oracle.request_row_bounds([]) is None


def test_oracle_reasons_in_order():
    problem = Problem(
        [[-1, 9, 300, 0], [0, 1, 1, 1], [1, 65, 1, 3]],
        [[4, -1]],
        [0, 5, 0],
        token_limits=[301, 2, 99],
        ws_ids=[-1, -1, 7],
        ws_starts=[0],
        dcp=(2, 1, 1),
        num_slots=4 * 64 + 1,
    )
    found = oracle.diagnose(problem)
    assert found["PADDING"] == [(0, 0, -1)]
    assert found["BEYOND_TABLE"] == [(0, 2, 300)]
    assert found["OTHER_RANK"] == [(0, 3, 0), (1, 0, 0)]
    assert found["BAD_REQUEST_ROW"] == [(1, 1, 1), (1, 2, 1), (1, 3, 1)]
    assert found["BAD_WORKSPACE_ID"] == [(2, k, tok) for k, tok in enumerate((1, 65, 1, 3))]
    assert found["OUT_OF_BOUNDS"] == [(0, 1, 9)]


def test_a_wrong_literal_is_an_error_of_the_suite():
    with pytest.raises(RuntimeError, match="the oracle says"):
        check_remap(SMALL, Run(), Literal([[448, 0, -1]], [2]), TORCH)


# --- memory ---------------------------------------------------------------------------------------


def test_canaries_see_a_write_beside_the_view():
    for at in (0, MARGIN - 1, MARGIN + 3, -1):
        out = placed(Layout(gap=2))
        before = out.buffer.clone()
        check_buffer("out", out, before, out.view.clone())
        out.buffer[at] = 0
        with pytest.raises(Failure, match="out: wrote outside its view, at element"):
            check_buffer("out", out, before, out.view.clone())


def test_a_wrong_value_is_named():
    out = placed()
    expected = out.view.clone()
    out.view[1, 2] = 77
    with pytest.raises(Failure, match=r"out\[1, 2\] is 77, must be 6 \(1 of 6 differ\)"):
        check_buffer("out", out, out.buffer.clone(), expected)


def test_shape_is_compared():
    with pytest.raises(Failure, match="shape"):
        differences("out", torch.zeros(2, 3), torch.zeros(3, 2))


def test_a_changed_input_is_seen_even_in_its_gaps():
    table = placed(Layout(step=2))
    before = table.buffer.clone()
    check_unchanged("block_table", table, before)
    table.buffer[MARGIN + 1] = 0
    with pytest.raises(Failure, match="block_table is an input and was changed, at element 1"):
        check_unchanged("block_table", table, before)


@pytest.mark.parametrize(
    ("layout", "strides", "offset"),
    [
        (Layout(), (3, 1), 0),
        (Layout(gap=2), (5, 1), 0),
        (Layout(step=2, gap=1), (7, 2), 0),
        (Layout(transposed=True), (1, 2), 0),
        (Layout(offset=3), (3, 1), 3),
    ],
)
def test_layouts(layout, strides, offset):
    view = placed(layout).view
    assert view.stride() == strides
    assert view.storage_offset() == MARGIN + offset
    assert view.tolist() == [[1, 2, 3], [4, 5, 6]]
    if layout.gap or layout.step > 1:
        assert 9 in placed(layout).buffer[MARGIN:-MARGIN].tolist()


def test_expanded_layouts_need_equal_values():
    same = placed(Layout(expanded=(0,)), values=((1, 2, 3), (1, 2, 3)))
    assert same.view.stride() == (0, 1)
    with pytest.raises(ValueError, match="not equal"):
        placed(Layout(expanded=(0,)))


def test_int64_where_values_need_it():
    tensors = place_inputs(replace(SMALL, tokens=[[2**40, 0, 1]]), Run(), CPU)
    assert tensors["token_indices"].view.dtype == torch.int64
    assert tensors["block_table"].view.dtype == torch.int32


def test_outputs_are_poisoned_again():
    scene = prepare(SMALL, Run(counts=True), TORCH)
    scene.call("torch")
    scene.verify()
    scene.poison()
    assert set(scene.outputs["out"].buffer.tolist()) == {CANARY[torch.int32]}
    with pytest.raises(Failure):
        scene.verify()


# --- which backend ran ----------------------------------------------------------------------------


def test_launches_are_recorded_and_then_forgotten():
    scene = prepare(SMALL, Run(), TORCH)
    with selector.record_launches() as launches:
        scene.call("torch")
        scene.call("torch")
    scene.call("torch")
    launch = selector.Launch("torch", "remap", scene.spec)
    assert launches == [launch, launch]
    expect_launches(launches, [launch, launch])
    for wrong in ([launch], [launch, launch._replace(backend="triton")], []):
        with pytest.raises(Failure, match="launched torch's remap"):
            expect_launches(launches, wrong)


def test_a_backend_that_declines_is_no_failure():
    limits = replace(ReferenceBackend("picky").limits, dtypes=(torch.int64,))
    mla_index.register(ReferenceBackend("picky", limits=limits))
    try:
        with pytest.raises(NotTaken, match="int32 are not taken"):
            check_remap(SMALL, Run(), None, Target("picky", CPU))
    finally:
        mla_index.unregister("picky")


def test_a_failure_names_job_and_backend():
    def fail(target):
        raise Failure("out[0, 0] is 1, must be 2")

    with pytest.raises(Failure, match=r"^some-id on torch: out\[0, 0\]"):
        Job("some-id", "remap", (), fail).run(TORCH)


# --- the cases are worth running ------------------------------------------------------------------


def test_every_report_of_one_process_has_a_case():
    ids = {job.id[:4] for job in cases.jobs(full=False)}
    kinds = {f"fr{n:02}" for n in range(1, 29)}
    # 29 to 32 are tests of their own on a device, 33 and 34 are about whole processes
    assert kinds <= ids


def test_generated_problems_hold_valid_and_invalid_entries():
    thin = []
    for name, (problem, _) in cases.problems().items():
        rows, topk = problem.shape
        if name.startswith(("fr", "empty", "extreme", "num-slots-0", "num-slots-1")) or topk < 7:
            continue
        valid = sum(oracle.remap(problem, slot_max=2**63 - 1).counts)
        if not rows * topk / 20 < valid < rows * topk:
            thin.append(f"{name}: {valid} of {rows * topk}")
    assert thin == []


def test_both_operations_and_all_modes_are_swept():
    jobs = list(sweep.jobs(full=False))
    assert {job.op for job in jobs} == {"remap", "dcp_filter"}
    assert {mode for job in jobs for mode in job.tags} >= {"plain", "counts", "compact", "safe"}


# --- memory -------------------------------------------------------------------------------------


CARD = torch.device("cuda", 0)


class Memory:
    """A device whose memory another process gives back after some attempts."""

    message = "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 1 has ... Process 9 has ..."

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    def __call__(self) -> torch.Tensor:
        self.refusals -= 1
        if self.refusals >= 0:
            raise torch.OutOfMemoryError(self.message)
        return torch.zeros(1)


def test_memory_that_others_hold_is_waited_for(monkeypatch):
    monkeypatch.setattr(scale_jobs, "_shared", lambda _: True)
    monkeypatch.setattr(scale_jobs.time, "sleep", lambda _: None)
    monkeypatch.setattr(scale_jobs, "_in_vain", set())
    assert len(scale_jobs._or_not_taken(Memory(3), CARD)) == 1
    monkeypatch.setattr(scale_jobs, "PATIENCE", -1.0)
    with pytest.raises(NotTaken):
        scale_jobs._or_not_taken(Memory(10**9), CARD)
    monkeypatch.setattr(scale_jobs, "PATIENCE", 60.0)
    again = Memory(10**9)
    with pytest.raises(NotTaken):  # at once: it was waited for in vain
        scale_jobs._or_not_taken(again, CARD)
    assert again.refusals == 10**9 - 1


def test_a_fault_that_shows_late_is_no_lack_of_memory():
    def allocate():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        scale_jobs._or_not_taken(allocate, CARD)


def test_memory_that_nobody_else_holds_is_not_waited_for():
    memory = Memory(10**9)
    short = "^no memory for it: CUDA out of memory. Tried to allocate 8.00 GiB.$"
    with pytest.raises(NotTaken, match=short):
        scale_jobs._or_not_taken(memory, torch.device("cpu"))
    assert memory.refusals == 10**9 - 1


# --- the hash of the sources ----------------------------------------------------------------------


def test_source_hash_covers_kernels_and_launching():
    names = {path.name for path in source.source_files()}
    assert {"operations.py", "selector.py", "kernels.py"} <= names
    assert source.source_hash() == source.source_hash()
    assert len(source.source_hash()) == 64


def test_source_hash_depends_on_content_and_name(tmp_path, monkeypatch):
    (tmp_path / "backends").mkdir()
    kernel = tmp_path / "backends" / "remap.cu"
    for name in source.SOURCES[1:]:
        (tmp_path / name).write_text("x\n")
    monkeypatch.setattr(source.mla_index, "__file__", str(tmp_path / "__init__.py"))
    seen = set()
    for text in ("a", "b"):
        kernel.write_text(text)
        seen.add(source.source_hash())
    kernel.rename(kernel.with_name("other.cu"))
    seen.add(source.source_hash())
    (tmp_path / "backends" / "notes.txt").write_text("not a source")
    seen.add(source.source_hash())
    assert len(seen) == 3
