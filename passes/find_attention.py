"""Find softmax attention in a Dynamo graph, however it is spelled.

    before: anything
    after:  the graph unchanged; an ``Attention`` or a ``Reject`` for each site, in graph order

Two anchors: ``scaled_dot_product_attention``, and a softmax whose operand comes from a product of two activations and
whose result goes into one. From the anchor the operands are walked by hand: outwards over casts, scales and masks to
the query-key product, through ``repeat_kv``, and forwards over casts and inference dropout to the value product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from hsa_compile.site import Attention, MaskTerm, Reject, Where

from .graph_tools import CASTS, argument, number, op, same, tensor, where

_TRANSPARENT = CASTS | {"contiguous", "clone", "detach"}
_UNKNOWN = {
    "flex_attention": "flex_attention is not rewritten",
    "multi_head_attention_forward": "torch.nn.MultiheadAttention's fused forward keeps no KV cache",
}


MADE = "hsa_made"
"""Marks, in a node's meta, a view that this pass added."""


class Mismatch(Exception):
    """Raised while matching, with the reason and the node that did not fit."""

    def __init__(self, reason: str, node: fx.Node) -> None:
        super().__init__(reason)
        self.node = node


def find_attention(graph: fx.Graph) -> list[Attention | Reject]:
    """All attention sites of the graph, in order."""
    found: list[Attention | Reject] = []
    for node in graph.nodes:
        name = op(node)
        place = where(node, len(found))
        try:
            if name in _UNKNOWN:
                raise Mismatch(_UNKNOWN[name], node)
            if name == "scaled_dot_product_attention":
                found.append(_from_sdpa(node, place))
            elif name == "softmax" and _looks_like_attention(node):
                found.append(_from_softmax(node, place))
        except Mismatch as miss:
            found.append(Reject(place, str(miss), miss.node.name))
    return found


def drop_unused_views(graph: fx.Graph) -> None:
    """Erase the views that this pass added for sites that were not rewritten after all."""
    for node in reversed(list(graph.nodes)):
        if node.meta.get(MADE) and not node.users:
            graph.erase_node(node)


def _from_sdpa(node: fx.Node, place: Where) -> Attention:
    q, k, v = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    mask = argument(node, 3, "attn_mask")
    if argument(node, 4, "dropout_p", 0.0) != 0:
        raise Mismatch("dropout is active", node)
    scale = argument(node, 6, "scale")
    query = _four_dimensional(q, node)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else number(scale)
    if factor is None:
        raise Mismatch("the scale is a tensor, not a number known at compile time", node)
    terms: tuple[MaskTerm, ...] = ()
    if isinstance(mask, fx.Node):
        held = tensor(mask)
        if held is None:
            raise Mismatch("the mask is not a tensor", node)
        terms = (MaskTerm("keep" if held.dtype == torch.bool else "add", mask),)
    causal = argument(node, 5, "is_causal", False)
    if isinstance(causal, fx.Node):
        raise Mismatch("is_causal is not known at compile time", node)
    if causal:
        terms += (MaskTerm("causal"),)
    return _attention(place, node, node, node, q, k, v, factor, terms)


def _from_softmax(softmax: fx.Node, place: Where) -> Attention:
    scores = tensor(softmax.args[0])
    dim = argument(softmax, 1, "dim")
    if scores is None or scores.ndim != 4:
        raise Mismatch(
            "attention scores are not 4-dimensional [batch, heads, queries, keys]", softmax
        )
    if dim not in (-1, 3):
        raise Mismatch(f"softmax runs over dimension {dim}, not over the keys", softmax)
    walk = _Scores(softmax)
    walk.back(softmax.args[0], 1.0)
    product = walk.product
    assert product is not None
    value_product = _value_product(softmax)
    k, factor = _transposed(product.args[1], product)
    return _attention(
        place,
        value_product,
        softmax,
        product,
        product.args[0],
        k,
        value_product.args[1],
        walk.scale * factor,
        tuple(walk.masks),
    )


