"""The page of evidence says what the records say; records of other sources are warned of."""

from __future__ import annotations

import warnings

import pytest
from conftest import PROJECT

from mla_index import registry
from mla_index.conformance import evidence
from mla_index.conformance.source import source_hash

RESULTS = PROJECT / "benchmarks" / "results"
RECORDS = evidence.records(RESULTS)


def test_there_are_records():
    assert RECORDS, "benchmarks/results holds no conformance-*.json"


def test_page_and_records_agree():
    shown = (PROJECT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert shown == evidence.page(RESULTS), (
        "regenerate: python -m mla_index.conformance.evidence benchmarks/results docs/evidence.md"
    )


def test_every_built_in_backend_has_passed_on_a_card():
    passed = evidence.passed_on_a_card(RECORDS)
    assert set(passed) == set(registry.BUILT_IN)
    assert all(passed.values()), passed


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_holds_what_it_must(name):
    record = RECORDS[name]
    assert record["versions"]["torch"]
    assert record["driver"]
    assert len(record["source_hash"]) == 64
    for result in record["backends"].values():
        for line in result["results"]:
            assert line["passed"] + line["failed"] + line["skipped"] > 0
            assert sum(line["skip_reasons"].values()) == line["skipped"]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.filterwarnings("default")
def test_records_older_than_the_sources_are_warned_of(name):
    """Only a warning: a machine without the card cannot renew the record."""
    if RECORDS[name]["source_hash"] != source_hash():
        warnings.warn(
            f"EVIDENCE IS STALE: {name} was recorded on other kernel or launch sources; "
            "run the suite on the card and record it anew",
            stacklevel=1,
        )
