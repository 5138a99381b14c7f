"""Targets answered from records, and pages that say what the records say."""

import pytest
from conftest import PROJECT, needed

from mla_index.bench import asked, pages, wording
from mla_index.bench.plot import origin
from mla_index.bench.record import Row

UNIFORM = {"workload": "uniform", "topk": 2048, "dcp": 1, "valid": 0.9, "dtype": "int32"}


def record(*rows, kind="bench", device="cuda", date="2026-01-02T03:04:05+00:00"):
    return {
        "format": 1,
        "kind": kind,
        "date": date,
        "source_hash": "0123456789abcdef" * 4,
        "device": {"type": device, "name": "a card", "host": "a host", "threads": 2, "driver": "1"},
        "versions": {"torch": "2.11", "triton": "3.6"},
        "left_out": [],
        "wrong": [],
        "file": f"{kind}-test.json",
        "rows": [row.as_dict() for row in rows],
    }


def gpu(operation, provider, rows, value, **other):
    return Row("gpu_us", value, operation, provider, rows=rows, **{**UNIFORM, **other})


def answer(name, *records):
    (found,) = [a for a in asked.answers(*records) if name in a.target.name]
    return found


def test_without_measurements_nothing_is_reached():
    found = asked.answers(record())
    assert len(found) == len(asked.TARGETS)
    assert all(a.reached is None and a.ask_met is a.stretch_met is None for a in found)


def test_the_worst_ratio_to_the_copy_counts():
    rows = [
        gpu("copy", "torch", 2048, 10.0),
        gpu("copy", "torch", 8192, 40.0),
        gpu("remap", "triton", 1024, 99.0),  # too few rows to be asked for
        gpu("remap", "triton", 2048, 11.2),
        gpu("remap", "triton", 8192, 42.0),
        gpu("remap", "triton", 8192, 99.0, topk=512),  # another K
    ]
    plain = "Triton, remap without counts, T ≥ 2048, "
    found = answer(f"{plain}K = 2048", record(*rows))
    assert found.reached == (pytest.approx(1.12), "triton remap at T = 2048, K = 2048")
    assert (found.ask_met, found.stretch_met, found.points) == (True, False, 2)
    rows.append(gpu("copy", "torch", 8192, 10.0, topk=512))
    assert answer(f"{plain}K = 2048", record(*rows)).reached == found.reached
    wide = answer(f"{plain}every K", record(*rows))
    assert wide.reached == (pytest.approx(9.9), "triton remap at T = 8192, K = 512")
    assert wide.ask_met is None
    rows.append(gpu("dcp_filter", "triton", 2048, 14.6, dcp=8))
    found = answer("Triton, remap with counts or dcp_filter, T ≥ 2048, K = 2048", record(*rows))
    assert found.reached == (
        pytest.approx(1.46),
        "triton dcp_filter, 8 ranks at T = 2048, K = 2048",
    )
    assert found.ask_met is False


def test_unsteady_times_are_not_compared():
    rows = [
        gpu("copy", "torch", 2048, 10.0, low=9.9, high=10.1),
        gpu("copy", "torch", 4096, 20.0),
        gpu("remap", "triton", 2048, 11.0, low=9.0, high=11.5),
        gpu("remap", "triton", 4096, 80.0, low=20.0, high=90.0),
    ]
    found = answer("Triton, remap without counts, T ≥ 2048, K = 2048", record(*rows))
    assert found.reached == (pytest.approx(1.1), "triton remap at T = 2048, K = 2048")
    rows[0] = gpu("copy", "torch", 2048, 10.0, low=8.0, high=18.0)
    found = answer("Triton, remap without counts, T ≥ 2048, K = 2048", record(*rows))
    assert (found.reached, found.unsteady) == (None, 2)
    text = pages.times(record(*rows))
    assert "| remap, triton | 11.0 | ~80.0 |" in text
    assert "~: the quartiles are more than 25% of the median apart." in text
    text = pages.asked([record(*rows)])
    assert "≤ 1.08 | not steady |" in text
    assert (
        "- `bench-test.json`: too unsteady (~) to answer a target: 2 of 4 times, of copy, " in text
    )


def test_ratios_are_taken_within_one_record():
    one, other = record(gpu("copy", "torch", 2048, 1.0)), record(gpu("remap", "triton", 2048, 9.0))
    name = "Triton, remap without counts, T ≥ 2048, K = 2048"
    assert answer(name, one, other).reached is None


