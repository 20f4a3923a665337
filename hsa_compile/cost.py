"""What a decode step reads, dense and sparse, as expressions in the sequence length (sympy)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from hsa_compile import algorithms, compat
from hsa_compile.ops.refine import forced_tokens
from hsa_compile.ops.select import FRACTION_UNIT, forced_pages
from hsa_compile.ops.signs import signs_width
from hsa_compile.site import ChosenPlan, LayerPlan

S = sympy.Symbol("S", integer=True, positive=True)
"""Tokens in the cache."""

_WORD = 8 + 16
"""Bytes a page for the packed mask and the coverage record."""


@dataclass(frozen=True)
class Cost:
    """Bytes read by one step of one layer, batch included.

    dense: keys and values once. sparse: page summaries and means, the packed mask, the keys that tokens are chosen
    by, and the selected keys and values.
    break_even: the length from which the sparse step reads less, or None where it never does.
    summaries: what is read to score pages, as a share of what dense attention reads; with the keys of candidates where
        their number follows the length.
    candidates: keys of a first stage of which tokens are chosen, in as many KV tokens.
    """

    dense: sympy.Expr
    sparse: sympy.Expr
    break_even: int | None
    summaries: float = 0.0
    candidates: float = 0.0

    def at(self, tokens: int) -> tuple[int, int]:
        """Bytes at a length: dense, sparse."""
        return int(self.dense.subs(S, tokens)), int(self.sparse.subs(S, tokens))


def cost_of(plan: LayerPlan) -> Cost:
    """The cost of a planned site; shapes come from its traced tensors."""
    attention, policy = plan.site.attention, plan.policy
    k, v = attention.k.meta["example_value"], attention.v.meta["example_value"]
    heads = compat.hint(k.shape[0]) * int(k.shape[1])
    token = heads * (int(k.shape[3]) + int(v.shape[3])) * k.element_size()
    dense = S * token
    if policy.algorithm == "dense":
        return Cost(dense, dense, None)
    width = algorithms.summary_width(policy.score, int(k.shape[3])) * k.element_size() + _WORD
    for what in plan.means:
        width += int((k if what == "keys" else v).shape[3]) * k.element_size() + _WORD
    page = policy.page_size
    if policy.indexes_tokens:
        width += 8 * signs_width(page, int(k.shape[3]))
    forced = forced_pages(policy.sink, plan.recent, page)
    each = policy.head_pages or (policy.of_pages.pages(0),)
    bought = sympy.Rational(sum(max(one, forced) for one in each) * page, len(each))
    pages = _selected(plan.fraction, bought)
    read, most = token * pages, token * sympy.Min(S, pages)
    share, candidates = heads * width / (page * token), 0.0
    if plan.tokens is not None:
        fewest = forced_tokens(policy.sink, plan.recent)
        single = _selected(plan.tokens.fraction, sympy.Integer(max(plan.tokens.budget, fewest)))
        key = heads * int(k.shape[3]) * k.element_size() if policy.granularity == "two_stage" else 0
        if plan.fraction:
            share += float(key * plan.fraction / (token * FRACTION_UNIT))
        else:
            candidates = float(key * pages / token)
        read = key * pages + token * single
        most = key * sympy.Min(S, pages) + token * sympy.Min(S, single)
    sparse = heads * width * sympy.ceiling(S / page) + most
    even = _break_even(heads * width, page, token, read)
    return Cost(dense, sparse, even, share, candidates)


def _selected(fraction: int, tokens: sympy.Expr) -> sympy.Expr:
    """Tokens that are selected: a fraction of the length where it is one."""
    return S * sympy.Rational(fraction, FRACTION_UNIT) if fraction else tokens


def cost_of_chosen(plan: ChosenPlan) -> Cost:
    """The cost of an attention to tokens that the model chose: the keys of its indexer, and what is cached of tokens.

    What is computed from that, for every token or for the chosen ones, is not read and not counted.
    """
    choice, region = plan.site.choice, plan.site.region
    index = 0 if choice.scores is None else _bytes_a_token(choice.scores.k, 1)
    token = sum(_bytes_a_token(node, place.token) for node, place in region.cached.items())
    dense = S * (index + token)
    if not isinstance(choice.most, int):
        return Cost(dense, dense, None)
    read = choice.most * plan.site.attention.queries
    return Cost(dense, S * index + token * sympy.Min(S, read), read + 1)


def _bytes_a_token(node: fx.Node, dim: int) -> int:
    held: torch.Tensor = node.meta["example_value"]
    sizes = (compat.hint(size) for at, size in enumerate(held.shape) if at != dim)
    return math.prod(sizes) * held.element_size()


def _break_even(summary: int, page: int, token: int, read: sympy.Expr) -> int | None:
    """The length from which summaries and what is ``read`` of the rest together are less than everything."""
    length = sympy.Symbol("length", positive=True)
    sparse = summary * length / page + read.subs(S, length)
    crossing = sympy.solve(sympy.Eq(token * length, sparse), length)
    if crossing:
        return int(sympy.ceiling(crossing[0]))
    return 1 if (token * length - sparse).subs(length, 1) > 0 else None
