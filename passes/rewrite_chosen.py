"""Rewrite attention to tokens that the model chose: no other token is read, and index scores are made in one go.

    before: s = weighted sum of relu(q_i @ k_i.mT) + mask; ids = topk(s, k)
            keys, values = expand(latents); out = attention(q, keys, values, mask and scatter(ids))
    after:  s = hsa.index_scores(q_i, k_i, weights, scale) + mask; ids = topk(s, k)
            keys', values' = expand(latents[rows, ids])
            out = hsa.sparse_attention(q, keys', values', all k of them, mask at ids, scale, page_size=1)

    where keys and values are cached as they are, and there is one query token:
            out = hsa.sparse_attention(q, keys, values, ids, mask, scale, page_size=1)

Several query tokens choose apart: they are rows of the batch, ``[B * S]``, with one query token each. The model's own
writes to its caches stay as they are, and there is no state beside them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from hsa_compile import compat
from hsa_compile.site import Attention, ChosenPlan, ChosenSite, MaskTerm, Place

from .emit import Emitter
from .graph_tools import fixed, tensor
from .masks import Masks
from .results import as_before, sunk
from .rewrite import erase_unused
from .token_wise import drop_unread, replay

_HSA = torch.ops.hsa
_TOKEN = 1
"""Page size where every token is a page of its own."""


def rewrite_chosen(
    gm: fx.GraphModule, plans: Sequence[ChosenPlan], fake_mode: object
) -> list[tuple[Attention, fx.Node]]:
    """Rewrite every plan whose decision is ``sparse``; ``gm`` is changed in place.

    Returns:
        Each attention with the node that is its result now.
    """
    rewriter = _Rewriter(gm.graph, fake_mode)
    results = [(plan.site.attention, rewriter.site(plan.site)) for plan in plans]
    rewriter.tidy()
    gm.graph.lint()
    gm.recompile()
    return results


class _Rewriter:
    def __init__(self, graph: fx.Graph, fake_mode: object) -> None:
        self.graph = graph
        self.emit = Emitter(graph, fake_mode)
        self.masks = Masks(self.emit)
        self.made: dict[object, fx.Node] = {}
        self.of_model = set(graph.nodes)
        self.unread: list[fx.Node] = []
        self.topks: dict[fx.Node, None] = {}

    def site(self, site: ChosenSite) -> fx.Node:
        self._scores(site)
        attention, in_place = site.attention, site.as_cached and site.attention.queries == 1
        with self.graph.inserting_before(attention.out):
            attend = self._in_place if in_place else self._gathered
            result = as_before(self.emit, attend(site), attention)
        result.meta["nn_module_stack"] = attention.out.meta.get("nn_module_stack")
        attention.out.replace_all_uses_with(result)
        erase_unused(self.graph, attention.out)
        self.unread += [*site.region.nodes, *site.choice.nodes]
        self.topks[site.choice.topk] = None
        return result

    def tidy(self) -> None:
        """Erase what nothing reads any more, and let a top-k go unsorted whose order nobody sees."""
        drop_unread(self.graph, self.unread)
        for topk in self.topks:
            seen = {user for place in topk.users for user in place.users} & self.of_model
            if not seen and all(place.args[1] == 1 for place in topk.users):
                topk.kwargs = {**topk.kwargs, "sorted": False}

    def _scores(self, site: ChosenSite) -> None:
        scores = site.choice.scores
        if scores is None or ("scores", scores.out) in self.made:
            return
        with self.graph.inserting_before(scores.out):
            made = self.emit.call(
                _HSA.index_scores.default, scores.q, scores.k, scores.weights, scores.scale
            )
        made.meta["nn_module_stack"] = scores.out.meta.get("nn_module_stack")
        scores.out.replace_all_uses_with(made)
        self.made["scores", scores.out] = made
        drop_unread(self.graph, scores.nodes)

    # -- attention

    def _in_place(self, site: ChosenSite) -> fx.Node:
        """One query token: of keys and values that are cached as they are, the chosen ones are pages."""
        attention, index = site.attention, self._index(site)
        keys = tensor(attention.k)
        assert keys is not None
        narrow = self._once(("ids", index), lambda: self.emit.method("to", index, torch.int32))
        ids = self.emit.method("expand", narrow, -1, keys.shape[1], -1)
        hidden = replace(attention, masks=site.choice.masks)
        attended = self._attend(hidden, ids)
        return self._result(attended, attention, apart=False)

    def _gathered(self, site: ChosenSite) -> fx.Node:
        """The chosen tokens of each query are gathered, and made keys and values of."""
        attention, index, method = site.attention, self._index(site), self.emit.method
        taken = {
            node: self._gather(node, place, index) for node, place in site.region.cached.items()
        }
        node, place = next(iter(site.region.cached.items()))
        rows, tokens = self._size(taken[node], 0), self._size(taken[node], place.token)
        made = replay(self.emit, site.region, taken, rows, tokens)
        q, several = attention.q, attention.queries > 1
        if several:
            q = method("unsqueeze", method("flatten", method("transpose", q, 1, 2), 0, 1), 2)
        keys = made[attention.k]
        read = tensor(keys)
        assert read is not None
        every = self.emit.call(torch.arange, tokens, dtype=torch.int32, device=read.device)
        ids = method("expand", every, rows, read.shape[1], -1)
        masks = tuple(self._mask(term, index, several) for term in site.choice.masks)
        chosen = replace(attention, q=q, k=keys, v=made[attention.v], masks=masks)
        return self._result(self._attend(chosen, ids), attention, several)

    def _attend(self, attention: Attention, ids: fx.Node) -> fx.Node:
        read = tensor(attention.k)
        assert read is not None
        bias, bits = self.masks.packed(attention, attention.k, read, _TOKEN)
        capped = (attention.softcap,) if attention.softcap else ()
        return self.emit.call(
            _HSA.sparse_attention.default,
            *(attention.q, attention.k, attention.v, ids, None, bits, bias),
            *(attention.scale, _TOKEN, *capped),
        )

    def _result(self, attended: fx.Node, attention: Attention, apart: bool) -> fx.Node:
        """Out of ``(out, lse)`` the result ``[B, Hq, S, Dv]``; ``apart`` where queries are rows."""
        result = self.emit.call(operator.getitem, attended, 0)
        result = self._by_head(result, attention.queries) if apart else result
        if attention.sink is None:
            return result
        lse = self.emit.method("unsqueeze", self.emit.call(operator.getitem, attended, 1), -1)
        lse = self._by_head(lse, attention.queries) if apart else lse
        return sunk(self.emit, result, lse, attention.sink)

    def _by_head(self, node: fx.Node, queries: int) -> fx.Node:
        """``[B * S, H, 1, X]`` as ``[B, H, S, X]``."""
        rows = self.emit.method("unflatten", self.emit.method("squeeze", node, 2), 0, (-1, queries))
        return self.emit.method("transpose", rows, 1, 2)

    # -- what is chosen

    def _index(self, site: ChosenSite) -> fx.Node:
        """The index ``[B, S, k]``."""
        index, dims = site.choice.index, site.choice.dims
        if dims == (0, 2, 3):
            return index
        spelled = "squeeze" if len(dims) == 4 else "unsqueeze"
        return self._once(("index", index), lambda: self.emit.method(spelled, index, 1))

    def _gather(self, node: fx.Node, place: Place, index: fx.Node) -> fx.Node:
        """Of ``node``, rows first and tokens at ``place``, those of each query: ``[B * S, ...]``, k at ``place``."""
        method, held = self.emit.method, tensor(index)
        assert held is not None
        batch, queries = held.shape[0], int(held.shape[1])
        rows = self._once(
            ("rows", compat.expression(batch), held.device),
            lambda: method(
                "unsqueeze",
                self.emit.call(torch.arange, self._size(index, 0), device=held.device),
                1,
            ),
        )
        flat = self._once(("flat", index), lambda: method("flatten", index, 1))
        turned = node if place.token == 1 else method("transpose", node, 1, place.token)
        taken = self.emit.call(operator.getitem, turned, (rows, flat))
        if queries > 1:
            taken = method("flatten", method("unflatten", taken, 1, (queries, -1)), 0, 1)
        return taken if place.token == 1 else method("transpose", taken, 1, place.token)

    def _mask(self, term: MaskTerm, index: fx.Node, several: bool) -> MaskTerm:
        """A mask of all tokens, ``[1 or B, 1 or H, 1 or S, T]`` or less, at the chosen ones: ``[B * S, ., 1, k]``."""
        mask, method = term.node, self.emit.method
        held, indexed = tensor(mask), tensor(index)
        assert mask is not None and held is not None and indexed is not None

        def make() -> fx.Node:
            node = mask
            for _ in range(4 - held.ndim):
                node = method("unsqueeze", node, 0)
            heads = held.shape[1] if held.ndim == 4 else 1
            node = method("expand", node, self._size(index, 0), -1, int(indexed.shape[1]), -1)
            at = method("expand", method("unsqueeze", index, 1), -1, heads, -1, -1)
            node = self.emit.call(torch.gather, node, -1, at)
            if several:
                node = method(
                    "unsqueeze", method("flatten", method("transpose", node, 1, 2), 0, 1), 2
                )
            return node

        return replace(term, node=self._once(("mask", mask, index), make))

    def _size(self, node: fx.Node, dim: int) -> object:
        """A size as a number, or as a node where it varies."""
        held = tensor(node)
        assert held is not None
        known = fixed(held.shape[dim])
        if known is not None:
            return known
        return self._once(("size", node, dim), lambda: self.emit.method("size", node, dim))

    def _once(self, key: object, make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]
