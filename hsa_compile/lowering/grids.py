"""How many programs each kernel is launched with.

Sizes may be sympy expressions; then ``cdiv`` is Inductor's.
"""

from collections.abc import Callable, Mapping
from typing import Any

Grid = tuple[Any, Any, int]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def summarize(
    batch: Any,
    kv_heads: Any,
    pages: Any,
    meta: Mapping[str, Any],
    *,
    cdiv: Callable[..., Any] = ceil_div,
) -> Grid:
    return (batch * kv_heads, cdiv(pages, meta["BLOCK_PAGES"]), 1)


def page_scores(
    batch: Any,
    kv_heads: Any,
    pages: Any,
    meta: Mapping[str, Any],
    *,
    cdiv: Callable[..., Any] = ceil_div,
) -> Grid:
    return (batch * kv_heads, cdiv(pages, meta["BLOCK_PAGES"]), 1)


def index_scores(
    batch: Any,
    queries: Any,
    tokens: Any,
    meta: Mapping[str, Any],
    *,
    cdiv: Callable[..., Any] = ceil_div,
) -> Grid:
    return (batch * queries, cdiv(tokens, meta["BLOCK_TOKENS"]), 1)


def token_scores(
    batch: Any,
    kv_heads: Any,
    tokens: Any,
    meta: Mapping[str, Any],
    *,
    cdiv: Callable[..., Any] = ceil_div,
) -> Grid:
    return (batch * kv_heads, cdiv(tokens, meta["BLOCK_TOKENS"]), 1)


def top_pages(batch: Any, kv_heads: Any, meta: Mapping[str, Any]) -> Grid:
    return (batch * kv_heads, 1, 1)


def append(batch: Any, kv_heads: Any, meta: Mapping[str, Any]) -> Grid:
    return (batch * kv_heads, 1, 1)


def diff(batch: Any, kv_heads: Any, meta: Mapping[str, Any]) -> Grid:
    return (batch * kv_heads, 1, 1)


def fetch(meta: Mapping[str, Any]) -> Grid:
    return (meta["PROGRAMS"], 1, 1)


def sparse_attention(batch: Any, kv_heads: Any, meta: Mapping[str, Any]) -> Grid:
    return (batch * kv_heads, meta["SPLITS"], 1)


def merge_splits(
    batch: Any,
    heads: Any,
    value_dim: Any,
    meta: Mapping[str, Any],
    *,
    cdiv: Callable[..., Any] = ceil_div,
) -> Grid:
    return (batch * heads, cdiv(value_dim, meta["BLOCK_DIM"]), 1)
