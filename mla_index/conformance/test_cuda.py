"""Streams, graphs, devices and memory, where there is a CUDA device."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mla_index
from mla_index import verdicts
from mla_index.conformance import oracle
from mla_index.conformance.checks import CANARY, Scene, differences, prepare
from mla_index.conformance.layouts import Placed
from mla_index.conformance.modes import I32
from mla_index.conformance.scenes import CONFIGURATIONS
from mla_index.conformance.scenes import problem as problem_of
from mla_index.conformance.scenes import scene as scene_of
from mla_index.conformance.target import Failure, Target
from mla_index.specs import RemapSpec, SafeLengthsSpec

LONG = 200_000_000
"""Cycles that the producer sleeps, about a tenth of a second."""


def _sleep(device: torch.device) -> None:
    """Keep the device's current stream busy."""
    with torch.cuda.device(device):
        torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Capture on the device; inside, the device that was current before is current as well."""
    current = torch.cuda.current_device()
    torch.cuda.synchronize(device)
    torch.cuda.synchronize(current)  # also makes its context, which a capture would not survive
    # By itself a capture is on the current device, and makes the device of its stream current.
    with torch.cuda.graph(graph, stream=_stream(device)), torch.cuda.device(current):
        yield


@pytest.fixture(autouse=True)
def _on_cuda(target: Target) -> None:
    if target.device.type != "cuda":
        pytest.skip(f"needs a CUDA device, runs on {target.device}")


def _fill(scene: Scene, other: Scene) -> None:
    """The other scene's inputs into this one's memory."""
    for tensor, placed in scene.tensors.items():
        placed.view.copy_(other.tensors[tensor].view)


@pytest.mark.mla_op("remap")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_capture_after_warmup(target: Target, name: str) -> None:
    """A graph captured right after `warmup` is right, and again with other inputs."""
    scene, same = scene_of(target, name), scene_of(target, name)
    full = problem_of(291, name)
    # another occupancy: most rows are empty now
    sparse = [row if t % 7 == 0 else [-1] * len(row) for t, row in enumerate(full.tokens)]
    other = prepare(replace(full, tokens=sparse), scene.run, target)
    mla_index.warmup(scene.run.op, scene.spec, device=target.device, backend=target.backend)
    graph = torch.cuda.CUDAGraph()
    with _captured(graph, target.device):
        scene.call(target.backend)
    for inputs in (same, other, same):
        _fill(scene, inputs)
        scene.poison()
        graph.replay()
        torch.cuda.synchronize(target.device)
        replace(scene, expected=inputs.expected).verify()


@pytest.mark.mla_op("safe_lengths")
def test_capture_safe_lengths(target: Target) -> None:
    """`safe_lengths` in a graph, replayed with other counts."""
    mla_index.warmup(
        "safe_lengths", SafeLengthsSpec(), device=target.device, backend=target.backend
    )
    slots, counts = torch.full((70, 5), 9, dtype=I32), torch.arange(-1, 69, dtype=I32)
    device = target.device
    on_device = slots.to(device), counts.to(device), torch.empty(70, dtype=I32, device=device)
    graph = torch.cuda.CUDAGraph()
    with _captured(graph, device):
        mla_index.safe_lengths(*on_device[:2], out=on_device[2], backend=target.backend)
    for numbers in (counts, counts.flip(0) - 30):
        on_device[0].copy_(slots)
        on_device[1].copy_(numbers)
        on_device[2].fill_(CANARY[I32])
        graph.replay()
        rows, lengths = oracle.safe_lengths(slots.tolist(), numbers.tolist())
        differences("slots", on_device[0].cpu(), torch.tensor(rows, dtype=I32))
        differences("lengths", on_device[2].cpu(), torch.tensor(lengths, dtype=I32))


@pytest.mark.mla_op("remap")
@pytest.mark.parametrize("op", ["remap", "safe_lengths"])
def test_first_use_in_a_capture_says_warmup(target: Target, op: str) -> None:
    """A first use inside a capture is refused with the cure, writes nothing, breaks nothing."""
    device = target.device
    target.choose("remap", RemapSpec(64, 1))  # the device itself has been asked
    tokens = torch.zeros(3, 5, dtype=I32, device=device)
    table = torch.zeros(1, 2, dtype=I32, device=device)
    req_id = torch.zeros(3, dtype=I32, device=device)
    out = torch.full((3, 5), CANARY[I32], dtype=I32, device=device)
    number = torch.zeros(1, device=device)
    number.add_(1).zero_()  # loaded before the capture
    # kernels that other tests have built are forgotten, so that this is a first use
    verdicts.forget_kernels()
    mla_index.reload_environment()  # and with it every choice

    def call() -> None:
        if op == "remap":
            mla_index.remap(req_id, table, tokens, block_size=64, out=out, backend=target.backend)
        else:
            mla_index.safe_lengths(out, req_id, backend=target.backend)

    graph, message = torch.cuda.CUDAGraph(), ""
    with _captured(graph, device):
        number += 1
        try:
            call()
        except mla_index.NotWarm as error:
            message = str(error)
    graph.replay()
    torch.cuda.synchronize(device)
    if "warmup" not in message:
        raise Failure(f"must raise NotWarm naming warmup, got {message or 'no error'}")
    if float(number) != 1 or not bool((out == CANARY[I32]).all()):
        raise Failure("the capture was broken, or something was written")
    call()
    torch.cuda.synchronize(device)


@pytest.mark.mla_op("remap")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_side_stream_behind_a_long_producer(target: Target, name: str) -> None:
    """The launch waits for what the current stream is still writing; the default one is idle."""
    scene, early = scene_of(target, name), scene_of(target, name)
    scene.call(target.backend)
    torch.cuda.synchronize(target.device)
    for placed in scene.tensors.values():
        placed.view.zero_()
    scene.poison()
    torch.cuda.synchronize(target.device)
    side = _stream(target.device)
    with torch.cuda.stream(side):
        _sleep(target.device)
        _fill(scene, early)
        scene.call(target.backend)
    side.synchronize()
    scene.verify()


@pytest.mark.mla_op("safe_lengths")
def test_safe_lengths_on_a_side_stream(target: Target) -> None:
    """The same for `safe_lengths`."""
    device = target.device
    slots = torch.full((70, 5), 9, dtype=I32, device=device)
    counts = torch.full((70,), 3, dtype=I32, device=device)
    out = torch.empty(70, dtype=I32, device=device)
    mla_index.safe_lengths(slots, counts, out=out, backend=target.backend)
    torch.cuda.synchronize(device)
    side = _stream(device)
    with torch.cuda.stream(side):
        _sleep(device)
        counts.zero_()
        mla_index.safe_lengths(slots, counts, out=out, backend=target.backend)
    side.synchronize()
    if not bool((slots[:, 0] == 0).all()) or not bool((out == 1).all()):
        raise Failure("the launch did not wait for the current stream")


@pytest.fixture
def _no_sync() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.mla_op("remap")
@pytest.mark.usefixtures("_no_sync")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("outputs", ["given", "allocated"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_host_synchronisation(target: Target, name: str, outputs: str) -> None:
    """Nothing in a call waits for the device."""
    run = replace(CONFIGURATIONS[name][0], outputs=outputs)
    scene = prepare(problem_of(292, name), run, target)
    scene.call(target.backend)
    torch.cuda.synchronize(target.device)
    _sleep(target.device)
    torch.cuda.set_sync_debug_mode("error")
    scene.call(target.backend)
    busy = not torch.cuda.current_stream(target.device).query()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(target.device)
    if not busy:
        raise Failure("the call returned only when the device had finished")


@pytest.mark.mla_op("remap")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_memory(target: Target, name: str) -> None:
    """With outputs given nothing is allocated; torch takes at most six times the output."""
    device = target.device
    scene = _enlarged(prepare(problem_of(293, name, 8, 2048), CONFIGURATIONS[name][0], target), 128)
    scene.call(target.backend)
    scene.poison()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocations = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    base = torch.cuda.memory_allocated(device)
    scene.call(target.backend)
    torch.cuda.synchronize(device)
    made = torch.cuda.memory_stats(device)["allocation.all.allocated"] - allocations
    peak = torch.cuda.max_memory_allocated(device) - base
    size = scene.outputs["out"].view.nbytes
    if target.backend == "torch":
        if peak > 6 * size:
            raise Failure(f"temporaries of {peak / size:.1f} times the output, at most 6 are taken")
    elif made:
        raise Failure(f"{made} allocations (peak {peak} bytes) with every output given")
    scene.verify()


def _enlarged(scene: Scene, times: int) -> Scene:
    """The scene with its rows again and again."""

    def again(tensor: Tensor) -> Tensor:
        return tensor.repeat(times, *[1] * (tensor.dim() - 1))

    for placed in (scene.tensors, scene.outputs):
        for name, (_, view) in placed.items():
            if name not in ("block_table", "request_rows", "ws_starts"):
                larger = again(view)
                placed[name] = Placed(larger, larger)
    for name, expected in scene.expected.items():
        scene.expected[name] = None if expected is None else again(expected)
    return scene


@pytest.mark.mla_op("remap")
def test_ten_thousand_launches(target: Target) -> None:
    """Configurations and streams in turn: no drift in results, no growth in memory."""
    scenes = [scene_of(target, name) for name in CONFIGURATIONS]
    streams = [_stream(target.device) for _ in range(2)]

    def round_of(count: int) -> None:
        for i in range(count):
            with torch.cuda.stream(streams[i % 2]):
                scenes[i % len(scenes)].call(target.backend)
        torch.cuda.synchronize(target.device)
        for scene in scenes:
            scene.verify()

    for scene in scenes:
        scene.call(target.backend)
    torch.cuda.synchronize(target.device)
    round_of(1_000)
    device, host = torch.cuda.memory_allocated(target.device), _resident()
    for _ in range(9):
        for scene in scenes:
            scene.poison()
        torch.cuda.synchronize(target.device)
        round_of(1_000)
    grown = torch.cuda.memory_allocated(target.device) - device, _resident() - host
    if grown[0] > 0 or grown[1] > 64 * 2**20:
        raise Failure(f"memory grew by {grown[0]} bytes on the device and {grown[1]} on the host")


def _resident() -> int:
    """Peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
