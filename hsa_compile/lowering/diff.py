"""Inductor's lowering of ``hsa::diff``."""

from typing import Any

import torch

from .. import compat
from . import kernels, options
from .kernels import eager, emit, spread_pages, written_in_place
from .limits import pool_limits


def lower(
    ids: Any,
    position: Any,
    page_size: int,
    table: Any,
    owner: Any,
    used: Any,
    clock: Any,
    more: int = 0,
) -> tuple[Any, Any, Any]:
    op = torch.ops.hsa.diff.default
    args = (ids, position, page_size, table, owner, used, clock, more)
    device = ids.get_device()
    if not kernels.run_on(device):
        return eager(op, None, *args)
    batch, kv_heads, named = ids.get_size()
    kv_heads, pool = compat.static_int(kv_heads), compat.static_int(owner.get_size()[2])
    reason = pool_limits(pool)
    state = {"table": table, "owner": owner, "used": used, "clock": clock}
    written, unwritable = written_in_place(state)
    reason = reason or unwritable
    if reason is not None:
        return eager(op, reason, *args)
    constants = options.diff(
        kv_heads,
        page_size,
        compat.static_int(named) if compat.is_constant(named) else None,
        pool,
        not compat.expressions_equal(position.get_size()[0], 1),
        more,
    )
    loads = compat.scratch(device, torch.int32, (batch, kv_heads, named, 2))
    counts = compat.scratch(device, torch.int32, (batch, kv_heads, 5))
    slots = emit(
        "diff",
        constants,
        options.diff_configs(int(constants["SLOTS_PAD"])),
        {
            "ids": compat.realize(ids),
            "position": compat.realize(position),
            **written,
            "loads": loads,
            "counts": counts,
        },
        compat.contiguous_layout(device, torch.int32, (batch, kv_heads, named)),
        (batch, kv_heads),
        writes=(*written, "loads", "counts"),
        examples={"ids": spread_pages(compat.expression_hint(table.get_size()[2]))},
    )
    return slots, loads, counts
