"""Every named case of the suite, as jobs with stable ids."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mla_index.conformance import (
    compile_jobs,
    field_reports,
    refusals,
    safe_jobs,
    scale_jobs,
    sweep,
    view_jobs,
)
from mla_index.conformance.checks import Run, check_remap
from mla_index.conformance.oracle import Problem
from mla_index.conformance.target import Job


def jobs(full: bool) -> Iterator[Job]:
    """All jobs; `full` takes the sizes of production."""
    yield from field_reports.jobs(full)
    yield from sweep.jobs(full)
    yield from scale_jobs.jobs(full)
    yield from safe_jobs.jobs(full)
    yield from view_jobs.jobs()
    yield from refusals.jobs()
    yield from compile_jobs.jobs()


def problems() -> dict[str, tuple[Problem, Run]]:
    """Every problem of `remap` once, with the run that gives its dtypes and layouts."""
    found: dict[str, tuple[Problem, Run]] = {}
    for job in (*field_reports.jobs(full=False), *sweep.jobs(full=False)):
        if isinstance(job.check, partial) and job.check.func is check_remap:
            problem, run, _ = job.check.args
            name = job.id.split(":")[0]
            if name not in found:
                found[name] = (problem() if callable(problem) else problem, run)
    return found
