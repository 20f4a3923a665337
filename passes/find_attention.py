"""Find softmax attention in a Dynamo graph, however it is spelled.

    before: anything
    after:  the graph unchanged but for unused views; an ``Attention`` or a ``Reject`` for each site, in graph order

Three anchors: ``scaled_dot_product_attention``; ``flex_attention``, whose functions are read in ``flex``; and a softmax
whose operand comes from a product of two activations and whose result goes into one. From the last the operands are
walked by hand: back over casts, scales and masks to the query-key product (``scores``), forwards over casts and
inference dropout to the value product (``products``). From all of them what is read is followed through the repetition
of KV heads (``operands``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from hsa_compile import compat
from hsa_compile.lowering.limits import MAX_STEP
from hsa_compile.site import Attention, MaskTerm, Reject, Sink, Where

from .flex import flex_call, modified_scores
from .graph_tools import (
    VIEWS,
    Mismatch,
    argument,
    casts_to_whole_numbers,
    fixed,
    number,
    op,
    same,
    tensor,
    where,
)
from .operands import STRAIGHT, Dims, arranged, operand
from .products import query_key, weights_values
from .scores import LOOSE, PRODUCTS, TRANSPARENT, separates_or_merges, trace_scores
from .splice import Splicer

_OPERANDS = ("query", "key", "value")

_UNKNOWN = {
    "multi_head_attention_forward": "torch.nn.MultiheadAttention's fused forward keeps no KV cache",
    "_transformer_encoder_layer_fwd": "torch.nn.TransformerEncoderLayer's fused forward keeps no KV cache",
}


def find_attention(graph: fx.Graph) -> list[Attention | Reject]:
    """All attention sites of the graph, in order."""
    found: list[Attention | Reject] = []
    splicer: Splicer | None = None
    for node in list(graph.nodes):
        name = op(node)
        place = where(node, len(found))
        try:
            if name in _UNKNOWN:
                raise Mismatch(_UNKNOWN[name], node)
            if name == "scaled_dot_product_attention":
                found.append(_from_sdpa(node, place))
            elif compat.is_flex_attention(node.target):
                splicer = splicer or Splicer(graph)
                found.append(_from_flex(node, place, splicer))
            elif name == "softmax" and _looks_like_attention(node):
                found.append(_from_softmax(node, place))
        except Mismatch as miss:
            found.append(Reject(place, str(miss), miss.node.name))
    return found


def _from_sdpa(node: fx.Node, place: Where) -> Attention:
    q, k, v = (argument(node, i, name) for i, name in enumerate(_OPERANDS))
    mask = argument(node, 3, "attn_mask")
    if argument(node, 4, "dropout_p", 0.0) != 0:
        raise Mismatch("dropout is active", node)
    scale = argument(node, 6, "scale")
    q, k, v = (_four_dimensional(x, node) for x in (q, k, v))
    size = tensor(q).shape[-1]  # type: ignore[union-attr]
    factor = 1.0 / math.sqrt(size) if scale is None else number(scale)
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
    return _attention(place, node, node, q, (k, STRAIGHT), (v, STRAIGHT), factor, terms)


def _from_flex(node: fx.Node, place: Where, splicer: Splicer) -> Attention:
    call = flex_call(node)
    q, k, v = (_four_dimensional(argument(node, i, name), node) for i, name in enumerate(_OPERANDS))
    factor = number(argument(node, 5, "scale"))
    if factor is None:
        raise Mismatch("the scale is a tensor, not a number known at compile time", node)
    found = _attention(place, call.out, node, q, (k, STRAIGHT), (v, STRAIGHT), factor, ())
    scores = modified_scores(call, splicer, found.q, found.k)
    return replace(
        found,
        scale=_positive(found.scale * scores.scale, node),
        masks=tuple(scores.masks),
        softcap=scores.softcap,
        lse=call.lse,
    )


def _from_softmax(softmax: fx.Node, place: Where) -> Attention:
    scores = tensor(argument(softmax, 0, "input"))
    dim = argument(softmax, 1, "dim")
    if scores is None or scores.ndim not in (3, 4):
        raise Mismatch(
            "attention scores are neither [batch, heads, queries, keys] nor [batch * heads, queries, keys]",
            softmax,
        )
    if dim not in (-1, scores.ndim - 1):
        raise Mismatch(f"softmax runs over dimension {dim}, not over the keys", softmax)
    walk = trace_scores(softmax)
    scored = query_key(walk.product)
    weights, out = _value_product(softmax, walk.sink)
    result = weights_values(out, weights)
    q = arranged(_four_dimensional(scored.first, softmax), scored.first_dims)
    k, v = (scored.second, scored.second_dims), (result.second, result.second_dims)
    found = _attention(place, out, softmax, q, k, v, walk.scale, tuple(walk.masks))
    return replace(
        found,
        scores=walk.product,
        softcap=walk.softcap,
        sink=walk.sink,
        out_dims=result.out_dims,
    )


def _attention(
    place: Where,
    out: fx.Node,
    anchor: fx.Node,
    q: fx.Node,
    k: tuple[fx.Node, Dims],
    v: tuple[fx.Node, Dims],
    scale: float,
    masks: tuple[MaskTerm, ...],
) -> Attention:
    """Keys and values are given with the order of dimensions that makes them ``[B, H, S, D]``."""
    key = operand(_four_dimensional(k[0], anchor), k[1])
    value = operand(_four_dimensional(v[0], anchor), v[1], constants=False)
    query, keys, values = tensor(q), tensor(key.node), tensor(value.node)
    assert query is not None and keys is not None and values is not None
    scale = _positive(scale * key.factor, anchor)
    length = query.shape[2]
    if fixed(length) is None:
        raise Mismatch(
            f"{length} query tokens, a number that varies: only steps of a fixed number up to {MAX_STEP} are rewritten",
            anchor,
        )
    if not 1 <= length <= MAX_STEP:
        raise Mismatch(
            f"{length} query tokens: only steps of up to {MAX_STEP} are rewritten", anchor
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
    result = tensor(out)
    if result is None or not same(result.numel(), query[..., 0].numel() * values.shape[3]):
        raise Mismatch(
            "there are more rows of attention than queries: a mask or the keys repeat them", anchor
        )
    return Attention(place, out, anchor, anchor, q, key.node, value.node, scale, masks)


def _positive(scale: float, anchor: fx.Node) -> float:
    if scale <= 0:
        raise Mismatch("the scale is zero" if scale == 0 else f"the scale is {scale:g}", anchor)
    return scale


def _four_dimensional(node: object, anchor: fx.Node) -> fx.Node:
    held = tensor(node)
    if not isinstance(node, fx.Node) or held is None or held.ndim != 4:
        shape = None if held is None else tuple(held.shape)
        raise Mismatch(
            f"operand of shape {shape}: [batch, heads, tokens, size] is expected", anchor
        )
    return node


def _value_product(softmax: fx.Node, sink: Sink | None) -> tuple[fx.Node, fx.Node]:
    """The weights as they are multiplied with the values, and that product; the weights may go nowhere else.

    The weight of a sink is cut off on the way.
    """
    node = softmax
    while True:
        if len(node.users) != 1:
            raise Mismatch(
                "attention weights are used by more than the product with the values", node
            )
        (user,) = node.users
        name = op(user)
        if name in PRODUCTS:
            if sink is not None:
                raise Mismatch("the weight of an attention sink is multiplied with a value", user)
            return node, user
        if sink is not None and name == "getitem" and user.args[1] == _keys_only(sink):
            node, sink = user, None
            continue
        inference_dropout = name == "dropout" and (
            not argument(user, 2, "training", True) or argument(user, 1, "p", 0.5) == 0
        )
        if casts_to_whole_numbers(user):
            raise Mismatch("attention weights are rounded to whole numbers", user)
        moved = name in VIEWS and separates_or_merges(user, node)
        if not inference_dropout and not moved and name not in TRANSPARENT:
            reason = (
                "dropout is active" if name == "dropout" else f"attention weights go into `{name}`"
            )
            raise Mismatch(reason + ", not into the product with the values", user)
        node = user


def _keys_only(sink: Sink) -> tuple[object, ...]:
    """The index that leaves the weights of the keys."""
    return (Ellipsis, slice(1, None, None) if sink.first else slice(None, -1, None))


def _looks_like_attention(softmax: fx.Node) -> bool:
    """A softmax between two products of activations; routers and samplers are none.

    Looser than what is matched, so that attention that is not understood is reported.
    """
    scores, weights = argument(softmax, 0, "input"), softmax
    return _meets_product([scores], lambda node: node.all_input_nodes) and _meets_product(
        list(weights.users), lambda node: list(node.users)
    )


def _meets_product(frontier: list[object], following: Callable[[fx.Node], list[fx.Node]]) -> bool:
    for _ in range(32):
        if not frontier:
            return False
        node = frontier.pop(0)
        if op(node) in PRODUCTS:
            return True
        if isinstance(node, fx.Node) and op(node) in LOOSE:
            frontier.extend(following(node))
    return False
