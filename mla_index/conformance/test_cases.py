"""Every named case on every backend under test."""

from __future__ import annotations

import pytest

from mla_index.conformance import cases
from mla_index.conformance.plugin import full_scale
from mla_index.conformance.target import Job, Target


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each job."""
    if "job" in metafunc.fixturenames:
        found = list(cases.jobs(full_scale(metafunc.config)))
        metafunc.parametrize("job", found, ids=[job.id for job in found])


def test_case(target: Target, job: Job) -> None:
    """The job's check."""
    job.run(target)
