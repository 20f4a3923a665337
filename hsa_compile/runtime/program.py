"""The callable that the backend returns: binds state to caches, calls the compiled graph, puts its outputs together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .growing import with_room_for_one
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
    ordinal: int = 0
    """Which of several summaries of the same keys, under different masks, this is."""


@dataclass(frozen=True)
class GrowingBinding:
    """One tensor of a growing cache: its argument becomes a view with room for one token, which is also an output."""

    argument: int
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class SiteCounter:
    """Names a row of the counters: ``[tokens selected, tokens attendable]``, summed over batch rows and KV heads."""

    index: int
    path: str
    heads: int
    batch: SizeReader


@dataclass
class CounterBlock:
    """The counters of the sites on one device: ``[sites, 2]`` int64, added to by the graph itself."""

    device: torch.device
    sites: tuple[SiteCounter, ...]
    rows: list[int] = field(default_factory=list)
    """For each site, batch rows x KV heads x steps so far: what the sums are to be divided by."""

    def __post_init__(self) -> None:
        with torch.inference_mode(False):
            self.values = torch.zeros((len(self.sites), 2), dtype=torch.int64, device=self.device)
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
    ) -> None:
        self.inner, self.summaries, self.growing, self.blocks = inner, summaries, growing, blocks
        self.outputs = outputs
        self.steps = 0
        self._placed = {at for cache in growing for at in cache.outputs}

    def __call__(self, *arguments: object) -> tuple[object, ...]:
        inputs = list(arguments)
        for cache in self.growing:
            inputs[cache.argument] = with_room_for_one(inputs[cache.argument])  # type: ignore[arg-type]
        states = [
            self._state(binding, inputs[binding.argument], arguments) for binding in self.summaries
        ]
        extra: list[Tensor] = []
        for binding, state in zip(self.summaries, states, strict=True):
            extra.extend(state.views(binding.pages(arguments)))
        results = self.inner(*inputs, *extra, *(block.values for block in self.blocks))
        outputs = self._assemble(results, inputs)
        for binding, state in zip(self.summaries, states, strict=True):
            held = inputs[binding.argument]
            if binding.moves_to is not None:
                moved = outputs[binding.moves_to]
                OWNERS.move(root_of(held), root_of(moved))  # type: ignore[arg-type]
                held = moved
            settle(state, held)  # type: ignore[arg-type]
        for block in self.blocks:
            block.step(arguments)
        self.steps += 1
        return outputs

    @staticmethod
    def _state(binding: SummaryBinding, held: object, arguments: Sequence[object]) -> PageState:
        assert isinstance(held, Tensor)
        batch = binding.batch(arguments)
        if binding.growing:
            geometry: Hashable = (batch, binding.ordinal)
            return state_of(
                held, held.untyped_storage(), binding.layout, binding.page_major, geometry
            )
        offset = held.storage_offset() + binding.offset
        geometry = (batch, binding.ordinal, offset, held.stride())
        return state_of(held, root_of(held), binding.layout, binding.page_major, geometry)

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
