"""Find how a layer's query can be guessed one layer early, and what its pages can be fetched behind.

before: plans whose policy says prefetch="cross_layer"
after:  the same with a ``Lookahead``, or with the reason why nothing is fetched ahead

        h0 ──norm──q_proj──rotary──> q0 ──attention──o_proj──(+)── m ──norm──mlp──(+)── h1 ──norm'──q_proj'──> q1
                                                              └──norm'──q_proj'──rotary'──> guess at q1

A residual stream changes little from layer to layer, so what the next layer would ask of this one's stream is much of
what it will ask of its own (InfiniGen, Lee et al. 2024, with the weights and the cache of the model itself). The guess
is made of the stream m to which the attention before was added: only what follows it is missing there, and what is
selected is fetched behind that, when the attention before no longer waits for pages of its own. Where nothing follows,
as in layers that compute both at once, it is made of h0, and fetched behind the attention before as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import fx

from hsa_compile import compat
from hsa_compile.site import CacheUpdate, ChosenPlan, LayerPlan, Lookahead, Reject

from .graph_tools import (
    CASTS,
    argument,
    memory,
    modifies,
    op,
    raw_name,
    same,
    tensor,
    where,
    writes,
)

if TYPE_CHECKING:
    import networkx

Planned = LayerPlan | ChosenPlan | Reject

_MOST_NODES = 200
"""Between a residual stream and a query; more is something else."""
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
_RANDOM = frozenset({"dropout1d", "dropout2d", "dropout3d", "gumbel_softmax"})
"""Functions that are random and have no op of their name."""


def schedule(graph: fx.Graph, plans: Sequence[Planned]) -> list[Planned]:
    """Plans in the same order, those with prefetch="cross_layer" with how; none where two attentions share a pool."""
    pooled = [item for item in plans if isinstance(item, LayerPlan) and item.pool_slots]
    if all(item.policy.prefetch == "none" for item in pooled):
        return list(plans)
    flow = _Flow(graph)
    readers = Counter(item.site.attention.k for item in pooled)
    scheduled: list[Planned] = []
    earlier: Planned | None = None
    for item in plans:
        if isinstance(item, LayerPlan) and item.pool_slots and item.policy.prefetch != "none":
            found: Lookahead | str | None = None
            if readers[item.site.attention.k] > 1:
                # The other would meet pages on their way.
                item, found = replace(item, ahead=0), "another attention reads the same cache"
            elif item.policy.prefetch == "cross_layer":
                found = _look_ahead(item, earlier, readers, flow)
            elif not item.ahead:
                found = "the selection has room for every page"
            if isinstance(found, str):
                item = replace(item, no_lookahead=found)
            else:
                item = replace(item, lookahead=found)
        scheduled.append(item)
        earlier = item
    return scheduled


@dataclass(frozen=True)
class _Streams:
    """The residual stream before an attention, and after."""

    before: fx.Node
    after: fx.Node


class _Flow:
    """Who reads whom, and where every node stands; made when a query is to be guessed."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.streams: dict[fx.Node, _Streams | None] = {}

    @cached_property
    def place(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.graph.nodes)}

    @cached_property
    def edges(self) -> networkx.DiGraph:
        import networkx

        edges = networkx.DiGraph()
        edges.add_nodes_from(self.graph.nodes)
        edges.add_edges_from(
            (read, node) for node in self.graph.nodes for read in node.all_input_nodes
        )
        return edges

    def residual(self, plan: LayerPlan) -> _Streams | None:
        """The stream that the layer's query is made of, and its sum with the result of its attention."""
        out = plan.site.attention.out
        if out not in self.streams:
            self.streams[out] = self._residual(plan)
        return self.streams[out]

    def _residual(self, plan: LayerPlan) -> _Streams | None:
        import networkx

        attention = plan.site.attention
        before = networkx.ancestors(self.edges, attention.q)
        after = networkx.descendants(self.edges, attention.out)
        for node in sorted(after, key=self.place.__getitem__):
            if op(node) != "add" or len(node.all_input_nodes) != 2 or modifies(node):
                continue
            for stream, added in (node.all_input_nodes, node.all_input_nodes[::-1]):
                stream = _uncast(stream)
                if stream in before and stream not in after and added in after | {attention.out}:
                    known = tensor(stream) is not None and tensor(node) is not None
                    return _Streams(stream, node) if known else None
        return None

    def is_product_between(self, begin: int, end: int) -> bool:
        """Whether anything is multiplied by a matrix there."""
        return any(begin <= at < end and op(node) in _PRODUCTS for node, at in self.place.items())


