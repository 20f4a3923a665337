"""Of selected pages, or of all tokens, the single ones that the budget buys: ``granularity`` of a policy.

    before: ids, counts = select(q, summary, bits, ...); o = sparse_attention(q, keys, values, ids, bits, ...)
    after:  ids, counts = select(..., of a larger budget); ids, counts = refine(q, keys, ids, counts, bits, ...)
            o = sparse_attention(q, keys, values, ids, page_mask(mask, 1), ..., 1)

    and by an index of every token, which ``summarize`` keeps beside the summaries:
            summarize(keys, ..., summary!, covered!, ..., signs!); ids, counts = select_tokens(q, summary, signs, ...)

A token is a page of one to the attention, as it is where the model itself chooses.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from hsa_compile.ops.refine import forced_tokens
from hsa_compile.ops.select import FRACTION_UNIT
from hsa_compile.site import LayerPlan

from .emit import Emitter

_HSA = torch.ops.hsa


def refine(
    emit: Emitter,
    plan: LayerPlan,
    q: fx.Node,
    keys: fx.Node,
    selected: tuple[fx.Node, fx.Node],
    bits: fx.Node,
    bias: fx.Node | None,
) -> fx.Node:
    """The best tokens of the ``selected`` pages (and what was counted of these), and what is counted of them."""
    held = (q, keys, *selected, bits, bias)
    return emit.call(_HSA.refine.default, *held, *_rule(emit, plan, keys))


def select_tokens(
    emit: Emitter,
    plan: LayerPlan,
    q: fx.Node,
    keys: fx.Node,
    index: tuple[fx.Node, fx.Node],
    bits: fx.Node,
    bias: fx.Node | None,
) -> fx.Node:
    """The best of all tokens by their ``index``, summary and signs, and what is counted of them."""
    held = (q, *index, bits, bias)
    return emit.call(_HSA.select_tokens.default, *held, *_rule(emit, plan, keys))


def _rule(emit: Emitter, plan: LayerPlan, keys: fx.Node) -> tuple[object, ...]:
    """What both are told behind their tensors."""
    attention, policy = plan.site.attention, plan.policy
    capped = (attention.softcap,) if attention.softcap else ()
    budget = token_budget(emit, plan, keys)
    reads = (policy.sink, plan.recent, policy.group_reduce, *capped)
    return (attention.scale, policy.page_size, *budget, *reads)


def token_budget(emit: Emitter, plan: LayerPlan, keys: fx.Node) -> tuple[object, int, int]:
    """Slots, budget and fraction; slots that follow the length are computed in the graph."""
    tokens = plan.tokens
    assert tokens is not None
    if tokens.slots:
        return tokens.slots, tokens.budget, tokens.fraction
    scaled = emit.call(operator.mul, emit.method("size", keys, 2), tokens.fraction)
    bought = emit.call(
        operator.floordiv, emit.call(operator.add, scaled, FRACTION_UNIT - 1), FRACTION_UNIT
    )
    forced = forced_tokens(plan.policy.sink, plan.recent)
    return emit.call(operator.add, bought, forced), 0, tokens.fraction
