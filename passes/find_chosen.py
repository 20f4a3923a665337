"""Find attention that a model was trained to make sparse: its mask is made of the indices of a top-k.

    before: ids = topk(index_scores + mask, k).indices
            unseen = ones(B, S, T).scatter(-1, ids, False).unsqueeze(1)
            out = attention(q, keys, values, mask.masked_fill(unseen, lowest))
    after:  the graph unchanged; a ``ChosenSite`` in the place of the attention: q, keys, values, ids, mask

The index scores are DeepSeek-V3.2's (see ``hsa_compile.ops.index_scores``), or any; the top-k decides. Its indices are
different from one another, so attention to what they gather is attention under the mask. What cannot be gathered is
left with a reason; attention under any other mask passes through.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from hsa_compile.ops.page_mask import MASKED_BELOW
from hsa_compile.site import Attention, Choice, ChosenSite, MaskTerm, Reject

from .find_scores import find_scores
from .graph_tools import CASTS, argument, fill, modifies, number, op, same, tensor, writes
from .operands import with_heads
from .token_wise import TogetherError, is_held, region_of

INDEX_DIMS = ((0, 2, 3), (0, 1, 2, 3), (0, 3))
"""Of the mask ``[B, 1, S, T]``, those that an index may have: rows, perhaps a head for all, perhaps query tokens, k."""

EVERY = (0, 1, 2, 3)
_NOT = frozenset({"invert", "logical_not", "bitwise_not", "__invert__"})
_AND = frozenset({"and_", "logical_and", "bitwise_and", "__and__"})
_OR = frozenset({"or_", "logical_or", "bitwise_or", "__or__"})


def find_chosen(
    found: Iterable[Attention | Reject],
) -> list[Attention | ChosenSite | Reject]:
    """Attention to tokens that the model chose becomes a ``ChosenSite`` or a ``Reject``; all else passes through."""
    return [
        item
        if isinstance(item, Reject) or (choice := _choice(item)) is None
        else _site(item, choice)
        for item in found
    ]


def _site(attention: Attention, choice: Choice) -> ChosenSite | Reject:
    chosen = f"the model's own top-{choice.most} of its indexer"

    def left(reason: str) -> Reject:
        return Reject(attention.where, f"{chosen}: {reason}", attention.anchor.name)

    keys, query, index = (tensor(node) for node in (attention.k, attention.q, choice.index))
    scored = tensor(argument(choice.topk, 0, "input"))
    assert keys is not None and query is not None and index is not None and scored is not None
    if not same(scored.shape[-1], keys.shape[2]):
        return left(f"chosen of {scored.shape[-1]} tokens, where {keys.shape[2]} are cached")
    wanted = {0: query.shape[0], 1: 1, 2: query.shape[2], 3: choice.count}
    if not all(same(size, wanted[dim]) for size, dim in zip(index.shape, choice.dims, strict=True)):
        return left(f"the index {tuple(index.shape)} is not one a row and query token")
    if any(term.kind == "causal" for term in choice.masks):
        return left("is_causal besides is not recognised")
    try:
        roots = ((attention.k, attention.scores), (attention.v, attention.out))
        region = region_of(roots, attention.out)
    except TogetherError as reason:
        return left(str(reason))
    as_cached = is_held(attention.k) and is_held(attention.v)
    return ChosenSite(attention, choice, region, as_cached)


def _choice(attention: Attention) -> Choice | None:
    """The choice in the masks of an attention, or None where there is none, or more than one."""
    found = [(at, part) for at, term in enumerate(attention.masks) if (part := _split(term))]
    if len(found) != 1:
        return None
    at, (seen, rest) = found[0]
    index, topk, casts = _top(seen.index)
    if topk is None:
        return None
    others = attention.masks[:at] + (() if rest is None else (rest,)) + attention.masks[at + 1 :]
    if seen.dims not in INDEX_DIMS or (len(seen.dims) == 2 and attention.queries > 1):
        return None
    scores = find_scores(argument(topk, 0, "input"))
    return Choice(index, topk, seen.dims, others, (*casts, *seen.nodes), scores)


class _Seen:
    """A boolean mask ``[., ., S, T]`` that is true where an index chose (``where``), or where it did not."""

    def __init__(self, index: fx.Node, dims: tuple[int, ...], where: bool, nodes: list[fx.Node]):
        self.index, self.dims, self.where, self.nodes = index, dims, where, nodes

    def also(self, node: fx.Node) -> _Seen:
        return _Seen(self.index, self.dims, self.where, [*self.nodes, node])


def _split(term: MaskTerm) -> tuple[_Seen, MaskTerm | None] | None:
    """The choice that a mask ``[B, 1, S, T]`` holds, and what it hides besides; None where it holds none."""
    node, passed = term.node, list[fx.Node]()
    dims: tuple[int, ...] = EVERY
    while node is not None and not modifies(node) and not writes(node):
        source = argument(node, 0, "input")
        if op(node) in _NOT and term.kind in ("keep", "drop"):
            term = replace(term, kind="drop" if term.kind == "keep" else "keep")
        elif dims == EVERY and _left_out(node) == 1:
            dims = (0, 2, 3)
        else:
            break
        passed.append(node)
        node = source if isinstance(source, fx.Node) else None
    if node is None:
        return None
    term = replace(term, node=node)
    kept = term.kind in ("keep", "drop")
    found = _split_boolean(node, term, dims) if kept else _split_added(node, term, dims)
    if found is None:
        return None
    seen, rest = found
    if rest is not None and dims != EVERY:
        assert rest.node is not None
        rest = replace(rest, node=with_heads(rest.node))
    return _Seen(seen.index, seen.dims, seen.where, [*passed, *seen.nodes]), rest


def _split_boolean(
    node: fx.Node, term: MaskTerm, dims: tuple[int, ...]
) -> tuple[_Seen, MaskTerm | None] | None:
    # True is what is chosen, or what is dropped because it is not.
    wanted = term.kind == "keep"
    whole = _seen(node, dims)
    if whole is not None:
        return (whole, None) if whole.where == wanted else None
    if op(node) not in (_AND if wanted else _OR):
        return None
    sides = argument(node, 0, "input"), argument(node, 1, "other")
    for one, other in (sides, sides[::-1]):
        seen = _seen(one, dims)
        if seen is not None and seen.where == wanted and isinstance(other, fx.Node):
            return seen.also(node), replace(term, node=other)
    return None


def _split_added(
    node: fx.Node, term: MaskTerm, dims: tuple[int, ...]
) -> tuple[_Seen, MaskTerm | None] | None:
    if op(node) == "masked_fill":
        base, condition, fill, unseen = (
            *(argument(node, at, name) for at, name in enumerate(("input", "mask", "value"))),
            True,
        )
    elif op(node) == "where" and len(node.args) == 3:
        condition, base, fill = node.args
        unseen = number(base) is not None
        base, fill = (fill, base) if unseen else (base, fill)
    elif op(node) in ("scatter", "scatter_"):
        whole = _scattered(node, dims)
        return None if whole is None else (whole, None)
    elif op(node) == "add":
        return _split_sum(node, term, dims)
    else:
        return None
    seen, hidden = _seen(condition, dims), number(fill)
    if seen is None or seen.where == unseen or hidden is None:
        return None
    if term.factor * hidden > -MASKED_BELOW:
        return None
    if number(base) is not None:
        return (seen.also(node), None) if number(base) == 0 else None
    held, of = tensor(base), tensor(node)
    if not isinstance(base, fx.Node) or held is None or of is None or held.dtype != of.dtype:
        return None
    return seen.also(node), replace(term, node=base)


def _split_sum(
    node: fx.Node, term: MaskTerm, dims: tuple[int, ...]
) -> tuple[_Seen, MaskTerm | None] | None:
    if argument(node, 2, "alpha", 1) != 1:
        return None
    sides = argument(node, 0, "input"), argument(node, 1, "other")
    for one, other in (sides, sides[::-1]):
        found = _split_added(one, term, dims) if isinstance(one, fx.Node) else None
        if found is not None and found[1] is None and isinstance(other, fx.Node):
            return found[0].also(node), replace(term, node=other)
    return None


def _left_out(node: object) -> int | None:
    """The dimension of size 1 that a view adds, where it does nothing else."""
    held = tensor(node)
    if not isinstance(node, fx.Node) or held is None:
        return None
    if op(node) == "unsqueeze":
        dim = argument(node, 1, "dim")
        return dim % held.ndim if isinstance(dim, int) else None
    if op(node) == "getitem" and tensor(node.args[0]) is not None:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        plain = all(item is None or item == slice(None) for item in index if item is not Ellipsis)
        if plain and index.count(None) == 1 and Ellipsis not in index[: index.index(None)]:
            return index.index(None)
    return None


def _seen(node: object, dims: tuple[int, ...]) -> _Seen | None:
    """The choice that a boolean node is, whose dimensions are ``dims`` of the mask."""
    where, passed = True, list[fx.Node]()
    while isinstance(node, fx.Node):
        name, source = op(node), argument(node, 0, "input")
        read, held = tensor(source), tensor(node)
        if held is None or held.ndim != len(dims):
            return None
        if name in ("scatter", "scatter_"):
            found = _scattered(node, dims)
            if found is None or held.dtype != torch.bool:
                return None
            return _Seen(found.index, found.dims, found.where == where, [*passed, *found.nodes])
        if writes(node) or modifies(node) or read is None:
            return None
        added = _left_out(node)
        if name in _NOT:
            where = not where
        elif added is not None:
            dims = dims[:added] + dims[added + 1 :]
        elif name in ("expand", "expand_as") and read.ndim == held.ndim:
            sizes = zip(dims, read.shape, held.shape, strict=True)
            if any(at != 1 and not same(a, b) for at, a, b in sizes):
                return None
        elif name not in CASTS | {"bool", "contiguous", "clone"}:
            return None
        passed.append(node)
        node = source
    return None


def _scattered(node: fx.Node, dims: tuple[int, ...]) -> _Seen | None:
    """``scatter`` of one constant into another along the last dimension, which tells the chosen from the others."""
    held, into = tensor(node), argument(node, 0, "input")
    dim, index, put = (argument(node, i, n) for i, n in ((1, "dim"), (2, "index"), (3, "value")))
    put = node.kwargs.get("src", put) if put is None else put
    if held is None or not isinstance(into, fx.Node) or not isinstance(index, fx.Node):
        return None
    if dim not in (-1, held.ndim - 1) or held.ndim != len(dims) or node.kwargs.get("reduce"):
        return None
    others = [write for write in writes(into) if write is not node]
    before, after = _constant(into), put if isinstance(put, bool) else number(put)
    if others or before is None or after is None:
        return None
    nodes = [node, into]
    if dims == EVERY and _left_out(index) == 1:
        nodes.append(index)
        index, dims = index.args[0], (0, 2, 3)
        assert isinstance(index, fx.Node)
    if held.dtype == torch.bool:
        if bool(before) == bool(after):
            return None
        return _Seen(index, dims, bool(after), nodes)
    hides = before <= -MASKED_BELOW and after == 0
    return _Seen(index, dims, True, nodes) if hides else None


def _constant(node: fx.Node) -> float | None:
    """What a tensor that is made of one number holds."""
    filled = fill(node)
    return float(filled) if isinstance(filled, bool) else number(filled)


def _top(index: fx.Node) -> tuple[fx.Node, fx.Node | None, list[fx.Node]]:
    """The index without casts, the top-k along the last dimension that it is of, and the casts."""
    passed: list[fx.Node] = []
    while op(index) in CASTS | {"long", "int"} and isinstance(index.args[0], fx.Node):
        if writes(index):
            return index, None, passed
        passed.append(index)
        index = index.args[0]
    topk = index.args[0] if op(index) == "getitem" and index.args[1] == 1 else None
    if op(topk) != "topk" or not isinstance(topk, fx.Node) or writes(index):
        return index, None, passed
    scored = tensor(argument(topk, 0, "input"))
    last = scored is not None and argument(topk, 2, "dim", -1) in (-1, scored.ndim - 1)
    largest = argument(topk, 3, "largest", True) is True
    return index, topk if last and largest else None, passed
