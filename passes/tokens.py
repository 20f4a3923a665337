"""Of selected pages, or of all tokens, the single ones that the budget buys: ``granularity`` of a policy.

    before: ids, counts = select(q, summary, bits, ...); o = sparse_attention(q, keys, values, ids, bits, ...)
    after:  ids, counts = select(..., of a larger budget); ids, counts = refine(q, keys, ids, counts, bits, ...)
            o = sparse_attention(q, keys, values, ids, page_mask(mask, 1), ..., 1)

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
) -> tuple[fx.Node, fx.Node]:
    """The best tokens of the ``selected`` pages (with what was counted), and what is counted of them."""
    attention, policy = plan.site.attention, plan.policy
    capped = (attention.softcap,) if attention.softcap else ()
    made = emit.call(
        _HSA.refine.default,
        *(q, keys, *selected, bits, bias, attention.scale, policy.page_size),
        *(*_budget(emit, plan, keys), policy.sink, plan.recent, policy.group_reduce, *capped),
    )
    return emit.call(operator.getitem, made, 0), emit.call(operator.getitem, made, 1)


def _budget(emit: Emitter, plan: LayerPlan, keys: fx.Node) -> tuple[object, int, int]:
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
