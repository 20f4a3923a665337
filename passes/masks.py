"""The masks of an attention site as the ops take them: a packed word a page, and a bias where a term is additive.

before: masked_fill(scores, drop, -inf) + bias
after:  bits = page_mask(where(drop, -inf, 0) + bias); the bias itself; page_bias(bias)

Several query tokens are as many heads to the ops: a mask that differs between them has a row a (head, token).
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from hsa_compile import compat
from hsa_compile.site import Attention, MaskTerm

from .emit import Emitter
from .graph_tools import memory, same, tensor, writes


class Masks:
    """Makes masks, each once for all layers that share it."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.order = {node: at for at, node in enumerate(emit.graph.nodes)}
        self.made: dict[object, fx.Node] = {}
        self.biases: dict[object, fx.Node | None] = {}

    def packed(
        self, attention: Attention, keys: fx.Node, read: torch.Tensor, page_size: int
    ) -> tuple[fx.Node | None, fx.Node]:
        """Bias (None where no term is additive) and packed mask; made once for layers that share a mask."""
        q = tensor(attention.q)
        assert q is not None
        heads, queries = q.shape[1], attention.queries
        terms = attention.masks
        # A model may change a mask in place from one attention to the next.
        written = tuple(
            sum(
                self.order.get(write, math.inf) < self.order[attention.out]
                for write in writes(memory(node))
            )
            for node in (term.node for term in terms)
            if node is not None
        )
        key = ("mask", terms, written, compat.expression(read.shape[2]), read.device, queries)
        if key not in self.made:
            self.made[key], self.biases[key] = self._combined(terms, keys, read, queries)
        mask, bias = self.made[key], self.biases[key]
        packed = ("bits", mask, page_size, heads if queries > 1 else 1)
        if packed not in self.made:
            rows = self._rows(mask) if queries > 1 else mask
            bits = self.emit.call(torch.ops.hsa.page_mask.default, rows, page_size)
            self.made[packed] = self._a_row_each(bits, mask, heads, queries)
        if bias is None or queries == 1:
            return bias, self.made[packed]
        spread = ("bias", bias, heads)
        if spread not in self.made:
            whole = self._a_row_each(self._rows(bias), bias, heads, queries)
            self.made[spread] = whole
        return self.made[spread], self.made[packed]

    def of_pages(self, bias: fx.Node | None, page_size: int) -> fx.Node | None:
        """What a bias of :meth:`packed` adds to each page, or None where there is none."""
        if bias is None:
            return None
        key = ("pages", bias, page_size)
        if key not in self.made:
            self.made[key] = self.emit.call(torch.ops.hsa.page_bias.default, bias, page_size)
        return self.made[key]

    def _rows(self, mask: fx.Node) -> fx.Node:
        """``[Bm, Hm, Lm, S]`` as ``[Bm, Hm * Lm, 1, S]``."""
        held = tensor(mask)
        assert held is not None
        if same(held.shape[2], 1):
            return mask
        return self.emit.method("unsqueeze", self.emit.method("flatten", mask, 1, 2), 2)

    def _a_row_each(self, rows: fx.Node, mask: fx.Node, heads: int, queries: int) -> fx.Node:
        """``rows [Bm, Hm * Lm, ...]`` of ``mask [Bm, Hm, Lm, S]`` as ``[Bm, Hq * L, ...]``, or with one row for all."""
        held = tensor(mask)
        assert held is not None
        one_head, one_token = same(held.shape[1], 1), same(held.shape[2], 1)
        if queries == 1 or (one_head and one_token):
            return rows
        method, rest = self.emit.method, (-1,) * (tensor(rows).ndim - 2)  # type: ignore[union-attr]
        apart = (1 if one_head else heads, 1 if one_token else queries)
        spread = method("expand", method("unflatten", rows, 1, apart), -1, heads, queries, *rest)
        return method("flatten", spread, 1, 2)

    def _combined(
        self,
        terms: tuple[MaskTerm, ...],
        keys: fx.Node,
        read: torch.Tensor,
        queries: int,
    ) -> tuple[fx.Node, fx.Node | None]:
        """The mask as one tensor ``[Bm, Hm, 1 or L, S]``, boolean or additive, and the bias."""
        call, device = self.emit.call, read.device
        fixed = isinstance(read.shape[2], int)
        tokens = read.shape[2] if fixed else self.emit.method("size", keys, 2)
        kept: fx.Node | None = None
        bias: fx.Node | None = None
        for term in terms:
            if term.kind == "causal":
                token: object = 0
                if queries > 1:
                    token = call(torch.arange, queries, device=device)
                    token = self.emit.method("unsqueeze", token, 1)
                seen = call(operator.le, call(torch.arange, tokens, device=device), token)
                part = self._spread(seen, tokens)
            else:
                part = self._spread(term.node, tokens)
            if term.kind == "add":
                part = part if term.factor == 1.0 else call(operator.mul, part, term.factor)
                bias = self._plus(bias, part)
            elif term.value == -math.inf:
                part = call(torch.logical_not, part) if term.kind == "drop" else part
                kept = part if kept is None else call(torch.logical_and, kept, part)
            else:
                part = part if term.kind == "drop" else call(torch.logical_not, part)
                bias = self._plus(bias, self._fill(part, term.value, device))
        if kept is None and bias is None:
            return call(torch.ones, (1, 1, 1, tokens), dtype=torch.bool, device=device), None
        if bias is None:
            return kept, None  # type: ignore[return-value]
        if kept is not None:
            hidden = call(torch.logical_not, kept)
            bias = self._plus(bias, self._fill(hidden, -math.inf, device))
        return bias, bias

    def _plus(self, bias: fx.Node | None, part: fx.Node) -> fx.Node:
        return part if bias is None else self.emit.call(operator.add, bias, part)

    def _fill(self, condition: fx.Node, fill: float, device: torch.device) -> fx.Node:
        """0 where ``condition`` is false, ``fill`` where it is true, in fp32."""
        if fill != -math.inf:
            # A fill takes the place of the scores: the lowest number swallows what it is added to.
            fill = torch.finfo(torch.float32).min
        zero = self.emit.call(torch.zeros, (), dtype=torch.float32, device=device)
        return self.emit.call(torch.where, condition, fill, zero)

    def _spread(self, node: fx.Node | None, tokens: object) -> fx.Node:
        """A mask of any broadcast shape as ``[Bm, Hm, 1 or L, S]``."""
        assert node is not None
        held = tensor(node)
        assert held is not None
        for _ in range(4 - held.ndim):
            node = self.emit.call(torch.unsqueeze, node, 0)
        return self.emit.method("expand", node, -1, -1, -1, tokens)
