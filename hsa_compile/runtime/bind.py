"""From the nodes of a rewritten graph to positions of arguments: what :class:`Program` needs at every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from hsa_compile import compat
from hsa_compile.passes.positions import PositionOfWrite
from hsa_compile.passes.rewrite import Rewritten, SparseSite

from .monitor import Monitor, Read, Step, WatchedSite
from .overrun import OverrunCheck
from .program import CounterBlock, GrowingBinding, Program, SiteCounter, SizeReader, SummaryBinding
from .state import SummaryLayout


@dataclass(frozen=True)
class Bindings:
    """All bindings of one graph; :meth:`program` adds the compiled callable."""

    summaries: tuple[SummaryBinding, ...]
    growing: tuple[GrowingBinding, ...]
    blocks: tuple[CounterBlock, ...]
    outputs: int
    watched: tuple[tuple[torch.device, tuple[WatchedSite, ...]], ...] = ()

    def program(self, inner: Callable[..., Sequence[object]]) -> Program:
        monitors = tuple(Monitor(sites, device) for device, sites in self.watched)
        return Program(inner, self.summaries, self.growing, self.blocks, self.outputs, monitors)


def bind(
    original: fx.Graph, graph: fx.Graph, rewritten: Rewritten, example_inputs: Sequence[object]
) -> tuple[Bindings, list[object]]:
    """Bindings, and the inputs with which the rewritten graph is to be compiled.

    Args:
        original: Dynamo's graph, whose placeholders are the arguments of every call.
        graph: the rewritten graph; its first placeholders stand in the same order.
        example_inputs: Dynamo's inputs.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    at = {node: i for i, node in enumerate(placeholders)}
    traced = [node.meta.get("example_value") for node in original.nodes if node.op == "placeholder"]
    readers = compat.symbol_values(traced)
    grown = {held.view for held in rewritten.growing}
    inputs = [
        compat.compile_input(node.meta["example_value"])
        if i >= len(example_inputs) or node in grown
        else example_inputs[i]
        for i, node in enumerate(placeholders)
    ]
    outputs = next(iter(reversed(original.nodes))).args[0]
    names = [node.name if isinstance(node, fx.Node) else None for node in outputs]  # type: ignore[union-attr]
    owners = [site for site in rewritten.sites if site.owns_summary]
    summaries = tuple(
        _summary(site, what, at, readers, grown, names)
        for site in owners
        for what in (None, *site.plan.means)
    )
    summaries = _told_apart(summaries)
    return (
        Bindings(
            summaries,
            tuple(
                GrowingBinding(at[held.view], held.places, held.on_host, held.tokens)
                for held in rewritten.growing
            ),
            tuple(
                _block(rewritten, device, sites, readers) for device, _, sites in rewritten.counters
            ),
            len(names),
            _watched(rewritten, at, readers, grown),
        ),
        inputs,
    )


def _summary(
    site: SparseSite,
    means: str | None,
    at: dict[fx.Node, int],
    readers: Any,
    grown: set[fx.Node],
    outputs: list[str | None],
) -> SummaryBinding:
    """What describes the pages of a site: the summaries that they are scored by, or means of its keys or values."""
    policy, attention, of_values = site.plan.policy, site.plan.site.attention, means == "values"
    cache = site.plan.site.values if of_values else site.plan.site.keys
    read: Tensor = (attention.v if of_values else attention.k).meta["example_value"]
    batch, heads, tokens, size = read.shape
    pages = (tokens + policy.page_size - 1) // policy.page_size
    pool_slots = 0 if means else site.plan.pool_slots
    layout = SummaryLayout(
        "mean" if means else policy.score,
        policy.page_size,
        int(heads),
        int(size),
        read.dtype,
        int(attention.v.meta["example_value"].shape[3]) if pool_slots else 0,
        pool_slots,
        policy.indexes_tokens and not means,
    )
    base: Tensor = cache.base.meta["example_value"]
    offset = 0 if cache.kind == "dynamic" else read.storage_offset() - base.storage_offset()
    return SummaryBinding(
        argument=at[site.values_input if of_values else site.cache_input],
        layout=layout,
        batch=size_reader(batch, readers),
        pages=size_reader(pages, readers),
        page_major=site.page_major,
        offset=int(offset),
        growing=site.cache_input in grown,
        moves_to=outputs.index(cache.write.name) if cache.kind == "functional" else None,
        values=at[site.values_input] if pool_slots else None,
        only_read=cache.kind == "fixed",
        overrun=None if site.write is None else _overrun(site.write, at, readers),
    )


