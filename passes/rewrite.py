"""Rewrite planned sites into the ops, and cut growing caches loose from ``torch.cat``.

    before: index_copy_(keys, 2, pos, k); o = sdpa(q, repeat_kv(keys), repeat_kv(values), mask, scale)
    after:  index_copy_(keys, 2, pos, k); bits = page_mask(mask)
            summarize(keys, bits, pos, summary!, covered!); ids, counts = select(q, summary, bits, ...)
            o = sparse_attention(q, keys, values, ids, bits, bias, scale)

    and, with the cache in host memory:
            append(keys, values, k, v, bits, pos, covered!, table!, owner!, pool!); summarize(..., tail of the pool)
            ids, counts = select(...); slots, loads = diff(ids, pos, table!, owner!, used!, clock!)
            o = fetch_attention(q, keys, values, ids, slots, loads, ..., pool!)

    before: keys' = cat(keys, k); ...; return keys', ...
    after:  keys'[:, :, -1:] = k; ...; return ...          (keys' is an input now: a view with room for k)

    before: o = sparse_attention(q, ...)
    after:  summarize(values, bits, pos, means!, covered!, "mean"); ...; o, lse = sparse_attention(q, ...)
            o = estimate_rest(q, summary, means, ids, bits, bias of pages, o, lse)   (with unselected="centroids")

    before: o = sdpa(q, ...) of several query tokens, q [B, Hq, L, D]
    after:  ... select and sparse_attention of q as [B, Hq * L, 1, D]: more heads of the group; summarize(..., written)

The model's own write of a static cache stays as it is. ``summary``, ``covered`` and the counters become graph inputs,
which the runtime binds to the cache at every call.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from hsa_compile import algorithms, compat
from hsa_compile.ops.select import FRACTION_UNIT, forced_pages
from hsa_compile.ops.signs import signs_width
from hsa_compile.policy_checks import THREE_LEVEL
from hsa_compile.site import Attention, CacheUpdate, LayerPlan

from .emit import Emitter
from .graph_tools import modifies, op, tensor
from .masks import Masks
from .pools import Pool, append, attend, fetch_early, join, pool_inputs
from .positions import PositionOfWrite, Positions
from .results import as_before, sunk
from .tokens import refine, select_tokens, token_budget

_HSA = torch.ops.hsa


@dataclass(frozen=True)
class SparseSite:
    """One rewritten site, and what the runtime needs to bind its state.

    ``owns_summary`` is False where the site reads the summary of an earlier one: same keys, mask and pages.
    """

    plan: LayerPlan
    cache_input: fx.Node
    page_major: bool
    result: fx.Node
    owns_summary: bool
    values_input: fx.Node
    write: PositionOfWrite | None = None
    """Where the write's position is checked before a step rather than in it."""
    lse: fx.Node | None = None
    """What takes the place of the attention's log-sum-exp, where that is used."""

    @property
    def counted(self) -> int:
        """Numbers that are counted for it."""
        return 7 if self.plan.pool_slots else 2


@dataclass(frozen=True)
class State:
    """What is kept beside one cache."""

    summary: fx.Node
    covered: fx.Node
    signs: fx.Node | None
    pool: Pool | None
    means: tuple[fx.Node, ...] = ()
    """Of keys (what else is behind them in a row does not matter) and values, where the rest is estimated."""


@dataclass(frozen=True)
class _Inputs:
    """Graph inputs for what is kept beside one cache: summary and coverage of keys, those of ``LayerPlan.means``."""

    summary: fx.Node
    covered: fx.Node
    signs: fx.Node | None
    pool: Pool | None
    means: dict[str, tuple[fx.Node, fx.Node]]


@dataclass(frozen=True)
class GrownInput:
    """An input that is now a view with room for ``tokens`` more."""

    view: fx.Node
    places: tuple[int, ...]
    """The outputs of the model that it stands for."""
    on_host: bool
    tokens: int = 1


