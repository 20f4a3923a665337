"""Nodes added to a model's graph while sites are looked for, each once for all sites that need the same.

    before: layer 0 and layer 1 each read padding[b, kv] in a function of their own
    after:  one node, before the first of them

Equal calls on equal operands are one node, unless what they read is written in between. All are marked as made, so that
``drop_unused_views`` takes away what nobody came to use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from hsa_compile import compat

from .emit import Emitter
from .graph_tools import Mismatch, may_write, modifies, tensor
from .merge import frozen
from .operands import MADE


class Splicer:
    """Adds nodes to ``graph`` before the node of a site, within :meth:`before`."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.emit = Emitter(graph, compat.trace_mode(graph))
        self.made: dict[object, fx.Node] = {}
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.written = [
            (self.order[node], compat.written_storage(held))
            for node in graph.nodes
            for held in map(tensor, _targets(node))
            if held is not None
        ]

    @contextlib.contextmanager
    def before(self, site: fx.Node) -> Iterator[None]:
        """Within it, nodes are added before ``site``, a node of the model."""
        self.site = site
        with self.graph.inserting_before(site):
            yield

    def call(self, target: Callable[..., object], *args: object, **kwargs: object) -> fx.Node:
        return self._once(self.emit.call, target, args, kwargs)

    def method(self, name: str, *args: object, **kwargs: object) -> fx.Node:
        return self._once(self.emit.method, name, args, kwargs)

    def size(self, node: fx.Node, dim: int) -> int | fx.Node:
        """The size of a dimension: a number, or a node where it is symbolic."""
        held = tensor(node)
        assert held is not None
        known = held.shape[dim]
        return known if isinstance(known, int) else self.method("size", node, dim)

    @contextlib.contextmanager
    def standing_for(
        self, shape: tuple[Any, ...], dtype: torch.dtype, *read: fx.Node
    ) -> Iterator[fx.Node]:
        """A product of ``read`` to be walked over, never run; at the end it goes, and all that reads it."""
        node = self.graph.call_function(torch.matmul, read)
        device = tensor(read[0]).device  # type: ignore[union-attr]
        held = compat.fake_tensor(self.emit.fake_mode, shape, None, dtype, device)
        node.meta = {"example_value": held, MADE: True}
        try:
            yield node
        finally:
            _erase_with_readers(node)

    def _once(self, emit: Callable[..., fx.Node], target: Any, args: Any, kwargs: Any) -> fx.Node:
        read: list[fx.Node] = []
        map_arg((args, kwargs), read.append)
        versions = tuple(map(self._version, read))
        key = (target, frozen(args), frozen(kwargs), versions)
        if key not in self.made:
            try:
                node = emit(target, *args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                name = target if isinstance(target, str) else getattr(target, "__name__", target)
                first = str(error).strip().partition("\n")[0]
                raise Mismatch(
                    f"`{name}` fails on all positions at once: {first}", self.site
                ) from error
            node.meta[MADE] = True
            self.made[key] = node
        return self.made[key]

    def _version(self, node: fx.Node) -> int:
        """How often the memory of a node of the model was written before the site."""
        held = tensor(node)
        if held is None or node.meta.get(MADE):
            return 0
        reached, now = (compat.written_storage(held), None), self.order[self.site]
        return sum(place < now and written in reached for place, written in self.written)


def _targets(node: fx.Node) -> list[object]:
    """What a call of the model writes, or may write."""
    if modifies(node):
        return [node.args[0]]
    return list(node.all_input_nodes) if may_write(node) else []


def _erase_with_readers(node: fx.Node) -> None:
    for reader in list(node.users):
        if reader in node.users:  # one that reads it twice may have gone
            _erase_with_readers(reader)
    node.graph.erase_node(node)
