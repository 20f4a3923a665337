"""Attention to a pool that ``diff`` and ``fetch_attention`` keep is attention to the full cache, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import hsa_compile.ops  # noqa: F401
from hsa_compile.lowering import standalone
from hsa_compile.ops.diff import HITS, LOADS, MISSING, diff_reference
from hsa_compile.ops.fetch_attention import fetch_attention_reference
from hsa_compile.ops.page_mask import page_mask
from hsa_compile.ops.sparse_attention import sparse_attention_reference

from .checks import HSA, inductor
from .interpreted import Check, child_process
from .pools import CacheShape, PoolShape, make_caches, make_pools, make_stale, new_state, selections


@dataclass(frozen=True)
class Decoding:
    """``slots`` as small as a pool may be: every page that is not selected anew is evicted soon."""

    selected: int = 5
    slots: int = 6
    tokens: int = 16 * 20 + 7
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    value_dim: int = 24
    page: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "head-major"
    bias: bool = False
    per_head: bool = False

    @property
    def cache(self) -> CacheShape:
        return CacheShape(
            batch=self.batch,
            kv_heads=self.kv_heads,
            tokens=self.tokens,
            dim=self.dim,
            value_dim=self.value_dim,
            page=self.page,
            slots=self.slots,
            selected=self.selected,
            layout=self.layout,
            dtype=self.dtype,
        )

    @property
    def pool(self) -> PoolShape:
        return PoolShape(
            self.selected,
            self.slots,
            -(-self.tokens // self.page),
            self.batch,
            self.kv_heads,
            self.page,
        )


@dataclass(frozen=True)
class Ops:
    diff: Callable[..., Any]
    fetch: Callable[..., Any]
    attend: Callable[..., Any]


EAGER = Ops(HSA.diff, HSA.fetch_attention, HSA.sparse_attention)
KERNELS = Ops(standalone.diff, standalone.fetch_attention, standalone.sparse_attention)


def attend_to_numbers(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Any:
    """The reference multiplies what does not take part by zero, so it cannot be shown the poison."""
    return sparse_attention_reference(q, keys.nan_to_num(), values.nan_to_num(), *rest)


def fetch_numbers(*args: Any) -> Any:
    for pool in args[9:11]:
        pool.nan_to_num_()
    return fetch_attention_reference(*args)


REFERENCES = Ops(diff_reference, fetch_numbers, attend_to_numbers)


def append(pools: tuple[Tensor, Tensor], at: Tensor, ids: Tensor, slots: Tensor, new: Any) -> None:
    """Write this step's token into the newest page's slot, as a layer does."""
    newest = (ids >= 0).sum(-1, keepdim=True) - 1
    slot = slots.gather(-1, newest.clamp(min=0)).squeeze(-1)
    for pool, token in zip(pools, new, strict=True):
        for b, h in (newest.squeeze(-1) >= 0).nonzero().tolist():
            pool[b, h, slot[b, h] % MISSING, int(at[b % len(at)]) % pool.shape[3]] = token[b, h]


def check_decoding(ops: Ops, case: Decoding, steps: int, tolerance: float = 0.0) -> None:
    """Tokens are appended and other pages overwritten; with a pool, and without, attention is the same."""
    keys, values = make_caches(case.cache)
    pools = make_pools(case.cache)
    for pool in pools:
        pool.fill_(float("nan"))  # what was never fetched shapes nothing
    state = new_state(case.pool)
    heads, loaded, hits = case.kv_heads * case.group, 0, 0
    page = torch.arange(case.pool.pages)
    covered, expected = (
        torch.zeros(case.batch, 1, case.pool.pages, dtype=torch.int64),
        torch.tensor(-1),
    )
    for ids, position in selections(case.pool, steps):
        position = position.clamp(max=case.tokens - 1)
        stale = make_stale(state, 0.05 if torch.rand(()) < 0.2 else 0.0)
        changed = stale.repeat_interleave(case.page, -1)[..., : case.tokens].unsqueeze(-1)
        new = [torch.randn(case.batch, case.kv_heads, x.shape[-1]) for x in (keys, values)]
        for cache, token in zip((keys, values), new, strict=True):
            if stale.any():
                cache[...] = torch.where(changed, torch.randn(cache.shape).to(cache), cache)
            for b in range(case.batch):
                cache[b, :, int(position[b % len(position)])] = token[b].to(cache)
        mask = torch.arange(case.tokens) <= position.view(-1, 1, 1, 1)
        # After a jump, a page may show tokens that the pool never had; a step in sequence adds one to the newest page.
        words = page_mask(mask, case.page).expand(case.batch, 1, -1)
        steady = (page == position.view(-1, 1, 1) // case.page) & (position == expected).view(
            -1, 1, 1
        )
        state.table.masked_fill_((words != covered) & ~steady, -1)
        covered, expected = words, position + 1
        if case.per_head:
            mask = mask & (torch.rand(case.batch, heads, 1, case.tokens) < 0.8)
        bits = page_mask(mask, case.page)
        bias = torch.randn(1, 1, 1, case.tokens).to(case.dtype) if case.bias else None
        q = torch.randn(case.batch, heads, 1, case.dim).to(case.dtype)
        slots, loads, counts = ops.diff(ids, position, case.page, *state.tensors())
        append(pools, position, ids, slots, new)
        rest = (case.dim**-0.5, case.page)
        missing = (ids, slots, loads, counts, bits, bias)
        got = ops.fetch(q, keys, values, *missing, *pools, *rest)
        want = ops.attend(q, keys, values, ids, None, bits, bias, *rest)
        again = ops.attend(q, *pools, ids, slots, bits, bias, *rest)
        for a, b, c in zip(got, want, again, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(a, c, rtol=0, atol=0)
            assert not a.isnan().any()
        check_slots(pools, (keys, values), ids, slots)
        # A row that selected nothing left this step's token out of its pool.
        empty = (ids < 0).all(-1, keepdim=True)
        state.table.masked_fill_(empty & (page == position.view(-1, 1, 1) // case.page), -1)
        hits, loaded = hits + int(counts[..., HITS].sum()), loaded + int(counts[..., LOADS].sum())
    assert min(hits, loaded) > steps // 8


def check_slots(pools: Any, caches: Any, ids: Tensor, slots: Tensor) -> None:
    """The whole page is in its slot, masked or not."""
    for pool, cache in zip(pools, caches, strict=True):
        page = pool.shape[3]
        for b, h, k in (slots >= MISSING).nonzero().tolist():
            begin = int(ids[b, h, k]) * page
            want = cache[b, h, begin : begin + page]
            assert torch.equal(pool[b, h, slots[b, h, k] % MISSING, : len(want)], want)


CASES = [
    Decoding(),
    Decoding(selected=1, slots=2, batch=3, kv_heads=1, bias=True),
    Decoding(slots=9, layout="interleaved", dtype=torch.bfloat16, page=32, per_head=True),
    Decoding(selected=12, slots=20, tokens=16 * 9, group=1, layout="token-major", bias=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case: Decoding) -> None:
    check_decoding(EAGER, case, steps=200)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case: Decoding) -> None:
    """Its dense products are of another length, so equal within rounding."""
    tolerance = 4 * torch.finfo(case.dtype).eps
    check_decoding(REFERENCES, replace(case, batch=1), steps=60, tolerance=tolerance)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Check]:
    pytest.importorskip("triton")
    with child_process() as run:
        yield run


@pytest.mark.parametrize(
    "case",
    [CASES[1], *(pytest.param(case, marks=pytest.mark.slow) for case in (CASES[0], *CASES[2:]))],
    ids=str,
)
def test_kernels(interpreted: Check, case: Decoding) -> None:
    interpreted(check_decoding, KERNELS, replace(case, batch=min(case.batch, 2)), steps=15)


def test_a_program_of_many_pages(interpreted: Check) -> None:
    """More slots than a program looks at together, padding behind those that are missing."""
    attend = (standalone.fetch_attention, standalone.sparse_attention)
    kernels = Ops(standalone.diff, *(partial(f, splits=1) for f in attend))
    case = Decoding(selected=36, slots=40, tokens=16 * 50, batch=1, kv_heads=1)
    interpreted(check_decoding, kernels, case, steps=6)


def test_compiled() -> None:
    """In one graph on a CPU, in which neither pools nor caches are copied."""
    case = Decoding(tokens=16 * 300, bias=True, layout="token-major")

    def step(
        q: Tensor,
        ids: Tensor,
        position: Tensor,
        bits: Tensor,
        bias: Tensor,
        cache: list[Tensor],
        pool: list[Tensor],
        state: list[Tensor],
        with_pool: bool,
    ) -> tuple[Tensor, Tensor]:
        if not with_pool:
            return HSA.sparse_attention(q, *cache, ids, None, bits, bias, 0.25, case.page)
        found = HSA.diff(ids, position, case.page, *state)
        return HSA.fetch_attention(q, *cache, ids, *found, bits, bias, *pool, 0.25, case.page)

    compiled = torch.compile(step, backend=inductor, dynamic=False, fullgraph=True)
    cache, pool = list(make_caches(case.cache)), list(make_pools(case.cache))
    state = list(new_state(case.pool).tensors())
    sources = ""
    for number, (ids, position) in enumerate(selections(case.pool, 10)):
        position = position[:1]
        ids = ids[:1].expand_as(ids).contiguous()
        bits = page_mask((torch.arange(case.tokens) <= position)[None, None, None], case.page)
        bias, q = torch.randn(1, 1, 1, case.tokens), torch.randn(2, 4, 1, case.dim)
        args = (q, ids, position, bits, bias, cache, pool, state)
        if number:
            got = compiled(*args, True)
        else:
            got, (sources,) = run_and_get_code(compiled, *args, True)
        for a, b in zip(got, compiled(*args, False), strict=True):
            assert torch.equal(a, b)
    assert "copy_" not in "".join(line.partition("#")[0] for line in sources.splitlines())
    assert int(state[3][0, 0]) == 10
