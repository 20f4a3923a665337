"""Hierarchical sparse attention as a ``torch.compile`` backend: ``torch.compile(model, backend="hsa")``."""

from hsa_compile.errors import (
    CacheError,
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

__version__ = "0.1.0"

__all__ = [
    "CacheError",
    "Explanation",
    "HostMemoryError",
    "HsaError",
    "LayerPolicy",
    "OptionError",
    "Policy",
    "PolicyError",
    "RewriteError",
    "Stats",
    "explain",
    "invalidate",
    "pool_bytes",
    "stats",
    "summary_bytes",
]
