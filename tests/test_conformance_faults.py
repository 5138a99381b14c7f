"""The suite, proven: a right backend passes every case, and each planted fault fails one."""

from __future__ import annotations

import pytest
import torch
from planted_faults import FAULTS, Fault, ReferenceBackend, reference

import mla_index
from mla_index.conformance import cases
from mla_index.conformance.target import Failure, NotTaken, Target

JOBS = tuple(cases.jobs(full=False))


@pytest.fixture
def run():
    """Register a backend and run jobs on it; the failures by job id.

    Nothing but the counting of compiled kernels may be declined: the backends compile none.
    """
    registered = []

    def run(backend, jobs):
        mla_index.register(backend)
        registered.append(backend.name)
        failures = {}
        for job in jobs:
            try:
                job.run(Target(backend.name, torch.device("cpu")))
            except Failure as failure:
                failures[job.id] = str(failure)
            except NotTaken:
                assert "compiling" in job.tags
        return failures

    yield run
    for name in registered:
        mla_index.unregister(name)


def test_the_reference_passes_every_case(run):
    assert run(ReferenceBackend("reference"), JOBS) == {}


def test_ids_are_unique():
    for full in (False, True):
        ids = [job.id for job in cases.jobs(full)]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught_by_a_case_that_names_it(run, fault: Fault):
    named = [j for j in JOBS if fault.caught_by in j.tags or j.id.startswith(fault.caught_by)]
    assert named, f"no case has the tag or id {fault.caught_by}"
    failures = run(fault.backend, named)
    assert failures
    assert all(message.startswith(f"{job} on {fault.name}: ") for job, message in failures.items())


def test_faults_differ_from_the_reference():
    assert all(fault.steps != reference.Steps() for fault in FAULTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 24