@dataclass
class _Scores:
    """The way back from a softmax to the query-key product: scale and mask terms met on it."""

    softmax: fx.Node
    scale: float = 1.0
    product: fx.Node | None = None

    def __post_init__(self) -> None:
        self.masks: list[MaskTerm] = []

    def back(self, node: object, factor: float) -> None:
        """Walk from ``node``, whose value reaches the softmax times ``factor``."""
        name = op(node)
        if not isinstance(node, fx.Node):
            raise Mismatch("attention scores are a constant", self.softmax)
        if name == "matmul":
            self.product, self.scale = node, factor
        elif name in _TRANSPARENT or (
            name == "dropout" and not argument(node, 2, "training", True)
        ):
            self.back(node.args[0], factor)
        elif name in ("mul", "div"):
            self._scaled(node, name, factor)
        elif name in ("add", "sub"):
            self._added(node, name, factor)
        elif name == "masked_fill":
            self._filled(node, node.args[0], node.args[1], node.args[2], "drop", factor)
        elif name == "where" and len(node.args) == 3:
            condition, kept, other = node.args
            if _reaches_product(kept):
                self._filled(node, kept, condition, other, "keep", factor)
            else:
                self._filled(node, other, condition, kept, "drop", factor)
        else:
            raise Mismatch(f"attention scores pass through `{name}`, which is not recognised", node)

    def _scaled(self, node: fx.Node, name: str, factor: float) -> None:
        left, right = node.args[:2]
        if name == "mul" and number(left) is not None:
            left, right = right, left
        by = number(right)
        if by is None or by == 0:
            raise Mismatch(
                "the scale is a tensor or zero, not a nonzero number known at compile time", node
            )
        self.back(left, factor * by if name == "mul" else factor / by)

    def _added(self, node: fx.Node, name: str, factor: float) -> None:
        left, right = node.args[:2]
        if argument(node, 2, "alpha", 1) != 1:
            raise Mismatch("a mask is added with alpha", node)
        if name == "add" and not _reaches_product(left):
            left, right = right, left
        if tensor(right) is None or _reaches_product(right):
            raise Mismatch("what is added to the scores is not a mask", node)
        assert isinstance(right, fx.Node)
        self.masks.append(MaskTerm("add", right, factor if name == "add" else -factor))
        self.back(left, factor)

    def _filled(
        self,
        node: fx.Node,
        scores: object,
        condition: object,
        fill: object,
        kind: str,
        factor: float,
    ) -> None:
        with_value = number(fill)
        mask = tensor(condition)
        if (
            with_value is None
            or mask is None
            or mask.dtype != torch.bool
            or not isinstance(condition, fx.Node)
        ):
            raise Mismatch(
                "scores are filled with something else than a number under a boolean mask", node
            )
        if factor * with_value > -9000:
            raise Mismatch(
                f"masked scores are set to {with_value:g}, which does not mask them", node
            )
        self.masks.append(MaskTerm(kind, condition, 1.0, factor * with_value))  # type: ignore[arg-type]
        self.back(scores, factor)


def _attention(
    place: Where,
    out: fx.Node,
    anchor: fx.Node,
    scores: fx.Node,
    q: object,
    k: object,
    v: object,
    scale: float,
    masks: tuple[MaskTerm, ...],
) -> Attention:
    query = _four_dimensional(q, anchor)
    key, value = _without_repeat(k, query, anchor), _without_repeat(v, query, anchor)
    keys, values = _four_dimensional(key, anchor), _four_dimensional(value, anchor)
    if scale == 0:
        raise Mismatch("the scale is zero", anchor)
    length = query.shape[2]
    if not same(length, 1):
        raise Mismatch(
            f"{length} query tokens: only decoding of a single token is rewritten", anchor
        )
    for what, held in (("keys", keys), ("values", values)):
        if not same(held.shape[0], query.shape[0]):
            raise Mismatch(
                f"batch of the {what} is {held.shape[0]}, of the query {query.shape[0]}", anchor
            )
    if not same(keys.shape[1], values.shape[1]):
        raise Mismatch(f"{keys.shape[1]} heads of keys and {values.shape[1]} of values", anchor)
    if query.shape[1] % keys.shape[1]:
        raise Mismatch(
            f"{query.shape[1]} query heads are no multiple of {keys.shape[1]} KV heads", anchor
        )
    return Attention(place, out, anchor, scores, q, key, value, scale, masks)  # type: ignore[arg-type]


def _four_dimensional(node: object, anchor: fx.Node) -> torch.Tensor:
    held = tensor(node)
    if held is None or held.ndim != 4:
        shape = None if held is None else tuple(held.shape)
        raise Mismatch(
            f"operand of shape {shape}: [batch, heads, tokens, size] is expected", anchor
        )
    return held


def _without_repeat(node: object, query: torch.Tensor, anchor: fx.Node) -> object:
    """Look through ``repeat_kv``: expand over a new group dimension and reshape, or ``repeat_interleave``."""
    repeated = _four_dimensional(node, anchor)
    inner = node
    while op(inner) in ("contiguous", "clone"):
        inner = inner.args[0]  # type: ignore[union-attr, attr-defined]
    if not isinstance(inner, fx.Node):
        return node
    if op(inner) == "repeat_interleave" and argument(inner, 2, "dim") in (1, -3):
        return inner.args[0]
    if op(inner) not in ("reshape", "view", "flatten"):
        return node
    grouped = inner.args[0]
    expanded = tensor(grouped)
    if expanded is None or expanded.ndim != 5 or op(grouped) not in ("expand", "expand_as"):
        return node
    opened = grouped.args[0]  # type: ignore[union-attr, attr-defined]
    if op(opened) not in ("getitem", "unsqueeze"):
        return node
    source = opened.args[0]
    before, single = tensor(source), tensor(opened)
    if before is None or single is None or before.ndim != 4 or single.ndim != 5:
        return node
    heads, group = before.shape[1], expanded.shape[2]
    fits = (
        same(single.shape[1], heads)
        and same(single.shape[2], 1)
        and same(single.shape[3], before.shape[2])
        and same(heads * group, repeated.shape[1])
        and same(repeated.shape[1], query.shape[1])
    )
    return source if fits else node


