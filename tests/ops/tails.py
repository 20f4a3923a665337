"""Decoding with the cache on one side and a pool on the other: random requests, and all that may happen to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa_compile import algorithms
from hsa_compile.ops.append import append_reference
from hsa_compile.ops.diff import HITS, LOADS
from hsa_compile.ops.page_mask import page_mask
from hsa_compile.ops.summarize import NEVER, expected

MASKS = ("causal", "window", "padding", "ahead", "within", "per-head", "nothing", "full")


@dataclass(frozen=True)
class Ops:
    append: Callable[..., Any]
    summarize: Callable[..., Any]
    select: Callable[..., Any]
    diff: Callable[..., Any]
    attend: Callable[..., Any]
    fetch_attend: Callable[..., Any]


@dataclass(frozen=True)
class Request:
    """``selected`` is K, ``slots`` N; ``apart``: a position a row of the batch; ``growing``: no spare capacity."""

    selected: int = 4
    slots: int = 5
    pages: int = 12
    page: int = 16
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    dim: int = 8
    value_dim: int = 12
    algorithm: str = "quest"
    apart: bool = False
    growing: bool = False
    events: float = 0.15
    masks: tuple[str, ...] = MASKS
    dtype: torch.dtype = torch.float32

    @property
    def capacity(self) -> int:
        return self.pages * self.page - 3


def layer(
    ops: Ops,
    request: Request,
    selection: tuple[object, ...],
    q: Tensor,
    new: list[Tensor],
    bits: Tensor,
    host: list[Tensor],
    at: Tensor,
    state: list[Tensor],
) -> tuple[Tensor, ...]:
    """What a layer does with a pool: ids, both counts, output and its normaliser."""
    summary, covered, table, *record, pool_keys, pool_values = state
    pools, size = (pool_keys, pool_values), request.page
    ops.append(*host, *new, bits, at, covered, table, record[0], *pools, size)
    tail = pool_keys[:, :, request.slots - 1]
    ops.summarize(host[0], bits, at, summary, covered, request.algorithm, size, tail)
    ids, counts = ops.select(q, summary, bits, *selection)
    found = ops.diff(ids, at, size, table, *record)
    masked = (bits, None, *pools, request.dim**-0.5)
    out, lse = ops.fetch_attend(q, *host, ids, *found, *masked, size)
    return ids, counts, found[2], out, lse


def check_append(append: Callable[..., Any], request: Request, cases: int) -> None:
    """Any state, any word, any position: what is written is what the specification writes, and no more."""
    rows, pages, page = (request.batch, request.kv_heads), request.pages, request.page
    last = request.slots - 1
    for _ in range(cases):
        decoder = Decoder(request)
        at = torch.randint(0, request.capacity, decoder.position.shape)
        at = at // page * page if torch.rand(()) < 0.3 else at
        decoder.position[:] = at
        new = decoder.write()
        heads = request.kv_heads * request.group
        size = ((1, 1), (request.batch, 1), (request.batch, heads))[int(torch.randint(3, ()))]
        mask = torch.rand(*size, 1, request.capacity) < torch.rand(())
        ahead = torch.rand(size) < 0.5
        causal = torch.arange(request.capacity) <= at.view(-1, 1, 1, 1)
        mask = mask & (causal | ahead[..., None, None])
        here = (at // page).view(-1, 1, 1).expand(*rows, 1)
        bits = page_mask(mask, page)
        words = page_mask(torch.rand(*rows, 1, request.capacity) < 0.9, page)
        found = expected(decoder.caches[0], at)
        stale = torch.rand(rows) < 0.3
        decoder.covered[..., 0] = words
        decoder.covered[..., 1] = torch.where(stale, NEVER, found).unsqueeze(-1)
        decoder.table[:] = torch.randint(-1, request.slots, decoder.table.shape)
        decoder.owner[:] = torch.randint(-1, pages, decoder.owner.shape)
        tails = torch.rand(*rows, 1) < 0.7
        owner = torch.where(tails, here, decoder.owner[..., -1:].long())
        decoder.owner[..., -1:] = owner.to(torch.int32)
        entry = torch.where(tails, last, decoder.table.gather(-1, here).long())
        decoder.table.scatter_(-1, here, entry.to(torch.int32))
        got = [decoder.covered, decoder.table, decoder.owner, *decoder.pools]
        want = [x.clone() for x in got]
        append_reference(*decoder.caches, *new, bits, at, *want, page)  # type: ignore[arg-type]
        append(*decoder.caches, *new, bits, at, *got, page)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


class Decoder:
    """A cache with its pool; ``position`` is that of the last token."""

    def __init__(self, request: Request) -> None:
        self.request = request
        rows, dtype = (request.batch, request.kv_heads), request.dtype

        def paged(*size: int, fill: float, dtype: torch.dtype) -> Tensor:
            """Page-major, as the state of a growing cache is kept."""
            full = torch.full((request.pages, *rows, *size), fill, dtype=dtype)
            return full.permute(1, 2, 0, *range(3, full.dim()))

        self.caches = [
            torch.randn(request.capacity, *rows, dim).to(dtype).permute(1, 2, 0, 3)
            for dim in (request.dim, request.value_dim)
        ]
        width = algorithms.summary_width(request.algorithm, request.dim)
        self.summary = paged(width, fill=float("nan"), dtype=dtype)
        self.covered = paged(2, fill=NEVER, dtype=torch.int64)
        self.table = paged(fill=-1, dtype=torch.int32)
        self.owner = torch.full((*rows, request.slots), -1, dtype=torch.int32)
        self.used = torch.randint(-9, 99, self.owner.shape, dtype=torch.int32)
        self.clock = torch.zeros(rows, dtype=torch.int32)
        # What was never written shapes nothing.
        self.pools = [
            torch.full((*rows, request.slots, request.page, dim), float("nan"), dtype=dtype)
            for dim in (request.dim, request.value_dim)
        ]
        count = request.batch if request.apart else 1
        self.position = torch.randint(0, request.capacity // 2, (count,))
        self.mask_kind = "causal"

    def rewrite(self, row: int, begin: int, end: int) -> None:
        """Other tokens, by other hands than a step's."""
        for cache in self.caches:
            rows = cache if self.position.shape[0] == 1 else cache[row : row + 1]
            rows[:, :, begin:end] = torch.randn(rows[:, :, begin:end].shape).to(cache)

    def happen(self) -> bool:
        """The next position of each row, after something happened to some; whether something did."""
        request, happened = self.request, False
        for row in range(self.position.shape[0]):
            last = int(self.position[row])
            kind = "step"
            if last + 1 >= request.capacity:
                kind = "restart"
            elif torch.rand(()) < request.events:
                kinds = ("crop", "rewrite", "jump", "reset", "again", "restart", "one row")
                kind = kinds[int(torch.randint(len(kinds), ()))]
            happened |= kind != "step"
            position = last + 1
            if kind == "crop":
                position = max(0, last - int(torch.randint(0, 2 * request.page, ())))
            elif kind == "rewrite":
                # The same length again, or a little less, by other tokens.
                begin = max(0, last - int(torch.randint(0, 2 * request.page, ())))
                position = min(last + 1, begin + int(torch.randint(1, 3 * request.page, ())))
                self.rewrite(row, begin, position)
            elif kind == "jump":
                ahead = int(torch.randint(1, 3 * request.page, ()))
                position = min(last + 1 + ahead, request.capacity - 1)
                self.rewrite(row, last + 1, position)
            elif kind == "reset":
                self.rewrite(row, 0, position)
            elif kind == "again":
                position = last
            elif kind == "restart":
                position = int(torch.randint(0, request.capacity // 2, ()))
                position = 0 if torch.rand(()) < 0.3 else position
                self.rewrite(row, 0, position)
            elif kind == "one row" and position:
                shared = self.position.shape[0] == 1
                b = int(torch.randint(request.batch, ())) if shared else row
                h = int(torch.randint(request.kv_heads, ()))
                for cache in self.caches:
                    one = cache[b, h]
                    one[:position] = torch.randn(one[:position].shape).to(cache)
            self.position[row] = position
        return happened

    def mask(self) -> Tensor:
        """A mask of a kind that stays for a while, ``[Bm, Hm, 1, S]`` bool."""
        request = self.request
        if torch.rand(()) < 0.1:
            self.mask_kind = request.masks[int(torch.randint(len(request.masks), ()))]
        token = torch.arange(self.length)
        at = self.position.view(-1, 1, 1, 1)
        causal = token <= at
        kind = self.mask_kind
        if kind == "window":
            return causal & (token > at - 2 * request.page - 3)
        if kind == "padding":
            return causal & (token >= torch.arange(request.batch).view(-1, 1, 1, 1) * 9)
        if kind == "ahead":
            return token <= at + int(torch.randint(0, request.page, ()))
        if kind == "within":
            return token // request.page <= at // request.page
        if kind == "per-head":
            heads = request.kv_heads * request.group
            return causal & (torch.rand(request.batch, heads, 1, self.length) < 0.8)
        if kind == "nothing":
            return causal & (torch.rand(request.batch, 1, 1, 1) < 0.5)
        return torch.ones_like(causal) if kind == "full" else causal

    @property
    def length(self) -> int:
        return int(self.position.max()) + 1 if self.request.growing else self.request.capacity

    def write(self) -> list[Tensor]:
        """The model's own write of this step's token."""
        batch = self.request.batch
        new = [torch.randn(*x.shape[:2], 1, x.shape[3]).to(x) for x in self.caches]
        for cache, token in zip(self.caches, new, strict=True):
            cache[torch.arange(batch), :, self.position.expand(batch)] = token.squeeze(2)
        return new

    def selection(self) -> tuple[object, ...]:
        request = self.request
        sink = 0 if request.selected == 1 else 1
        budget = max(1, request.selected - 1)
        scale, rule = request.dim**-0.5, request.algorithm
        return (scale, rule, request.page, request.selected, budget, 0, sink, 1, "softmax_mean")

    def state(self, pages: int | None = None) -> list[Tensor]:
        """Summary, covered, table, owner, used, clock, pools; of the first ``pages`` of the cache."""
        by_page = [x[:, :, :pages] for x in (self.summary, self.covered, self.table)]
        return [*by_page, self.owner, self.used, self.clock, *self.pools]

    def step(
        self, ops: Ops, q: Tensor, new: list[Tensor], bits: Tensor, host: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """One step with the pool, where ``host`` is read for the cache."""
        state = self.state(bits.shape[-1])
        return layer(ops, self.request, self.selection(), q, new, bits, host, self.position, state)

    def truth(self, ops: Ops, q: Tensor, bits: Tensor) -> tuple[Tensor, ...]:
        """The same from the full cache, with summaries made anew: these, what they cover, ids, counts, output."""
        request, pages = self.request, bits.shape[-1]
        keys, values = (x[:, :, : self.length] for x in self.caches)
        summary = torch.zeros_like(self.summary[:, :, :pages])
        covered = torch.full_like(self.covered[:, :, :pages], NEVER)
        ops.summarize(keys, bits, self.position, summary, covered, request.algorithm, request.page)
        ids, counts = ops.select(q, summary, bits, *self.selection())
        scale = request.dim**-0.5
        out = ops.attend(q, keys, values, ids, None, bits, None, scale, request.page)
        return summary, covered, ids, counts, *out

    def check_pool(self, bits: Tensor) -> None:
        """A resident page is what the cache holds; the tail, as far as this step can attend it."""
        request, pages = self.request, bits.shape[-1]
        table, last = self.table[:, :, :pages].long(), request.slots - 1
        for b, h, page in (table >= 0).nonzero().tolist():
            slot = int(table[b, h, page])
            if self.owner[b, h, slot] != page:
                continue
            tail = int(self.position[b % len(self.position)]) // request.page
            assert (slot == last) == (page == tail)
            for cache, pool in zip(self.caches, self.pools, strict=True):
                tokens = cache[b, h, : self.length][page * request.page :][: request.page]
                end = len(tokens) if page != tail else int(self.position[b % len(self.position)])
                count = end if page != tail else end % request.page + 1
                assert torch.equal(pool[b, h, slot, :count], tokens[:count])


def check_decoding(ops: Ops, request: Request, steps: int) -> None:
    """Whatever happens, a step with the pool selects and computes what one without does, bit by bit."""
    decoder = Decoder(request)
    hits = loads = 0
    for _ in range(steps):
        decoder.happen()
        new, mask = decoder.write(), decoder.mask()
        bits = page_mask(mask, request.page)
        heads = request.kv_heads * request.group
        q = torch.randn(request.batch, heads, 1, request.dim).to(request.dtype)
        host = [x[:, :, : decoder.length] for x in decoder.caches]
        ids, counts, moved, *out = decoder.step(ops, q, new, bits, host)
        summary, covered, want_ids, want_counts, *want = decoder.truth(ops, q, bits)
        pages = bits.shape[-1]
        assert torch.equal(decoder.covered[:, :, :pages], covered)
        assert torch.equal(decoder.summary[:, :, :pages], summary)
        assert torch.equal(ids, want_ids) and torch.equal(counts, want_counts)
        for a, b in zip(out, want, strict=True):
            assert torch.equal(a, b) and not a.isnan().any()
        assert torch.equal(moved[..., HITS] + moved[..., LOADS], (ids >= 0).sum(-1))
        decoder.check_pool(bits)
        hits, loads = hits + int(moved[..., HITS].sum()), loads + int(moved[..., LOADS].sum())
    assert steps < 20 or min(hits, loads) > steps // 8


def check_nothing_is_read(ops: Ops, request: Request, steps: int) -> None:
    """While a request decodes, the tail's page of the cache is not read, but for the mark of the last key."""
    decoder = Decoder(request)
    decoder.position -= decoder.position % request.page
    decoder.position += request.page - 1
    for number in range(steps):
        decoder.position += 1
        new = decoder.write()
        token, at = torch.arange(decoder.length), decoder.position.view(-1, 1, 1, 1)
        bits = page_mask(token <= at, request.page)
        heads = request.kv_heads * request.group
        q = torch.randn(request.batch, heads, 1, request.dim).to(request.dtype)
        host = [x[:, :, : decoder.length].clone() for x in decoder.caches]
        if number:
            hidden = token // request.page == at // request.page
            host[1].masked_fill_(hidden.squeeze(1).unsqueeze(-1), float("nan"))
            hidden &= token != at - 1
            host[0].masked_fill_(hidden.squeeze(1).unsqueeze(-1), float("nan"))
        before = expected(host[0], decoder.position)
        ids, _, _, *out = decoder.step(ops, q, new, bits, host)
        summary, _, want_ids, _, *want = decoder.truth(ops, q, bits)
        assert torch.equal(before, expected(decoder.caches[0], decoder.position))
        assert torch.equal(decoder.summary[:, :, : bits.shape[-1]], summary)
        assert torch.equal(ids, want_ids)
        for a, b in zip(out, want, strict=True):
            assert torch.equal(a, b)
