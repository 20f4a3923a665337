"""The way back from a softmax to the query-key product: the scale, the masks, a cap and a sink that are met on it.

    before: softmax(cat([where(keep, tanh(q @ k / c) * c + bias, -inf), sink], -1))
    after:  the product q @ k; scale 1; soft cap c; the terms ``add bias``, ``keep``; the sink

The scores are followed as memory, not as names: a model may scale or fill them in place and use the node of before.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from hsa_compile.ops.page_mask import MASKED_BELOW
from hsa_compile.site import MaskTerm, Sink

from .graph_tools import (
    CASTS,
    VIEWS,
    Mismatch,
    argument,
    casts_to_whole_numbers,
    modifies,
    number,
    op,
    same,
    tensor,
    writes,
)
from .operands import apart
from .products import merges_heads, query_key

TRANSPARENT = CASTS | {"contiguous", "clone", "detach"}
PRODUCTS = frozenset({"matmul", "einsum", "baddbmm"})
_ELEMENTWISE = frozenset({"mul", "div", "add", "sub", "masked_fill", "where", "dropout", "tanh"})
_OTHERS = frozenset(
    "clamp clamp_min clamp_max clip max maximum sigmoid exp abs neg pow relu softplus".split()
)
LOOSE = TRANSPARENT | _ELEMENTWISE | _OTHERS | VIEWS | {"cat", "pad", "setitem"}
"""What scores and weights pass through in attention of any kind, understood or not."""


@dataclass
class Scores:
    """What :func:`trace_scores` finds."""

    product: fx.Node
    scale: float
    masks: list[MaskTerm] = field(default_factory=list)
    softcap: float = 0.0
    sink: Sink | None = None


def trace_scores(softmax: fx.Node) -> Scores:
    """Raises ``Mismatch`` where the operand of ``softmax`` is not a scaled and masked product."""
    return _Walk(softmax, reaches_product).scores(argument(softmax, 0, "input"))


def trace_modified(scores: fx.Node, site: fx.Node, scored: Container[object], sums: bool) -> Scores:
    """The same for scores that a function made for ``site`` of a product; ``scored`` is all that depends on that.

    sums: whether their sum is asked for too, to which a number that is added to all of them matters.
    """
    if scores not in scored:
        raise Mismatch("the score_mod of flex_attention does not use the score", site)
    found = _Walk(site, scored.__contains__, sums).scores(scores)
    for term in found.masks:
        if term.node in scored:
            raise Mismatch("what masks the scores, or is added to them, depends on them", site)
    return found


class _Walk:
    def __init__(
        self, softmax: fx.Node, reaches: Callable[[object], bool], sums: bool = False
    ) -> None:
        self.softmax, self.reaches, self.sums = softmax, reaches, sums
        self.order = {node: i for i, node in enumerate(softmax.graph.nodes)}
        self.masks: list[MaskTerm] = []
        self.merged: list[int] = []
        self.softcap = 0.0
        self.sink: Sink | None = None

    def scores(self, last: object) -> Scores:
        """What the softmax reads as ``last``."""
        product, scale = self.back(last, 1.0, self.softmax)
        self.take_masks_apart(product)
        # cap * tanh(a * s) = cap * tanh((a * cap) * s / cap)
        scale *= self.softcap or 1.0
        return Scores(product, scale, self.masks, self.softcap, self.sink)

    def back(self, node: object, factor: float, reader: fx.Node) -> tuple[fx.Node, float]:
        """Walk from ``node``, which ``reader`` reads and whose value reaches the softmax times ``factor``."""
        if not isinstance(node, fx.Node):
            raise Mismatch("attention scores are a constant", self.softmax)
        read = self._as_read(node, reader)
        return self._through(read, factor)

    def _through(self, node: fx.Node, factor: float) -> tuple[fx.Node, float]:
        """One step of the walk over a node that is not written afterwards."""
        name = op(node)
        source = argument(node, 0, "input")
        if name == "baddbmm":
            return self._accumulated(node, factor)
        if name in PRODUCTS:
            return node, factor
        if name in VIEWS and separates_or_merges(node, source):
            return self.back(source, factor, node)
        if casts_to_whole_numbers(node):
            raise Mismatch("attention scores are rounded to whole numbers", node)
        if name in TRANSPARENT or (name == "dropout" and not argument(node, 2, "training", True)):
            return self.back(source, factor, node)
        if name in ("mul", "div"):
            return self._scaled(node, name, factor)
        if name in ("add", "sub"):
            return self._added(node, name, factor)
        if name == "masked_fill":
            condition, fill = argument(node, 1, "mask"), argument(node, 2, "value")
            return self._filled(node, source, condition, fill, "drop", factor)
        if name == "where" and len(node.args) == 3:
            condition, kept, other = node.args
            if self.reaches(kept):
                return self._filled(node, kept, condition, other, "keep", factor)
            return self._filled(node, other, condition, kept, "drop", factor)
        if name == "tanh":
            return self._capped(node, factor)
        if name in ("cat", "pad"):
            return self._joined(node, name, factor)
        raise Mismatch(f"attention scores pass through `{name}`, which is not recognised", node)

    def _accumulated(self, node: fx.Node, factor: float) -> tuple[fx.Node, float]:
        """``beta * input + alpha * (batch1 @ batch2)``"""
        beta, alpha = (number(node.kwargs.get(name, 1)) for name in ("beta", "alpha"))
        if beta is None or not alpha:
            raise Mismatch("the factors of `baddbmm` are not numbers known at compile time", node)
        added = argument(node, 0, "input")
        if beta and op(added) not in ("zeros", "new_zeros", "zeros_like"):
            self._term(added, factor * beta, node)
        return node, factor * alpha

    def _capped(self, node: fx.Node, factor: float) -> tuple[fx.Node, float]:
        """``factor * tanh(scores)``: what follows is inside of the cap, where no mask may be."""
        if factor <= 0 or self.softcap:
            raise Mismatch("attention scores pass through `tanh`, but not as a soft cap", node)
        self.softcap, outside = factor, len(self.masks)
        found = self.back(argument(node, 0, "input"), 1.0, node)
        if len(self.masks) > outside:
            raise Mismatch("scores are masked before `tanh` caps them", node)
        return found

    def _joined(self, node: fx.Node, name: str, factor: float) -> tuple[fx.Node, float]:
        """One column more than there are keys, before or behind them."""
        if self.masks or self.sink is not None or self.softcap:
            raise Mismatch("scores are masked or capped together with an attention sink", node)
        joined = tensor(node)
        found = _padded(node) if name == "pad" else _concatenated(node)
        if found is None or joined is None or joined.ndim != 4:
            raise Mismatch("attention scores are joined to something else than one column", node)
        scores, sink = found
        self.sink = replace(sink, factor=sink.factor * factor)
        return self.back(scores, factor, node)

    def _as_read(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The last write into the memory of ``node`` before ``reader``, or ``node`` where there is none."""
        while modifies(node) and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        made = [w for w in writes(node) if self.order[w] < self.order[reader]]
        if not made:
            return node
        last = max(made, key=self.order.__getitem__)
        target = last.args[0]
        while isinstance(target, fx.Node) and target is not node:
            if not modifies(target):
                raise Mismatch("a part of the attention scores is written in place", last)
            target = target.args[0]
        return last

    def _scaled(self, node: fx.Node, name: str, factor: float) -> tuple[fx.Node, float]:
        left, right = argument(node, 0, "input"), argument(node, 1, "other")
        if node.kwargs.get("rounding_mode") is not None:
            raise Mismatch("attention scores are rounded by `div`", node)
        if name == "mul" and number(left) is not None:
            left, right = right, left
        by = number(right)
        if by is None or by == 0:
            raise Mismatch(
                "the scale is a tensor or zero, not a nonzero number known at compile time", node
            )
        return self.back(left, factor * by if name == "mul" else factor / by, node)

    def _added(self, node: fx.Node, name: str, factor: float) -> tuple[fx.Node, float]:
        left, right = argument(node, 0, "input"), argument(node, 1, "other")
        if argument(node, 2, "alpha", 1) != 1:
            raise Mismatch("a mask is added with alpha", node)
        if name == "add" and not self.reaches(left):
            left, right = right, left
        self._term(right, factor if name == "add" else -factor, node)
        return self.back(left, factor, node)

    def _term(self, right: object, factor: float, node: fx.Node) -> None:
        """Something is added to the scores: a mask, or a number that softmax does not see."""
        added, scores = tensor(right), tensor(node)
        one = added is not None and (
            added.ndim == 0
            or (same(added.shape[-1], 1) and not (scores is None or same(scores.shape[-1], 1)))
        )
        if one or number(right) is not None:
            if self.softcap or self.sink is not None:
                raise Mismatch(
                    "a number is added to scores that are capped or joined to a sink", node
                )
            if not self.sums:
                return  # the same for all keys
            if number(right) is not None:
                raise Mismatch("a number is added to scores whose log-sum-exp is used", node)
        if not isinstance(right, fx.Node) or added is None or self.reaches(right):
            raise Mismatch("what is added to the scores is not a mask", node)
        if not added.dtype.is_floating_point:
            raise Mismatch(f"a mask of {added.dtype} is added to the scores", node)
        self._mask(MaskTerm("add", right, factor), node)

    def _mask(self, term: MaskTerm, scores: fx.Node) -> None:
        mask, held = tensor(term.node), tensor(scores)
        assert mask is not None and held is not None
        if held.ndim == mask.ndim == 3 and not same(mask.shape[0], 1):
            self.merged.append(len(self.masks))
        self.masks.append(term)

    def take_masks_apart(self, product: fx.Node) -> None:
        """Masks of scores ``[B * H, L, S]`` become masks of ``[B, H, L, S]``."""
        if not self.merged:
            return
        query = query_key(product)
        held = tensor(query.first)
        heads = None if held is None or held.ndim != 4 else held.shape[query.first_dims[1]]
        if not isinstance(heads, int):
            raise Mismatch("the mask has three dimensions, the scores have others", product)
        for i in self.merged:
            mask = self.masks[i].node
            assert mask is not None
            self.masks[i] = replace(self.masks[i], node=apart(mask, heads))

    def _filled(
        self,
        node: fx.Node,
        scores: object,
        condition: object,
        fill: object,
        kind: str,
        factor: float,
    ) -> tuple[fx.Node, float]:
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
        if factor * with_value > -MASKED_BELOW:
            raise Mismatch(
                f"masked scores are set to {with_value:g}, which does not mask them", node
            )
        self._mask(MaskTerm(kind, condition, 1.0, factor * with_value), node)  # type: ignore[arg-type]
        return self.back(scores, factor, node)


