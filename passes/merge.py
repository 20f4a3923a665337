"""Compute once what several layers compute alike.

    before: a = popcount(bits); ...; b = popcount(bits)     (in ATen, as many nodes)
    after:  a = popcount(bits); ...; a

The ops of the rewrite are decomposed to ATen layer by layer, and much of what they do depends on the mask and the
position alone. Inductor merges equal nodes where it partitions a training graph, and not in inference. This runs on its
graph, in which everything is functional but for writes into inputs at the end.
"""

from __future__ import annotations

import torch
from torch import fx

from hsa_compile import compat


def merge_equal(graph: fx.Graph) -> None:
    """Replace every node that computes what an earlier one does; what the graph returns keeps its own memory."""
    output = next(iter(reversed(graph.nodes)))
    returned = {_memory(node) for node in output.all_input_nodes}
    seen: dict[object, fx.Node] = {}
    writes = 0
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.op != "call_function":
            continue
        if compat.is_mutable(node.target):
            writes += 1
        elif torch.Tag.nondeterministic_seeded not in node.target.tags:
            memory = _memory(node)
            if memory is None or memory in returned:
                continue
            key = (node.target, writes, frozen(node.args), frozen(node.kwargs))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _memory(node: fx.Node) -> int | None:
    """Stands for the storage of the tensor that a node holds; None where it does not hold one tensor."""
    held = node.meta.get("val")
    return compat.storage_key(held) if isinstance(held, torch.Tensor) else None


def frozen(argument: object) -> object:
    """A key for arguments: equal where they are the same nodes and the same constants (1 is not 1.0, nor 0.0 -0.0)."""
    if isinstance(argument, (tuple, list)):
        return tuple(map(frozen, argument))
    if isinstance(argument, dict):
        return tuple((name, frozen(value)) for name, value in argument.items())
    return argument if isinstance(argument, fx.Node) else (type(argument), repr(argument))
