"""Inductor's lowering of ``hsa::summarize``."""

from typing import Any

import torch

from .. import compat
from . import kernels, options
from .kernels import eager, emit, rows_of, written_in_place
from .limits import kernel_limits


def lower(
    keys: Any,
    bits: Any,
    position: Any,
    summary: Any,
    covered: Any,
    algorithm: str,
    page_size: int,
    tail: Any = None,
    written: int = 1,
    signs: Any = None,
) -> None:
    op = torch.ops.hsa.summarize.default
    args = (keys, bits, position, summary, covered, algorithm, page_size, tail, written, signs)
    device = keys.get_device()
    if not kernels.run_on(device):
        return eager(op, None, *args)
    batch, kv_heads, _, dim = keys.get_size()
    kv_heads, dim = compat.static_int(kv_heads), compat.static_int(dim)
    group = max(1, compat.static_int(bits.get_size()[1]) // kv_heads)
    reason = kernel_limits(keys.get_dtype(), dim, dim, group, page_size)
    if summary.get_dtype() != keys.get_dtype():
        reason = reason or f"summaries are {summary.get_dtype()}, keys {keys.get_dtype()}"
    if tail is not None and tail.get_dtype() != keys.get_dtype():
        reason = reason or f"keys are {keys.get_dtype()}, those of the pool {tail.get_dtype()}"
    kept = {"summary": summary, "covered": covered}
    stored, unwritable = written_in_place(kept if signs is None else {**kept, "signs": signs})
    reason = reason or unwritable
    if reason is not None:
        return eager(op, reason, *args)
    inputs = {
        "keys": compat.realize(keys),
        "bits": compat.realize(bits),
        "position": compat.realize(position),
        **stored,
    }
    if tail is not None:
        inputs["tail"] = compat.realize(tail)
    emit(
        "summarize",
        options.summarize(
            algorithm,
            kv_heads,
            group,
            dim,
            page_size,
            rows_of(bits),
            batch_position=not compat.expressions_equal(position.get_size()[0], 1),
            tail=tail is not None,
            written=written,
            accumulates=compat.static_int(covered.get_size()[3]) > 2,
            signs=signs is not None,
        ),
        options.summarize_configs(page_size, dim),
        inputs,
        compat.contiguous_layout(device, torch.int32, (batch, kv_heads)),
        (batch, kv_heads, summary.get_size()[2]),
        writes=tuple(stored),
    )
    return None
