"""Operands of attention as ``[B, H, S, D]`` tensors: what stands between them and the KV cache is looked through.

    before: q @ (repeat_kv(cache.transpose(1, 2)) * c).transpose(2, 3)
    after:  cache.transpose(1, 2), c

Looked through are copies, constants, the repetition of KV heads (``expand`` over a new dimension and ``reshape``,
``expand`` of a single head, or ``repeat_interleave``) and any order of dimensions between them. Where that order
leaves no node with the wanted one, a ``permute`` is added to the graph; ``drop_unused_views`` takes it away again where
the site is not rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .graph_tools import argument, modifies, number, op, same, tensor, writes

MADE = "hsa_made"
"""Marks, in a node's meta, a view that this module added."""

Dims = tuple[int, ...]
STRAIGHT: Dims = (0, 1, 2, 3)
_COPIES = frozenset({"contiguous", "clone"})


@dataclass(frozen=True)
class Operand:
    """A tensor ``[B, H, S, D]`` and the constant that it is to be multiplied by."""

    node: fx.Node
    factor: float


def operand(node: fx.Node, dims: Dims = STRAIGHT, constants: bool = True) -> Operand:
    """What ``node.permute(dims)`` reads, ``[B, H, S, D]``, without the repetition of its heads.

    constants: whether to look through multiplication by a number.
    """
    walk = _Walk(node, dims, node, dims, constants)
    while walk.step():
        pass
    if walk.kept_dims == STRAIGHT:
        return Operand(walk.kept, walk.factor)
    return Operand(arranged(walk.node, walk.dims), walk.factor)


def drop_unused_views(graph: fx.Graph) -> None:
    """Erase the views that were added for sites that are left as they were."""
    for node in reversed(list(graph.nodes)):
        if node.meta.get(MADE) and not node.users:
            graph.erase_node(node)


@dataclass
class _Walk:
    """A walk towards the cache. The operand is ``node.permute(dims)``, and also ``kept.permute(kept_dims)``.

    ``kept`` is the last node behind which something other than an order of dimensions was looked through, or the
    last one that has the wanted order.
    """

    node: fx.Node
    dims: Dims
    kept: fx.Node
    kept_dims: Dims
    constants: bool
    factor: float = 1.0

    def step(self) -> bool:
        """Look through ``node``; false where it is to be taken as it is."""
        name, source = op(self.node), self.node.args[0] if self.node.args else None
        if not isinstance(source, fx.Node):
            return False
        order = _order(self.node, name)
        if order is not None:
            self.node, self.dims = source, tuple(order[d] for d in self.dims)
            if self.dims == STRAIGHT:
                self._keep()
            return True
        # Whatever is a tensor of its own must hold what it was made with.
        if modifies(self.node) or writes(self.node):
            return False
        if name in _COPIES:
            self.node = source
        elif name in ("mul", "div"):
            scaled = constant(self.node)
            if scaled is None or not self.constants:
                return False
            self.node, self.factor = scaled[0], self.factor * scaled[1]
        else:
            inner = _unrepeated(self.node, self.dims[1])
            if inner is None:
                return False
            self.node = inner
        self._keep()
        return True

    def _keep(self) -> None:
        self.kept, self.kept_dims = self.node, self.dims


def constant(node: fx.Node) -> tuple[fx.Node, float] | None:
    """For ``x * c``, ``c * x`` and ``x / c`` with a nonzero number: x and what it is multiplied by."""
    left, right = argument(node, 0, "input"), argument(node, 1, "other")
    if op(node) == "mul" and number(left) is not None:
        left, right = right, left
    by = number(right)
    if not isinstance(left, fx.Node) or by is None or by == 0:
        return None
    return left, by if op(node) == "mul" else 1 / by