@dataclass(frozen=True)
class Watched:
    """One site that is measured: the places of its operands among the values that are returned for monitors.

    Queries, results and log-sum-exps are stacked for all sites that are alike; ``at`` is the site's place in a stack.
    Keys and values are there only where they are no views of an input (or of an output that takes its place).
    """

    plan: LayerPlan
    at: int
    q: int
    out: int
    lse: int
    bits: int
    bias: int | None
    keys: int | None
    values: int | None
    view: tuple[fx.Node, fx.Node]
    """The graph inputs that keys and values are views of, where they are."""


@dataclass
class Rewritten:
    """What the rewrite did to the graph."""

    sites: list[SparseSite] = field(default_factory=list)
    growing: list[GrownInput] = field(default_factory=list)
    counters: list[tuple[torch.device, fx.Node, list[int]]] = field(default_factory=list)
    """A device, its counter input ``[sites, 2 or 7]``, and the sites (indices into ``sites``) of its rows."""
    outputs: int = 0
    watched: list[Watched] = field(default_factory=list)
    """Sites whose quality is measured, and where the values after the model's own outputs are."""
    overlaps: bool = False
    """Whether pages are copied beside the step."""
    chosen: list[tuple[Attention, fx.Node]] = field(default_factory=list)
    """Attention to tokens that the model chose, and what gives its result now."""


@dataclass(frozen=True)
class _Early:
    """What is fetched for a layer one layer early: what the copy reads, and how many pages moved."""

    held: list[fx.Node]
    moved: fx.Node


