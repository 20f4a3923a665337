"""Where tokens are written: one position for all that need it, counted from the start, and checked before the write.

before: cache[:, :, pos] = k                       (pos may be negative, a number, counted in place, ...)
after:  checked = checked_position(pos, capacity); cache[:, :, checked] = k
        position = where(checked < 0, checked + capacity, checked)

Of several positions it is the first, or ``APART`` where the others are not those that follow: the graph does not tell.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from hsa_compile import compat
from hsa_compile.ops.summarize import APART
from hsa_compile.site import CacheUpdate, LayerPlan

from .emit import Emitter
from .graph_tools import memory, same, tensor, value, writes

_MOST_NODES = 100
"""Of a graph that computes a position; more are not for computing again beside the step."""


@dataclass(frozen=True)
class PositionOfWrite:
    """The position of a static cache's write as a function of graph inputs; what it must not pass: int or SymInt."""

    compute: Callable[..., torch.Tensor]
    inputs: tuple[fx.Node, ...]
    capacity: object
    from_end: bool
    tokens: int


def checked_in_graph(device: torch.device) -> bool:
    """Whether a look at a position within a step waits for nothing."""
    return device.type == "cpu"


class Positions:
    """Makes positions, each once for all layers that share it."""

    def __init__(self, emit: Emitter, plans: Iterable[LayerPlan]) -> None:
        self.emit = emit
        self.made: dict[object, fx.Node] = {}
        # Layers may share a position and differ in capacity: nothing is written where one would overrun.
        self.capacity: dict[fx.Node, int] = {}
        for plan in plans:
            for cache in (plan.site.keys, plan.site.values):
                position, tokens = cache.position, _capacity(cache)
                if isinstance(position, fx.Node) and isinstance(tokens, int):
                    self.capacity[position] = min(tokens, self.capacity.get(position, tokens))

    def guard(self, cache: CacheUpdate) -> None:
        """On a CPU, let the position of the model's write pass a check first."""
        position = cache.position
        held = tensor(position)
        if held is None or not isinstance(position, fx.Node) or not checked_in_graph(held.device):
            return
        written, dim = cache.along
        capacity: object = self.capacity.get(position)
        # A symbolic length is read of the tensor, where that is there in time.
        length = None if capacity is not None else compat.expression(_capacity(cache))
        late = bool(writes(memory(position))) or (capacity is None and written.op != "placeholder")
        key = ("checked", position, cache.counts_from_end, length, cache.write if late else None)
        if key not in self.made:
            first = next(node for node in self.emit.graph.nodes if node.op != "placeholder")
            defined = first if position.op == "placeholder" else position.next
            with self.emit.graph.inserting_before(cache.write if late else defined):
                if capacity is None:
                    capacity = self.emit.method("size", written, dim)
                self.made[key] = self.emit.call(
                    torch.ops.hsa.checked_position.default,
                    position,
                    capacity,
                    cache.counts_from_end,
                )
        cache.write.replace_input_with(position, self.made[key])

    def of_write(self, cache: CacheUpdate) -> PositionOfWrite | None:
        """For a check before the step, where there is none in it and the position follows from inputs alone."""
        position = cache.position
        held = tensor(position)
        if held is None or not isinstance(position, fx.Node) or checked_in_graph(held.device):
            return None
        computed = _from_inputs(position)
        if computed is None:
            return None
        capacity = self.capacity.get(position, _capacity(cache))
        return PositionOfWrite(*computed, capacity, cache.counts_from_end, cache.tokens)

    def of(self, cache: CacheUpdate, keys: fx.Node, read: torch.Tensor) -> fx.Node:
        """Where the (first) new token is, ``[1]`` int64; what the write saw, if the model counts in place.

        In a cache that is only read it would be behind the last one.

        A write behind the part of the cache that attention reads counts as one to the last tokens of that part.
        """
        position: object = cache.position
        counted = isinstance(position, fx.Node) and bool(writes(memory(position)))
        from_end = cache.counts_from_end and not isinstance(position, int)
        bounded = may_pass(cache, read)
        tokens = cache.tokens
        key = (
            *("position", keys if position is None else position, read.device),
            *(counted and cache.write, from_end and str(_capacity(cache)), bounded and keys),
            *((tokens,) if tokens != 1 else ()),
        )
        if key in self.made:
            return self.made[key]
        if position is None:
            position = self.emit.method("size", keys, 2)
            if tokens:
                position = self.emit.call(operator.sub, position, tokens)
        held = tensor(position)
        if held is None:
            made = self.emit.call(torch.full, (1,), position, dtype=torch.int64, device=read.device)
        elif counted:
            with self.emit.graph.inserting_before(cache.write):
                flat = self.emit.call(torch.reshape, position, (tokens,))
                made = self.emit.call(torch.clone, flat)
        else:
            made = self.emit.call(torch.reshape, position, (tokens,))
        if held is not None and held.dtype != torch.int64:
            made = self.emit.method("to", made, torch.int64)
        if from_end:
            capacity = _capacity(cache)
            if not isinstance(capacity, int):
                capacity = self.emit.method("size", *cache.along)
            counted_on = self.emit.call(operator.add, made, capacity)
            negative = self.emit.call(operator.lt, made, 0)
            made = self.emit.call(torch.where, negative, counted_on, made)
        if held is not None and tokens > 1:
            made = self._first(made, tokens)
        if bounded:
            last = self.emit.call(operator.sub, self.emit.method("size", keys, 2), tokens)
            made = self.emit.method("clamp", made, None, last)
        self.made[key] = made
        return made

    def _first(self, positions: fx.Node, tokens: int) -> fx.Node:
        """The first of ``positions [tokens]`` if the others follow it one by one, ``[1]``."""
        call, held = self.emit.call, tensor(positions)
        assert held is not None
        first = call(operator.getitem, positions, slice(None, 1))
        following = call(operator.add, first, call(torch.arange, tokens, device=held.device))
        in_order = call(torch.all, call(operator.eq, positions, following))
        return call(torch.where, in_order, first, APART)


def _from_inputs(node: fx.Node) -> tuple[fx.GraphModule, tuple[fx.Node, ...]] | None:
    """What computes ``node`` from graph inputs, if that is little and reads nothing that was written in place."""
    needed: dict[fx.Node, None] = {}
    frontier = [node]
    while frontier:
        held = frontier.pop()
        if held in needed:
            continue
        needed[held] = None
        frontier.extend(held.all_input_nodes)
    known = ("placeholder", "call_function", "call_method")
    if len(needed) > _MOST_NODES or any(held.op not in known for held in needed):
        return None
    place = {held: i for i, held in enumerate(node.graph.nodes)}
    ordered = sorted(needed, key=place.__getitem__)
    if any(place[write] < place[node] for held in ordered for write in writes(memory(held))):
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for held in ordered:
        copies[held] = graph.node_copy(held, copies.__getitem__)
    graph.output(copies[node])
    inputs = tuple(held for held in ordered if held.op == "placeholder")
    return fx.GraphModule(torch.nn.Module(), graph), inputs


def _capacity(cache: CacheUpdate) -> object:
    """Tokens of the tensor that is written, an int or a SymInt."""
    written, dim = cache.along
    return written.meta["example_value"].shape[dim]


def may_pass(cache: CacheUpdate, read: torch.Tensor) -> bool:
    """Whether a token may be written behind the part of the cache that attention reads."""
    if cache.position is None or same(_capacity(cache), read.shape[2]):
        return False
    held = value(cache.position)
    return isinstance(held, torch.Tensor) or not compat.statically_known_true(held < read.shape[2])
