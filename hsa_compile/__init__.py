"""Hierarchical sparse attention as a ``torch.compile`` backend: ``torch.compile(model, backend="hsa")``.

``hsa_compile.HostCache`` is imported when it is first asked for, because it needs transformers.
"""

from typing import TYPE_CHECKING, Any

from hsa_compile.algorithms import PageKernel, PageScore
from hsa_compile.algorithms import register as register_algorithm
from hsa_compile.calibration import Calibration, calibrate
from hsa_compile.errors import (
    CacheError,
    CalibrationError,
    HostMemoryError,
    HsaError,
    OptionError,
    PolicyError,
    RewriteError,
)
from hsa_compile.explain import Explanation, explain
from hsa_compile.invalidate import invalidate
from hsa_compile.policy import LayerPolicy, Policy
from hsa_compile.runtime.state import pool_bytes, summary_bytes
from hsa_compile.stats import Stats, stats

if TYPE_CHECKING:
    from hsa_compile.host_cache import HostCache as HostCache

__version__ = "0.1.0"

__all__ = [
    "CacheError",
    "Calibration",
    "CalibrationError",
    "Explanation",
    "HostMemoryError",
    "HsaError",
    "LayerPolicy",
    "OptionError",
    "PageKernel",
    "PageScore",
    "Policy",
    "PolicyError",
    "RewriteError",
    "Stats",
    "calibrate",
    "explain",
    "invalidate",
    "pool_bytes",
    "register_algorithm",
    "stats",
    "summary_bytes",
]


def __getattr__(name: str) -> Any:
    if name == "HostCache":
        from hsa_compile.host_cache import HostCache

        return HostCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
