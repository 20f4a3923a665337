"""Inductor's lowering of ``hsa::index_scores``."""

from typing import Any

import torch

from .. import compat
from . import kernels, options
from .kernels import eager, emit
from .limits import index_limits


def lower(q: Any, k: Any, weights: Any, scale: float) -> Any:
    op = torch.ops.hsa.index_scores.default
    args = (q, k, weights, scale)
    device = q.get_device()
    if not kernels.run_on(device):
        return eager(op, None, *args)
    batch, queries, heads, dim = q.get_size()
    queries, heads, dim = (compat.static_int(size) for size in (queries, heads, dim))
    tokens, dtype = k.get_size()[1], q.get_dtype()
    reason = index_limits(dtype, heads, dim)
    if k.get_dtype() != dtype:
        reason = reason or f"index queries are {dtype}, keys {k.get_dtype()}"
    if reason is not None:
        return eager(op, reason, *args)
    return emit(
        "index_scores",
        options.index_scores(float(scale), queries, heads, dim),
        options.index_scores_configs(dtype.itemsize, heads, dim),
        {name: compat.realize(node) for name, node in (("q", q), ("k", k), ("weights", weights))},
        compat.contiguous_layout(device, torch.float32, (batch, queries, tokens)),
        (batch, queries, tokens),
    )
