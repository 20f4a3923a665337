"""Inductor's lowering of ``hsa::fetch``."""

from typing import Any

import torch

from .. import compat
from . import kernels, options
from .kernels import eager, emit, unlike_pool, written_in_place
from .limits import kernel_limits
from .standalone import processors


def lower(
    keys: Any,
    values: Any,
    loads: Any,
    counts: Any,
    pool_keys: Any,
    pool_values: Any,
    page_size: int,
) -> None:
    op = torch.ops.hsa.fetch.default
    args = (keys, values, loads, counts, pool_keys, pool_values, page_size)
    device = pool_keys.get_device()
    if not kernels.run_on(device):
        return eager(op, None, *args)
    batch, kv_heads, _, dim = keys.get_size()
    kv_heads, dim = compat.static_int(kv_heads), compat.static_int(dim)
    value_dim = compat.static_int(values.get_size()[3])
    dtype = keys.get_dtype()
    reason = kernel_limits(dtype, dim, value_dim, 1, page_size)
    reason = reason or unlike_pool(keys, values, pool_keys, pool_values)
    written, unwritable = written_in_place({"pool_keys": pool_keys, "pool_values": pool_values})
    reason = reason or unwritable
    if reason is not None:
        return eager(op, reason, *args)
    constants = options.fetch(
        kv_heads,
        dim,
        value_dim,
        page_size,
        compat.static_int(batch) * kv_heads if compat.is_constant(batch) else None,
        processors(device),
    )
    configs = options.fetch_configs(
        dtype.itemsize * options.dim_pad(max(dim, value_dim)), page_size
    )
    # Never timed: Inductor would time copies within the device, and allocate as much there as the host holds.
    emit(
        "fetch",
        constants,
        configs[:1],
        {
            "keys": compat.realize(keys),
            "values": compat.realize(values),
            "loads": compat.realize(loads),
            "counts": compat.realize(counts),
            **written,
        },
        compat.contiguous_layout(device, torch.int32, (constants["PROGRAMS"],)),
        (),
        writes=tuple(written),
    )
    return None
