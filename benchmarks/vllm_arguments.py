"""What the comparison with vLLM is asked for, refused before anything runs where it cannot be."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import torch

from mla_index.errors import UnknownBackend
from mla_index.explanation import explain

REFUSED = 2
"""Exit code where nothing was compared."""
OPERATION_NAMES = (
    "remap", "remap_counts", "dcp_filter", "workspace", "request_rows", "safe_lengths"
)  # fmt: skip
ROWS = (1, 32, 128, 512, 2048, 8192, 32768)
DCP = (2, 4, 8)
TILE = 128
"""vLLM's `BLOCK_N`, which K must be a multiple of."""
HOST_TOPK = (2048, 4224)
HOST_ROUNDS, HOST_CALLS = 49, 80
MOST_PROCESSES = 8
DEVICES = ("cpu", "cuda")


class CannotBegin(Exception):
    """Something that the comparison needs is not there; the message says what."""


class _Parser(argparse.ArgumentParser):
    """Refuses in a line: the usage would be longer than what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"error: {message}\n")


def parse(command_line: Sequence[str] | None, description: str | None = None) -> argparse.Namespace:
    """The arguments, checked one by one.

    Raises:
        SystemExit: one cannot be; said on standard error, with the exit code 2.
    """
    some, several = _whole(1), _whole(2)
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--vllm-src", type=Path, help="folder that holds an unpacked vllm/")
    add("--json", type=_new_file, help="write the record here")
    add("--equality", type=some, help="compare on so many random inputs, and stop")
    add("--kinds", type=some, default=64, help="configurations of --equality")
    add("--backend", default="auto", help="ours on the device")
    add("--operations", nargs="+", default=OPERATION_NAMES, choices=OPERATION_NAMES)
    add("--rows", nargs="+", type=some, default=ROWS)
    add("--topk", nargs="+", type=_width, help="widths; the kernels' defaults")
    add("--dcp", nargs="+", type=several, default=DCP)
    add("--host-topk", nargs="*", type=_width, help="widths timed on the host")
    add("--host-rounds", type=some, default=HOST_ROUNDS)
    add("--host-calls", type=some, default=HOST_CALLS, help="calls in a round")
    add("--seconds", type=_seconds, default=210.0, help="start no shape after these")
    add("--processes", type=some, help="that compile, or compare random inputs")
    add("--device", type=_device, help="cpu or cuda")
    add("--seed", type=_whole(0, 2**63 - 1), default=0)
    return _with_defaults(parser.parse_args(command_line))


def _with_defaults(arguments: argparse.Namespace) -> argparse.Namespace:
    """What was not given, by the device."""
    if arguments.device is None:
        arguments.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    on_cpu = arguments.device.type == "cpu"
    if arguments.processes is None:  # on the CPU nothing is compiled
        processors = os.cpu_count() or 1
        arguments.processes = 1 if on_cpu else max(1, min(MOST_PROCESSES, processors // 2))
    if arguments.host_topk is None:
        arguments.host_topk = () if on_cpu else HOST_TOPK
    return arguments


def usable_backend(arguments: argparse.Namespace) -> str:
    """Our backend, after a look at whether the device can run it and vLLM's kernels.

    Raises:
        CannotBegin: it cannot.
    """
    device, asked = arguments.device, arguments.backend
    try:
        found = explain("remap", device=device, backend=asked, probe=True)
    except UnknownBackend as error:
        raise CannotBegin(str(error)) from error
    if found.chosen is None:
        rows = [row for row in found.rows if asked in ("auto", row.name)]
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows)
        raise CannotBegin(f"backend {asked} cannot run on {device}: {reasons}")
    if find_spec("triton") is None:
        raise CannotBegin("vLLM's kernels need Triton, and it is not installed")
    # As vllm_source reads it; Triton's own library of kernels is defined while it is imported.
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise CannotBegin(
            "on a CPU vLLM's kernels run in Triton's interpreter alone: set TRITON_INTERPRET=1 in "
            "the environment of this command"
        )
    return found.chosen


# --- what is taken -------------------------------------------------------------------------------


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Takes integers in a range."""
    taken = f"an integer of at least {least}" + (f" and at most {most}" if most else "")

    def take(text: str) -> int:
        value = _integer(text)
        if value is None or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be {taken}, got {text}")
        return value

    return take


def _width(text: str) -> int:
    value = _integer(text)
    if value is None or value < TILE or value % TILE:
        raise argparse.ArgumentTypeError(
            f"must be a multiple of {TILE}, the columns of vLLM's tile, got {text}"
        )
    return value


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:  # nor NaN
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return value


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEVICES:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(DEVICES)}, got {text}")
    return device


def _new_file(text: str) -> Path:
    """Takes what can be written; `mla_index.cli.files` would need the extra `cli`."""
    path = Path(os.path.realpath(text))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that is there, got {text}: there is no {path.parent}"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file that can be written, got {text}")
    return path
