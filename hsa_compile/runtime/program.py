"""The callable that the backend returns: binds state to caches, calls the compiled graph, puts its outputs together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .growing import with_room_for
from .host_tier import move_to_host
from .monitor import Monitor, Step
from .offload import join_all
from .overrun import OverrunCheck
from .state import OWNERS, PageState, SummaryLayout, root_of, settle, state_of

SizeReader = Callable[[Sequence[object]], int]
"""A size of the graph as a function of the call's arguments."""


@dataclass(frozen=True)
class SummaryBinding:
    """One site's summary: which argument holds its cache, and the shapes that this call needs."""

    argument: int
    layout: SummaryLayout
    batch: SizeReader
    pages: SizeReader
    page_major: bool
    offset: int
    growing: bool
    moves_to: int | None
    """Output that takes the cache's place, for functional updates."""
    values: int | None = None
    """Argument that holds the values, where the cache is placed on the host."""
    ordinal: int = 0
    """Which of several summaries of the same keys, under different masks, this is."""
    overrun: OverrunCheck | None = None
    only_read: bool = False
    """The graph does not write the cache: if it changes in a step all the same, the summary is not true to it."""

    def read(self, inputs: Sequence[object]) -> tuple[Tensor, ...]:
        """The tensors of the cache that the state depends on."""
        held = (inputs[self.argument], *(() if self.values is None else (inputs[self.values],)))
        return held  # type: ignore[return-value]


@dataclass(frozen=True)
class GrowingBinding:
    """One tensor of a growing cache: its argument becomes a view with room for ``tokens``, which is also an output."""

    argument: int
    outputs: tuple[int, ...]
    on_host: bool = False
    tokens: int = 1


@dataclass(frozen=True)
class SiteCounter:
    """Names a row of the counters, which are summed over batch rows and KV heads.

    They are tokens selected and attendable, and for a cache on the host the counts of ``hsa::diff``; ``page_bytes`` is
    what one page moves.
    """

    index: int
    path: str
    heads: int
    batch: SizeReader
    page_bytes: int = 0


@dataclass
class CounterBlock:
    """The counters of the sites on one device: ``[sites, width]`` int64, added to by the graph itself."""

    device: torch.device
    sites: tuple[SiteCounter, ...]
    width: int = 2
    rows: list[int] = field(default_factory=list)
    """For each site, batch rows x KV heads x steps so far: what the sums are to be divided by."""

    def __post_init__(self) -> None:
        with torch.inference_mode(False):
            self.values = torch.zeros(
                (len(self.sites), self.width), dtype=torch.int64, device=self.device
            )
        self.rows = [0] * len(self.sites)

    def step(self, arguments: Sequence[object]) -> None:
        for i, site in enumerate(self.sites):
            self.rows[i] += site.heads * site.batch(arguments)


class Program:
    """A compiled graph with its bindings; called by Dynamo with the arguments of the model's own graph."""

    def __init__(
        self,
        inner: Callable[..., Sequence[object]],
        summaries: tuple[SummaryBinding, ...],
        growing: tuple[GrowingBinding, ...],
        blocks: tuple[CounterBlock, ...],
        outputs: int,
        monitors: tuple[Monitor, ...] = (),
    ) -> None:
        self.monitors = monitors
        self.inner, self.summaries, self.growing, self.blocks = inner, summaries, growing, blocks
        self.outputs = outputs
        self.steps = 0
        self._hosted = any(binding.values is not None for binding in summaries)
        self._placed = {at for cache in growing for at in cache.outputs}
        self._own = outputs - len(self._placed)
        """What the graph returns of the model's outputs; behind them is what monitors read."""

    def __call__(self, *arguments: object) -> tuple[object, ...]:
        inputs = list(arguments)
        if self._hosted:
            join_all()
        for cache in self.growing:
            held: Tensor = inputs[cache.argument]  # type: ignore[assignment]
            inputs[cache.argument] = with_room_for(held, cache.tokens, cache.on_host)
        states = [self._state(binding, inputs, arguments) for binding in self.summaries]
        extra: list[Tensor] = []
        for binding, state in zip(self.summaries, states, strict=True):
            if binding.overrun is not None:
                binding.overrun(state, arguments)
            extra.extend(state.inputs(binding.pages(arguments)))
            if binding.only_read:
                settle(state, binding.read(inputs))
        results = self.inner(*inputs, *extra, *(block.values for block in self.blocks))
        results, returned = results[: self._own], results[self._own :]
        outputs = self._assemble(results, inputs)
        for binding, state in zip(self.summaries, states, strict=True):
            if binding.moves_to is not None:
                held, moved = inputs[binding.argument], outputs[binding.moves_to]
                OWNERS.move(root_of(held), root_of(moved))  # type: ignore[arg-type]
                inputs[binding.argument] = moved
            if not binding.only_read:
                settle(state, binding.read(inputs))
        for block in self.blocks:
            block.step(arguments)
        for monitor in self.monitors:
            monitor.after(Step(self.steps, arguments, inputs, returned))
        self.steps += 1
        return outputs

    @staticmethod
    def _state(
        binding: SummaryBinding, inputs: Sequence[object], arguments: Sequence[object]
    ) -> PageState:
        read = binding.read(inputs)
        if binding.values is not None:
            for tensor in read:
                move_to_host(tensor)
        held, batch = read[0], binding.batch(arguments)
        layout, page_major = binding.layout, binding.page_major
        if binding.growing:
            geometry: Hashable = (batch, binding.ordinal)
            return state_of(read, held.untyped_storage(), layout, page_major, geometry)
        offset = held.storage_offset() + binding.offset
        geometry = (batch, binding.ordinal, offset, held.stride())
        return state_of(read, root_of(held), layout, page_major, geometry)

    def _assemble(self, results: Sequence[object], inputs: Sequence[object]) -> tuple[object, ...]:
        """The model's outputs: the graph's, with views of growing buffers where it concatenated."""
        if not self._placed:
            return tuple(results)
        outputs: list[object] = [None] * self.outputs
        for cache in self.growing:
            for at in cache.outputs:
                outputs[at] = inputs[cache.argument]
        rest = iter(results)
        for at in range(self.outputs):
            if at not in self._placed:
                outputs[at] = next(rest)
        return tuple(outputs)