@pytest.mark.parametrize(
    ("theirs", "ours", "met"),
    [(1.0, 1.14, True), (1.0, 1.16, False), (100.0, 102.9, True), (100.0, 103.1, False)],
)
def test_slower_than_vllm_by_the_larger_of_a_share_and_a_time(theirs, ours, met):
    compared = record(
        gpu("remap", "vllm 0.33.0", 1, theirs), gpu("remap", "triton", 1, ours), kind="compare"
    )
    found = answer("slower than vLLM", compared)
    assert found.ask_met is met
    assert (found.stretch_reached is None) is (theirs == 1.0)  # no ratio below 3 µs


def test_faster_than_vllm_is_a_ratio_where_it_takes_a_while():
    compared = record(
        gpu("remap", "vllm 0.33.0", 1, 10.0), gpu("remap", "triton", 1, 7.0),
        gpu("dcp_filter", "vllm 0.33.0", 1, 10.0, dcp=8),
        gpu("dcp_filter", "triton", 1, 5.0, dcp=4),
    )  # fmt: skip
    found = answer("slower than vLLM", compared)
    assert found.stretch_reached == (pytest.approx(0.7), "triton remap at T = 1, K = 2048")
    assert found.stretch_met is True
    assert found.points == 1  # other numbers of ranks do not compare


def test_the_host_is_compared_with_vllms_convert():
    small = {**UNIFORM, "rows": 32}
    rows = [
        Row("host_us", 12.0, "remap_counts", "auto", **small),
        Row("host_us", 100.0, "remap_counts", "vllm 0.33.0", **small),
    ]
    found = answer("over vLLM's convert", record(*rows))
    assert found.reached.value == pytest.approx(0.12)
    assert (found.ask_met, found.stretch_met) == (True, False)
    assert answer("over vLLM's convert", record(rows[0])).reached is None
    assert answer("over the 104 µs", record(rows[0])).ask_met is True


def host(operation, provider, value, **other):
    return Row("host_us", value, operation, provider, **{**UNIFORM, "rows": 32, **other})


def test_the_host_is_compared_at_the_same_shape():
    rows = [
        host("remap_counts", "vllm 0.33.0", 50.0),
        host("remap_counts", "vllm 0.33.0", 100.0, topk=4224),
        host("remap_counts", "auto", 11.0),
        host("remap_counts", "auto", 12.0, topk=4224),
        host("remap_counts", "auto", 99.0, topk=512),  # vLLM was not timed there
        host("dcp_filter", "vllm 0.33.0", 1.0, dcp=8),
        host("dcp_filter", "auto", 9.0, dcp=8),  # not its convert
    ]
    found = answer("over vLLM's convert", record(*rows))
    assert found.reached == (pytest.approx(0.22), "auto remap_counts at T = 32, K = 2048")
    assert found.points == 2


def test_vllms_names_are_compared_with_what_allocates_alike():
    rows = [
        host("dcp_filter", "vllm 0.33.0, outputs allocated", 80.0, dcp=8),
        host("remap_counts", "vllm 0.33.0", 60.0),
        host("remap_counts", "auto", 14.0),
        host("remap_counts", "auto by vLLM's names", 15.5),
        host("remap_counts", "auto, outputs allocated", 21.0),
        host("remap_counts", "auto by vLLM's names, outputs allocated", 22.0),
        host("dcp_filter", "auto", 14.0, dcp=8),
        host("dcp_filter", "auto, outputs allocated", 21.0, dcp=8),
        host("dcp_filter", "auto by vLLM's names, outputs allocated", 22.75, dcp=8),
    ]
    found = answer("vLLM's names over the native function", record(*rows))
    assert found.reached == (
        pytest.approx(1.75),
        "auto by vLLM's names, outputs allocated dcp_filter, 8 ranks at T = 32, K = 2048",
    )
    assert (found.ask_met, found.points) == (True, 3)
    assert answer("by lower quartiles", record(*rows)).reached is None
    assert answer("over vLLM's convert", record(*rows)).reached.value == pytest.approx(14 / 60)
    rows.append(host("flat_row_view", "auto, outputs allocated", 3.0, topk=0))
    rows.append(host("flat_row_view", "auto by vLLM's names, outputs allocated", 5.5, topk=0))
    assert answer("vLLM's names over the native function", record(*rows)).ask_met is False


