"""Serving traces: which requests came, how long, and what they share."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

HASH_BLOCK = 512
"""Prompt tokens that one hash id stands for; the last id of a request may cover fewer."""


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace.

    Args:
        timestamp: arrival, in milliseconds.
        input_length: tokens of the prompt, at least 1.
        output_length: tokens of the answer.
        hash_ids: one id for every `HASH_BLOCK` prompt tokens; equal ids, equal content.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: str | Path | None = None, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a trace in JSON lines; all of them without a limit.

    Each line is an object with `timestamp`, `input_length`, `output_length` and `hash_ids`, as in
    the traces that the Mooncake project published. Other keys and empty lines are passed over.
    Without a path, a small trace that comes with the package is read.

    Raises:
        TraceError: the file cannot be read, has no request, or a line is not a request.
    """
    source = Path(path) if path is not None else files(__package__).joinpath("small_trace.jsonl")
    requests: list[Request] = []
    try:
        with source.open(encoding="utf-8") as lines:
            requests.extend(islice(_requests(lines, str(source)), limit))
    except OSError as error:
        raise TraceError(f"cannot read the trace {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{source} is not a trace in JSON lines: it is no UTF-8 text") from error
    if not requests:
        raise TraceError(f"{source} has no requests")
    return requests


def _requests(lines: Any, name: str) -> Iterator[Request]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _request(json.loads(line))
        except json.JSONDecodeError as error:
            raise TraceError(f"{name}, line {number}: not JSON: {error.msg}") from error
        except RecursionError as error:
            raise TraceError(f"{name}, line {number}: not a request: nested too deep") from error
        except ValueError as error:
            raise TraceError(f"{name}, line {number}: {error}") from error


def _request(line: object) -> Request:
    if not isinstance(line, dict):
        raise ValueError(f"a request must be an object, got {type(line).__name__}")
    length = _integer(line, "input_length", least=1)
    output_length = _integer(line, "output_length", least=0)
    timestamp = line.get("timestamp")
    if (
        isinstance(timestamp, bool)
        or not isinstance(timestamp, int | float)
        or not abs(timestamp) < math.inf  # nor NaN
    ):
        raise ValueError(f"timestamp must be a number of milliseconds, got {timestamp!r}")
    ids = line.get("hash_ids")
    if not isinstance(ids, list) or not all(type(item) is int and item >= 0 for item in ids):
        raise ValueError("hash_ids must be a list of integers of at least 0")
    needed = -(-length // HASH_BLOCK)
    if len(ids) != needed:
        raise ValueError(
            f"hash_ids must have one id for every {HASH_BLOCK} of the {length} tokens, "
            f"that is {needed}, got {len(ids)}"
        )
    return Request(timestamp, length, output_length, tuple(ids))


def _integer(line: dict[str, object], key: str, least: int) -> int:
    value = line.get(key)
    if type(value) is not int or value < least:
        raise ValueError(f"{key} must be an integer of at least {least}, got {value!r}")
    return value
