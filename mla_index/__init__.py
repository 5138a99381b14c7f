"""Index operations of sparse multi-head latent attention over a paged KV cache.

`remap` turns the request-local token numbers that a query selected into rows of the paged cache,
`dcp_filter` keeps one rank's share of them, `safe_lengths` makes empty rows safe for attention,
`flat_row_view` is the cache as rows. Each runs on interchangeable backends; `explain` says which
and why.
"""

from mla_index.diagnosis import Diagnosis, Reason, diagnose
from mla_index.errors import (
    BackendError,
    BackendUnavailable,
    BackendUnsupported,
    InvalidBackend,
    NotWarm,
    UnknownBackend,
)
from mla_index.explanation import Candidate, Explanation, explain
from mla_index.operations import Remapped, dcp_filter, flat_row_view, remap, safe_lengths
from mla_index.registry import OPERATIONS, register, unregister
from mla_index.rows import request_row_bounds
from mla_index.selector import reload_environment, set_default_backend, use_backend
from mla_index.specs import Dcp, PrefillWorkspace, RemapSpec, SafeLengthsSpec
from mla_index.version import __version__
from mla_index.views import FlatRows
from mla_index.warming import warmup

__all__ = [
    "OPERATIONS",
    "BackendError",
    "BackendUnavailable",
    "BackendUnsupported",
    "Candidate",
    "Dcp",
    "Diagnosis",
    "Explanation",
    "FlatRows",
    "InvalidBackend",
    "NotWarm",
    "PrefillWorkspace",
    "Reason",
    "RemapSpec",
    "Remapped",
    "SafeLengthsSpec",
    "UnknownBackend",
    "__version__",
    "dcp_filter",
    "diagnose",
    "explain",
    "flat_row_view",
    "register",
    "reload_environment",
    "remap",
    "request_row_bounds",
    "safe_lengths",
    "set_default_backend",
    "unregister",
    "use_backend",
    "warmup",
]
