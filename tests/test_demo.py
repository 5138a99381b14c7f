"""`mla-index demo`, on the small trace and on a real one."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from mla_index.cli import demo as demo_command
from mla_index.cli.app import app
from mla_index.cli.progress import PATIENCE, PatientProgress
from mla_index.simulation.run import simulate
from mla_index.simulation.setting import Config
from mla_index.simulation.trace import read_trace

SMALL = ("--requests", "8", "--topk", "64", "--heads", "2")


def demo(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def test_it_tells_what_was_simulated_and_found():
    result = demo(*SMALL)
    assert result.exit_code == 0, result.output
    for told in (
        "8 of 3 to 2,644 tokens",
        "8 rows × 2 heads, the top 64 tokens each; 1 row has fewer",
        "earlier request's too",
        "1 of 8 rows (12.5%) has no token on some rank",
        "other rank's",
        "padding",
        "dcp_filter, then safe_lengths, all ranks",
        "4 ranks vs one: relative L2 error, worst row",
        "every bound holds",
    ):
        assert told in " ".join(result.stdout.split())
    first = "runs on torch (by auto); why not the others: mla-index explain remap"
    assert result.stdout.splitlines()[:3] == [first, "", "the job"]
    assert "rejected" not in result.stdout
    assert "broken" not in result.stdout
    assert result.stderr == ""


def test_backends_are_told_by_operation_where_they_differ():
    report = simulate(Config(requests=2, topk=8, heads=1))
    answers = {op: replace(answer, chosen="x") for op, answer in report.explanations.items()}
    answers["flat_row_view"] = report.explanations["flat_row_view"]
    told = demo_command._served(replace(report, explanations=answers, device="cuda:0"))
    assert told == (
        "runs remap, dcp_filter, safe_lengths on x, flat_row_view on torch (by auto); "
        "why not the others: mla-index explain remap --device cuda:0 --probe"
    )


def test_what_is_equal_is_said_once():
    told = demo("--requests", 1, "--topk", 1, "--heads", 1, "--dcp", 2).stdout
    for line in (
        "requests         1 of 1,180 tokens\n",
        "queries          1 row × 1 head, the top 1 token each; 0 rows have fewer\n",
        "ranks            2, interleave 1; 10 blocks each\n",
        "empty rows       1 of 1 row (100.0%) has no token on some rank\n",
    ):
        assert line in told


def test_one_rank_has_no_second_part():
    result = demo(*SMALL, "--dcp", 1)
    assert result.exit_code == 0
    assert "vs one" not in result.stdout
    assert "shards" not in result.stdout
    assert "\nranks " not in result.stdout
    assert "every bound holds" in result.stdout


def test_the_help_knows_how_many_requests_there_are():
    count = len(read_trace(None, 1000))
    assert f"the trace of the package has {count}." in " ".join(
        demo("--help").stdout.replace("│", " ").split()
    )


def test_several_reasons_have_a_line_each():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    result = demo("--device", "cuda")
    assert result.exit_code == 3
    first, *reasons, last = result.stderr.splitlines()
    assert first.startswith("error: no backend for ")
    assert first.endswith("(asked for by auto):")
    assert [line.split(":")[0] for line in reasons] == ["  triton", "  cupy", "  numba", "  torch"]
    assert last == "Could run: none"


def test_json_is_the_report():
    result = demo(*SMALL, "--dcp", 2, "--interleave", 64, "--rows", 2, "--backend", "torch,auto")
    assert result.exit_code == 0
    result = demo(*SMALL, "--dcp", 2, "--interleave", 64, "--rows", 2, "--json")
    told = json.loads(result.stdout)
    assert (told["requests"], told["rows"], told["topk"], told["interleave"]) == (8, 16, 64, 64)
    assert told["passed"] is True
    assert len(told["ranks"]) == 2
    assert told["backends"]["dcp_filter"]["chosen"] == "torch"
    assert {check["bound"] for check in told["checks"]} == {1e-5, 0}


def test_many_ranks_are_summed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = demo(*SMALL, "--dcp", 9)
    assert result.exit_code == 0
    assert "9 ranks" in result.stdout
    assert "rank 3" not in result.stdout


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_nothing_is_cut_in_a_narrow_terminal(monkeypatch, tmp_path, columns, ranks):
    """Names and numbers stay whole; ranks for which there is no room are summed."""
    monkeypatch.setenv("COLUMNS", str(columns))
    trace = tmp_path / f"{'a-long-name' * 6}.jsonl"
    request = {"timestamp": 0, "input_length": 2000, "output_length": 1, "hash_ids": [1, 2, 3, 4]}
    trace.write_text(f"{json.dumps(request)}\n")
    result = demo("--trace", trace, "--topk", 1500, "--heads", 2, "--dcp", ranks)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "…" not in result.stdout
    words = set(result.stdout.split())
    assert {"dcp_filter", "explain", "1,500", "holds"} <= words
    assert "".join(trace.name.split()) in "".join(result.stdout.split())
    assert ("rank 3" in result.stdout) == (ranks == 4)


def test_a_broken_bound_is_exit_code_1(monkeypatch):
    monkeypatch.setattr("mla_index.simulation.run.BOUND", 1e-12)
    result = demo(*SMALL)
    assert result.exit_code == 1
    assert "a bound is broken" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--requests", 0], 2, "error: requests must be at least 1, got 0"),
        (["--dcp", 0], 2, "error: dcp must be at least 1, got 0"),
        (["--topk", -5], 2, "error: topk must be at least 1, got -5"),
        (["--rows", 0], 2, "error: rows must be at least 1, got 0"),
        (
            ["--rows", 10**8],
            2,
            "error: rows must be lower than 100000000: the run would take about",
        ),
        (["--dcp", 10**9], 2, "error: dcp must be lower than 1000000000: the run would take"),
        (["--topk", 10**11], 2, "error: topk must be lower than 100000000000: the run would"),
        (["--device", "meta"], 2, "error: device must hold values to attend to, got meta"),
        (["--backend", "abacus"], 2, "error: no backend is named 'abacus'; there are triton"),
        (["--backend", "torch,,cupy"], 2, "error: --backend must be names with commas, and one"),
        (["--device", "abacus"], 2, "error: --device abacus: "),
        (["--trace", "absent.jsonl"], 2, "error: cannot read the trace absent.jsonl: No such"),
        (["--backend", "cupy"], 3, "error: no backend for "),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(arguments, code, message):
    result = demo(*arguments)
    assert result.exit_code == code
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_broken_line_of_a_trace_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": []}\n')
    result = demo("--trace", path)
    assert result.exit_code == 2
    assert "trace.jsonl, line 1: hash_ids must have one id" in result.stderr


def test_the_progress_bar_waits_and_then_shows():
    now = [0.0]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with PatientProgress(console, clock=lambda: now[0]) as progress:
        progress("filling", 1, 4)
        now[0] = PATIENCE
        progress("filling", 2, 4)
        assert not progress.shown
        assert screen.getvalue() == ""
        now[0] = PATIENCE + 0.1
        progress("attending", 3, 4)
        assert progress.shown
    assert "attending" in screen.getvalue()
    assert "3/4" in screen.getvalue()


def test_no_bar_where_nobody_watches():
    screen = io.StringIO()
    times = iter(range(0, 100, 10))
    with PatientProgress(Console(file=screen), clock=lambda: next(times)) as progress:
        progress("filling", 1, 2)
    assert screen.getvalue() == ""


def test_a_real_trace_holds_every_bound(shared):
    """The first requests of a day; all 64 are for the demo itself (`make demo`)."""
    trace = shared / "data" / "mooncake_conversation_1000.jsonl"
    report = simulate(Config(trace=trace, requests=6, topk=2048, dcp=4))
    assert report.passed
    assert sum(report.lengths) > 30_000
    assert report.single.saved_blocks == 5 * 8  # all six begin with the same 512 tokens
    screen = io.StringIO()
    demo_command.show(report, Console(file=screen, width=80))
    assert "mooncake_conversation_1000.jsonl" in screen.getvalue()
