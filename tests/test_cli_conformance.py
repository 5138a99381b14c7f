"""`mla-index conformance`: what it runs, what it tells, and how it ends."""

import json

import pytest
import torch
from typer.testing import CliRunner

from mla_index import registry
from mla_index.cli import conformance
from mla_index.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, ["conformance", *map(str, arguments)])


def line(operation, passed=0, skipped=0, failures=(), **reasons):
    return {
        "backend": "x",
        "operation": operation,
        "passed": passed,
        "failed": len(failures),
        "skipped": skipped,
        "skip_reasons": reasons,
        "failures": {
            test: {"message": f"{test} is wrong\nand more", "rerun": f"pytest {test}"}
            for test in failures
        },
    }


def ended(status, *results, code=1, problems=()):
    return {
        "status": status,
        "exit_status": code,
        "scale": "small",
        "problems": list(problems),
        "results": list(results),
    }


PASSED = ended("passed", line("remap", 3), line("view", 1), code=0)
FAILED = ended("failed", line("remap", 2, failures=["module::test_case[x]"]))
ABSENT = ended("did not run", line("a", 0, 2, no=2), problems=["nothing ran"])
NOTHING = ended("did not run", problems=["nothing ran"])
REFUSED = ended("did not run", code=4, problems=["nothing ran"])
BROKEN = {
    "status": "failed",
    "exit_status": 3,
    "problems": ["the run ended without a report: exit status 3"],
    "results": [],
}


@pytest.fixture
def suite(monkeypatch):
    """Stands for the suite: results by backend, and what it was called with."""
    results, calls = {}, []

    def run_suite(names, device, **how):
        calls.append((list(names), device, how))
        return {"device": device, "backends": {name: results.get(name, PASSED) for name in names}}

    monkeypatch.setattr("mla_index.conformance.run.run_suite", run_suite)
    run_suite.results, run_suite.calls = results, calls
    return run_suite


def test_by_default_what_can_run_on_the_device(suite):
    assert run().exit_code == 0
    names, device, how = suite.calls[0]
    assert "torch" in names
    assert "cupy" not in names
    assert (device, how["scale"], how["output"], how["pytest_args"]) == ("cpu", None, None, [])


def test_all_is_every_backend_and_one_that_cannot_run_fails_nothing(suite):
    suite.results["cupy"] = ABSENT
    result = run("--all")
    assert result.exit_code == 0
    assert suite.calls[0][0] == list(registry.names())
    assert "did not run  nothing ran" in result.stdout
    assert "why skipped" in result.stdout
    assert "cupy         2  no" in result.stdout


def test_what_ran_beside_every_backend_is_told_once(suite):
    def with_others(name, failures=()):
        others = line("diagnose", 5, failures=failures) | {"backend": "(any)"}
        return ended("passed", others, line("remap", 3) | {"backend": name})

    suite.results.update({name: with_others(name) for name in ("torch", "cupy", "numba")})
    result = run("--backend", "torch,cupy")
    lines = [words.split() for words in result.stdout.splitlines()]
    told = [words[:2] for words in lines[2 : lines.index([])]]
    assert told == [["torch", "remap"], ["cupy", "remap"], ["(any)", "diagnose"]]
    suite.results["cupy"] = with_others("cupy", ["module::test"])  # not the same there
    assert run("--backend", "torch,cupy").stdout.count("diagnose") == 2


@pytest.mark.parametrize("results", [NOTHING, REFUSED], ids=["no test", "not taken"])
def test_where_nothing_ran_for_a_wrong_name_there_are_no_tables(suite, results):
    suite.results["torch"] = results
    result = run("--backend", "torch", "--only", "x")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")


def test_named_ones_alone_and_how(suite, tmp_path):
    path = tmp_path / "record.json"
    result = run("--backend", "torch", "--scale", "full", "--only", "fr05", "--json", path)
    assert result.exit_code == 0
    names, _, how = suite.calls[0]
    assert names == ["torch"]
    assert (how["scale"], how["pytest_args"]) == ("full", ["-k", "fr05"])
    assert json.loads(path.read_text())["backends"] == {"torch": PASSED}


def test_several_with_commas(suite):
    assert run("--backend", "torch, cupy", "--require", "numba,torch").exit_code == 0
    assert suite.calls[0][0] == ["torch", "cupy", "numba"]


