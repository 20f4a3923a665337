"""Page summaries, bound to the cache that they describe.

A state is found by the *object* that holds the cache (a tensor, or the storage of a growing buffer) through a weak
reference, never by address alone, and is freed with it. It is reset, which makes the next step summarise every page
anew, whenever the cache may have been written behind its back: another version counter, another memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hsa_compile import algorithms
from hsa_compile.ops.signs import signs_width
from hsa_compile.ops.summarize import NEVER


@dataclass(frozen=True)
class SummaryLayout:
    """Which summaries a site needs: the rule, and the shape of what it describes.

    ``pool_slots`` is 0 where attention reads the cache itself; else pages of a KV head that are held beside it.
    """

    algorithm: str
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    value_dim: int = 0
    pool_slots: int = 0
    signs: bool = False
    """Whether an index of the single tokens is kept beside (``hsa_compile.ops.select_tokens``)."""

    @property
    def width(self) -> int:
        return algorithms.summary_width(self.algorithm, self.head_dim)

    @property
    def covered_width(self) -> int:
        return algorithms.covered_width(self.algorithm)


class PageState:
    """Summary ``[B, Hkv, P, R]`` and coverage ``[B, Hkv, P, 2 or 3]`` of one cache tensor, and signs of its tokens.

    ``page_major`` storage keeps strides independent of the number of pages, so that a cache of growing length can be
    compiled once; otherwise pages of one KV head are contiguous.
    """

    def __init__(
        self, layout: SummaryLayout, batch: int, device: torch.device, page_major: bool
    ) -> None:
        self.layout, self.batch, self.device, self.page_major = layout, batch, device, page_major
        self.summary = self._allocate(0, layout.width, layout.dtype)
        self.covered = self._allocate(0, layout.covered_width, torch.int64)
        self.signs: Tensor | None = None
        if layout.signs:
            words = signs_width(layout.page_size, layout.head_dim)
            self.signs = self._allocate(0, words, torch.int64)
        self.seen: list[tuple[int | None, int]] | None = None
        self.pool: PagePool | None = None
        self.position: int | None = None
        """Where the last step wrote its token, as far as that was counted (``overrun``)."""

    def _allocate(self, pages: int, width: int, dtype: torch.dtype) -> Tensor:
        batch, heads = self.batch, self.layout.kv_heads
        with torch.inference_mode(False):
            if self.page_major:
                return torch.zeros(
                    (pages, batch, heads, width), dtype=dtype, device=self.device
                ).permute(1, 2, 0, 3)
            return torch.zeros((batch, heads, pages, width), dtype=dtype, device=self.device)

    def _grown(self, held: Tensor, room: int) -> Tensor:
        """``held`` with as many pages as there is ``room`` for, zeros behind its own."""
        larger = self._allocate(room, held.shape[3], held.dtype)
        larger[:, :, : held.shape[2]] = held
        return larger

    def views(self, pages: int) -> tuple[Tensor, ...]:
        """Summary and coverage of the first ``pages`` pages, and signs; grows where there are fewer."""
        have = self.summary.shape[2]
        if have < pages:
            room = max(pages, have + have // 2) if self.page_major else pages
            self.summary, self.covered = (
                self._grown(held, room) for held in (self.summary, self.covered)
            )
            self.covered[:, :, have:, 1] = NEVER
            if self.signs is not None:
                self.signs = self._grown(self.signs, room)
        held = (self.summary, self.covered, self.signs)
        return tuple(tensor[:, :, :pages] for tensor in held if tensor is not None)

    def inputs(self, pages: int) -> tuple[Tensor, ...]:
        """What the graph is given: summary and coverage of the first ``pages`` pages, and the pool."""
        if not self.layout.pool_slots:
            return self.views(pages)
        if self.pool is None:
            self.pool = PagePool(self.layout, self.batch, self.device, self.page_major)
        return (*self.views(pages), self.pool.table(pages), *self.pool.rest)

    def reset(self) -> None:
        """Forget what is covered: the next step summarises every page anew, and trusts no page of the pool."""
        self.covered[..., 1] = NEVER
        self.position = None

    @property
    def memory(self) -> set[int]:
        """Addresses of the storages that were described after the last step."""
        return {address for _, address in self.seen or ()}

    def bytes(self) -> int:
        signs = 0 if self.signs is None else self.signs.nbytes
        return self.summary.nbytes + self.covered.nbytes + signs


class PagePool:
    """Pages of one cache on the device (see ``hsa_compile.ops.diff``), empty at first.

    ``rest`` are, in the order of the graph's inputs: owner and used ``[B, Hkv, N]``, clock ``[B, Hkv]``, all int32, and
    keys and values ``[B, Hkv, N, T, D]``. The table is stored as summaries are (:class:`PageState`).
    """

    def __init__(
        self, layout: SummaryLayout, batch: int, device: torch.device, page_major: bool
    ) -> None:
        self.page_major = page_major
        rows, slots = (batch, layout.kv_heads), layout.pool_slots
        held = (*rows, slots, layout.page_size)
        with torch.inference_mode(False):
            self._table = torch.empty((*rows, 0), dtype=torch.int32, device=device)
            self.rest = (
                torch.full((*rows, slots), -1, dtype=torch.int32, device=device),
                torch.zeros((*rows, slots), dtype=torch.int32, device=device),
                torch.zeros(rows, dtype=torch.int32, device=device),
                torch.zeros((*held, layout.head_dim), dtype=layout.dtype, device=device),
                torch.zeros((*held, layout.value_dim), dtype=layout.dtype, device=device),
            )

    def table(self, pages: int) -> Tensor:
        """The slot of each page or -1, ``[B, Hkv, pages]`` int32; grows where there are fewer."""
        batch, heads, have = self._table.shape
        if have < pages:
            room = max(pages, have + have // 2) if self.page_major else pages
            with torch.inference_mode(False):
                shape = (room, batch, heads) if self.page_major else (batch, heads, room)
                table = self._table.new_full(shape, -1)
            if self.page_major:
                table = table.permute(1, 2, 0)
            table[:, :, :have] = self._table
            self._table = table
        return self._table[:, :, :pages]

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._table, *self.rest))


def version_of(tensor: Tensor) -> int | None:
    """The version counter; inference tensors have none."""
    return None if tensor.is_inference() else tensor._version


@dataclass
class _Owner:
    reference: weakref.ref[object]
    states: dict[Hashable, object] = field(default_factory=dict)


class Owners:
    """States by owner object: weakly referenced, so that they go when the owner goes."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}

    def of(self, owner: object) -> dict[Hashable, object]:
        """The states of ``owner``, created empty where there are none."""
        key = id(owner)
        entry = self._owners.get(key)
        if entry is None or entry.reference() is not owner:
            entry = _Owner(weakref.ref(owner, lambda gone: self._forget(key, gone)))
            self._owners[key] = entry
        return entry.states

    def peek(self, owner: object, key: Hashable) -> object:
        """One state of ``owner``, or None; creates nothing."""
        entry = self._owners.get(id(owner))
        return entry.states.get(key) if entry is not None and entry.reference() is owner else None

    def move(self, old: object, new: object) -> None:
        """Hand the states of ``old`` over to ``new``."""
        entry = self._owners.pop(id(old), None)
        if entry is not None and entry.reference() is old:
            self.of(new).update(entry.states)

    def _forget(self, key: int, gone: weakref.ref[object]) -> None:
        entry = self._owners.get(key)
        if entry is not None and entry.reference is gone:
            del self._owners[key]

    def states(self) -> list[object]:
        return [state for owner in self._owners.values() for state in owner.states.values()]