def _look_ahead(
    plan: LayerPlan,
    earlier: Planned | None,
    readers: Counter[fx.Node],
    flow: _Flow,
) -> Lookahead | str:
    if plan.site.keys.kind == "dynamic":
        return "its cache grows"
    if earlier is None:
        return "there is no attention before it"
    if isinstance(earlier, Reject):
        return "the attention before it is left as it is"
    if isinstance(earlier, ChosenPlan) or not earlier.pool_slots:
        return "the attention before it reads no pool"
    if readers[earlier.site.attention.k] > 1:
        return "another attention reads the cache of the attention before it"
    streams, its, place = flow.residual(plan), flow.residual(earlier), flow.place
    if streams is None or its is None:
        return "no residual stream was found around the attention"
    mine, out = streams.before, earlier.site.attention.out
    behind_attention = place[its.after] + 1
    if flow.is_product_between(behind_attention, place[mine]):
        found = _guess(plan, mine, its.after, behind_attention, its.after.next, flow)
        if isinstance(found, Lookahead):
            return found
    return _guess(plan, mine, its.before, place[out], out, flow)


def _guess(
    plan: LayerPlan, mine: fx.Node, its: fx.Node, begin: int, anchor: fx.Node, flow: _Flow
) -> Lookahead | str:
    """A guess made of ``its`` in the place of ``mine``, at ``begin``, right before ``anchor``."""
    place = flow.place
    now, then = tensor(mine), tensor(its)
    assert now is not None and then is not None
    alike = now.dtype == then.dtype and now.device == then.device and now.ndim == then.ndim
    if not alike or not all(
        map(same, (*now.shape, *_strides(now)), (*then.shape, *_strides(then)))
    ):
        return "the residual stream changes its shape between the layers"
    steps = _steps(plan, mine, begin, place)
    if isinstance(steps, str):
        return steps
    if place[its] >= begin:
        return "the residual stream of the layer before is not there yet"
    masks = [term.node for term in plan.site.attention.masks if term.node is not None]
    if any(place[node] >= begin for node in masks):
        return "its mask is made after the attention before it"
    behind = _modules(place, begin, place[plan.site.keys.write])
    if not behind:
        return "nothing runs between the attention before it and its own"
    attention, keys, values = plan.site.attention, plan.site.keys, plan.site.values
    views = (_views(keys, attention.k), _views(values, attention.v))
    if any(place[node] >= begin for view in sum(views, ()) for node in view.all_input_nodes[1:]):
        return "what it reads of its cache is chosen after the attention before it"
    return Lookahead(mine, its, steps, views, anchor, behind)


def _strides(stream: torch.Tensor) -> list[object]:
    """Strides, where they matter."""
    pairs = zip(stream.shape, stream.stride(), strict=True)
    return [1 if same(size, 1) else stride for size, stride in pairs]


def _views(cache: CacheUpdate, read: fx.Node) -> tuple[fx.Node, ...]:
    """From the cache to what attention reads of it; in order."""
    found: list[fx.Node] = []
    while read is not cache.base:
        if read is not cache.write and not modifies(read):
            found.insert(0, read)
        read = read.args[0]  # type: ignore[assignment]
    return tuple(found)


def _uncast(node: fx.Node) -> fx.Node:
    while op(node) in CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _steps(
    plan: LayerPlan, stream: fx.Node, begin: int, place: dict[fx.Node, int]
) -> tuple[fx.Node, ...] | str:
    """What makes the query of the stream, and of what is there at ``begin``; in order."""
    needed: dict[fx.Node, None] = {}
    frontier = [plan.site.attention.q]
    while frontier:
        node = frontier.pop()
        if node is stream or node in needed or place[node] < begin:
            continue
        if node.op not in ("call_function", "call_method"):
            return f"its query is made of {node.name}, which is given later"
        if place[node] == begin:
            return "its query is made of more than the residual stream"
        if _is_random(node):
            return f"its query is random ({node.name})"
        if _is_written(node):
            return f"its query is made of {node.name}, which is written in place"
        needed[node] = None
        frontier.extend(node.all_input_nodes)
        if len(needed) > _MOST_NODES:
            return "its query is made of more than the residual stream"
    if not any(stream in node.all_input_nodes for node in needed):
        return "its query is not made of the residual stream"
    return tuple(sorted(needed, key=place.__getitem__))


def _is_random(node: fx.Node) -> bool:
    if op(node).endswith("dropout") and argument(node, 2, "training", True) is False:
        return False
    named = getattr(torch.ops.aten, raw_name(node), None)
    found = [*compat.overloads(node.target), *compat.overloads(named)]
    seeded = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in found)
    return seeded or raw_name(node) in _RANDOM


def _is_written(node: fx.Node) -> bool:
    """Whether a call writes in place, or another into what it returns; ops of other libraries tell by their schema."""
    called = (o for call in (node, *node.users) for o in compat.overloads(call.target))
    by_schema = any(map(compat.is_mutable, called))
    return modifies(node) or "out" in node.kwargs or bool(writes(memory(node))) or by_schema


def _modules(place: dict[fx.Node, int], begin: int, end: int) -> tuple[str, ...]:
    """Paths of the modules that run between two places, each once."""
    paths = (where(node, 0).path for node, at in place.items() if begin <= at < end)
    found = dict.fromkeys(path or "the model" for path in paths)
    return tuple(p for p in found if not any(q.startswith(p + ".") for q in found))
