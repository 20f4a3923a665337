"""The host tier in the graph: a pool of pages of each cache, and the ops that keep it and read from it.

before: o = sparse_attention(q, keys, values, ids, None, ...)
after:  append(keys, values, k, v, bits, pos, covered!, pool!); ...
        slots, loads, moved = diff(ids, pos, pool!)
        o = fetch_attention(q, keys, values, ids, slots, loads, moved, ..., pool!)

with prefetch: ids, counts = select(..., more); slots, loads, moved = diff(ids, ..., more)
        o = fetch_attention(q, keys, values, ids[..., :K], slots[..., :K], ..., pool!)
        held = prefetch(keys, values, loads, moved, pool!); ...; join_prefetch([held, loads, moved, ...], counters!)

    or, one layer early: held, moved = prefetch_select(guess at q, summary, bits, ..., pool!)
        ...; join_prefetch([held], table!, moved!); append(...); ...
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from hsa_compile.site import CacheUpdate, LayerPlan

from .emit import Emitter
from .graph_tools import tensor
from .positions import may_pass

_HSA = torch.ops.hsa


@dataclass(frozen=True)
class Pool:
    """The inputs that hold a cache's pages on the device (see ``hsa_compile.ops.diff``)."""

    table: fx.Node
    owner: fx.Node
    used: fx.Node
    clock: fx.Node
    keys: fx.Node
    values: fx.Node


def pool_inputs(emit: Emitter, plan: LayerPlan, number: int) -> Pool:
    """Inputs for the pages of one cache that are on the device."""
    read, value = (
        node.meta["example_value"] for node in (plan.site.attention.k, plan.site.attention.v)
    )
    rows, slots, page = tuple(read.shape[:2]), plan.pool_slots, plan.policy.page_size
    pages = -(-read.shape[2] // page)
    # As its summaries are stored.
    strides = (rows[1], 1, rows[0] * rows[1]) if plan.page_major else None
    inputs = {
        "table": ((pages,), torch.int32),
        "owner": ((slots,), torch.int32),
        "used": ((slots,), torch.int32),
        "clock": ((), torch.int32),
        "keys": ((slots, page, read.shape[3]), read.dtype),
        "values": ((slots, page, value.shape[3]), value.dtype),
    }
    return Pool(
        **{
            name: emit.input(
                f"hsa_pool_{name}_{number}",
                rows + shape,
                dtype,
                read.device,
                strides if name == "table" else None,
            )
            for name, (shape, dtype) in inputs.items()
        }
    )


def append(
    emit: Emitter,
    plan: LayerPlan,
    keys: fx.Node,
    values: fx.Node,
    bits: fx.Node,
    position: fx.Node,
    covered: fx.Node,
    pool: Pool,
) -> fx.Node:
    """Put this step's token into the pool; returns the keys of the page that it is in, ``[B, Hkv, T, D]``."""
    k, v = (
        _new_token(emit, cache, held, position)
        for cache, held in ((plan.site.keys, keys), (plan.site.values, values))
    )
    written = (covered, pool.table, pool.owner, pool.keys, pool.values)
    arguments = (keys, values, k, v, bits, position, *written, plan.policy.page_size)
    emit.call(_HSA.append.default, *arguments)
    return emit.method("select", pool.keys, 2, plan.pool_slots - 1)


def _new_token(emit: Emitter, cache: CacheUpdate, held: fx.Node, position: fx.Node) -> fx.Node:
    """The token at ``position``, ``[B, Hkv, 1, D]`` in the dtype of the cache."""
    new, full = tensor(cache.new), tensor(held)
    assert new is not None and full is not None
    if tuple(new.shape) != (*full.shape[:2], 1, full.shape[3]) or may_pass(cache, full):
        return emit.call(torch.index_select, held, 2, position)
    return cache.new if new.dtype == full.dtype else emit.method("to", cache.new, full.dtype)


def attend(
    emit: Emitter,
    plan: LayerPlan,
    keys: fx.Node,
    values: fx.Node,
    ids: fx.Node,
    position: fx.Node,
    masks: tuple[fx.Node, fx.Node | None],
    rest: tuple[object, ...],
    pool: Pool,
    moves: bool,
) -> tuple[fx.Node, fx.Node, list[fx.Node]]:
    """Attend to the selected pages, which this brings into the pool, and copy those ahead beside what comes next.

    Returns the output of attention, how many pages stayed and moved, and what the copy beside the step reads.

    Args:
        masks: packed, and additive.
        rest: what attention is told behind its tensors.
        moves: without, nothing is copied, and attended is what the pool happens to hold.
    """
    page, more = plan.policy.page_size, plan.ahead
    state = (pool.table, pool.owner, pool.used, pool.clock)
    found = emit.call(_HSA.diff.default, ids, position, page, *state, *((more,) if more else ()))
    slots, loads, moved = (emit.call(operator.getitem, found, i) for i in range(3))
    if more:
        selected = (..., slice(None, -more))
        ids, slots = (emit.call(operator.getitem, x, selected) for x in (ids, slots))
    q, full, pools = plan.site.attention.q, (keys, values), (pool.keys, pool.values)
    if not moves:
        out = emit.call(_HSA.sparse_attention.default, q, *pools, ids, slots, *masks, *rest)
        return out, moved, []
    out = emit.call(
        _HSA.fetch_attention.default, q, *full, ids, slots, loads, moved, *masks, *pools, *rest
    )
    if not more:
        return out, moved, []
    # Behind attention, so that what is waited for has the bus to itself.
    ahead = emit.call(_HSA.prefetch.default, *full, loads, moved, *pools, page)
    return out, moved, [ahead, loads, moved]


def fetch_early(
    emit: Emitter,
    plan: LayerPlan,
    summary: fx.Node,
    bits: fx.Node,
    position: fx.Node,
    pool: Pool,
    rule: tuple[object, ...],
) -> tuple[list[fx.Node], fx.Node]:
    """Guess the layer's query and fetch what it would select; returns what the copy reads, and how many pages moved.

    The cache is read as it is before the layer writes into it.
    """
    ahead = plan.lookahead
    assert ahead is not None
    copies = {ahead.stream: ahead.earlier}
    for node in ahead.steps:
        copies[node] = emit.graph.node_copy(node, lambda source: copies.get(source, source))
    caches = []
    for cache, views in zip((plan.site.keys, plan.site.values), ahead.views, strict=True):
        read = cache.base
        for view in views:
            copies[view.args[0]] = read  # type: ignore[index]
            read = emit.graph.node_copy(view, lambda source: copies.get(source, source))
        caches.append(read)
    state = (pool.table, pool.owner, pool.used, pool.clock, pool.keys, pool.values)
    guess = copies[plan.site.attention.q]
    found = emit.call(
        _HSA.prefetch_select.default, guess, summary, bits, position, *caches, *state, *rule
    )
    held, moved = (emit.call(operator.getitem, found, i) for i in range(2))
    return [held, guess], moved


def join(emit: Emitter, held: list[fx.Node], *marks: fx.Node) -> None:
    """Wait for the copies, before ``marks`` are read or written."""
    emit.call(_HSA.join_prefetch.default, held, *marks)
