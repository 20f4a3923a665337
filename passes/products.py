"""The two products of attention, as ``matmul`` or as ``einsum`` in any order of dimensions.

before: einsum("bqhd,bkhd->bhqk", q, k)        matmul(q, k)        bmm(q.view(B * H, L, D), k.view(B * H, S, D).mT)
after:  q and k as [B, H, L, D]: the order in which each operand's dimensions are to be taken
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .graph_tools import Mismatch, argument, modifies, op, same, tensor, writes
from .operands import STRAIGHT, Dims


@dataclass(frozen=True)
class Product:
    """``first.permute(first_dims)`` and ``second.permute(second_dims)`` are ``[B, H, ., .]``, both with D (the scores)
    or S (the result) contracted.

    out_dims: what the product ``[B, H, L, .]`` is to be permuted by to give the node's own value.
    """

    first: fx.Node
    first_dims: Dims
    second: fx.Node
    second_dims: Dims
    out_dims: Dims = STRAIGHT


def query_key(node: fx.Node) -> Product:
    """The product that gives the scores ``[B, H, L, S]``: q as ``[B, H, L, D]`` and k as ``[B, H, S, D]``."""
    if op(node) in ("matmul", "baddbmm"):
        (q, q_dims), (k, k_dims) = map(separated, _operands(node))
        return Product(q, q_dims, k, tuple(k_dims[d] for d in (0, 1, 3, 2)))
    terms, out, operands = _einsum(node)
    for a, b in ((0, 1), (1, 0)):
        inner = set(terms[a]) & set(terms[b]) - set(out)
        batched = set(out[:2]) <= set(terms[a]) & set(terms[b])
        if len(inner) == 1 and batched and out[2] in terms[a] and out[3] in terms[b]:
            (d,) = inner
            q = tuple(terms[a].index(letter) for letter in (*out[:3], d))
            k = tuple(terms[b].index(letter) for letter in (*out[:2], out[3], d))
            return Product(operands[a], q, operands[b], k)
    raise Mismatch("the einsum of the scores is not a product of query and keys", node)


def weights_values(node: fx.Node, weights: fx.Node) -> Product:
    """The product of ``weights [B, H, L, S]`` with the values, v as ``[B, H, S, Dv]``."""
    if op(node) == "matmul":
        first, second = _operands(node)
        if first is not weights:
            raise Mismatch("attention weights are the right operand of a product", node)
        return Product(weights, STRAIGHT, *separated(second))
    terms, out, operands = _einsum(node)
    a = operands.index(weights)
    w, v_term = terms[a], terms[1 - a]
    free = set(v_term) - set(w)
    if len(free) == 1 and set(v_term) == {*w[:2], w[3], *free} and set(out) == {*w[:3], *free}:
        (d,) = free
        dims = tuple(v_term.index(letter) for letter in (*w[:2], w[3], d))
        back = tuple((*w[:3], d).index(letter) for letter in out)
        return Product(weights, STRAIGHT, operands[1 - a], dims, back)
    raise Mismatch("the einsum of the weights is not a product with the values", node)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    if op(node) == "baddbmm":
        return _both(node, argument(node, 1, "batch1"), argument(node, 2, "batch2"))
    second = argument(node, 1, "other", node.kwargs.get("mat2"))
    return _both(node, argument(node, 0, "input"), second)


def separated(node: fx.Node) -> tuple[fx.Node, Dims]:
    """``view([B, H, L, D], [B * H, L, D])``, perhaps transposed: what is viewed, and the order of its dimensions.

    Anything else is returned as it is.
    """
    held = tensor(node)
    found, dims = node, STRAIGHT
    while held is not None and held.ndim == 3 and not modifies(found) and not writes(found):
        source = found.args[0] if found.args else None
        if not isinstance(source, fx.Node):
            break
        if merges_heads(tensor(source), tensor(found)):
            return source, dims
        swaps = op(found) == "getattr" and found.args[1] == "mT"
        if op(found) == "transpose":
            swaps = {argument(found, 1, "dim0"), argument(found, 2, "dim1")} in _SWAPS
        if swaps:
            dims = tuple(dims[d] for d in (0, 1, 3, 2))
        elif op(found) != "contiguous":
            break
        found = source
    return node, STRAIGHT


_SWAPS = ({1, 2}, {-1, -2}, {1, -1}, {2, -2})


def merges_heads(apart: torch.Tensor | None, merged: torch.Tensor | None) -> bool:
    """Whether shapes are ``[B, H, X, Y]`` and ``[B * H, X, Y]``."""
    return (
        apart is not None
        and merged is not None
        and (apart.ndim, merged.ndim) == (4, 3)
        and same(apart.shape[0] * apart.shape[1], merged.shape[0])
        and all(map(same, apart.shape[2:], merged.shape[1:]))
    )


def _both(node: fx.Node, first: object, second: object) -> tuple[fx.Node, fx.Node]:
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        raise Mismatch(f"`{op(node)}` of something else than two tensors", node)
    return first, second


def _einsum(node: fx.Node) -> tuple[list[str], str, tuple[fx.Node, fx.Node]]:
    """Terms, output and operands of an einsum of two tensors with four dimensions each."""
    if op(node) != "einsum":
        raise Mismatch(f"attention scores are made by `{op(node)}`, which is not recognised", node)
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    left, arrow, out = str(equation).replace(" ", "").partition("->")
    terms = left.split(",")
    plain = all(len(set(term)) == len(term) == 4 and term.isalpha() for term in (*terms, out))
    if not arrow or not plain or len(terms) != 2 or len(operands) != 2:
        raise Mismatch(f"einsum {equation!r} is not a product of two 4-dimensional tensors", node)
    return terms, out, _both(node, *operands)
