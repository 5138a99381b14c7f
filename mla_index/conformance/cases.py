"""Every named case of the suite, as jobs with stable ids."""

from __future__ import annotations

from collections.abc import Iterator

from mla_index.conformance import field_reports, refusals, safe_jobs, scale_jobs, sweep, view_jobs
from mla_index.conformance.target import Job


def jobs(full: bool) -> Iterator[Job]:
    """All jobs; `full` takes the sizes of production."""
    yield from field_reports.jobs(full)
    yield from sweep.jobs(full)
    yield from scale_jobs.jobs(full)
    yield from safe_jobs.jobs(full)
    yield from view_jobs.jobs()
    yield from refusals.jobs()
