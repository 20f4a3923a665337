"""The two products of attention, as ``matmul`` or as ``einsum`` in any order of dimensions.

before: einsum("bqhd,bkhd->bhqk", q, k)        matmul(q, k)
after:  q and k as [B, H, L, D]: the order in which each operand's dimensions are to be taken
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .graph_tools import Mismatch, argument, op
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
    if op(node) == "matmul":
        q, k = _both(node, argument(node, 0, "input"), argument(node, 1, "other"))
        return Product(q, STRAIGHT, k, (0, 1, 3, 2))
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
        first, v = _both(node, argument(node, 0, "input"), argument(node, 1, "other"))
        if first is not weights:
            raise Mismatch("attention weights are the right operand of a product", node)
        return Product(first, STRAIGHT, v, STRAIGHT)
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
