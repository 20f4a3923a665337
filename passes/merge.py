"""Compute once what several layers compute alike.

    before: a = popcount(bits); ...; b = popcount(bits)     (in ATen, as many nodes)
    after:  a = popcount(bits); ...; a

The ops of the rewrite are decomposed to ATen layer by layer, and much of what they do depends on the mask and the
position alone. Inductor merges equal nodes where it partitions a training graph, and not in inference. This runs on its
graph, in which everything is functional but for writes into inputs at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx


def merge_equal(graph: fx.Graph) -> None:
    """Replace every node that computes what an earlier one does; what the graph returns keeps its own memory."""
    output = next(iter(reversed(graph.nodes)))
    returned = _memory(output.all_input_nodes)
    seen: dict[object, fx.Node] = {}
    writes = 0
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.op != "call_function":
            continue
        if node.target._schema.is_mutable:
            writes += 1
        elif torch.Tag.nondeterministic_seeded not in node.target.tags:
            if not _memory([node]) or _memory([node]) & returned:
                continue
            key = (node.target, writes, _frozen(node.args), _frozen(node.kwargs))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _memory(nodes: Iterable[fx.Node]) -> set[int]:
    """Storages of the tensors that the nodes hold (of one tensor each: others are let be)."""
    held = (node.meta.get("val") for node in nodes)
    return {value.untyped_storage()._cdata for value in held if isinstance(value, torch.Tensor)}


def _frozen(argument: object) -> object:
    """A key for arguments: equal where they are the same nodes and the same constants (1 is not 1.0, nor 0.0 -0.0)."""
    if isinstance(argument, (tuple, list)):
        return tuple(map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple((name, _frozen(value)) for name, value in argument.items())
    return argument if isinstance(argument, fx.Node) else (type(argument), repr(argument))