OWNERS = Owners()


def root_of(tensor: Tensor) -> Tensor:
    """The tensor whose memory and version counter a view shares; under inference mode, the view itself."""
    return tensor if tensor._base is None else tensor._base


def state_of(
    read: Sequence[Tensor],
    owner: object,
    layout: SummaryLayout,
    page_major: bool,
    geometry: Hashable,
) -> PageState:
    """The state of what attention reads, reset where its cache was written since the last step.

    Args:
        read: the tensors whose version and memory tell about outside writes: keys, and values where a pool holds some.
        owner: the object that the state lives with.
        geometry: what distinguishes this state from others of the same owner (offset, shape of the view).
    """
    states = OWNERS.of(owner)
    key = (layout, page_major, geometry)
    state = states.get(key)
    if not isinstance(state, PageState):
        batch = geometry[0]  # type: ignore[index]
        state = states[key] = PageState(layout, batch, read[0].device, page_major)
    elif state.seen != _look(read):
        state.reset()
    return state


def settle(state: PageState, read: Sequence[Tensor]) -> None:
    """Record, after a step, what the cache looks like when nobody else has written it."""
    state.seen = _look(read)


def _look(read: Sequence[Tensor]) -> list[tuple[int | None, int]]:
    """Version counter and address of each tensor."""
    return [(version_of(tensor), tensor.untyped_storage().data_ptr()) for tensor in read]


def summary_bytes() -> int:
    """Bytes of all live page summaries and their coverage."""
    return sum(state.bytes() for state in OWNERS.states() if isinstance(state, PageState))


def pool_bytes() -> int:
    """Bytes of all live pools of pages on devices, for caches with ``placement="host"``."""
    pools = [state.pool for state in OWNERS.states() if isinstance(state, PageState)]
    return sum(pool.bytes() for pool in pools if pool is not None)