def test_a_record_to_standard_output_is_alone_there(suite):
    result = run("--backend", "torch", "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["backends"] == {"torch": PASSED}
    assert "conformance on cpu" in result.stderr
    assert suite.calls[0][2]["output"] == 2


def test_failures_are_named_with_the_command_for_the_first(suite):
    failures = [f"module::test_case[{number}-{'long' * 20}]" for number in range(7)]
    suite.results["torch"] = ended("failed", line("remap", 1, failures=failures))
    result = run("--backend", "torch")
    assert result.exit_code == 1
    assert "torch: 7 failed" in result.stdout
    for test in failures[:5]:
        assert f"\n  {test}\n" in result.stdout
        assert " is wrong" in result.stdout
    assert "and more" not in result.stdout.replace("and 2 more", "")
    assert failures[5] not in result.stdout
    assert f"to run the first of them again:\npytest {failures[0]}\n" in result.stdout


@pytest.mark.parametrize("columns", [60, 80])
def test_names_stay_whole(suite, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    reason = "it is not served here; what is served is this and that and many other things too"
    own = line("request_row_bounds", 198, 0)
    suite.results["torch"] = ended("passed", own, line("flat_row_view", 3, 2, **{reason: 2}))
    suite.results["cupy"] = ABSENT
    result = run("--backend", "torch", "--all")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    words = set(result.stdout.split())
    assert {"request_row_bounds", "flat_row_view", "torch", "cupy", "198", "things"} <= words
    assert "did not run" in result.stdout
    assert "…" not in result.stdout


def test_required_ones_are_added(suite):
    assert run("--require", "cupy").exit_code == 0
    assert suite.calls[0][0][-1] == "cupy"


@pytest.mark.parametrize(
    ("arguments", "results", "code", "message"),
    [
        (["--backend", "torch"], {"torch": FAILED}, 1, ""),
        (["--backend", "torch"], {"torch": BROKEN}, 1, ""),
        (["--backend", "torch", "--only", "x"], {"torch": BROKEN}, 1, ""),
        (["--backend", "torch", "--only", "x"], {"torch": NOTHING}, 2, "error: --only 'x' matches"),
        (
            ["--backend", "torch", "--only", "x ("],
            {"torch": REFUSED},
            2,
            "error: pytest does not take --o",
        ),
        (["--backend", "cupy"], {"cupy": ABSENT}, 3, "error: cupy had to run and did not\n"),
        (["--all", "--require", "cupy"], {"cupy": ABSENT}, 3, "error: cupy had to run"),
        (["--all", "--require", "cupy"], {"cupy": ABSENT, "torch": FAILED}, 1, ""),
        (["--backend", "torch,"], {}, 2, "error: --backend must be names with commas, and one is"),
        (["--backend", "abacus"], {}, 2, "error: no backend is named 'abacus'"),
        (["--scale", "huge"], {}, 2, "error: --scale must be small or full, got huge"),
        (["--json", "no/such/folder.json"], {}, 2, "error: --json no/such/folder.json: there is"),
        (["--json", "."], {}, 2, "error: --json .: that is a folder"),
        (["--json", "--all"], {}, 2, "error: --json takes a file, got --all"),
        (["--device", "abacus"], {}, 2, "error: --device abacus"),
        (["--device", "meta"], {}, 2, "error: --device meta: its tensors hold nothing to compare"),
    ],
    ids=str,
)
def test_how_it_ends(suite, arguments, results, code, message):
    suite.results.update(results)
    result = run(*arguments)
    assert result.exit_code == code
    assert result.stderr.startswith(message)
    if not message:
        assert "failed" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "options", "told"),
    [
        (["--only", "x ("], None, "--only 'x (' as an expression for its -k"),
        (["--only", "x"], "-z", "--only 'x' as an expression for its -k or PYTEST_ADDOPTS='-z'"),
        ([], "-z", "PYTEST_ADDOPTS='-z'"),
    ],
)
def test_whatever_pytest_may_not_take_is_named(suite, monkeypatch, arguments, options, told):
    if options is None:
        monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    else:
        monkeypatch.setenv("PYTEST_ADDOPTS", options)
    suite.results["torch"] = BROKEN | {"exit_status": 4}
    result = run("--backend", "torch", *arguments)
    assert result.exit_code == 2
    assert result.stderr == f"error: pytest does not take {told}; what it says is above\n"


def test_nothing_that_ran_is_no_success(suite):
    suite.results.update(dict.fromkeys(registry.names(), ABSENT))
    assert run("--all").exit_code == 3


def test_a_device_that_is_not_there_is_said_before_the_run(suite):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    result = run("--device", "cuda")
    assert result.exit_code == 3
    assert result.stderr == (
        "error: no backend can run on cuda: `mla-index info --probe --device cuda` says why\n"
    )
    assert suite.calls == []


def test_more_workers_need_xdist(suite, monkeypatch):
    monkeypatch.setattr(conformance, "find_spec", lambda name: None if name == "xdist" else name)
    assert run("--backend", "torch").exit_code == 0
    result = run("--backend", "torch", "--workers", "2")
    assert result.exit_code == 3
    assert result.stderr == "error: conformance needs xdist: pip install 'mla_index[test]'\n"


def test_without_pytest_it_says_what_to_install(suite, monkeypatch):
    monkeypatch.setattr(conformance, "NEEDED", ("pytest", "abacus_test"))
    result = run()
    assert result.exit_code == 3
    assert result.stderr == (
        "error: conformance needs abacus_test: pip install 'mla_index[test]'\n"
    )
    assert suite.calls == []


def test_the_suite_itself_on_one_case(tmp_path):
    path = tmp_path / "record.json"
    result = run("--backend", "torch", "--only", "fr05", "--json", path)
    assert result.exit_code == 0, result.output
    assert "remap" in result.stdout
    record = json.loads(path.read_text())
    assert record["backends"]["torch"]["status"] == "passed"
    assert record["backends"]["torch"]["exit_status"] == 0
    assert sum(line["passed"] for line in record["backends"]["torch"]["results"]) > 0
