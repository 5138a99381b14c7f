"""The whole job on the small trace, and that it fails when an operation is wrong."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_index import Reason, UnknownBackend, register, unregister
from mla_index.backends import torch as right
from mla_index.registry import CONTRACT_VERSION, Kernel, Limits
from mla_index.simulation import memory
from mla_index.simulation.memory import refuse_too_large
from mla_index.simulation.paged import plan_blocks
from mla_index.simulation.report import Check
from mla_index.simulation.run import BOUND, simulate
from mla_index.simulation.setting import Config, ConfigError
from mla_index.simulation.trace import Request

SMALL = {"requests": 8, "topk": 64, "heads": 2}  # the fifth has three tokens


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dcp": 1},
        {"dcp": 3, "interleave": 48},
        {"dcp": 2, "interleave": 128, "rows": 3, "seed": 7},
    ],
    ids=str,
)
def test_every_bound_holds(more):
    report = simulate(Config(**SMALL, **more))
    assert report.passed
    assert all(math.isfinite(check.value) for check in report.checks)
    assert any(check.bound == BOUND and check.value > 0 for check in report.checks)
    rows = 8 * more.get("rows", 1)
    assert report.rows == rows
    for rank in (report.single, *report.ranks):
        assert rank.diagnosis.valid + sum(rank.diagnosis.counts.values()) == rows * 64
    if more.get("dcp") == 1:
        return
    assert len(report.ranks) == more.get("dcp", 4)
    assert sum(rank.diagnosis.valid for rank in report.ranks) == report.single.diagnosis.valid


def test_one_rank_is_not_compared_with_itself():
    report = simulate(Config(**SMALL, dcp=1))
    assert report.ranks == ()
    assert report.rows_empty_somewhere == 0
    assert set(report.explanations) == {"remap", "flat_row_view"}
    assert {check.name.partition(":")[0] for check in report.checks} == {"one rank vs unpaged"}
    assert not any("rank" in stage or "shards" in stage for stage in report.seconds)


def test_the_facts_add_up():
    report = simulate(Config(**SMALL))
    assert report.short_rows == 1
    assert report.single.diagnosis.counts[Reason.PADDING] == 61
    assert report.single.diagnosis.valid == 8 * 64 - 61
    assert [rank.empty_rows for rank in report.ranks] == [0, 0, 0, 1]  # three tokens, four ranks
    assert report.rows_empty_somewhere == 1
    assert report.single.saved_blocks > 0
    assert set(report.explanations) == {"remap", "dcp_filter", "safe_lengths", "flat_row_view"}
    assert {answer.chosen for answer in report.explanations.values()} == {"torch"}
    told = json.loads(json.dumps(report.as_dict()))
    assert told["passed"] is True
    assert told["backends"]["remap"]["chosen"] == "torch"
    assert told["ranks"][3]["entries"]["other_rank"] > 0


def test_the_seed_decides_and_nothing_else():
    def errors(seed):
        return [check.value for check in simulate(Config(**SMALL, seed=seed)).checks]

    assert errors(1) == errors(1)
    assert errors(1) != errors(2)


def test_progress_reaches_its_total():
    seen = []
    simulate(Config(**SMALL, dcp=2), lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == list(range(1, 25))
    assert {total for *_, total in seen} == {24}
    seen.clear()
    simulate(Config(**SMALL, dcp=1), lambda *step: seen.append(step))
    assert [(done, total) for _, done, total in seen] == [(done, 16) for done in range(1, 17)]


# --- planted faults ------------------------------------------------------------------------------


def next_row(slots, counts, **_):
    slots.copy_(torch.where(slots >= 0, slots + 1, slots))


def one_entry_doubled(slots, counts, **_):
    slots[0, 0] = slots[0, 1]


def blocks_are_adjacent(slots, counts, *, block_stride_rows, **_):
    slots.copy_(torch.where(slots >= 0, slots // block_stride_rows * 64 + slots % 64, slots))


def last_entry_dropped(slots, counts, **_):
    counts.sub_(1).clamp_min_(0)


class Wrong:
    name = "wrong"
    contract_version = CONTRACT_VERSION
    limits = Limits(("remap", "safe_lengths"), ("cpu",))

    def __init__(self, fault, *, only_dcp=False):
        self.fault, self.only_dcp = fault, only_dcp

    def unavailable(self, device, *, probe):
        return None

    def unsupported(self, op, spec):
        return None

    def build(self, op, spec, device):
        launch = right.build(op, spec, device).launch

        def remap(*arguments):
            launch(*arguments)
            if not self.only_dcp or spec.dcp_size > 1:
                self.fault(arguments[3], arguments[4], block_stride_rows=arguments[11])
                if arguments[5] is not None:
                    arguments[5].copy_(arguments[4].clamp_min(1))

        def safe_lengths(slots, counts, lengths):
            launch(slots, counts, lengths)
            if self.fault is None:
                lengths.add_(1)

        return Kernel(safe_lengths if op == "safe_lengths" else remap)


def simulate_with(backend, **more):
    register(backend)
    try:
        return simulate(Config(**SMALL, backend="wrong", **more))
    finally:
        unregister("wrong")


@pytest.mark.parametrize("fault", [next_row, one_entry_doubled, blocks_are_adjacent])
def test_a_wrong_slot_breaks_the_first_bound(fault):
    report = simulate_with(Wrong(fault))
    assert not report.passed
    assert not report.checks[0].passed
    assert report.explanations["remap"].chosen == "wrong"


@pytest.mark.parametrize("fault", [next_row, one_entry_doubled, last_entry_dropped])
def test_a_wrong_share_breaks_the_second_bound(fault):
    report = simulate_with(Wrong(fault, only_dcp=True))
    broken = [check.name for check in report.checks if not check.passed]
    assert "4 ranks vs one: relative L2 error, worst row" in broken
    assert not any("unpaged" in name for name in broken)
    lost = "entries that the ranks lose or keep twice"
    assert (lost in broken) == (fault is last_entry_dropped)


def test_nan_exceeds_every_bound():
    check = Check("x", math.nan, 1.0)
    assert not check.passed
    assert json.dumps(check.as_dict()).count("null") == 1


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"topk": 0}, "topk must be at least 1"),
        ({"dcp": 0}, "dcp must be at least 1"),
        ({"interleave": -1}, "interleave must be at least 1"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"dcp": 2**20, "interleave": 2**20}, "size * "),
        ({"device": "abacus"}, "abacus"),
        ({"device": "meta"}, "device must hold values"),
    ],
    ids=str,
)
def test_bad_configurations(wrong, message):
    with pytest.raises(ConfigError) as error:
        Config(**wrong)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_backend_is_refused_before_any_work():
    with pytest.raises(UnknownBackend, match="abacus"):
        Config(backend="abacus")


def requests_of(*lengths):
    """Requests that share nothing."""
    return [
        Request(0, length, 0, tuple(range(n << 20, (n << 20) + -(-length // 512))))
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("more", "lengths", "message"),
    [
        (
            {"rows": 100_000},
            [6000] * 24,
            "rows must be lower than 100000: the run would take about",
        ),
        ({"heads": 10**6}, [6000] * 24, "heads must be lower than 1000000: "),
        ({"topk": 10**8}, [6000] * 24, "topk must be lower than 100000000: "),
        ({"dcp": 10**6}, [6000] * 24, "dcp must be lower than 1000000: "),
        (
            {"rows": 10**6, "heads": 1, "topk": 1, "dcp": 1},
            [10**6],
            "for the indexer's scores, and",
        ),
        ({}, [500_000] * 64, "requests must be lower than 64: "),
        ({}, [10**8], "the trace must have shorter prompts: "),
        ({"heads": 1}, [10**6] * 2, "requests must be lower than 2: "),
    ],
    ids=str,
)
def test_what_the_machine_cannot_hold_is_refused_and_the_parameter_named(
    monkeypatch, more, lengths, message
):
    monkeypatch.setattr(memory, "available", lambda device: 4 * 10**9)
    requests = requests_of(*lengths)
    plan = plan_blocks(requests, block_size=64)
    with pytest.raises(ConfigError) as error:
        refuse_too_large(Config(**more), requests, [plan], torch.device("cpu"))
    assert message in str(error.value)
    assert str(error.value).endswith(", and cpu has 4.00 GB free")


@pytest.mark.parametrize(
    ("part", "more", "count", "remedy"),
    [
        ("the indexer's scores", {}, 9, "the trace must have shorter prompts"),
        ("the queries", {}, 1, "heads must be lower than 16"),
        ("the queries", {"heads": 4}, 9, "heads must be lower than 4"),
        ("the queries", {"heads": 1}, 9, "requests must be lower than 9"),
        ("the queries", {"heads": 1}, 1, "the trace must have shorter prompts"),
        ("the results of attention", {"heads": 1, "dcp": 2}, 1, "dcp must be lower than 2"),
    ],
)
def test_only_what_can_be_lower_is_to_be_lower(part, more, count, remedy):
    assert memory._remedy(Config(**more), count, part) == remedy


def test_it_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr("mla_index.simulation.run.make_workload", None)
    monkeypatch.setattr("mla_index.simulation.run._choose", None)
    with pytest.raises(ConfigError, match="rows must be lower than 10000000000"):
        simulate(Config(rows=10**10))


def test_where_nobody_knows_the_memory_nothing_is_refused():
    requests = requests_of(10**6)
    plan = plan_blocks(requests, block_size=64)
    refuse_too_large(Config(rows=10**3), requests, [plan], torch.device("xpu"))


def test_the_memory_of_this_machine_is_known():
    assert 10**8 < memory.available(torch.device("cpu")) < 10**14


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells it there")
@pytest.mark.parametrize("more", [{"topk": 300_000}, {"rows": 32}], ids=str)
def test_the_estimate_is_about_what_is_taken(more):
    """Measured in a process of its own, whose peak is nobody else's."""
    code = f"""
from pathlib import Path
from mla_index.simulation import memory, run
from mla_index.simulation.setting import Config

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

found, needed = {{}}, memory.needed
memory.needed = lambda *arguments: found.update(needed(*arguments)) or found
run.simulate(Config(requests=1, topk=1, heads=1, dcp=1))  # what is loaded at first use
before = peak()
run.simulate(Config(**{more!r}))
print(sum(found.values()), peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    estimated, taken = map(int, done.stdout.split())
    assert 0.6 < estimated / taken < 2.5


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("Error code 12"), False),
        (ValueError("can't allocate memory"), False),
    ],
    ids=repr,
)
def test_what_says_that_memory_ran_out(error, exhausted):
    assert memory.is_exhausted(error) is exhausted


def test_what_torch_says_on_the_cpu_is_known():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.int8)
    assert memory.is_exhausted(error.value)
