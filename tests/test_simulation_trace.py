"""Reading serving traces, and saying what is wrong with a broken one."""

import json

import pytest

from mla_index.simulation.trace import HASH_BLOCK, Request, TraceError, read_trace

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]}


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def test_a_line_becomes_a_request(tmp_path):
    path = write(tmp_path, {**GOOD, "more": 1}, "", GOOD)
    assert read_trace(path) == [Request(5, 600, 3, (7, 9))] * 2


def test_the_limit_stops_before_what_lies_behind_it(tmp_path):
    path = write(tmp_path, GOOD, GOOD, "broken")
    assert len(read_trace(path, 2)) == 2
    with pytest.raises(TraceError, match="line 3"):
        read_trace(path, 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a request must be an object, got list"),
        ({**GOOD, "input_length": 0}, "line 2: input_length must be an integer of at least 1"),
        ({**GOOD, "input_length": True}, "input_length must be an integer"),
        ({**GOOD, "input_length": "600"}, "got '600'"),
        ({**GOOD, "output_length": -1}, "output_length must be an integer of at least 0"),
        ({**GOOD, "timestamp": None}, "timestamp must be a number"),
        (
            {**GOOD, "timestamp": float("nan")},
            "timestamp must be a number of milliseconds, got nan",
        ),
        ({**GOOD, "input_length": float("inf")}, "input_length must be an integer of at least 1"),
        ("[" * 100_000, "line 2: not a request: nested too deep"),
        ({**GOOD, "hash_ids": 3}, "hash_ids must be a list"),
        ({**GOOD, "hash_ids": [1, -2]}, "hash_ids must be a list of integers of at least 0"),
        ({**GOOD, "hash_ids": [1]}, "that is 2, got 1"),
        ({**GOOD, "hash_ids": [1, 2, 3]}, "that is 2, got 3"),
        ({key: GOOD[key] for key in GOOD if key != "hash_ids"}, "hash_ids must be a list"),
    ],
    ids=lambda given: str(given)[:60],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    with pytest.raises(TraceError) as error:
        read_trace(write(tmp_path, GOOD, line))
    assert message in str(error.value)
    assert "trace.jsonl, line 2" in str(error.value)


def test_files_that_are_no_trace(tmp_path):
    with pytest.raises(TraceError, match=r"cannot read the trace .*: No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(write(tmp_path, ""))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="no UTF-8"):
        read_trace(binary)


def test_the_small_trace_has_what_the_demo_is_to_show():
    requests = read_trace()
    lengths = [request.input_length for request in requests]
    assert 20 <= len(requests) <= 30
    assert min(lengths) < 4  # so that some of four ranks own nothing
    assert max(lengths) > 5000
    assert any(length % HASH_BLOCK == 0 for length in lengths)
    assert sorted(request.timestamp for request in requests) == [r.timestamp for r in requests]
    full = [i for r in requests for i in r.hash_ids[: r.input_length // HASH_BLOCK]]
    assert len(set(full)) < len(full) / 2  # real sharing
    last = {r.hash_ids[-1] for r in requests if r.input_length % HASH_BLOCK}
    assert not last & set(full)  # a partial block has an id of its own
