"""Pools of pages for the tests of ``diff`` and ``fetch``: their state, random decoding, and a model of the rule."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hsa_compile.ops.diff import AHEAD, EVICTIONS, FIRST_HITS, LOADS, MISSING, diff_reference
from hsa_compile.ops.fetch import fetch_reference

Diff = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class PoolShape:
    """``selected`` is K, ``more`` M, ``slots`` N; ``early``: what may be selected is asked for before each step."""

    selected: int = 6
    slots: int = 12
    pages: int = 40
    batch: int = 2
    kv_heads: int = 2
    page: int = 16
    page_major: bool = False
    more: int = 0
    early: bool = False


@dataclass(frozen=True)
class PoolState:
    table: Tensor
    owner: Tensor
    used: Tensor
    clock: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.table, self.owner, self.used, self.clock

    def clone(self) -> PoolState:
        return PoolState(*(x.clone() for x in self.tensors()))


def new_state(shape: PoolShape) -> PoolState:
    rows = (shape.batch, shape.kv_heads)
    table = torch.full((*rows, shape.pages), -1, dtype=torch.int32)
    if shape.page_major:
        table = table.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    owner = torch.full((*rows, shape.slots), -1, dtype=torch.int32)
    # What a slot without a page was used for is nobody's business.
    used = torch.randint(-9, 99, owner.shape, dtype=torch.int32)
    return PoolState(table, owner, used, torch.zeros(rows, dtype=torch.int32))


def select_some(last: set[int], newest: int, shape: PoolShape) -> list[int]:
    """A selection much like the last one, with the newest page in it; now and then few pages, or others."""
    kind = float(torch.rand(()))
    count = shape.selected if kind < 0.7 else int(torch.randint(1, shape.selected + 1, ()))
    share = 0.8 if kind < 0.9 else 0.0
    kept = [page for page in sorted(last) if page <= newest and torch.rand(()) < share]
    order = [page for page in torch.randperm(newest + 1).tolist() if page not in kept]
    return sorted({newest, *([*kept, *order][: count - 1])})


def selections(shape: PoolShape, steps: int, ahead: float = 0.0) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and position, step by step: tokens one after another, now and then from another place on.

    A share ``ahead`` of the selections has its newest page at or after the position's, which then need not be selected.
    Behind the selected pages stand up to ``shape.more`` others, which the next selection likes as much.
    """
    rows = [(b, h) for b in range(shape.batch) for h in range(shape.kv_heads)]
    last: dict[tuple[int, int], set[int]] = {row: set() for row in rows}
    capacity = shape.pages * shape.page
    apart = shape.batch > 1 and bool(torch.rand(()) < 0.5)
    position = torch.randint(0, capacity, (shape.batch if apart else 1,))
    for _ in range(steps):
        position = (position + 1) % capacity
        if torch.rand(()) < 0.1:
            position = torch.randint(0, capacity, position.shape)
        if torch.rand(()) < 0.1:
            position = position // shape.page * shape.page
        named = shape.selected + shape.more
        ids = torch.full((shape.batch, shape.kv_heads, named), -1, dtype=torch.int32)
        for b, h in rows:
            newest = int(position[b % len(position)]) // shape.page
            if torch.rand(()) < ahead:
                newest = int(torch.randint(newest, shape.pages, ()))
            chosen = select_some(last[b, h], newest, shape)
            if torch.rand(()) < 0.02:
                chosen = []  # a row whose mask is empty
            ids[b, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            left = [page for page in torch.randperm(shape.pages).tolist() if page not in chosen]
            others = sorted(left[: int(torch.randint(0, shape.more + 1, ()))])
            places = slice(shape.selected, shape.selected + len(others))
            ids[b, h, places] = torch.tensor(others, dtype=torch.int32)
            last[b, h] = {*chosen, *others}
        yield ids, position


def make_stale(state: PoolState, share: float) -> Tensor:
    """Take random pages out of the pool as ``summarize`` does; returns which."""
    stale = torch.rand(state.table.shape) < share
    state.table.masked_fill_(stale, -1)
    return stale


def move_tail(
    state: PoolState, position: Tensor, page: int, dropped: Tensor
) -> tuple[Tensor, Tensor]:
    """The last slot becomes that of the position's page, as ``append`` has it; now and then it holds all of the page.

    Returns what is dropped, with the pages that this took out of the pool, and the rows whose page is in it by this.
    """
    table, owner, last = state.table, state.owner, state.owner.shape[2] - 1
    dropped, opened = dropped.clone(), torch.zeros(owner.shape[:2], dtype=torch.bool)
    for b in range(table.shape[0]):
        tail, token = divmod(int(position[b % len(position)]), page)
        for h in range(table.shape[1]):
            old = int(owner[b, h, last])
            if old != tail or table[b, h, tail] != last:
                opened[b, h] = token == 0 and torch.rand(()) < 0.5
                dropped[b, h, [tail, max(old, 0)] if old >= 0 else tail] = True
                table[b, h, tail] = last if opened[b, h] else -1
            owner[b, h, last] = tail
    return dropped, opened


class Recency:
    """One row's pool as a cache that evicts by recency: pages in the order of their last use, and their slots.

    The last slot is the tail's alone. ``proven`` are pages that were selected since they were loaded.
    """

    def __init__(self, slots: int) -> None:
        self.pages: OrderedDict[int, int] = OrderedDict()
        self.proven: set[int] = set()
        self.last = slots - 1
        self.empty = set(range(self.last))

    def drop(self, pages: list[int]) -> None:
        for page in pages:
            slot = self.pages.pop(page, self.last)
            self.proven.discard(page)
            self.empty |= {slot} - {self.last}

    def step(
        self, selected: list[int], others: list[int], tail: int
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Loads, and the counts; afterwards ``pages`` has the slots."""
        others = [page for page in others if page != tail]
        asked = (*selected, *others)
        missing = [page for page in asked if page not in self.pages]
        hits = [page for page in selected if page in self.pages]
        first = [page for page in hits if page not in self.proven and page != tail]
        need_slots = [page for page in missing if page != tail]
        taken = sorted(self.empty)[: len(need_slots)]
        self.empty -= set(taken)
        unused = [page for page in self.pages if page not in asked and page != tail]
        evicted = unused[: len(need_slots) - len(taken)]
        self.proven -= set(evicted)
        taken = sorted(taken + [self.pages.pop(page) for page in evicted])
        self.pages |= dict(zip(need_slots, taken, strict=True))
        self.pages |= {tail: self.last} if tail in missing else {}
        self.proven |= set(selected)
        for page in sorted(asked, key=lambda page: (page in self.proven, self.pages[page])):
            self.pages.move_to_end(page)
        loads = [(page, self.pages[page]) for page in missing]
        demanded = len([page for page in missing if page in selected])
        ahead = len(missing) - demanded
        return loads, [len(hits), demanded, len(evicted), ahead, len(first)]


def padded(entries: list[object], like: Tensor) -> Tensor:
    result = torch.full_like(like, -1)
    if entries:
        result[: len(entries)] = torch.tensor(entries, dtype=like.dtype)
    return result


def check_invariants(state: PoolState, ids: Tensor, slots: Tensor, more: int = 0) -> None:
    """Pages are in the slots named, no two in one, and every table entry names the slot of its page."""
    table, owner = state.table.long(), state.owner
    valid, selected = slots >= 0, ids.shape[-1] - more
    assert torch.equal(valid[..., :selected], ids[..., :selected] >= 0)
    assert not (valid & (ids < 0)).any()
    held = owner.gather(-1, slots.clamp(min=0).long())
    assert torch.equal(held[valid], ids[valid])
    entry = table.gather(-1, ids.clamp(min=0).long())
    assert torch.equal(entry[valid], slots[valid].long())
    # Former tails may name the last slot.
    resident = (table >= 0) & (table < owner.shape[-1] - 1)
    pages = torch.arange(table.shape[-1]).expand_as(table)
    assert torch.equal(owner.gather(-1, table.clamp(min=0))[resident].long(), pages[resident])
    for row, named in zip(table.flatten(0, 1), resident.flatten(0, 1), strict=True):
        assert len(row[named].unique()) == int(named.sum())


def compare_diff(
    diff: Diff,
    shape: PoolShape,
    state: PoolState,
    rows: list[list[Recency]],
    ids: Tensor,
    position: Tensor,
    more: int,
) -> Tensor:
    """One call is what the specification and the model of the rule make of it; returns its counts."""
    want = state.clone()
    before = ids.clone(), position.clone()
    got = diff(ids, position, shape.page, *state.tensors(), more)
    expected = diff_reference(ids, position, shape.page, *want.tensors(), more)
    assert torch.equal(ids, before[0]) and torch.equal(position, before[1])
    for name, a, b in zip(("slots", "loads", "counts"), got, expected, strict=True):
        assert a.dtype == torch.int32 and torch.equal(a, b), f"{name}: {a} instead of {b}"
    assert torch.equal(state.table, want.table) and torch.equal(state.owner, want.owner)
    # The last slot's is of no meaning.
    assert torch.equal(state.used[..., :-1], want.used[..., :-1])
    assert torch.equal(state.clock, want.clock)
    slots, loads, counts = got
    missing = slots >= MISSING
    assert torch.equal(missing.sum(-1), counts[..., LOADS] + counts[..., AHEAD])
    slots = slots - MISSING * missing
    check_invariants(state, ids, slots, more)
    selects = ids.shape[-1] - more
    for b, row in enumerate(rows):
        tail = int(position[b % len(position)]) // shape.page
        for h, recency in enumerate(row):
            named = ids[b, h].tolist()
            selected = [page for page in named[:selects] if page >= 0]
            others = [page for page in named[selects:] if page >= 0]
            to_load, counted = recency.step(selected, others, tail)
            left_out = {tail, -1} if tail not in selected else {-1}
            in_slots = [-1 if page in left_out else recency.pages[page] for page in named]
            assert slots[b, h].tolist() == in_slots
            assert ids[b, h][missing[b, h]].tolist() == [page for page, _ in to_load]
            assert torch.equal(loads[b, h], padded(to_load, loads[b, h]))
            assert counts[b, h].tolist() == counted
    return counts


def check_diff(diff: Diff, shape: PoolShape, steps: int, stale: float = 0.02) -> None:
    """Decode at random; every step is what the specification and the model of the rule make of it."""
    state = new_state(shape)
    rows = [[Recency(shape.slots) for _ in range(shape.kv_heads)] for _ in range(shape.batch)]
    evictions = first_hits = 0
    for ids, position in selections(shape, steps, ahead=0.1):
        dropped = make_stale(state, stale if torch.rand(()) < 0.5 else 0.0)
        dropped, opened = move_tail(state, position, shape.page, dropped)
        for b, row in enumerate(rows):
            tail = int(position[b % len(position)]) // shape.page
            for h, recency in enumerate(row):
                recency.drop(dropped[b, h].nonzero().flatten().tolist())
                recency.pages |= {tail: recency.last} if opened[b, h] else {}
        if shape.early:
            guess = ids[..., : shape.selected].clone()
            guess[torch.rand(guess.shape) < 0.3] = -1
            compare_diff(diff, shape, state, rows, guess, position, guess.shape[-1])
        counts = compare_diff(diff, shape, state, rows, ids, position, shape.more)
        evictions += int(counts[..., EVICTIONS].sum())
        first_hits += int(counts[..., FIRST_HITS].sum())
    if (shape.more or shape.early) and steps > 20:
        assert first_hits > 0
    if shape.pages > 2 * shape.slots and stale < 0.1 and steps > 20:
        assert evictions > 0


Fetch = Callable[..., None]
LAYOUTS = ("head-major", "token-major", "interleaved")


@dataclass(frozen=True)
class CacheShape:
    """A cache, and how many pages of each row are to be loaded (at random where ``loads`` is None)."""

    batch: int = 2
    kv_heads: int = 2
    tokens: int = 100
    dim: int = 64
    value_dim: int = 64
    page: int = 16
    slots: int = 9
    selected: int = 5
    loads: int | None = None
    layout: str = "head-major"
    dtype: torch.dtype = torch.bfloat16


def make_caches(shape: CacheShape) -> tuple[Tensor, Tensor]:
    """Keys and values; ``interleaved`` has the value of a token beside its key, ``token-major`` all heads of it."""
    batch, heads, tokens = shape.batch, shape.kv_heads, shape.tokens
    if shape.layout == "interleaved":
        both = torch.randn(batch, heads, tokens, shape.dim + shape.value_dim).to(shape.dtype)
        return both[..., : shape.dim], both[..., shape.dim :]
    if shape.layout == "token-major":
        keys, values = (
            torch.randn(tokens + 3, batch, heads, dim).to(shape.dtype)[:tokens].permute(1, 2, 0, 3)
            for dim in (shape.dim, shape.value_dim)
        )
        return keys, values
    keys, values = (
        torch.randn(batch, heads, tokens, dim).to(shape.dtype)
        for dim in (shape.dim, shape.value_dim)
    )
    return keys, values


def make_pools(shape: CacheShape) -> tuple[Tensor, Tensor]:
    """Pools of garbage."""
    rows = (shape.batch, shape.kv_heads, shape.slots, shape.page)
    keys, values = (torch.randn(*rows, dim).to(shape.dtype) for dim in (shape.dim, shape.value_dim))
    return keys, values


def check_fetch(fetch: Fetch, shape: CacheShape, ahead: bool = False) -> None:
    """Every slot named gets its page; nothing else changes, and nothing past the cache is read.

    Args:
        ahead: ``fetch`` is ``hsa::prefetch``, whose entries stand behind some of the others.
    """
    keys, values = make_caches(shape)
    pages = -(-shape.tokens // shape.page)
    rows = (shape.batch, shape.kv_heads)
    # What stands before and after the loads is not to be acted upon.
    loads = torch.full((*rows, shape.selected + 3, 2), 2**30, dtype=torch.int32)
    counts = torch.randint(0, 99, (*rows, 5), dtype=torch.int32)
    most = min(shape.selected, pages)
    for b in range(shape.batch):
        for h in range(shape.kv_heads):
            count = shape.loads if shape.loads is not None else int(torch.randint(0, most + 1, ()))
            chosen = torch.randperm(pages)[:count].sort().values
            if count:
                chosen[-1] = pages - 1
            first = int(torch.randint(0, 4, ())) if ahead else 0
            loads[b, h, first : first + count, 0] = chosen
            loads[b, h, first : first + count, 1] = torch.randperm(shape.slots)[:count]
            counts[b, h, LOADS] = first if ahead else count
            counts[b, h, AHEAD] = count if ahead else counts[b, h, AHEAD]
    pools = make_pools(shape)
    want = [pool.clone() for pool in pools]
    fetch_reference(keys, values, loads, counts, want[0], want[1], shape.page, ahead)
    fetch(keys, values, loads, counts, *pools, shape.page)
    for pool, expected in zip(pools, want, strict=True):
        assert torch.equal(pool, expected)
