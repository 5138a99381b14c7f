"""The pytest side of the suite: which backends, the `target` fixture, and what ran in the end.

Loaded by `mla_index_pytest` when it is needed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_index_pytest
from mla_index import questions, registry
from mla_index.conformance.run import EMULATION
from mla_index.conformance.target import Failure, Job, NotTaken, Target
from mla_index.explanation import explain

_OUTCOMES = ("passed", "failed", "skipped")
_LABEL = "mla_index"
_TEST = "mla_index_test"
_ANY = "(any)"
"""What stands for the backend of a test that no backend has a part in."""


# --- what is tested -----------------------------------------------------------------------------


def _device(config: pytest.Config) -> torch.device:
    given = str(mla_index_pytest.value(config, "--mla-device") or "cpu")
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise pytest.UsageError(f"--mla-device {given}: {error}") from None
    if device.type == "meta":
        raise pytest.UsageError("--mla-device meta: its tensors hold nothing to compare")
    return questions.with_index(device)


def _full(config: pytest.Config) -> bool:
    scale = mla_index_pytest.value(config, "--mla-scale")
    if scale not in (None, "small", "full"):
        raise pytest.UsageError(f"--mla-scale must be small or full, got {scale}")
    return scale == "full" if scale else _device(config).type != "cpu"


def _backends(config: pytest.Config) -> list[str]:
    """Those that were named; else all that can run on the device."""
    named = mla_index_pytest.names(config, "--mla-backend")
    required = mla_index_pytest.names(config, "--mla-require")
    for name in (*named, *required):
        if name not in registry.names():
            raise pytest.UsageError(
                f"no backend is named {name!r}; there are {', '.join(registry.names())}"
            )
    if named:
        return list(dict.fromkeys((*named, *required)))
    rows = explain("remap", device=_device(config), probe=True).rows
    found = {row.name for row in rows if row.accepted}
    return [name for name in registry.names() if name in found or name in required]


def targets(config: pytest.Config) -> list[Target]:
    """The backends under test, on the device, at the scale."""
    known: list[Target] | None = config.stash.get(_TARGETS, None)
    if known is None:
        examples = int(str(mla_index_pytest.value(config, "--mla-examples") or 30))
        device, full = _device(config), _full(config)
        known = [Target(name, device, full, examples) for name in _backends(config)]
        config.stash[_TARGETS] = known
    return known


def full_scale(config: pytest.Config) -> bool:
    """Whether the sizes of production are run."""
    return _full(config)


# --- tests --------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """The marker that says which operation a test is of, and the report."""
    config.addinivalue_line("markers", "mla_op(name): the operation of mla_index that is tested")
    config.pluginmanager.register(_Report(config), "mla_index_report")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each backend."""
    if "target" in metafunc.fixturenames:
        found = targets(metafunc.config)
        ids = [target.backend for target in found]
        metafunc.parametrize("target", found, ids=ids, indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device, for what no backend has a part in."""
    return _device(request.config)


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """The backend under test; a backend that cannot run skips with its reason."""
    chosen: Target = request.param
    return chosen


def _params(item: pytest.Item) -> dict[str, object]:
    """What the test is parametrized with."""
    call = getattr(item, "callspec", None)
    return {} if call is None else dict(call.params)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Label each test with its backend and operation; the label travels with its reports.

    With xdist's `--dist loadgroup`, tests that share compiled kernels stay on one worker.
    """
    grouped = config.pluginmanager.hasplugin("xdist")
    for item in items:
        chosen, job = _params(item).get("target"), _params(item).get("job")
        marker = item.get_closest_marker("mla_op")
        op = job.op if isinstance(job, Job) else marker.args[0] if marker else None
        if op is not None:
            backend = chosen.backend if isinstance(chosen, Target) else _ANY
            item.user_properties += [(_LABEL, f"{backend} {op}"), (_TEST, _address(item))]
        if grouped and isinstance(job, Job):
            item.add_marker(pytest.mark.xdist_group(_group(job)))


def _address(item: pytest.Item) -> str:
    """How `pytest --pyargs` finds the test again from any folder, unlike its node id.

    The tests of others, which plugins and paths of theirs may have to be there for, keep theirs.
    """
    module = getattr(getattr(item, "module", None), "__name__", "")
    if not module.startswith(f"{mla_index_pytest.SUITE}."):
        return item.nodeid
    return f"{module}::{item.nodeid.partition('::')[2]}"


def _group(job: Job) -> str:
    """Jobs of one family, mode and dtypes share kernels; those of 16 GiB run one after another."""
    if job.id.startswith("fr26"):
        return "memory"
    name, _, variant = job.id.partition(":")
    return f"{name.rstrip('0123456789').split('-')[0].rstrip('0123456789')}:{variant}"


_TARGETS = pytest.StashKey[list[Target]]()
_REASONS = pytest.StashKey[dict[Target, str | None]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what the backend cannot run on this device at all, with the backend's reason."""
    chosen = _params(item).get("target")
    if isinstance(chosen, Target):
        reasons = item.config.stash.setdefault(_REASONS, {})
        if chosen not in reasons:
            reasons[chosen] = chosen.unavailable()
        if reasons[chosen] is not None:
            pytest.skip(f"{chosen.backend}: {reasons[chosen]}")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A configuration that the backend declines is a skip; a failure needs no traceback."""
    try:
        return (yield)
    except NotTaken as reason:
        pytest.skip(str(reason))
    except Failure as failure:
        # hypothesis adds the example that it shrank to as a note
        told = "\n".join((str(failure), *getattr(failure, "__notes__", ())))
    pytest.fail(told, pytrace=False)  # out here, where it does not carry the first along


# --- the end ------------------------------------------------------------------------------------


@dataclass
class _Line:
    """What happened to the tests of one backend and operation."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)


class _Report:
    """Collects outcomes (from workers too), prints the table, and decides the exit status."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.lines: dict[tuple[str, str], _Line] = {}
        self.compiled: Counter[str] = Counter()
        self.ended: list[str] = []
        path = mla_index_pytest.value(config, "--mla-json")
        self.path = Path(str(path)) if path else None
        if self.path is not None and (
            self.path.is_dir() or not self.path.absolute().parent.is_dir()
        ):
            raise pytest.UsageError(f"--mla-json {path}: must be a file in a folder that is there")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        label = properties.get(_LABEL)
        setup_or_call = report.when == "call" or (report.when == "setup" and not report.passed)
        if label is None or not (setup_or_call or report.failed):
            return
        backend, op = str(label).split(" ", 1)
        line = self.lines.setdefault((backend, op), _Line())
        line.outcomes[report.outcome] += 1
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            line.reasons[str(reason).removeprefix("Skipped: ")] += 1
        if report.failed:
            line.failures[str(properties[_TEST])] = _message(report.longrepr)

    def problems(self) -> list[str]:
        """Why the run must not count as passed, beyond its failures."""
        ran = {key for key, line in self.lines.items() if _ran(line)}
        # Who names a test that no backend has a part in has got what was asked for.
        named = any("::" in argument for argument in self.config.args)
        backends = {key for key in ran if key[0] != _ANY}
        found = [] if backends or (named and ran) else ["no conformance test ran"]
        for name in mla_index_pytest.names(self.config, "--mla-require"):
            ops = [op for backend, op in self.lines if backend == name]
            missing = [op for op in ops if (name, op) not in ran]
            if not ops or missing:
                found.append(
                    f"required backend {name} did not run {', '.join(missing) or 'at all'}"
                )
        return found + self.ended

    def _count_kernels(self) -> dict[str, int]:
        """Kernels compiled in this process, by backend, where the backend tells."""
        found = {target.backend: target.compiled_kernels() for target in targets(self.config)}
        return {name: count for name, count in found.items() if count is not None}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist has ended."""
        self.compiled.update(getattr(node, "workeroutput", {}).get(_LABEL, {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.option.collectonly:
            return
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[_LABEL] = self._count_kernels()
            return
        self.compiled.update(self._count_kernels())
        if session.exitstatus == pytest.ExitCode.INTERRUPTED:
            self.ended.append("the run was interrupted")
        self._write()
        if self.problems() and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _write(self) -> None:
        if self.path is None:
            return
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False)
        try:
            self.path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            self.ended.append(f"--mla-json {self.path}: {error.strerror}; it was not written")

    def as_dict(self) -> dict[str, object]:
        """The results as JSON can hold them."""
        return {
            "device": str(_device(self.config)),
            "scale": "full" if _full(self.config) else "small",
            "problems": self.problems(),
            "compiled_kernels": dict(self.compiled),
            "results": [
                {
                    "backend": backend,
                    "operation": op,
                    **{outcome: line.outcomes[outcome] for outcome in _OUTCOMES},
                    "skip_reasons": dict(line.reasons),
                    "failures": {
                        test: {"message": message, "rerun": self.rerun(backend, test)}
                        for test, message in line.failures.items()
                    },
                }
                for (backend, op), line in sorted(self.lines.items())
            ],
        }

    def rerun(self, backend: str, test: str) -> str:
        """The command that runs this test alone, for a shell."""
        device = _device(self.config)
        emulation = EMULATION.get(backend, {}) if device.type == "cpu" else {}
        variables = [f"{key}={value}" for key, value in emulation.items() if key in os.environ]
        plugins = [name for name in self.config.option.plugins if not name.startswith("no:")]
        examples = mla_index_pytest.value(self.config, "--mla-examples")
        words = [
            *(*variables, "python", "-m", "pytest"),
            *(word for name in dict.fromkeys(plugins) for word in ("-p", name)),
            *("--pyargs", test, "--mla-device", str(device)),
            *(() if backend == _ANY else ("--mla-backend", backend)),
            *("--mla-scale", "full" if _full(self.config) else "small"),
            *(("--mla-examples", str(examples)) if examples else ()),
        ]
        return shlex.join(words)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.config.option.collectonly:
            return
        scale = "full" if _full(self.config) else "small"
        write = terminalreporter.write_line
        terminalreporter.section(f"mla_index conformance on {_device(self.config)}, {scale} scale")
        for text in self._table(shutil.get_terminal_size().columns):
            write(text)
        again = [
            self.rerun(backend, test)
            for (backend, _), line in sorted(self.lines.items())
            for test in line.failures
        ]
        if again:
            write(f"the first failure again: {again[0]}")
        for problem in self.problems():
            write(f"FAILED: {problem}", red=True)

    def _table(self, width: int) -> Iterator[str]:
        """Counts in columns, and below them why tests were skipped."""
        names = [("backend", "operation"), *sorted(self.lines)]
        first, second = (max(len(name[column]) for name in names) for column in (0, 1))
        yield f"{'backend':<{first}}  {'operation':<{second}}  {'ran':>6} {'failed':>6} skipped"
        for (backend, op), line in sorted(self.lines.items()):
            counts = f"{_ran(line):>6} {line.outcomes['failed']:>6} {line.outcomes['skipped']:>7}"
            yield f"{backend:<{first}}  {op:<{second}}  {counts}"
            for reason, count in line.reasons.most_common():
                yield textwrap.fill(
                    f"{count} × {reason}", width, initial_indent="    ",
                    subsequent_indent="        ", break_long_words=False, break_on_hyphens=False,
                )  # fmt: skip


def _message(failure: object) -> str:
    """What a test's error says; where pytest keeps none apart, the end of what it shows."""
    crash = getattr(failure, "reprcrash", None)
    told = str(failure)[-2000:] if crash is None else str(crash.message)[:2000]
    return told.removeprefix("Failed: ")  # of `pytest.fail`


def _ran(line: _Line) -> int:
    return line.outcomes["passed"] + line.outcomes["failed"]