def _watched(
    rewritten: Rewritten, at: dict[fx.Node, int], readers: Any, grown: set[fx.Node]
) -> tuple[tuple[torch.device, tuple[WatchedSite, ...]], ...]:
    by_device: dict[torch.device, list[WatchedSite]] = {}
    for site in rewritten.watched:
        attention, policy = site.plan.site.attention, site.plan.policy
        reads = []
        for place, source, node in zip(
            (site.keys, site.values), site.view, (attention.k, attention.v), strict=True
        ):
            if place is not None:
                reads.append(_returned(place))
            elif source in grown:
                reads.append(_input(at[source]))
            else:
                reads.append(_view(at[source], source, node, readers))
        watched = WatchedSite(
            attention.where.index,
            attention.where.path,
            policy.monitor,
            policy.monitor_bound,
            attention.scale,
            attention.softcap,
            policy.page_size,
            _in_stack(site.q, site.at),
            _in_stack(site.out, site.at),
            _in_stack(site.lse, site.at),
            reads[0],
            reads[1],
            _returned(site.bits),
            None if site.bias is None else _returned(site.bias),
        )
        by_device.setdefault(attention.q.meta["example_value"].device, []).append(watched)
    return tuple((device, tuple(sites)) for device, sites in by_device.items())


def _returned(place: int) -> Read:
    return lambda step: step.returned[place]  # type: ignore[return-value]


def _in_stack(place: int, at: int) -> Read:
    return lambda step: step.returned[place][at]  # type: ignore[index]


def _input(argument: int) -> Read:
    return lambda step: step.inputs[argument]  # type: ignore[return-value]


def _view(argument: int, source: fx.Node, node: fx.Node, readers: Any) -> Read:
    """What attention reads of an input: the same view of the argument of each call."""
    whole, read = source.meta["example_value"], node.meta["example_value"]
    sizes = [size_reader(size, readers) for size in read.shape]
    strides = [size_reader(stride, readers) for stride in read.stride()]
    offset = int(read.storage_offset() - whole.storage_offset())

    def view(step: Step) -> Tensor:
        held: Tensor = step.inputs[argument]  # type: ignore[assignment]
        return held.as_strided(
            [size(step.arguments) for size in sizes],
            [stride(step.arguments) for stride in strides],
            held.storage_offset() + offset,
        )

    return view


def _overrun(write: PositionOfWrite, at: dict[fx.Node, int], readers: Any) -> OverrunCheck:
    arguments = tuple(at[node] for node in write.inputs)
    capacity = size_reader(write.capacity, readers)
    return OverrunCheck(write.compute, arguments, capacity, write.from_end, write.tokens)


def _told_apart(summaries: tuple[SummaryBinding, ...]) -> tuple[SummaryBinding, ...]:
    """Number the summaries of one cache, which differ in their masks."""
    times: Counter[tuple[object, ...]] = Counter()
    numbered = []
    for binding in summaries:
        key = (binding.argument, binding.offset, binding.layout)
        numbered.append(replace(binding, ordinal=times[key]))
        times[key] += 1
    return tuple(numbered)


def _block(
    rewritten: Rewritten, device: torch.device, sites: list[int], readers: Any
) -> CounterBlock:
    rows = []
    for i in sites:
        attention = rewritten.sites[i].plan.site.attention
        read = attention.k.meta["example_value"]
        batch, heads = read.shape[:2]
        where = attention.where
        plan = rewritten.sites[i].plan
        value = attention.v.meta["example_value"]
        token = (read.shape[3] + value.shape[3]) * read.element_size()
        page = int(token) * plan.policy.page_size if plan.pool_slots else 0
        counted = size_reader(batch, readers)
        rows.append(SiteCounter(where.index, where.path, int(heads), counted, page))
    return CounterBlock(device, tuple(rows), max(rewritten.sites[i].counted for i in sites))


def size_reader(size: Any, readers: Any) -> SizeReader:
    """A function that computes a traced size from the arguments of a call."""
    expr = compat.expression(size)
    if expr.is_number:
        constant = int(expr)
        return lambda arguments: constant
    symbols = sorted(expr.free_symbols, key=str)
    inputs = [readers[symbol] for symbol in symbols]
    if expr.is_symbol:
        return inputs[0]
    compute = sympy.lambdify(symbols, expr, modules=[{"FloorDiv": lambda a, b: a // b}, "math"])
    return lambda arguments: int(compute(*(read(arguments) for read in inputs)))