def test_a_neighbour_on_the_host_is_told_apart_but_not_forgiven():
    found = record(
        host("remap", "auto", 14.0, low=13.0, high=15.0),
        host("remap", "auto by vLLM's names", 18.0, low=14.5, high=20.0),
    )
    told = answer("vLLM's names over the native function", found)
    assert (told.reached.value, told.ask_met) == (pytest.approx(4.0), False)
    quiet = answer("the same by lower quartiles", found)
    assert (quiet.reached.value, quiet.ask_met) == (pytest.approx(1.5), None)


def test_vllms_names_with_outputs_unlike_are_not_compared():
    old = record(
        host("dcp_filter", "vllm 0.33.0", 80.0, dcp=8), host("dcp_filter", "auto", 14.0, dcp=8),
        host("dcp_filter", "auto, vLLM's names", 25.0, dcp=8), kind="compare",
    )  # fmt: skip
    found = answer("vLLM's names over the native function", old)
    assert found.reached is found.ask_met is None
    assert pages.beside_vllm(old) == pages.beside_vllm(None) == "Not measured yet."


def test_memory_is_compared_with_the_output():
    row = Row("peak_bytes", 7 * 8 * 4 * 16, "remap", "torch", rows=4, topk=16, dtype="int64")
    found = answer("torch: memory", record(row))
    assert found.reached.value == 7
    assert found.ask_met is False
    zero = Row("peak_bytes", 0, "remap", "cupy", rows=4, topk=16, dtype="int32")
    assert answer("cupy: memory", record(zero)).ask_met is True


def test_fused_lengths_launches_and_composition():
    found = record(
        gpu("remap_counts", "cupy", 8, 2.0), gpu("remap_safe_lengths", "cupy", 8, 2.2),
        gpu("remap", "torch", 8, 9.0), gpu("remap", "composition", 8, 10.0),
        Row("kernels", 1, "remap_safe_lengths", "cupy"), Row("kernels", 26, "remap", "torch"),
        Row("import_ms", 51.0, "import", "mla_index"),
    )  # fmt: skip
    assert answer("cupy: counts and safe lengths", found).ask_met is False
    assert answer("counts and safe lengths: launches", found).ask_met is True
    assert answer("plain composition", found).stretch_met is True
    assert answer("torch: kernels, plain", found).ask_met is False
    assert answer("import beside torch", found).ask_met is False


# --- pages ---------------------------------------------------------------------------------------


def test_the_summary_shows_measured_columns_alone():
    found = record(
        gpu("copy", "torch", 1, 1.3), gpu("copy", "torch", 32768, 128.4),
        gpu("remap", "triton", 1, 1.62),
        Row("host_us", 18.0, "remap_counts", "auto", rows=32, **UNIFORM),
    )  # fmt: skip
    compared = record(
        gpu("remap", "vllm 0.33.0", 32768, 325.0), host("remap_counts", "auto", 12.34),
        host("remap_counts", "vllm 0.33.0", 61.0),
    )  # fmt: skip
    text = pages.summary(found, compared)
    assert text.splitlines()[0] == "| µs on the device, T = | 1 | 32768 |"
    assert "| copy of the same bytes | 1.3 | 128 |" in text
    assert "| remap, triton | 1.6 | – |" in text
    assert "| remap, vllm 0.33.0 | – | 325 |" in text
    assert "cupy" not in text
    assert "a card, driver 1; torch 2.11, triton 3.6; 2026-01-02; sources `0123456789ab`" in text
    assert "10% of the entries −1" in text
    assert "costs the host 12.3 µs; vllm 0.33.0's own, in turn with it, 61.0 µs." in text
    assert "costs the host" not in pages.summary(found)