def _concatenated(node: fx.Node) -> tuple[object, Sink] | None:
    """``cat([scores, sink], -1)`` and the other way round."""
    parts, joined = argument(node, 0, "tensors"), tensor(node)
    last = joined is not None and argument(node, 1, "dim", 0) in (-1, joined.ndim - 1)
    if not last or not isinstance(parts, (tuple, list)) or len(parts) != 2:
        return None
    first = reaches_product(parts[1])
    column, scores = parts if first else reversed(parts)
    held = tensor(column)
    if held is None or not same(held.shape[-1], 1) or reaches_product(column):
        return None
    return scores, Sink(column, 1.0, first)


def _padded(node: fx.Node) -> tuple[object, Sink] | None:
    """``pad(scores, (0, 1), value=c)`` and ``(1, 0)``."""
    widths = argument(node, 1, "pad")
    fill = argument(node, 3, "value")
    value = 0.0 if fill is None else number(fill)
    if argument(node, 2, "mode", "constant") != "constant" or value is None:
        return None
    if not isinstance(widths, (tuple, list)) or list(widths) not in ([0, 1], [1, 0]):
        return None
    return argument(node, 0, "input"), Sink(None, value, list(widths) == [1, 0])


def separates_or_merges(node: fx.Node, source: object) -> bool:
    """Whether a view puts batch and heads into one dimension, or takes them apart."""
    before, after = tensor(source), tensor(node)
    return merges_heads(before, after) or merges_heads(after, before)


def reaches_product(node: object, depth: int = 12) -> bool:
    """Whether scores come from a product, looking over elementwise operations only."""
    if not isinstance(node, fx.Node) or depth == 0:
        return False
    if op(node) in PRODUCTS:
        return True
    merging = op(node) in VIEWS and separates_or_merges(node, argument(node, 0, "input"))
    if op(node) not in TRANSPARENT | _ELEMENTWISE and not merging:
        return False
    return any(reaches_product(source, depth - 1) for source in node.all_input_nodes)
