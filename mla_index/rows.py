"""Bounds of the rows of each request, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    import numpy as np


def request_row_bounds(
    req_idx: np.ndarray[tuple[int, ...], np.dtype[np.integer]] | Sequence[int] | Tensor,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where each run of adjacent equal request ids begins and ends.

    Run `r` is the rows `[bounds[r], bounds[r + 1])`: `[3, 3, 5, 5, 5, 2]` gives `[0, 2, 5, 6]`.

    Args:
        req_idx: integers `[n]`, n at least 1: a NumPy array, a sequence or a CPU tensor.

    Returns:
        int64 array of one more than the number of runs.

    Raises:
        ValueError: empty, not 1-D, or one request in two runs; the message names the request and
            the row where it returns.
        TypeError: not integers, or a tensor on a device (reading it would synchronise).
        ModuleNotFoundError: NumPy is not installed.
    """
    try:
        import numpy as np  # the core brings torch alone
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "request_row_bounds needs NumPy: pip install numpy", name="numpy"
        ) from error

    if isinstance(req_idx, Tensor):
        if req_idx.device.type != "cpu":
            raise TypeError(f"req_idx must be on the host, got a tensor on {req_idx.device}")
        req_idx = req_idx.numpy()
    elif not isinstance(req_idx, (np.ndarray, Sequence)):
        raise TypeError(
            f"req_idx must be an array, a sequence or a CPU tensor, got {type(req_idx).__name__}"
        )
    ids = np.asarray(req_idx)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(f"req_idx must be 1-D with at least one row, got shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"req_idx must hold integers, got {ids.dtype}")
    starts = np.concatenate(([0], np.flatnonzero(ids[1:] != ids[:-1]) + 1))
    heads = ids[starts]
    _, first = np.unique(heads, return_index=True)
    if first.size != heads.size:
        run = np.setdiff1d(np.arange(heads.size), first)[0]
        raise ValueError(
            f"req_idx must hold each request in one run of rows, "
            f"but request {heads[run]} returns at row {starts[run]}"
        )
    return np.append(starts, ids.size).astype(np.int64)