def test_the_summary_tells_how_triton_does_beside_vllm():
    compared = record(
        gpu("remap", "vllm 0.33.0", 1, 1.0), gpu("remap", "triton", 1, 1.14),  # within 0.15 µs
        gpu("remap", "vllm 0.33.0", 8, 100.0), gpu("remap", "triton", 8, 102.0),  # within 3 %
        gpu("remap", "vllm 0.33.0", 9, 100.0), gpu("remap", "triton", 9, 104.0),
        gpu("dcp_filter", "vllm 0.33.0", 2, 2.0, dcp=4),
        gpu("dcp_filter", "triton", 2, 2.5, dcp=4),
        gpu("remap", "vllm 0.33.0", 16, 5.0), gpu("remap", "triton", 32, 50.0),  # no pair
    )  # fmt: skip
    told = (
        "Of 4 shapes timed beside vllm 0.33.0, Triton is slower at 2 by more than the larger of "
        "3 % and 0.15 µs; its worst time is 1.25 × vLLM's "
        "(triton dcp_filter, 4 ranks at T = 2, K = 2048)."
    )
    found = record(gpu("copy", "torch", 1, 1.3))
    assert pages.summary(found, compared).splitlines()[-1] == told
    assert "shapes" not in pages.summary(found, record())
    assert "shapes" not in pages.summary(found)


def test_the_tables_show_everything_and_what_was_left_out():
    found = record(
        gpu("copy", "torch", 1, 1.3), gpu("dcp_filter", "cupy", 4, 2.0, dcp=8, topk=512),
        Row("host_us", 9.0, "remap", "cupy", rows=32, **UNIFORM),
    )  # fmt: skip
    found |= {"left_out": ["T = 9: too large"], "wrong": ["remap on numba: broken"]}
    text = pages.times(found)
    for told in (
        "**uniform, K = 512**", "| dcp_filter, 8 ranks, cupy | 2.0 |", "| remap | 9.0 |",
        "- T = 9: too large", "- remap on numba: broken", "bench-test.json",
    ):  # fmt: skip
        assert told in text
    assert pages.times(None) == "Not measured yet."


def test_the_host_beside_vllm_shows_how_and_each_width():
    found = record(
        host("remap", "auto", 14.0), host("remap", "auto", 16.0, topk=4224),
        host("remap", "auto, outputs allocated", 21.5),
        host("flat_row_view", "auto, outputs allocated", 3.0, topk=0), kind="compare",
    )  # fmt: skip
    text = pages.beside_vllm(found | {"host_method": "in 3 rounds", "compiled": {}})
    assert "~" not in text
    assert "Kernels compiled" not in text
    assert "Beware" not in text
    for told in (
        "compare-test.json", "Timed in 3 rounds.",
        "| µs on the host | auto | auto, outputs allocated |",
        "| remap, K = 2048 | 14.0 | 21.5 |", "| remap, K = 4224 | 16.0 | – |",
        "| flat_row_view | – | 3.0 |",
    ):  # fmt: skip
        assert told in text


def test_times_that_are_noise_are_told_from_others():
    rows = [
        host("remap", "auto", 14.0, low=13.9, high=14.2),
        host("remap", "vllm 0.33.0", 60.0, low=50.0, high=70.0),
    ]
    compiled = {"vllm 0.33.0": {"remap": 5, "workspace": 3}, "triton": {"remap": 10}}
    told = {"host_method": "in 3 rounds", "compiled": compiled}
    text = pages.beside_vllm(record(*rows, kind="compare") | told)
    assert "in 3 rounds. Kernels compiled for it: vllm 0.33.0: 8, triton: 10." in text
    assert "| remap | 14.0 | ~60.0 |" in text
    assert "~: the quartiles are more than 25% of the median apart." in text
    assert "Beware: 1 of 2 times on the host or the CPU have quartiles more than 25%" in text


def test_the_summary_tells_how_far_the_comparison_is_from_what_stands_beside_it():
    found = record(gpu("copy", "torch", 32, 1.0), gpu("remap", "triton", 32, 2.0))
    compared = record(gpu("remap", "vllm 0.33.0", 32, 3.0), gpu("remap", "triton", 32, 2.1))
    assert "in whose process Triton's times were within 5% of these" in pages.summary(
        found, compared
    )


def test_the_targets_are_a_table():
    rows = [gpu("copy", "torch", 2048, 10.0), gpu("remap", "triton", 2048, 12.0)]
    lines = pages.asked([record(*rows)]).splitlines()
    assert lines[2 + len(asked.TARGETS) :] == [
        "", "Shapes that were timed, by record:", "",
        "- `bench-test.json`: uniform, K = 2048: T = 2048 alone",
    ]  # fmt: skip
    assert lines[2] == (
        "| Triton, remap without counts, T ≥ 2048, K = 2048 | ≤ 1.15 | ≤ 1.08 | 1.2 × copy | "
        "triton remap at T = 2048, K = 2048 | **missed** | **missed** |"
    )
    assert "| not measured |" in lines[3]


