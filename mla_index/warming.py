"""`warmup`: choosing and compiling ahead of the first call."""

from __future__ import annotations

import torch

from mla_index import questions, selector
from mla_index.selector import Names
from mla_index.specs import Spec


def warmup(op: str, spec: Spec, *, device: torch.device | str, backend: Names = "auto") -> str:
    """Choose and compile ahead, so that no later call of this configuration compiles anything.

    Args:
        op: an operation from `mla_index.OPERATIONS`.
        spec: a `RemapSpec` for remap and dcp_filter, a `SafeLengthsSpec` for safe_lengths, None
            for flat_row_view.
        device: where the tensors will be; without an index, the current device of that type.
        backend: as for the operations.

    Returns:
        The name of the backend that was chosen.

    Raises:
        ValueError, TypeError: an unknown operation, a spec of another operation.
        UnknownBackend, BackendUnavailable, BackendUnsupported: when no backend can serve it.
        NotWarm: called inside a CUDA graph capture.
    """
    questions.check(op, spec)
    if spec is None and op != "flat_row_view":
        raise TypeError(f"warmup of {op} needs a spec, got None")
    place = questions.with_index(questions.named_device(device))
    choice = selector.choose(op, spec, place, backend)
    if choice.kernel.warm is not None:
        choice.kernel.warm()
    return choice.backend
