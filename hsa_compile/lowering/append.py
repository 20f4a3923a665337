"""Inductor's lowering of ``hsa::append``."""

from typing import Any

import torch

from .. import compat
from . import kernels, options
from .kernels import eager, emit, rows_of, unlike_pool, written_in_place
from .limits import kernel_limits


def lower(
    keys: Any,
    values: Any,
    k: Any,
    v: Any,
    bits: Any,
    position: Any,
    covered: Any,
    table: Any,
    owner: Any,
    pool_keys: Any,
    pool_values: Any,
    page_size: int,
) -> None:
    op = torch.ops.hsa.append.default
    state = {
        "covered": covered,
        "table": table,
        "owner": owner,
        "pool_keys": pool_keys,
        "pool_values": pool_values,
    }
    args = (keys, values, k, v, bits, position, *state.values(), page_size)
    device = pool_keys.get_device()
    if not kernels.run_on(device):
        return eager(op, None, *args)
    batch, kv_heads, _, dim = keys.get_size()
    kv_heads, dim = compat.static_int(kv_heads), compat.static_int(dim)
    value_dim = compat.static_int(v.get_size()[3])
    group = max(1, compat.static_int(bits.get_size()[1]) // kv_heads)
    reason = kernel_limits(keys.get_dtype(), dim, value_dim, group, page_size)
    reason = reason or unlike_pool(k, v, pool_keys, pool_values)
    written, unwritable = written_in_place(state)
    reason = reason or unwritable
    if reason is not None:
        return eager(op, reason, *args)
    emit(
        "append",
        options.append(
            kv_heads,
            group,
            dim,
            value_dim,
            page_size,
            rows_of(bits),
            batch_position=not compat.expressions_equal(position.get_size()[0], 1),
        ),
        options.append_configs(),
        {
            "keys": compat.realize(keys),
            "k": compat.realize(k),
            "v": compat.realize(v),
            "bits": compat.realize(bits),
            "position": compat.realize(position),
            **written,
        },
        compat.contiguous_layout(device, torch.int32, (batch, kv_heads)),
        (batch, kv_heads),
        writes=tuple(written),
    )
    return None
