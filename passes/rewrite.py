"""Rewrite planned sites into the ops, and cut growing caches loose from ``torch.cat``.

    before: index_copy_(keys, 2, pos, k); o = sdpa(q, repeat_kv(keys), repeat_kv(values), mask, scale)
    after:  index_copy_(keys, 2, pos, k); bits = page_mask(mask)
            summarize(keys, bits, pos, summary!, covered!); ids, counts = select(q, summary, bits, ...)
            o = sparse_attention(q, keys, values, ids, bits, bias, scale)

    before: keys' = cat(keys, k); ...; return keys', ...
    after:  keys'[:, :, -1:] = k; ...; return ...          (keys' is an input now: a view with room for k)

The model's own write of a static cache stays as it is. ``summary``, ``covered`` and the counters become graph inputs,
which the runtime binds to the cache at every call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.node import map_arg

from hsa_compile import algorithms, compat
from hsa_compile.ops.select import FRACTION_UNIT, forced_pages
from hsa_compile.site import CacheUpdate, LayerPlan, MaskTerm

from .graph_tools import op, raw_name, tensor, value

_HSA = torch.ops.hsa
_IN_PLACE_OPERATORS = frozenset({"iadd", "isub", "imul", "itruediv"})


@dataclass(frozen=True)
class SparseSite:
    """One rewritten site: its new inputs, and what the runtime needs to bind them."""

    plan: LayerPlan
    summary: fx.Node
    covered: fx.Node
    cache_input: fx.Node
    page_major: bool
    result: fx.Node


@dataclass
class Rewritten:
    """What the rewrite did to the graph."""

    sites: list[SparseSite] = field(default_factory=list)
    growing: list[tuple[fx.Node, tuple[int, ...]]] = field(default_factory=list)
    """Inputs that are now views with room for one token, and the outputs of the model that they stand for."""
    counters: list[tuple[torch.device, fx.Node, list[int]]] = field(default_factory=list)
    """A device, its counter input ``[sites, 2]``, and the sites (indices into ``sites``) of its rows."""
    outputs: int = 0


class _Rewriter:
    def __init__(self, gm: fx.GraphModule, plans: list[LayerPlan], fake_mode: object) -> None:
        self.gm, self.graph, self.plans, self.fake_mode = gm, gm.graph, plans, fake_mode
        self.made: dict[object, fx.Node] = {}
        self.biases: dict[object, fx.Node | None] = {}
        self.result = Rewritten()
        self.counts: list[fx.Node] = []

    def run(self) -> Rewritten:
        output = next(iter(reversed(self.graph.nodes)))
        self.result.outputs = len(output.args[0])  # type: ignore[arg-type]
        for plan in self.plans:
            grown = plan.site.keys.kind == "dynamic"
            for cache in (plan.site.keys, plan.site.values):
                self._guard_capacity(cache, plan.site.attention.k.meta["example_value"])
            keys = self._grow(plan.site.keys) if grown else plan.site.attention.k
            values = self._grow(plan.site.values) if grown else plan.site.attention.v
            self._attention(plan, keys, values)
        self._drop_outputs(output)
        self._count()
        return self.result

    # -- growing caches

    def _grow(self, cache: CacheUpdate) -> fx.Node:
        if cache.write in self.made:
            return self.made[cache.write]
        joined = tensor(cache.write)
        assert joined is not None
        batch, heads, tokens, size = joined.shape
        old = cache.base
        strides = (heads * size, size, batch * heads * size, 1)
        view = self._input(
            f"{old.name}_grown",
            (batch, heads, tokens, size),
            joined.dtype,
            joined.device,
            strides,
            old,
        )
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        if set(old.users) - {cache.write}:
            with self.graph.inserting_before(first):
                before = self._call(
                    operator.getitem, view, (slice(None), slice(None), slice(None, -1))
                )
            old.replace_all_uses_with(before, delete_user_cb=lambda user: user is not cache.write)
        with self.graph.inserting_before(cache.write):
            last = self._call(operator.getitem, view, (slice(None), slice(None), slice(-1, None)))
            self._method("copy_", last, cache.new)
        output = next(iter(reversed(self.graph.nodes)))
        places = tuple(i for i, node in enumerate(output.args[0]) if node is cache.write)  # type: ignore[arg-type]
        self.result.growing.append((view, places))
        cache.write.replace_all_uses_with(view, delete_user_cb=lambda user: user is not output)
        self.made[cache.write] = view
        return view

    def _drop_outputs(self, output: fx.Node) -> None:
        taken = {place for _, places in self.result.growing for place in places}
        kept = tuple(node for i, node in enumerate(output.args[0]) if i not in taken)  # type: ignore[arg-type]
        output.args = (kept,)
        for plan in self.plans:
            for cache in (plan.site.keys, plan.site.values):
                if cache.kind == "dynamic" and cache.write in self.made and not cache.write.users:
                    self.graph.erase_node(cache.write)
                    self.graph.erase_node(cache.base)
                    self.made.pop(cache.write)

    # -- static caches

    def _guard_capacity(self, cache: CacheUpdate, read: torch.Tensor) -> None:
        """On a CPU, let the position of the model's write pass a check first."""
        position = cache.position
        held = tensor(position)
        if held is None or held.device.type != "cpu" or not isinstance(position, fx.Node):
            return
        key = ("checked", position)
        if key not in self.made:
            capacity = read.shape[2]
            if not isinstance(capacity, int):
                return
            first = next(node for node in self.graph.nodes if node.op != "placeholder")
            after_inputs = position.op == "placeholder"
            with self.graph.inserting_before(first if after_inputs else position.next):
                self.made[key] = self._call(_HSA.checked_position.default, position, capacity)
        cache.write.replace_input_with(position, self.made[key])

    # -- attention

    def _attention(self, plan: LayerPlan, keys: fx.Node, values: fx.Node) -> None:
        attention, policy = plan.site.attention, plan.policy
        read, q, out = tensor(attention.k), tensor(attention.q), tensor(attention.out)
        assert read is not None and q is not None and out is not None
        number = len(self.result.sites)
        page_major = not isinstance(read.shape[2], int)
        summary, covered = self._state_inputs(plan, read, number, page_major)
        with self.graph.inserting_before(attention.out):
            bias, bits = self._mask(attention.masks, keys, read, policy.page_size)
            position = self._position(plan.site.keys, keys, read)
            self._call(
                _HSA.summarize.default,
                keys,
                bits,
                position,
                summary,
                covered,
                policy.algorithm,
                policy.page_size,
            )
            slots, budget = self._budget(plan, keys)
            selected = self._call(
                _HSA.select.default,
                attention.q,
                summary,
                bits,
                attention.scale,
                policy.algorithm,
                policy.page_size,
                slots,
                budget,
                plan.fraction,
                policy.sink,
                policy.recent,
                policy.group_reduce,
            )
            ids = self._call(operator.getitem, selected, 0)
            counts = self._call(operator.getitem, selected, 1)
            attended = self._call(
                _HSA.sparse_attention.default,
                attention.q,
                keys,
                values,
                ids,
                bits,
                bias,
                attention.scale,
                policy.page_size,
            )
            result = self._call(operator.getitem, attended, 0)
            if out.dtype != q.dtype:
                result = self._method("to", result, out.dtype)
        result.meta["nn_module_stack"] = attention.out.meta.get("nn_module_stack")
        attention.out.replace_all_uses_with(result)
        self.counts.append(counts)
        cache_input = keys if plan.site.keys.kind == "dynamic" else plan.site.keys.base
        self.result.sites.append(
            SparseSite(plan, summary, covered, cache_input, page_major, result)
        )
        erase_unused(self.graph, attention.out)

    def _state_inputs(
        self, plan: LayerPlan, read: torch.Tensor, number: int, page_major: bool
    ) -> tuple[fx.Node, fx.Node]:
        policy = plan.policy
        batch, heads, tokens, size = read.shape
        pages = (tokens + policy.page_size - 1) // policy.page_size
        made = []
        widths = (algorithms.summary_width(policy.algorithm, size), 2)
        for name, width, dtype in zip(
            ("summary", "covered"), widths, (read.dtype, torch.int64), strict=True
        ):
            strides = (heads * width, width, batch * heads * width, 1) if page_major else None
            made.append(
                self._input(
                    f"hsa_{name}_{number}",
                    (batch, heads, pages, width),
                    dtype,
                    read.device,
                    strides,
                )
            )
        return made[0], made[1]

    def _budget(self, plan: LayerPlan, keys: fx.Node) -> tuple[object, object]:
        if not plan.fraction or plan.slots:
            return plan.slots, plan.budget_pages
        unit = plan.policy.page_size * FRACTION_UNIT
        tokens = self._method("size", keys, 2)
        scaled = self._call(operator.add, self._call(operator.mul, tokens, plan.fraction), unit - 1)
        pages = self._call(operator.floordiv, scaled, unit)
        forced = forced_pages(plan.policy.sink, plan.policy.recent, plan.policy.page_size)
        return self._call(operator.add, pages, forced), 0  # the fraction is the budget

    def _position(self, cache: CacheUpdate, keys: fx.Node, read: torch.Tensor) -> fx.Node:
        key = ("position", cache.position if cache.kind != "dynamic" else keys, read.device)
        if key not in self.made:
            position: object = cache.position
            if cache.kind == "dynamic":
                position = self._call(operator.sub, self._method("size", keys, 2), 1)
            held = tensor(position)
            if held is None:
                self.made[key] = self._call(
                    torch.full, (1,), position, dtype=torch.int64, device=read.device
                )
            else:
                self.made[key] = self._call(torch.reshape, position, (1,))
                if held.dtype != torch.int64:
                    self.made[key] = self._method("to", self.made[key], torch.int64)
        return self.made[key]

    # -- masks

    def _mask(
        self, terms: tuple[MaskTerm, ...], keys: fx.Node, read: torch.Tensor, page_size: int
    ) -> tuple[fx.Node | None, fx.Node]:
        """Bias (None where no term is additive) and packed mask; made once for layers that share a mask."""
        sized = None if isinstance(read.shape[2], int) else keys
        key = ("mask", terms, read.shape[2] if sized is None else sized, read.device)
        if key not in self.made:
            self.made[key], bias = self._combined(terms, keys, read)
            self.biases[key] = bias
        mask, bias = self.made[key], self.biases[key]
        packed = ("bits", mask, page_size)
        if packed not in self.made:
            self.made[packed] = self._call(_HSA.page_mask.default, mask, page_size)
        return bias, self.made[packed]

    def _combined(
        self, terms: tuple[MaskTerm, ...], keys: fx.Node, read: torch.Tensor
    ) -> tuple[fx.Node, fx.Node | None]:
        tokens = read.shape[2] if isinstance(read.shape[2], int) else self._method("size", keys, 2)
        kept: fx.Node | None = None
        bias: fx.Node | None = None
        for term in terms:
            if term.kind == "keep" or (term.kind == "drop" and term.value == float("-inf")):
                part = self._spread(term.node, tokens)
                part = part if term.kind == "keep" else self._call(torch.logical_not, part)
                if term.kind == "keep" and term.value != float("-inf"):
                    bias = self._plus(
                        bias, self._fill(self._call(torch.logical_not, part), term.value, read)
                    )
                    continue
                kept = part if kept is None else self._call(torch.logical_and, kept, part)
            elif term.kind == "drop":
                bias = self._plus(
                    bias, self._fill(self._spread(term.node, tokens), term.value, read)
                )
            elif term.kind == "causal":
                first = self._call(torch.arange, tokens, device=read.device)
                part = self._spread(self._call(operator.le, first, 0), tokens, ndim=1)
                kept = part if kept is None else self._call(torch.logical_and, kept, part)
            else:
                part = self._spread(term.node, tokens)
                part = part if term.factor == 1.0 else self._call(operator.mul, part, term.factor)
                bias = self._plus(bias, part)
        if kept is None and bias is None:
            kept = self._call(torch.ones, (1, 1, 1, tokens), dtype=torch.bool, device=read.device)
        if bias is None:
            assert kept is not None
            return kept, None
        if kept is not None:
            bias = self._plus(
                bias, self._fill(self._call(torch.logical_not, kept), float("-inf"), read)
            )
        return bias, bias

    def _plus(self, bias: fx.Node | None, part: fx.Node) -> fx.Node:
        return part if bias is None else self._call(operator.add, bias, part)

    def _fill(self, condition: fx.Node, fill: float, read: torch.Tensor) -> fx.Node:
        """0 where ``condition`` is false, ``fill`` where it is true, in fp32."""
        low = torch.finfo(torch.float32).min
        filled = fill if fill == float("-inf") else max(fill, low)
        zero = self._call(torch.zeros, (), dtype=torch.float32, device=read.device)
        return self._call(torch.where, condition, filled, zero)

    def _spread(self, node: fx.Node | None, tokens: object, ndim: int | None = None) -> fx.Node:
        """A mask of any broadcast shape as ``[Bm, Hm, 1, S]``."""
        assert node is not None
        held = tensor(node)
        ndim = held.ndim if held is not None else ndim
        assert ndim is not None
        for _ in range(4 - ndim):
            node = self._call(torch.unsqueeze, node, 0)
        return self._method("expand", node, -1, -1, -1, tokens)

    # -- plumbing

    def _count(self) -> None:
        output = next(iter(reversed(self.graph.nodes)))
        by_device: dict[torch.device, list[int]] = {}
        for i, site in enumerate(self.result.sites):
            held = tensor(site.plan.site.attention.q)
            assert held is not None
            by_device.setdefault(held.device, []).append(i)
        for number, (device, sites) in enumerate(by_device.items()):
            counter = self._input(f"hsa_counters_{number}", (len(sites), 2), torch.int64, device)
            with self.graph.inserting_before(output):
                sums = [self._call(torch.sum, self.counts[i], (0, 1)) for i in sites]
                self._method("add_", counter, self._call(torch.stack, sums))
            self.result.counters.append((device, counter, sites))

    def _call(self, target: Callable[..., object], *args: object, **kwargs: object) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        return self._propagated(node, target, args, kwargs)

    def _method(self, name: str, *args: object) -> fx.Node:
        node = self.graph.call_method(name, args)  # type: ignore[arg-type]
        return self._propagated(node, lambda this, *rest: getattr(this, name)(*rest), args, {})

    def _propagated(
        self, node: fx.Node, run: Callable[..., object], args: object, kwargs: object
    ) -> fx.Node:
        """Give a new node the value that it holds under the trace, so that ``verify`` can compare."""
        with self.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            held = run(*map_arg(args, value), **map_arg(kwargs, value))  # type: ignore[arg-type]
        node.meta["example_value"] = held
        return node

    def _input(
        self,
        name: str,
        shape: tuple[object, ...],
        dtype: torch.dtype,
        device: torch.device,
        strides: tuple[object, ...] | None = None,
        replacing: fx.Node | None = None,
    ) -> fx.Node:
        """A new graph input, after the others or in the place of one."""
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(last if replacing is None else replacing):
            node = self.graph.placeholder(name)
        node.meta["example_value"] = compat.fake_tensor(
            self.fake_mode, shape, strides, dtype, device
        )
        static = replacing is None and strides is None
        compat.mark_input(node, static_address=static)
        return node


_FRESH = frozenset({"matmul", "mul", "div", "add", "sub", "masked_fill", "where", "softmax"})


def erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a replaced node and the pure computation that fed only it (the repetition of heads, scores, casts)."""
    if node.users or node.op not in ("call_function", "call_method"):
        return
    name = raw_name(node)
    writes = (
        name == "setitem"
        or (name.endswith("_") and not name.endswith("__"))
        or name in _IN_PLACE_OPERATORS
    )
    target = node.args[0] if node.args else None
    if writes and not (
        op(target) in _FRESH and isinstance(target, fx.Node) and set(target.users) == {node}
    ):
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        erase_unused(graph, source)


def rewrite(gm: fx.GraphModule, plans: list[LayerPlan], fake_mode: object) -> Rewritten:
    """Rewrite every plan whose decision is ``sparse``; ``gm`` is changed in place."""
    result = _Rewriter(gm, [plan for plan in plans if plan.decision == "sparse"], fake_mode).run()
    gm.graph.lint()
    gm.recompile()
    return result
