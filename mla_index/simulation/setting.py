"""What a simulation is asked for, and what it carries along."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mla_index.errors import UnknownBackend
from mla_index.selector import Names, check_names
from mla_index.simulation.workload import Workload
from mla_index.specs import Dcp

BLOCK_SIZE = 64
"""Tokens in a block of the simulated cache."""

Progress = Callable[[str, int, int], None]
"""Called with the stage at work, the steps done and the steps there are in the whole run."""


class ConfigError(ValueError):
    """A configuration that cannot be simulated; the message names the parameter."""


@dataclass(frozen=True)
class Config:
    """What to simulate.

    Args:
        trace: a file in JSON lines; None for the small trace of the package.
        requests: at most so many, the first of the trace.
        topk: tokens selected for each query row.
        dcp: ranks of the second part, which 1 leaves out.
        interleave: adjacent tokens that stay on one rank.
        heads: query heads.
        rows: query rows of each request, 1 + drafted tokens.
        seed: of contents, queries and block order, at least 0.
        backend: for every operation, as the operations take it.
        device: where the cache lives and the operations run; the first of its type without an
            index.

    Raises:
        ConfigError: a number out of its range, a device that torch does not know or that holds
            no values.
        UnknownBackend: a name that no backend has.
    """

    trace: str | Path | None = None
    requests: int = 64
    topk: int = 2048
    dcp: int = 4
    interleave: int = 1
    heads: int = 16
    rows: int = 1
    seed: int = 0
    backend: Names = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        least = dict.fromkeys(("requests", "topk", "dcp", "interleave", "heads", "rows"), 1)
        for name, low in {**least, "seed": 0}.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        try:
            self.place()
            Dcp(self.dcp, 0, self.interleave)
            check_names(self.backend)
        except UnknownBackend:
            raise
        except (RuntimeError, ValueError) as error:
            raise ConfigError(str(error).splitlines()[0]) from error

    def place(self) -> torch.device:
        """The device, with the index that tensors on it will report."""
        device = torch.device(self.device)
        if device.type == "meta":
            raise ConfigError("device must hold values to attend to, got meta")
        if device.type == "cpu":
            return torch.device("cpu")
        return torch.device(device.type, device.index or 0)


class Stages:
    """Times the stages of a run on a device, and tells how far it has come.

    Args:
        device: waited for at both ends of a stage.
        total: calls of `step` that there will be.
        progress: told after each.
    """

    def __init__(self, device: torch.device, total: int, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._total = total
        self._done = 0
        self._progress = progress

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add what happens inside to the stage's time."""
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def step(self, stage: str) -> None:
        """One step of `stage` is done."""
        self._done += 1
        if self._progress is not None:
            self._progress(stage, self._done, self._total)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)


@dataclass(frozen=True)
class Setting:
    """What every step of a simulation needs."""

    config: Config
    device: torch.device
    stages: Stages
    workload: Workload
