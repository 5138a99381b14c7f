"""Every way in which the numba kernels cut a row, run in Numba's simulator, against torch.

The conformance suite fixes what the operations compute; here each number of groups of a lane meets
every alignment of tokens and slots, in rows of one tile and of several.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

try:
    import numba
    import numba_cuda
except ImportError as error:
    if os.environ.get("CI"):
        raise
    pytest.skip(f"numba-cuda is not installed: {error}", allow_module_level=True)

assert numba
assert numba_cuda

SWEEP = """
    import itertools, json
    import torch
    import mla_index
    from mla_index.backends.numba import simulate
    from mla_index.backends.numba.compile import Block

    generator = torch.Generator().manual_seed(0)
    wrong, seen = [], set()

    def view(rows, width, offset, gap, fill=None):
        # Rows that begin `offset` elements past 16 bytes, `width + gap` apart.
        store = torch.full((rows * (width + gap) + 8,), 0x5EED, dtype=torch.int32)
        start = (offset - store.data_ptr() // 4) % 4
        rows_of = store.as_strided((rows, width), (width + gap, 1), start)
        if fill is not None:
            rows_of.copy_(fill)
        return store, rows_of

    table = torch.randint(-1, 50, (3, 6), generator=generator, dtype=torch.int32)
    request = torch.tensor([0, 2, 1, 3, -1])
    wants = {
        "plain": {},
        "counts": {"counts": True},
        "compact": {"compact": True},
        "safe": {"compact": True, "safe_lengths": True},
    }
    for groups, width in itertools.product((1, 2, 4), (1, 3, 7, 15, 16, 17, 33, 130)):
        simulate.BLOCKS = {1: Block(groups, 4, 1)}
        for (token_at, slot_at), (name, want) in zip(
            itertools.cycle(itertools.product(range(4), repeat=2)), [*wants.items()] * 4
        ):
            fill = torch.randint(-40, 400, (5, width), generator=generator, dtype=torch.int32)
            _, tokens = view(5, width, token_at, width % 3, fill)
            store, out = view(5, width, slot_at, 1 + width % 2)
            untouched = store.clone()
            call = dict(block_size=64, backend="numba", num_slots=2000)
            # A block size of its own for each: another spec, so another kernel is built.
            call["block_size"] = 60 + groups
            theirs = mla_index.remap(request, table, tokens, **want, **call | {"backend": "torch"})
            ours = mla_index.remap(request, table, tokens, **want, **call, out=out)
            untouched.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(theirs.slots)
            seen.add((groups, token_at == slot_at, name, width > 16 * groups))
            same = torch.equal(store, untouched) and all(
                torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:]) if b is not None
            )
            if not same:
                wrong.append([groups, width, token_at, slot_at, name])
    print(json.dumps({"wrong": wrong, "seen": sorted(seen)}))
"""

WARPS = """
    import itertools, json, threading
    import torch
    import mla_index
    from mla_index.backends.numba import simulate, target
    from mla_index.backends.numba.compile import Block

    WARPS = 3

    def wrapped(number):
        return (number + 2**31) % 2**32 - 2**31

    class Warps:
        # The lanes of a warp hand a number to each other between two meetings.
        def __init__(self):
            self.meetings = [threading.Barrier(32) for _ in range(WARPS)]
            self.lanes = [[0] * 32 for _ in range(WARPS)]

        def all_of(self, value):
            warp, lane = divmod(threading.current_thread().threadIdx.x, 32)
            self.lanes[warp][lane] = value
            self.meetings[warp].wait()
            values = list(self.lanes[warp])
            self.meetings[warp].wait()
            return values

        def scan(self, value, lane):
            return wrapped(sum(self.all_of(value)[: lane + 1]))

        def last(self, value):
            return self.all_of(value)[-1]

        def over(self, shared, warp, warps, lane):
            own = int(shared[lane]) if lane < warps else 0
            upto = self.scan(own, lane)
            return self.all_of(upto - own)[warp], self.last(upto)

    lanes, one_lane = Warps(), target.in_simulator()
    simulate.in_simulator = lambda: one_lane._replace(
        lanes=32, warp_scan=lanes.scan, warp_last=lanes.last, over_warps=lanes.over
    )
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, 50, (3, 40), generator=generator, dtype=torch.int32)
    request = torch.tensor([0, 2, 1])
    wrong, tiles = [], set()
    for groups, width in itertools.product((1, 2, 4), (130, 389, 1600)):
        simulate.BLOCKS = {1: Block(groups, WARPS, 1)}
        tokens = torch.randint(-300, 2560, (3, width), generator=generator, dtype=torch.int32)
        tokens[0] = tokens[0].abs()  # every lane full: the largest sums that a byte holds
        call = dict(block_size=60 + groups, counts=True, compact=width != 389)
        theirs, ours = (
            mla_index.remap(request, table, tokens, backend=name, **call)
            for name in ("torch", "numba")
        )
        tiles.add((groups, -(-width // (3 * 32 * 4 * groups))))
        if not (torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])):
            wrong.append([groups, width])
    print(json.dumps({"wrong": wrong, "tiles": sorted(tiles)}))
"""

OUTSIDE = """
    import pytest
    import torch
    from mla_index.backends.numba.target import SimulatedPointer

    store = torch.arange(20)
    pointer = SimulatedPointer(store[3:].as_strided((2, 3), (5, 1)))
    assert [pointer[i] for i in (0, 7)] == [0 + 3, 7 + 3]
    for index in (-1, 8):
        with pytest.raises(IndexError, match=str(index)):
            pointer[index]
        with pytest.raises(IndexError, match=str(index)):
            pointer[index] = 1
    words = SimulatedPointer(torch.tensor([-(2**40) - 5]), words=True)
    assert ((words[1] << 32) | (words[0] & 0xFFFFFFFF)) == -(2**40) - 5
    with pytest.raises(IndexError):
        words[2]
    assert store.equal(torch.arange(20))
"""


def simulated(program: str) -> str:
    """What a program prints in a process with the simulator."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={
            **os.environ,
            "NUMBA_ENABLE_CUDASIM": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sweep() -> dict[str, list[Any]]:
    return json.loads(simulated(SWEEP))  # type: ignore[no-any-return]


def test_every_cut_of_a_row_gives_the_bits_of_torch(sweep: dict[str, list[Any]]) -> None:
    assert sweep["wrong"] == []


def test_every_cut_was_taken(sweep: dict[str, list[Any]]) -> None:
    """One tile and several, tokens and slots aligned alike and not, for each number of groups."""
    wanted = {
        (groups, alike, name, several)
        for groups in (1, 2, 4)
        for alike in (False, True)
        for name in ("plain", "counts", "compact", "safe")
        for several in (False, True)
    }
    assert {tuple(cut) for cut in sweep["seen"]} == wanted


def test_warps_of_32_lanes_give_the_bits_of_torch() -> None:
    """The text as the card runs it, lanes exchanging numbers by a stand-in for the shuffles."""
    found = json.loads(simulated(WARPS))
    assert found["wrong"] == []
    assert {tuple(pair) for pair in found["tiles"]} >= {
        (1, 1),
        (1, 5),
        (2, 1),
        (2, 3),
        (4, 1),
        (4, 2),
    }


def test_the_simulator_refuses_what_lies_outside_a_view() -> None:
    simulated(OUTSIDE)
