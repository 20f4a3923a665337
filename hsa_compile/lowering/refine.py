"""Inductor's lowering of ``hsa::refine``: scores of the tokens of selected pages, then the search among these."""

from typing import Any

import torch

from .. import compat
from . import kernels, options
from .kernels import eager, emit, full_words, rows_of, spread_pages
from .limits import kernel_limits
from .options import Rows
from .select import search


def lower(
    q: Any, keys: Any, ids: Any, seen: Any, bits: Any, bias: Any, scale: float, page_size: int, *rule: Any
) -> tuple[Any, Any]:  # fmt: skip
    op = torch.ops.hsa.refine.default
    args = (q, keys, ids, seen, bits, bias, scale, page_size, *rule)
    if not kernels.run_on(q.get_device()):
        return eager(op, None, *args)
    reason = unfit(q, keys, page_size)
    if reason is not None:
        return eager(op, reason, *args)
    pages = compat.realize(ids)
    index = {"keys": compat.realize(keys), "pages": pages}
    named = {"pages": pages, "seen": compat.realize(seen)}
    return choose(q, index, bits, bias, scale, page_size, named, *rule)


def unfit(q: Any, keys: Any, page_size: int) -> str | None:
    """Why the kernels cannot score these ``keys`` (or what is kept of them), or None where they can."""
    query_heads, dim = (compat.static_int(q.get_size()[at]) for at in (1, 3))
    kv_heads = compat.static_int(keys.get_size()[1])
    reason = kernel_limits(q.get_dtype(), dim, dim, query_heads // kv_heads, page_size)
    if keys.get_dtype() != q.get_dtype():
        reason = reason or f"queries are {q.get_dtype()}, what is scored {keys.get_dtype()}"
    return reason


def choose(
    q: Any,
    index: dict[str, Any],
    bits: Any,
    bias: Any,
    scale: float,
    page_size: int,
    named: dict[str, Any],
    slots: Any,
    budget: int,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    softcap: float = 0.0,
) -> tuple[Any, Any]:
    """The two kernels, over realised tensors.

    ``index`` are keys and pages, or summary and signs; ``named`` the pages whose tokens are scored and what was seen of
    the row, or empty where all of the cache is.
    """
    device = q.get_device()
    batch, query_heads, _, dim = q.get_size()
    query_heads, dim = compat.static_int(query_heads), compat.static_int(dim)
    scored, per_page = index.values()
    kv_heads = compat.static_int(scored.get_size()[1])
    group = query_heads // kv_heads
    tokens = per_page.get_size()[2] * page_size
    added = {} if bias is None else {"bias": compat.realize(bias)}
    pages = compat.expression_hint(bits.get_size()[2])
    examples = {"bits": full_words, "pages": spread_pages(pages)}
    scores = emit(
        "token_scores",
        options.token_scores(
            float(scale), kv_heads, group, dim, page_size, rows_of(bits),
            None if bias is None else rows_of(bias), float(softcap), not named,
        ),
        options.token_scores_configs(q.get_dtype().itemsize, dim, page_size, not named),
        {"q": compat.realize(q), **index, "bits": compat.realize(bits), **added},
        compat.contiguous_layout(device, torch.float32, (batch, query_heads, tokens)),
        (batch, kv_heads, tokens),
        examples=examples,
    )  # fmt: skip
    constants = options.top_pages(
        1.0, group_reduce, kv_heads, group, 1, Rows(False, False), budget, fraction, sink, recent,
        compat.static_int(tokens) if compat.is_constant(tokens) else None,
        tokens=True, named=page_size if named else 0,
    )  # fmt: skip
    given = {"scores": compat.realize(scores), **named}
    return search(device, constants, given, (batch, kv_heads), tokens, slots, examples)