def _transposed(node: object, product: fx.Node) -> tuple[object, float]:
    """The keys behind the right operand of the query-key product, and the constant that they are multiplied by."""
    factor = 1.0
    while isinstance(node, fx.Node):
        name = op(node)
        if name in ("mul", "div"):
            left, right = node.args[:2]
            if name == "mul" and number(left) is not None:
                left, right = right, left
            by = number(right)
            if by is None or by == 0:
                break
            factor, node = (factor * by if name == "mul" else factor / by), left
        elif name in ("contiguous", "clone"):
            node = node.args[0]
        elif name == "transpose" and {_dim(node.args[1]), _dim(node.args[2])} == {2, 3}:
            return _constant_factor(node.args[0], factor)
        elif name == "permute" and _dims(node) == (0, 1, 3, 2):
            return _constant_factor(node.args[0], factor)
        elif name == "permute" and len(_dims(node)) == 4:
            return _permuted_back(node), factor
        elif name == "getattr" and node.args[1] in ("mT",):
            return _constant_factor(node.args[0], factor)
        else:
            break
    raise Mismatch(
        "the right operand of the query-key product is not a transposed [B, H, S, D] tensor",
        product,
    )


def _permuted_back(node: fx.Node) -> fx.Node:
    """The same permutation with its last two dimensions exchanged; unused, and erased, where the site is left."""
    b, h, d, t = _dims(node)
    held = tensor(node)
    with node.graph.inserting_after(node):
        keys = node.graph.call_method("permute", (node.args[0], b, h, t, d))
    keys.meta = {
        **node.meta,
        "example_value": None if held is None else held.transpose(2, 3),
        MADE: True,
    }
    return keys


def _constant_factor(node: object, factor: float) -> tuple[object, float]:
    while op(node) in ("mul", "div"):
        left, right = node.args[:2]  # type: ignore[union-attr, attr-defined]
        if op(node) == "mul" and number(left) is not None:
            left, right = right, left
        by = number(right)
        if by is None or by == 0:
            break
        factor, node = (factor * by if op(node) == "mul" else factor / by), left
    return node, factor


def _dim(index: object) -> int:
    return index + 4 if isinstance(index, int) and index < 0 else index  # type: ignore[return-value]


def _dims(node: fx.Node) -> tuple[int, ...]:
    dims = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
    return tuple(_dim(d) for d in dims)


def _value_product(softmax: fx.Node) -> fx.Node:
    """The product of the weights with the values; the weights may go nowhere else."""
    node = softmax
    while True:
        if len(node.users) != 1:
            raise Mismatch(
                "attention weights are used by more than the product with the values", node
            )
        (user,) = node.users
        name = op(user)
        if name == "matmul" and user.args[0] is node:
            return user
        inference_dropout = name == "dropout" and (
            not argument(user, 2, "training", True) or argument(user, 1, "p", 0.5) == 0
        )
        if not inference_dropout and name not in _TRANSPARENT:
            reason = (
                "dropout is active" if name == "dropout" else f"attention weights go into `{name}`"
            )
            raise Mismatch(reason + ", not into the product with the values", user)
        node = user


def _reaches_product(node: object, depth: int = 12) -> bool:
    """Whether scores come from a product, looking over elementwise operations only."""
    if not isinstance(node, fx.Node) or depth == 0:
        return False
    name = op(node)
    if name == "matmul":
        return True
    if name not in _TRANSPARENT | {
        "mul",
        "div",
        "add",
        "sub",
        "masked_fill",
        "where",
        "dropout",
        "tanh",
    }:
        return False
    return any(_reaches_product(source, depth - 1) for source in node.args)


def _looks_like_attention(softmax: fx.Node) -> bool:
    """A softmax between two products of activations; routers and samplers are none."""
    if not _reaches_product(softmax.args[0]):
        return False
    frontier, seen = [softmax], 0
    while frontier and seen < 16:
        node = frontier.pop()
        seen += 1
        for user in node.users:
            if op(user) == "matmul" and user.args[0] is node:
                return True
            if op(user) in _TRANSPARENT | {
                "dropout",
                "mul",
                "masked_fill",
                "where",
                "add",
                "getitem",
            }:
                frontier.append(user)
    return False
