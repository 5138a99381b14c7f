"""Whether a contender computes what the torch backend does, before it is timed."""

from __future__ import annotations

from mla_index.bench.contenders import bind
from mla_index.bench.plan import Contender
from mla_index.bench.workloads import Inputs

CHUNK = 2**24
"""Entries that are compared at once: the torch backend needs memory for temporaries."""


class Differs(Exception):
    """A result that is not the torch backend's; the message says how much of it is not."""


def verify(who: Contender, inputs: Inputs) -> None:
    """Run the contender once, and compare every output with the torch backend's.

    Raises:
        Differs: a value is another.
    """
    bind(who.operation, who.provider, inputs.blank(), who.dcp)()
    if who.provider == "torch" or not who.operation.on_device:
        return
    rows, topk = inputs.tokens.shape
    step = max(1, CHUNK // topk)
    for start in range(0, rows, step):
        right = inputs.part(start, min(start + step, rows)).blank()
        bind(who.operation, "torch", right, who.dcp)()
        for name in ("out", "counts", "lengths"):
            got = getattr(inputs, name)[start : start + step]
            differing = int((got != getattr(right, name)).sum())
            if differing:
                raise Differs(f"{name} is not torch's in {differing} of {got.numel()} values")