def _order(node: fx.Node, name: str) -> Dims | None:
    """The order of dimensions that a view of four gives its source's, or None where it is something else."""
    held = tensor(node)
    if held is None or held.ndim != 4:
        return None
    if name == "transpose":
        a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
        if not isinstance(a, int) or not isinstance(b, int):
            return None
        order = list(STRAIGHT)
        order[a], order[b] = order[b], order[a]
        return tuple(order)
    if name == "permute":
        first = argument(node, 1, "dims")
        dims = first if isinstance(first, (tuple, list)) else node.args[1:]
        return tuple(d % 4 for d in dims)  # type: ignore[operator, union-attr, misc]
    if name == "getattr" and node.args[1] == "mT":
        return (0, 1, 3, 2)
    return None


def _unrepeated(node: fx.Node, heads: int) -> fx.Node | None:
    """The tensor whose dimension ``heads`` was repeated, each head next to its copies, to give ``node``."""
    name, repeated = op(node), tensor(node)
    if repeated is None or repeated.ndim != 4:
        return None
    source = argument(node, 0, "input")
    if not isinstance(source, fx.Node):
        return None
    if name == "repeat_interleave":
        dim, times = argument(node, 2, "dim"), argument(node, 1, "repeats")
        return source if isinstance(times, int) and dim in (heads, heads - 4) else None
    if name in ("expand", "expand_as"):
        return source if _shape_times(source, heads, repeated, single=True) else None
    if name not in ("reshape", "view", "flatten"):
        return None
    expanded = tensor(source)
    opened = source.args[0] if op(source) in ("expand", "expand_as") else None
    if expanded is None or expanded.ndim != 5 or not isinstance(opened, fx.Node):
        return None
    inner = opened.args[0] if opened.args else None
    single, before = tensor(opened), tensor(inner)
    if (
        not isinstance(inner, fx.Node)
        or single is None
        or before is None
        or before.ndim != 4
        or not _inserts_dimension(opened)
    ):
        return None
    wanted = [*before.shape[: heads + 1], 1, *before.shape[heads + 1 :]]
    grown = [*before.shape[: heads + 1], expanded.shape[heads + 1], *before.shape[heads + 1 :]]
    fits = (
        single.ndim == 5
        and all(map(same, single.shape, wanted))
        and all(map(same, expanded.shape, grown))
        and _shape_times(inner, heads, repeated)
    )
    return inner if fits else None


def _inserts_dimension(node: fx.Node) -> bool:
    if op(node) == "unsqueeze":
        return True
    index = node.args[1] if op(node) == "getitem" else ()
    plain = (None, slice(None), Ellipsis)
    return isinstance(index, tuple) and None in index and all(item in plain for item in index)


def _shape_times(source: fx.Node, heads: int, repeated: torch.Tensor, single: bool = False) -> bool:
    """Whether the shapes differ in dimension ``heads`` alone, and there by a whole factor (from 1 if ``single``)."""
    before = tensor(source)
    if before is None or before.ndim != 4:
        return False
    rest = all(same(before.shape[d], repeated.shape[d]) for d in range(4) if d != heads)
    small, large = before.shape[heads], repeated.shape[heads]
    if not rest or not isinstance(small, int) or not isinstance(large, int):
        return False
    return small == 1 if single else large % small == 0


def arranged(node: fx.Node, dims: Dims) -> fx.Node:
    """``node`` with its dimensions in this order: itself, or a view that is added to the graph."""
    return node if dims == STRAIGHT else _viewed(node, "permute", *dims)


def apart(node: fx.Node, heads: int) -> fx.Node:
    """A view ``[B, H, ...]`` of ``node [B * H, ...]``, added to the graph."""
    return _viewed(node, "unflatten", 0, (-1, heads))


def with_heads(node: fx.Node) -> fx.Node:
    """A view ``[B, 1, ...]`` of ``node [B, ...]``, added to the graph."""
    return _viewed(node, "unsqueeze", 1)


def _viewed(node: fx.Node, method: str, *arguments: object) -> fx.Node:
    held = tensor(node)
    after = node
    if node.op == "placeholder":
        while after.next.op == "placeholder":
            after = after.next
    with node.graph.inserting_after(after):
        view = node.graph.call_method(method, (node, *arguments))  # type: ignore[arg-type]
    shown = None if held is None else getattr(held, method)(*arguments)
    view.meta = {**node.meta, "example_value": shown, MADE: True}
    return view
