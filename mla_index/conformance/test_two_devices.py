"""Tensors on one CUDA device while another is current, and a thread for each; needs two devices."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import mla_index
from mla_index.conformance import test_cuda as on_one_device
from mla_index.conformance.checks import Scene, current_device_unchanged, differences
from mla_index.conformance.scenes import CONFIGURATIONS, scene
from mla_index.conformance.target import Failure, NotTaken, Target


@pytest.fixture
def away(target: Target) -> Iterator[Target]:
    """The target on a device that is not current: its own, or else the next one."""
    if target.device.type != "cuda":
        pytest.skip(f"needs a CUDA device, runs on {target.device}")
    devices = torch.cuda.device_count()
    if devices < 2:
        pytest.skip(f"needs two CUDA devices, there is {devices}")
    current = torch.cuda.current_device()
    index = target.device.index if target.device.index != current else (current + 1) % devices
    with torch.cuda.device(current):
        yield replace(target, device=torch.device("cuda", index))


@pytest.mark.mla_op("remap")
@pytest.mark.parametrize("outputs", ["given", "allocated"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_tensors_elsewhere(away: Target, name: str, outputs: str) -> None:
    """Right there, outputs are made there, and the current device stays (see `checks.call`)."""
    given = scene(away, name)
    if outputs == "given":
        given.call(away.backend)
        given.verify()
        return
    allocated = replace(given, outputs={}, run=replace(given.run, outputs="allocated"))
    result = allocated.call(away.backend)
    for expected, got in zip(given.expected.values(), result, strict=True):
        if expected is not None:
            if got is None or got.device != away.device:
                raise Failure(f"a result must be on {away.device}, got {got}")
            differences("an allocated result", got.cpu(), expected)


@pytest.mark.mla_op("safe_lengths")
def test_safe_lengths_elsewhere(away: Target) -> None:
    """The same for `safe_lengths`."""
    slots = torch.full((70, 5), 9, dtype=torch.int32, device=away.device)
    counts = torch.arange(-1, 69, dtype=torch.int32, device=away.device)
    with current_device_unchanged(away.device):
        lengths = mla_index.safe_lengths(slots, counts, backend=away.backend)
    if lengths.device != away.device or lengths.tolist() != [1, 1, *range(1, 69)]:
        raise Failure(f"lengths are wrong: {lengths}")
    if slots[:, 0].tolist() != [0, 0, *[9] * 68]:
        raise Failure(f"dummy slots are wrong: {slots[:, 0]}")


@pytest.mark.mla_op("remap")
def test_the_current_device_is_not_touched(away: Target) -> None:
    """Choosing, compiling and calling make no context and no memory on the device that is current.

    In a process of its own, where there is nothing on that device.
    """
    index = away.device.index
    if index == 0:
        raise NotTaken("in a fresh process device 0 is current, and the tensors would be there")
    command = [sys.executable, "-m", "mla_index.conformance.untouched", away.backend, str(index)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "UnknownBackend" in done.stderr:
        raise NotTaken(f"{away.backend} is registered in this process alone")
    if done.returncode:
        raise Failure(f"calls with tensors on {away.device} failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    nothing = {"context": False, "bytes": 0}
    if found["before"] != nothing:
        raise NotTaken(f"torch itself has made {found['before']} on cuda:{found['current']}")
    if found["after"] != nothing:
        raise Failure(f"the calls left {found['after']} on cuda:{found['current']}")
    if found["current after"] != found["current"]:
        raise Failure(f"the current device became {found['current after']}")


# --- graphs: the tests of one device, on one that is not current ---------------------------------


@pytest.mark.mla_op("remap")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_capture_elsewhere(away: Target, name: str) -> None:
    """A capture there while the other is current, replayed with other inputs."""
    on_one_device.test_capture_after_warmup(away, name)


@pytest.mark.mla_op("safe_lengths")
def test_capture_of_safe_lengths_elsewhere(away: Target) -> None:
    """The same for `safe_lengths`."""
    on_one_device.test_capture_safe_lengths(away)


@pytest.mark.mla_op("remap")
@pytest.mark.parametrize("op", ["remap", "safe_lengths"])
def test_first_use_in_a_capture_elsewhere(away: Target, op: str) -> None:
    """A capture on a device that is not current is noticed as well."""
    on_one_device.test_first_use_in_a_capture_says_warmup(away, op)


# --- a thread for each device --------------------------------------------------------------------

ROUNDS = 10


def _calls(
    target: Target,
    start: threading.Barrier,
    block_size: int,
    calls: int,
    failures: list[BaseException],
) -> None:
    """Call a device's configurations in turn, first use included; check at the end of each round.

    The current device is this thread's own and stays the first one, whatever the target's is.
    """
    try:
        scenes = [scene(target, name, block_size, block_size=block_size) for name in CONFIGURATIONS]
        start.wait(timeout=60)
        for _ in range(ROUNDS):
            _round(scenes, target, calls // ROUNDS)
    except BaseException as error:  # handed to the main thread, the cause first
        error.add_note(f"in the thread of {target.device}")
        failures.append(error)
        start.abort()


def _round(scenes: list[Scene], target: Target, calls: int) -> None:
    for one in scenes:
        one.poison()
    for i in range(calls):
        scenes[i % len(scenes)].call(target.backend)
    torch.cuda.synchronize(target.device)
    for one in scenes:
        one.verify()


@pytest.mark.mla_op("remap")
def test_a_thread_for_each_device(away: Target) -> None:
    """Thousands of calls at once on two devices, each with configurations of its own."""
    home = replace(away, device=torch.device("cuda", torch.cuda.current_device()))
    calls = 10_000 if away.full else 100
    start = threading.Barrier(2)
    failures: list[BaseException] = []
    threads = [
        threading.Thread(target=_calls, args=(place, start, block_size, calls, failures))
        for place, block_size in ((home, 48), (away, 24))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