def test_which_shapes_were_measured_is_told_by_width():
    rows = [gpu("remap", "triton", count, 1.0) for count in (1, 2, 4, 8)]
    rows += [gpu("remap", "triton", 1, 1.0, topk=topk) for topk in (512, 4224)]
    rows += [gpu("remap", "triton", count, 1.0, topk=128) for count in (1, 4, 8)]
    rows += [gpu("remap", "triton", 8, 1.0, workload="trace prefill")]
    assert wording.measured(rows) == (
        "uniform, K = 2048: T = 1 to 8; K = 512, 4224: T = 1 alone; K = 128: T = 1, 4, 8; "
        "trace prefill, K = 2048: T = 8 alone"
    )


def test_what_was_left_out_is_told_once_for_each_reason():
    late = "the 9 seconds of the run were over"
    lines = [f"uniform, T = {rows}, K = {topk}: {late}" for rows in (2, 8, 4) for topk in (7, 9)]
    lines += [
        "host, memory, kernels, K = 9: too large",
        f"uniform, T = 1, K = 5: {late}",
        "uniform, T = 8, K = 3: T * K is 24, and at most 20 is measured on cpu",
        "uniform, T = 16, K = 3: T * K is 48, and at most 20 is measured on cpu",
        "uniform, T = 1, K = 9: remap on cupy: over",
        "uniform, T = 1, K = 9: remap on numba: over",
        "trace decode, T = 4, K = 9: over",
    ]
    assert wording.left_out(lines, {1, 2}) == [
        f"uniform, K = 7, 9: T = 2 to 8; K = 5: T = 1: {late}",
        "uniform, K = 3: T = 8, 16: T * K is above 20, the most that is measured on cpu",
        "uniform, K = 9: T = 1: remap on cupy, remap on numba: over",
        "trace decode, K = 9: T = 4: over",
        "host, memory, kernels, K = 9: too large",
    ]
    # A T between that was measured breaks a run.
    lines = [f"uniform, T = {rows}, K = 7: {late}" for rows in (1, 2, 4, 16, 32, 64)]
    assert wording.left_out(lines, {8}) == [f"uniform, K = 7: T = 1 to 4, 16 to 64: {late}"]


def test_a_section_is_replaced_between_its_marks():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    assert pages.replace_section(text, "x", r"new \1") == (
        "a\n<!-- x:begin -->\nnew \\1\n<!-- x:end -->\nb\n"
    )
    with pytest.raises(ValueError, match="must stand there once"):
        pages.replace_section(text, "y", "new")


def test_the_latest_record_of_a_device_counts(tmp_path):
    from mla_index.bench.record import write

    for name, date in (("bench-a", "2026-01-02"), ("bench-b", "2026-01-01")):
        write(record(date=f"{date}T00:00:00+00:00"), tmp_path / f"{name}.json")
    write(record(kind="compare"), tmp_path / "compare-a.json")
    (tmp_path / "conformance-a.json").write_text("{}")
    found = pages.records(tmp_path)
    assert {about: r["file"] for about, r in found.items()} == {
        "bench cuda": "bench-a.json",
        "compare cuda": "compare-a.json",
    }


RECORDS = pages.records(PROJECT / "benchmarks" / "results")
SECTIONS = pages.sections(RECORDS)


@pytest.mark.parametrize("place", SECTIONS, ids="-".join)
def test_the_pages_say_what_the_records_say(place):
    """`python -m mla_index.bench.pages` writes them again."""
    name, marker = place
    text = (PROJECT / name).read_text(encoding="utf-8")
    assert pages.replace_section(text, marker, SECTIONS[place]) == text


def test_the_readme_has_a_record_to_show():
    assert ("README.md", "speed") in SECTIONS


@pytest.mark.parametrize("name", pages.pictures(RECORDS))
def test_the_pictures_are_of_the_records(name):
    image = needed("PIL.Image")
    with image.open(PROJECT / name) as picture:
        assert picture.info["Source"] == origin(pages.pictures(RECORDS)[name])