class _Rewriter:
    def __init__(
        self, gm: fx.GraphModule, plans: list[LayerPlan], fake_mode: object, moves: bool
    ) -> None:
        self.gm, self.graph, self.plans, self.moves = gm, gm.graph, plans, moves
        self.emit = Emitter(gm.graph, fake_mode)
        self.masks = Masks(self.emit)
        self.positions = Positions(self.emit, plans)
        self.made: dict[object, fx.Node] = {}
        self.result = Rewritten()
        self.counts: list[tuple[fx.Node, fx.Node | None]] = []
        self.states: dict[tuple[object, ...], State] = {}
        self.ahead: dict[torch.device, list[fx.Node]] = {}
        self.early: dict[int, _Early] = {}
        self.watched: list[
            tuple[LayerPlan, tuple[fx.Node, ...], fx.Node | None, tuple[fx.Node, ...]]
        ] = []
        self.inputs: dict[int, _Inputs] = {}
        pooled = [plan.site for plan in plans if plan.pool_slots]
        self.on_host = {cache.write for site in pooled for cache in (site.keys, site.values)}

    def run(self) -> Rewritten:
        output = next(iter(reversed(self.graph.nodes)))
        self.result.outputs = len(output.args[0])  # type: ignore[arg-type]
        for at, plan in enumerate(self.plans):
            ahead = self.plans[at + 1].lookahead if at + 1 < len(self.plans) else None
            is_first = ahead is not None and ahead.anchor is plan.site.attention.out
            if is_first:
                self._look_ahead(at, at + 1)
            grown = plan.site.keys.kind == "dynamic"
            for cache in (plan.site.keys, plan.site.values):
                self.positions.guard(cache)
            write = self.positions.of_write(plan.site.keys)
            keys = self._grow(plan.site.keys) if grown else plan.site.attention.k
            values = self._grow(plan.site.values) if grown else plan.site.attention.v
            self._attention(at, keys, values, write)
            if ahead is not None and not is_first:
                self._look_ahead(at, at + 1)
        self._drop_outputs(output)
        self._count()
        self._watch(output)
        self.result.overlaps = bool(self.ahead or self.early)
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
        view = self.emit.input(
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
                before = self.emit.call(
                    operator.getitem, view, (slice(None), slice(None), slice(None, -cache.tokens))
                )
            old.replace_all_uses_with(before, delete_user_cb=lambda user: user is not cache.write)
        with self.graph.inserting_before(cache.write):
            last = self.emit.call(
                operator.getitem, view, (slice(None), slice(None), slice(-cache.tokens, None))
            )
            self.emit.method("copy_", last, cache.new)
        output = next(iter(reversed(self.graph.nodes)))
        places = tuple(i for i, node in enumerate(output.args[0]) if node is cache.write)  # type: ignore[arg-type]
        on_host = cache.write in self.on_host
        self.result.growing.append(GrownInput(view, places, on_host, cache.tokens))
        cache.write.replace_all_uses_with(view, delete_user_cb=lambda user: user is not output)
        self.made[cache.write] = view
        return view

    def _drop_outputs(self, output: fx.Node) -> None:
        taken = {place for grown in self.result.growing for place in grown.places}
        kept = tuple(node for i, node in enumerate(output.args[0]) if i not in taken)  # type: ignore[arg-type]
        output.args = (kept,)
        for plan in self.plans:
            for cache in (plan.site.keys, plan.site.values):
                if cache.kind == "dynamic" and cache.write in self.made and not cache.write.users:
                    self.graph.erase_node(cache.write)
                    self.graph.erase_node(cache.base)
                    self.made.pop(cache.write)

    # -- attention

    def _attention(
        self, at: int, keys: fx.Node, values: fx.Node, write: PositionOfWrite | None
    ) -> None:
        plan = self.plans[at]
        attention, policy = plan.site.attention, plan.policy
        read, q, out = tensor(attention.k), tensor(attention.q), tensor(attention.out)
        assert read is not None and q is not None and out is not None
        accumulates = algorithms.get(policy.score).accumulates
        with self.graph.inserting_before(attention.out):
            bias, bits = self.masks.packed(attention, keys, read, policy.page_size)
            position = self.positions.of(plan.site.keys, keys, read)
            query = self._as_heads(attention)
            described: tuple[object, ...] = (
                *(keys, bits, position, policy.score, policy.page_size),
                policy.indexes_tokens,
                *((values, plan.pool_slots) if plan.pool_slots else ()),
                # What its queries attended is its own.
                *((attention.out,) if accumulates else ()),
                *((values, plan.means) if plan.means else ()),
            )
            owns = described not in self.states
            if owns:
                self.states[described] = self._state(at, keys, values, bits, position)
            state = self.states[described]
            if policy.algorithm == THREE_LEVEL:
                selected = self._strided(plan, keys, read)
            elif state.signs is not None:
                index = (state.summary, state.signs)
                selected = select_tokens(self.emit, plan, query, keys, index, bits, bias)
            else:
                accumulated = (state.covered, policy.decay) if accumulates else ()
                selected = self.emit.call(
                    _HSA.select_accumulated.default if accumulates else _HSA.select.default,
                    *(query, state.summary, bits, *accumulated),
                    *self._rule(plan, keys),
                    *self._beyond(plan, bias),
                )
            ids = self.emit.call(operator.getitem, selected, 0)
            counts = self.emit.call(operator.getitem, selected, 1)
            capped = (attention.softcap,) if attention.softcap or policy.dense_below else ()
            ragged = (True,) if policy.dense_below else ()
            words, page_size = bits, policy.page_size
            if policy.granularity == "two_stage":
                refined = refine(self.emit, plan, query, keys, (ids, counts), bits, bias)
                ids = self.emit.call(operator.getitem, refined, 0)
                counts = self.emit.call(operator.getitem, refined, 1)
            if plan.tokens is not None:
                _, words = self.masks.packed(attention, keys, read, 1)
                page_size = 1
            rest = (attention.scale, page_size, *capped, *ragged)
            moved = None
            if state.pool is None:
                attended = self.emit.call(
                    _HSA.sparse_attention.default,
                    *(query, keys, values, ids, None, words, bias),
                    *rest,
                )
            else:
                attended, moved, held = attend(
                    *(self.emit, plan, keys, values, ids, position, (bits, bias), rest),
                    *(state.pool, self.moves),
                )
                if held:
                    self.ahead.setdefault(read.device, []).extend(held)
                if at in self.early:
                    moved = self.emit.call(operator.add, moved, self.early[at].moved)
            selection = attended
            if policy.estimates:
                attended = self._with_rest(plan, state, query, (ids, bits, bias), selection)
            result = self.emit.call(operator.getitem, attended, 0)
            if policy.monitor:
                lse = self.emit.call(operator.getitem, selection, 1)
                self.watched.append((plan, (query, result, lse, bits), bias, (keys, values)))
            if attention.queries > 1:
                apart = self.emit.method("unflatten", result, 1, (q.shape[1], attention.queries))
                result = self.emit.method("squeeze", apart, 3)
            if attention.sink is not None:
                lse = self.emit.method("unsqueeze", self._of_queries(attended, attention), -1)
                result = sunk(self.emit, result, lse, attention.sink)
            result = as_before(self.emit, result, attention)
            total = None if attention.lse is None else self._log2(attended, attention)
        result.meta["nn_module_stack"] = attention.out.meta.get("nn_module_stack")
        attention.out.replace_all_uses_with(result)
        if total is not None and attention.lse is not None:
            attention.lse.replace_all_uses_with(total)
        self.counts.append((counts, moved))
        grown = plan.site.keys.kind == "dynamic"
        inputs = (keys, values) if grown else (plan.site.keys.base, plan.site.values.base)
        self.result.sites.append(
            SparseSite(plan, inputs[0], plan.page_major, result, owns, inputs[1], write, total)
        )
        for other in list(attention.anchor.users):  # flex_attention has several results
            if other is not attention.out:
                erase_unused(self.graph, other)
        erase_unused(self.graph, attention.out)

    def _strided(self, plan: LayerPlan, keys: fx.Node, read: torch.Tensor) -> fx.Node:
        """Pages, or tokens as pages of one, by position; made once for layers that agree in the mask and the budget."""
        policy, held = plan.policy, keys.meta["example_value"]
        page_size = policy.page_size if plan.tokens is None else 1
        _, bits = self.masks.packed(plan.site.attention, keys, read, page_size)
        sizes = tuple(compat.expression(size) for size in held.shape[:3])
        budget = (plan.slots, plan.budget_pages, plan.fraction)
        if plan.tokens is not None:
            budget = (plan.tokens.slots, plan.tokens.budget, plan.tokens.fraction)
        key = ("strided", bits, sizes, page_size, *budget, policy.sink, plan.recent)
        if key not in self.made:
            batch, kv_heads = held.shape[:2]
            if not isinstance(batch, int):
                batch = self.emit.method("size", keys, 0)
            bought = (*self._budget(plan, keys), plan.fraction)
            if plan.tokens is not None:
                bought = token_budget(self.emit, plan, keys)
            self.made[key] = self.emit.call(
                _HSA.strided_pages.default,
                *(bits, batch, int(kv_heads), page_size, *bought, policy.sink, plan.recent),
            )
        return self.made[key]

    def _with_rest(
        self,
        plan: LayerPlan,
        state: State,
        query: fx.Node,
        read: tuple[fx.Node, fx.Node, fx.Node | None],
        selection: fx.Node,
    ) -> fx.Node:
        """Attention to the selection and an estimate of the rest; ``read`` are ids, packed mask and bias.

        Where single tokens were read, pages take part with those that were not.
        """
        call, attention = self.emit.call, plan.site.attention
        ids: fx.Node | None
        ids, bits, bias = read
        if plan.tokens is not None:
            heads = query.meta["example_value"].shape[1]
            bits, ids = call(_HSA.unread.default, bits, ids, heads, plan.policy.page_size), None
        if plan.ahead:
            ids = call(operator.getitem, ids, (..., slice(None, -plan.ahead)))
        out, lse = (call(operator.getitem, selection, i) for i in range(2))
        added = self.masks.of_pages(bias, plan.policy.page_size)
        prototypes = plan.policy.prototypes if plan.policy.algorithm == THREE_LEVEL else 0
        capped = (attention.softcap,) if attention.softcap or prototypes else ()
        rest = (attention.scale, *capped, *((prototypes,) if prototypes else ()))
        operands = (query, *state.means, ids, bits, added, out, lse)
        return call(_HSA.estimate_rest.default, *operands, *rest)

    def _as_heads(self, attention: Attention) -> fx.Node:
        """The query ``[B, Hq, L, D]`` as ``[B, Hq * L, 1, D]``: tokens are heads of one group, next to each other."""
        if attention.queries == 1:
            return attention.q
        key = ("query", attention.q)
        if key not in self.made:
            flat = self.emit.method("flatten", attention.q, 1, 2)
            self.made[key] = self.emit.method("unsqueeze", flat, 2)
        return self.made[key]

    def _of_queries(self, attended: fx.Node, attention: Attention) -> fx.Node:
        """The log-sum-exp ``[B, Hq, L]``, fp32."""
        lse = self.emit.call(operator.getitem, attended, 1)
        if attention.queries == 1:
            return lse
        apart = self.emit.method("unflatten", lse, 1, (-1, attention.queries))
        return self.emit.method("squeeze", apart, 3)

    def _log2(self, attended: fx.Node, attention: Attention) -> fx.Node:
        return self.emit.call(operator.truediv, self._of_queries(attended, attention), math.log(2))

    # -- state

    def _inputs(self, at: int) -> _Inputs:
        """Graph inputs for what is kept beside the cache of a site; made once."""
        if at in self.inputs:
            return self.inputs[at]
        plan = self.plans[at]
        attention, policy, number = plan.site.attention, plan.policy, len(self.inputs)
        size = attention.k.meta["example_value"].shape[3]

        def of_keys(name: str, width: int, dtype: torch.dtype | None = torch.int64) -> fx.Node:
            return self._of_pages(f"hsa_{name}_{number}", plan, attention.k, width, dtype)

        summary = of_keys("summary", algorithms.summary_width(policy.score, size), None)
        covered = of_keys("covered", algorithms.covered_width(policy.score))
        words = signs_width(policy.page_size, size)
        signs = of_keys("signs", words) if policy.indexes_tokens else None
        pool = pool_inputs(self.emit, plan, number) if plan.pool_slots else None
        means: dict[str, tuple[fx.Node, fx.Node]] = {}
        for what in plan.means:
            held = attention.k if what == "keys" else attention.v
            width = held.meta["example_value"].shape[3]
            means[what] = (
                self._of_pages(f"hsa_means_{what}_{number}", plan, held, width),
                self._of_pages(f"hsa_covered_{what}_{number}", plan, held, 2, torch.int64),
            )
        self.inputs[at] = _Inputs(summary, covered, signs, pool, means)
        return self.inputs[at]

    def _of_pages(
        self,
        name: str,
        plan: LayerPlan,
        cache: fx.Node,
        width: int,
        dtype: torch.dtype | None = None,
    ) -> fx.Node:
        """An input ``[B, Hkv, P, width]`` for the pages of ``cache``, in its dtype by default."""
        read = cache.meta["example_value"]
        batch, heads, tokens, _ = read.shape
        pages = (tokens + plan.policy.page_size - 1) // plan.policy.page_size
        strides = (heads * width, width, batch * heads * width, 1) if plan.page_major else None
        shape = (batch, heads, pages, width)
        return self.emit.input(name, shape, dtype or read.dtype, read.device, strides)

    def _state(
        self, at: int, keys: fx.Node, values: fx.Node, bits: fx.Node, position: fx.Node
    ) -> State:
        """The inputs that describe the keys, and the ops that keep them true."""
        plan, early = self.plans[at], self.early.get(at)
        policy = plan.policy
        inputs = self._inputs(at)
        summary, covered, signs, pool = inputs.summary, inputs.covered, inputs.signs, inputs.pool
        tail: tuple[fx.Node, ...] = ()
        if pool is not None:
            if early is not None:
                join(self.emit, early.held, pool.table, early.moved)
            tail = (append(self.emit, plan, keys, values, bits, position, covered, pool),)
        arguments = (keys, bits, position, summary, covered, policy.score, policy.page_size)
        written = plan.site.keys.tokens
        rest: tuple[object, ...] = tail if written == 1 else (None, written)
        rest = rest if signs is None else (None, written, signs)
        self.emit.call(_HSA.summarize.default, *arguments, *rest)
        # These read their page from the cache even where a pool holds it: which of it to trust is known of keys alone.
        rest = () if written == 1 else (None, written)
        for what, (held, its) in inputs.means.items():
            cache = keys if what == "keys" else values
            arguments = (cache, bits, position, held, its, "mean", policy.page_size)
            self.emit.call(_HSA.summarize.default, *arguments, *rest)
        means = {"keys": summary} | {what: held for what, (held, _) in inputs.means.items()}
        of_both = (means["keys"], means["values"]) if plan.means else ()
        return State(summary, covered, signs, pool, of_both)

    def _look_ahead(self, at: int, later: int) -> None:
        """Around the attention of one layer, guess the query of a later one and fetch what it would select."""
        plan, now = self.plans[later], self.plans[at]
        ahead = plan.lookahead
        if ahead is None or not self.moves:
            return
        self._inputs(at)  # the inputs stand in the order of the layers
        summary, pool = self._inputs(later).summary, self._inputs(later).pool
        assert pool is not None
        read, mine = (tensor(p.site.attention.k) for p in (plan, now))
        assert read is not None and mine is not None
        with self.graph.inserting_before(ahead.anchor):
            keys = plan.site.keys.base
            _, bits = self.masks.packed(plan.site.attention, keys, read, plan.policy.page_size)
            position = self.positions.of(now.site.keys, now.site.attention.k, mine)
            rule = (*self._rule(plan, keys), *plan.policy.stops)
            held, moved = fetch_early(self.emit, plan, summary, bits, position, pool, rule)
        self.early[later] = _Early(held, moved)

    def _rule(self, plan: LayerPlan, keys: fx.Node) -> tuple[object, ...]:
        """What ``select`` is told, behind its tensors."""
        policy = plan.policy
        return (
            *(plan.site.attention.scale, policy.algorithm, policy.page_size),
            *self._budget(plan, keys),
            *(plan.fraction, policy.sink, plan.recent, policy.group_reduce),
        )

    def _beyond(self, plan: LayerPlan, bias: fx.Node | None) -> tuple[object, ...]:
        """What ``select`` is told behind that, as far as it is not the default."""
        pages = None if bias is None else self.masks.of_pages(bias, plan.policy.page_size)
        if plan.policy.stops:
            return (plan.ahead, pages, *plan.policy.stops)
        return (plan.ahead, *(() if pages is None else (pages,))) if plan.ahead or pages else ()

    def _budget(self, plan: LayerPlan, keys: fx.Node) -> tuple[object, object]:
        if plan.slots:
            return plan.slots, plan.budget_pages
        # All of them, or as many as the fraction buys.
        share = FRACTION_UNIT if plan.policy.dense_below else plan.fraction
        unit = plan.policy.page_size * FRACTION_UNIT
        tokens = self.emit.method("size", keys, 2)
        scaled = self.emit.call(operator.add, self.emit.call(operator.mul, tokens, share), unit - 1)
        pages = self.emit.call(operator.floordiv, scaled, unit)
        if plan.policy.dense_below:
            return pages, plan.budget_pages
        forced = forced_pages(plan.policy.sink, plan.recent, plan.policy.page_size)
        return self.emit.call(operator.add, pages, forced), 0  # the fraction is the budget

    # -- monitors

    def _watch(self, output: fx.Node) -> None:
        """Return what monitors need behind the model's own outputs: one value for all sites that are alike."""
        alike: dict[object, list[int]] = {}
        for i, (_, operands, _, _) in enumerate(self.watched):
            held = [tensor(node) for node in operands[:3]]
            key = [
                (tuple(map(compat.expression, one.shape)), one.dtype, one.device)
                for one in held
                if one is not None
            ]
            alike.setdefault(tuple(key), []).append(i)
        returned: list[fx.Node] = []

        def place(node: fx.Node) -> int:
            if node not in returned:
                returned.append(node)
            return returned.index(node)

        with self.graph.inserting_before(output):
            for sites in alike.values():
                stacks = [
                    place(self.emit.call(torch.stack, [self.watched[i][1][part] for i in sites]))
                    for part in range(3)
                ]
                for at, i in enumerate(sites):
                    plan, operands, bias, read = self.watched[i]
                    caches = (plan.site.keys, plan.site.values)
                    sources = [
                        node if cache.kind == "dynamic" else cache.base
                        for cache, node in zip(caches, read, strict=True)
                    ]
                    copies = [
                        None if compat.same_memory(tensor(node), tensor(source)) else place(node)
                        for node, source in zip(read, sources, strict=True)
                    ]
                    self.result.watched.append(
                        Watched(
                            plan,
                            at,
                            q=stacks[0],
                            out=stacks[1],
                            lse=stacks[2],
                            bits=place(operands[3]),
                            bias=None if bias is None else place(bias),
                            keys=copies[0],
                            values=copies[1],
                            view=(sources[0], sources[1]),
                        )
                    )
        output.args = ((*output.args[0], *returned),)  # type: ignore[misc]

    # -- counters

    def _count(self) -> None:
        output = next(iter(reversed(self.graph.nodes)))
        by_device: dict[torch.device, list[int]] = {}
        for i, site in enumerate(self.result.sites):
            held = tensor(site.plan.site.attention.q)
            assert held is not None
            by_device.setdefault(held.device, []).append(i)
        for number, (device, sites) in enumerate(by_device.items()):
            width = max(self.result.sites[i].counted for i in sites)
            alike: dict[object, list[int]] = {}
            for i in sites:
                shape = map(compat.expression, self.counts[i][0].meta["example_value"].shape)
                alike.setdefault((*shape, self.result.sites[i].counted), []).append(i)
            counter = self.emit.input(
                f"hsa_counters_{number}", (len(sites), width), torch.int64, device
            )
            with self.graph.inserting_before(output):
                sums = [self._sums(group, width) for group in alike.values()]
                if device in self.ahead:
                    join(self.emit, self.ahead[device], counter)
                added = sums[0] if len(sums) == 1 else self.emit.call(torch.cat, sums)
                self.emit.method("add_", counter, added)
            rows = [i for group in alike.values() for i in group]
            self.result.counters.append((device, counter, rows))

    def _sums(self, sites: list[int], width: int) -> fx.Node:
        """Sums over rows and KV heads ``[sites, width]``: tokens selected and attendable, then the counts of ``diff``.

        Of all sites at once, which is two kernels and not two a site.
        """
        call = self.emit.call
        kinds = zip(*(self.counts[i] for i in sites), strict=True)
        sums = [
            call(torch.sum, call(torch.stack, list(kind)), (1, 2))
            for kind in kinds
            if kind[0] is not None
        ]
        joined = sums[0] if len(sums) == 1 else call(torch.cat, sums, 1)
        counted = self.result.sites[sites[0]].counted
        if counted == width:
            return joined
        return call(torch.nn.functional.pad, joined, (0, width - counted))


_FRESH = frozenset({"matmul", "mul", "div", "add", "sub", "masked_fill", "where", "softmax"})


def erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a replaced node and the pure computation that fed only it (the repetition of heads, scores, casts)."""
    if node.users or node.op not in ("call_function", "call_method", "get_attr"):
        return
    target = node.args[0] if node.args else None
    if modifies(node) and not (
        op(target) in _FRESH and isinstance(target, fx.Node) and set(target.users) == {node}
    ):
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        if source in graph.nodes:
            erase_unused(graph, source)


def rewrite(
    gm: fx.GraphModule, plans: list[LayerPlan], fake_mode: object, moves: bool = True
) -> Rewritten:
    """Rewrite every plan whose decision is ``sparse``; ``gm`` is changed in place.

    Without ``moves`` pages are not brought into the pools, and what is attended is garbage: for benchmarks.
    """
    sparse = [plan for plan in plans if plan.decision == "sparse"]
    result = _Rewriter(gm, sparse, fake_mode, moves).run()
    gm.delete_all_unused_submodules()
    gm.graph.lint()
    gm.recompile()
    return result
