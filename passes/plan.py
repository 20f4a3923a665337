"""Decide what becomes of each site: the policy of its layer, and what the kernels can take.

before: sites and rejects
after:  a ``LayerPlan`` (sparse, or dense by choice) or a ``Reject`` for each, in the same order
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch

from hsa_compile import algorithms
from hsa_compile.errors import located, refuse
from hsa_compile.lowering.limits import kernel_limits, pool_limits
from hsa_compile.ops.refine import forced_tokens
from hsa_compile.ops.select import FRACTION_UNIT, forced_pages
from hsa_compile.policy import LayerName, LayerPolicy, Policy
from hsa_compile.site import (
    AttentionSite,
    ChosenPlan,
    ChosenSite,
    LayerPlan,
    Reject,
    TokenBudget,
    recent_tokens,
)

from .graph_tools import same, tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def plan(
    sites: Sequence[AttentionSite | ChosenSite | Reject], policy: Policy
) -> list[LayerPlan | ChosenPlan | Reject]:
    """Resolve the policy for the layers present and plan each site.

    Raises:
        PolicyError: a key of the policy matches none of the layers, or a budget is not for the KV heads of its layer.
    """
    policies = policy.resolve([LayerName(site.where.index, site.where.path) for site in sites])
    return [_plan(site, layer) for site, layer in zip(sites, policies, strict=True)]


def _plan(
    site: AttentionSite | ChosenSite | Reject, policy: LayerPolicy
) -> LayerPlan | ChosenPlan | Reject:
    if isinstance(site, Reject):
        return site
    return _plan_chosen(site, policy) if isinstance(site, ChosenSite) else _plan_site(site, policy)


def _plan_chosen(site: ChosenSite, policy: LayerPolicy) -> ChosenPlan | Reject:
    """The model's own choice is no approximation of it: the policy has no say but ``dense``."""
    attention, count = site.attention, site.choice.count
    q, k, v = tensor(attention.q), tensor(attention.k), tensor(attention.v)
    assert q is not None and k is not None and v is not None
    if policy.algorithm == "dense":
        return ChosenPlan(site, policy, "dense", "dense by policy")
    if same(count, k.shape[2]):
        note = f"the model's own indexer chooses all of {k.shape[2]} tokens"
        return ChosenPlan(site, policy, "dense", note)
    reason = _cannot(q, k, v, 1, 1)
    if policy.placement == "host":
        reason = "placement 'host' keeps pages, and the model's own indexer chooses single tokens"
    if attention.lse is not None:
        reason = "the log-sum-exp of an attention to tokens that the model chose is used, too"
    if reason is not None:
        return Reject(site.where, reason, attention.anchor.name)
    return ChosenPlan(site, policy, "sparse")


