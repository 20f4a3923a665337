"""Inductor's lowering of ``hsa::sparse_attention``: a partial result a split, then the merge."""

from typing import Any

import torch

from .. import compat
from . import kernels, options
from .kernels import eager, emit, full_words, rows_of, spread_pages
from .limits import kernel_limits
from .standalone import processors


def lower(
    q: Any,
    keys: Any,
    values: Any,
    ids: Any,
    slots: Any,
    bits: Any,
    bias: Any,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
    ragged: bool = False,
) -> tuple[Any, Any]:
    op = torch.ops.hsa.sparse_attention.default
    args = (q, keys, values, ids, slots, bits, bias, scale, page_size, softcap, ragged)
    if not kernels.run_on(q.get_device()):
        return eager(op, None, *args)
    reason = unfit(q, keys, values, page_size)
    if reason is not None:
        return eager(op, reason, *args)
    given = {"q": q, "keys": keys, "values": values, "ids": ids, "slots": slots}
    return attend({**given, "bits": bits, "bias": bias}, scale, page_size, softcap, ragged=ragged)


def unfit(q: Any, keys: Any, values: Any, page_size: int) -> str | None:
    """Why the kernels cannot take this attention, or None where they can."""
    query_heads, dim = (compat.static_int(q.get_size()[at]) for at in (1, 3))
    kv_heads = compat.static_int(keys.get_size()[1])
    value_dim = compat.static_int(values.get_size()[-1])
    dtype = q.get_dtype()
    reason = kernel_limits(dtype, dim, value_dim, query_heads // kv_heads, page_size)
    if {keys.get_dtype(), values.get_dtype()} != {dtype}:
        reason = (
            reason or f"queries are {dtype}, keys {keys.get_dtype()}, values {values.get_dtype()}"
        )
    return reason


def attend(
    given: dict[str, Any],
    scale: float,
    page_size: int,
    softcap: float,
    fetches: bool = False,
    ragged: bool = False,
) -> tuple[Any, Any]:
    """The two kernels; ``given`` are the tensors of the first, or None for those that there are not.

    With ``fetches`` it reads the full cache, and writes into the pool, ``keys`` and ``values``, which must be realised.
    """
    q, keys, values, ids, slots, bits, bias = (
        given[name] for name in ("q", "keys", "values", "ids", "slots", "bits", "bias")
    )
    device, dtype = q.get_device(), q.get_dtype()
    batch, query_heads, _, dim = q.get_size()
    query_heads, dim = compat.static_int(query_heads), compat.static_int(dim)
    kv_heads = compat.static_int(keys.get_size()[1])
    value_dim = compat.static_int(values.get_size()[-1])
    selected = ids.get_size()[2]
    splits = options.attention_splits(
        compat.expression_hint(batch) * kv_heads,
        compat.expression_hint(selected),
        page_size,
        processors(device),
    )
    constants = options.sparse_attention(
        float(scale), kv_heads, query_heads // kv_heads, dim, value_dim, page_size, rows_of(bits),
        None if bias is None else rows_of(bias), splits, slots is not None, float(softcap), fetches,
        ragged,
    )  # fmt: skip
    configs = options.sparse_attention_configs(
        dtype.itemsize * options.dim_pad(max(dim, value_dim)),
        page_size,
        compat.expression_hint(selected) * page_size // splits,
    )
    part_lse = compat.scratch(device, torch.float32, (batch, query_heads, splits))
    acc = emit(
        "sparse_attention",
        constants,
        # Never timed: Inductor would time copies within the device, and allocate as much there as the host holds.
        configs[:1] if fetches else configs,
        {
            **{name: compat.realize(node) for name, node in given.items() if node is not None},
            "lse": part_lse,
        },
        compat.contiguous_layout(device, torch.float32, (batch, query_heads, splits, value_dim)),
        (batch, kv_heads),
        writes=("keys", "values", "lse") if fetches else ("lse",),
        examples={
            "bits": full_words,
            "ids": spread_pages(compat.expression_hint(bits.get_size()[2])),
            "slots": spread_pages(compat.expression_hint(keys.get_size()[2])),
        },
    )
    lse = compat.scratch(device, torch.float32, (batch, query_heads, 1))
    out = emit(
        "merge_splits",
        options.merge_splits(query_heads, value_dim, splits),
        options.merge_splits_configs(value_dim, splits),
        {"acc": compat.realize(acc), "part_lse": part_lse, "lse": lse},
        compat.contiguous_layout(device, dtype, (batch, query_heads, 1, value_dim)),
        (batch, query_heads, value_dim),
        writes=("lse",),
    )
    return out, lse
