"""Inductor's lowering of ``hsa::fetch_attention``: the kernels of ``hsa::sparse_attention``, fetching as they go."""

from typing import Any

import torch

from . import kernels
from .kernels import eager, unlike_pool, written_in_place
from .sparse_attention import attend, unfit


def lower(
    q: Any,
    keys: Any,
    values: Any,
    ids: Any,
    slots: Any,
    loads: Any,
    counts: Any,
    bits: Any,
    bias: Any,
    pool_keys: Any,
    pool_values: Any,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
) -> tuple[Any, Any]:
    op = torch.ops.hsa.fetch_attention.default
    pools, rest = (pool_keys, pool_values), (scale, page_size, softcap)
    args = (q, keys, values, ids, slots, loads, counts, bits, bias, *pools, *rest)
    if not kernels.run_on(q.get_device()):
        return eager(op, None, *args)
    written, unwritable = written_in_place({"keys": pool_keys, "values": pool_values})
    reason = unfit(q, *pools, page_size) or unlike_pool(keys, values, *pools) or unwritable
    if reason is not None:
        return eager(op, reason, *args)
    given = {"q": q, **written, "ids": ids, "slots": slots, "bits": bits, "bias": bias}
    full = {"full_keys": keys, "full_values": values}
    return attend({**given, **full}, *rest, fetches=True)