def _plan_site(site: AttentionSite, policy: LayerPolicy) -> LayerPlan | Reject:
    attention = site.attention
    q, k, v = tensor(attention.q), tensor(attention.k), tensor(attention.v)
    assert q is not None and k is not None and v is not None
    tokens = k.shape[2]
    # A growing cache is rewritten from its first step, whatever its length: the trace that follows is symbolic.
    fixed = site.keys.kind != "dynamic" and isinstance(tokens, int)
    policy = policy.at_length(tokens if fixed else None)
    stays = "; it stays on the device" if policy.placement == "host" else ""
    if policy.algorithm == "dense":
        return LayerPlan(site, policy, "dense", "dense by policy" + stays)
    if isinstance(policy.budget, tuple) and len(policy.budget) != k.shape[1]:
        _refuse_heads(site, policy.budget, int(k.shape[1]))
    if fixed and policy.holds(tokens):
        note = f"the cache holds {tokens} tokens, within the budget"
        return LayerPlan(site, policy, "dense", note + stays)
    reason = _cannot(q, k, v, policy.page_size, int(q.shape[2]))
    if q.device.type == "cuda" and algorithms.get(policy.score).kernel is None:
        reason = (
            f"algorithm {policy.algorithm!r} was registered without its form for GPUs (PageKernel)"
        )
    if site.keys.kind == "fixed" and algorithms.get(policy.score).accumulates:
        reason = (
            f"algorithm {policy.algorithm!r} takes caches that a step writes; this one is only read, and nothing tells "
            "the queries of one request from those of the next"
        )
    if reason is not None:
        return Reject(site.where, reason, attention.anchor.name)
    recent, of_pages = recent_tokens(policy, attention.queries), policy.of_pages
    fraction = _fraction(of_pages)
    forced = forced_pages(policy.sink, recent, policy.page_size)
    if isinstance(tokens, int):
        budget = of_pages.pages(tokens)
        slots = min(max(budget + 1, forced), -(-tokens // policy.page_size))
    elif fraction:
        # Both follow the length; the rewrite computes slots that are 0 in the graph.
        budget = slots = 0
    else:
        budget = of_pages.pages(0)
        slots = max(budget + 1, forced)
    if policy.dense_below:
        slots = -(-tokens // policy.page_size) if isinstance(tokens, int) else 0
    if policy.placement == "device":
        single = None if policy.granularity == "page" else _token_budget(policy, tokens, recent)
        return LayerPlan(site, policy, "sparse", "", slots, budget, fraction, tokens=single)
    if site.keys.kind == "fixed":
        reason = "placement 'host' takes caches that a step writes; this one is only read"
        return Reject(site.where, reason, attention.anchor.name)
    if attention.queries > 1 or site.keys.tokens > 1:
        reason = (
            f"placement 'host' takes steps of a single token; this one has {attention.queries} query tokens "
            f"and writes {site.keys.tokens}"
        )
        return Reject(site.where, reason, attention.anchor.name)
    if site.keys.kind == "functional":
        reason = (
            "placement 'host' takes caches that are written in place or grow by torch.cat; "
            "this one is replaced by a new tensor at every step"
        )
        return Reject(site.where, reason, attention.anchor.name)
    if not isinstance(tokens, int) and fraction:
        reason = (
            "placement 'host' with a budget that is a fraction takes caches of one length, and this graph is for any: "
            "give the budget in tokens, or compile one graph a length with torch.compile(..., dynamic=False)"
        )
        return Reject(site.where, reason, attention.anchor.name)
    pool = math.ceil(policy.pool * slots)
    if isinstance(tokens, int):
        pool = min(pool, -(-tokens // policy.page_size))
    pool += 1  # the tail's
    reason = pool_limits(pool) if q.device.type == "cuda" else None
    if reason is not None:
        return Reject(site.where, reason, attention.anchor.name)
    ahead = 0
    if policy.prefetch == "next_rank":
        ahead = max(0, min(math.ceil(policy.ahead * slots), pool - 1 - slots))
    return LayerPlan(site, policy, "sparse", "", slots, budget, fraction, pool, ahead)


def _refuse_heads(site: AttentionSite, budget: tuple[int, ...], kv_heads: int) -> NoReturn:
    where = f"policy: layer {site.where.index} ({site.where.path!r}), which has {kv_heads} KV heads"
    valid = f"{kv_heads} ints, one for each of its KV heads, or one number for all; this has {len(budget)}"
    with located(where):
        refuse("budget", list(budget), valid)


def _fraction(policy: LayerPolicy) -> int:
    """A budget that is a fraction, in its unit; 0 for one in tokens."""
    return round(policy.budget * FRACTION_UNIT) if isinstance(policy.budget, float) else 0


def _token_budget(policy: LayerPolicy, tokens: int | torch.SymInt, recent: int) -> TokenBudget:
    fraction, forced = _fraction(policy), forced_tokens(policy.sink, recent)
    whole = policy.budget if isinstance(policy.budget, int) else 0
    if not isinstance(tokens, int):
        # A fraction follows the length; the rewrite computes it in the graph.
        return TokenBudget(0 if fraction else max(whole, forced), whole, fraction)
    budget = -(-fraction * tokens // FRACTION_UNIT) if fraction else whole
    return TokenBudget(min(max(budget, forced), tokens), budget, fraction)


def _cannot(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_size: int, queries: int
) -> str | None:
    if not q.dtype == k.dtype == v.dtype:
        return f"query, keys and values are of different dtypes ({q.dtype}, {k.dtype}, {v.dtype})"
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} is not supported: one of {', '.join(str(d) for d in _DTYPES)}"
    if not q.device == k.device == v.device:
        return (
            f"query, keys and values are on different devices ({q.device}, {k.device}, {v.device})"
        )
    if q.device.type not in ("cpu", "cuda"):
        return f"device {q.device.type} is not supported: cpu or cuda"
    if k.stride(3) != 1 or v.stride(3) != 1:
        return "the last dimension of the cache is not contiguous"
    if q.device.type == "cuda":
        group = q.shape[1] // k.shape[1]
        return kernel_limits(q.dtype, q.shape[3], v.shape[3], group, page_size, queries)
    return None
