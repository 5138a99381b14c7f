"""Two threads with configurations of their own: neither sees the other's results."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import mla_index
from mla_index.conformance.checks import Run, Scene, prepare
from mla_index.conformance.generate import random_problem
from mla_index.conformance.target import Failure, Target


def _calls(scene: Scene, target: Target, repeats: int, failures: list[BaseException]) -> None:
    """Call and verify again and again, on a stream of this thread's own."""
    cuda = target.device.type == "cuda"
    stream = torch.cuda.Stream(target.device) if cuda else None  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream) if stream else nullcontext():
            for _ in range(repeats):
                scene.poison()
                scene.call(target.backend)
                scene.verify()
    except BaseException as error:  # handed to the main thread
        failures.append(error)


@pytest.mark.mla_op("remap")
def test_two_threads(target: Target) -> None:
    """Different block sizes, ranks and modes at the same time, first use included."""
    rows, topk = (64, 2048) if target.full else (4, 33)
    make = partial(random_problem, rows=rows, topk=topk)
    scenes = [
        prepare(make(71, block_size=48), Run(counts=True), target),
        prepare(make(72, dcp=(2, 1, 3), block_size=24), Run(compact=True, safe=True), target),
    ]
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    failures: list[BaseException] = []
    repeats = 200 if target.full else 5
    threads = [
        threading.Thread(target=_calls, args=(scene, target, repeats, failures)) for scene in scenes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.mla_op("remap")
def test_overrides_stay_in_their_thread(target: Target) -> None:
    """`use_backend` in one thread names no backend for another."""
    seen: list[tuple[str, ...] | None] = []
    with mla_index.use_backend(target.backend):
        thread = threading.Thread(target=lambda: seen.append(mla_index.selector.override()))
        thread.start()
        thread.join()
        inside = mla_index.selector.override()
    if seen != [None] or inside != (target.backend,):
        raise Failure(f"another thread saw {seen}, this one {inside}")
