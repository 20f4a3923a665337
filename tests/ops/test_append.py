"""``hsa::append`` by hand, and a layer's step with a pool whose last slot holds the tail."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import hsa_compile.ops
from hsa_compile.lowering import standalone
from hsa_compile.ops.append import append_reference
from hsa_compile.ops.diff import diff_reference
from hsa_compile.ops.fetch import fetch_reference
from hsa_compile.ops.page_mask import page_mask
from hsa_compile.ops.summarize import NEVER, expected

from .checks import HSA, inductor
from .interpreted import Check, child_process
from .tails import (
    Decoder,
    Ops,
    Request,
    check_append,
    check_decoding,
    check_nothing_is_read,
    layer,
)

assert hsa_compile.ops

EAGER = Ops(
    *(HSA.append, HSA.summarize, HSA.select, HSA.diff, HSA.sparse_attention, HSA.fetch_attention)
)


def one_after_the_other(fetch: Any, attend: Any) -> Any:
    """``fetch_attention`` of its two parts."""

    def both(
        q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, slots: Tensor, *rest: Any
    ) -> Any:
        loads, counts, bits, bias, pool_keys, pool_values, scale, page = rest
        fetch(keys, values, loads, counts, pool_keys, pool_values, page)
        return attend(q, pool_keys, pool_values, ids, slots, bits, bias, scale, page)

    return both


REFERENCES = replace(
    EAGER,
    append=append_reference,
    diff=diff_reference,
    fetch_attend=one_after_the_other(fetch_reference, HSA.sparse_attention),
)
KERNELS = Ops(
    standalone.append,
    standalone.summarize,
    standalone.select,
    standalone.diff,
    standalone.sparse_attention,
    standalone.fetch_attention,
)
REQUESTS = [
    Request(),
    Request(apart=True, batch=3),
    Request(growing=True, slots=9, algorithm="mean"),
    Request(growing=True, page=32, pages=7, slots=16, dtype=torch.bfloat16),
    Request(selected=1, slots=2, kv_heads=1, group=1, page=64, pages=4, algorithm="cuboid"),
    Request(selected=6, slots=24, masks=("causal", "ahead", "within", "full"), events=0.05),
    Request(masks=("causal",), events=0.02, slots=8, apart=True),
]


LONG = Request(page=64, pages=5, group=3, masks=("full",))
BOTH = pytest.mark.parametrize("append", [append_reference, HSA.append], ids=["reference", "op"])


@dataclass(frozen=True)
class Row:
    """One row with four pages of four tokens and a pool of three slots."""

    keys: Tensor
    covered: Tensor
    table: Tensor
    owner: Tensor
    pool: Tensor

    def step(
        self, append: Callable[..., None], position: int, word: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Table, owner, and the pages of which something is expected."""
        token = self.keys[:, :, position : position + 1]
        bits = torch.tensor([15] * 4)
        bits[position // 4] = word
        at, pools = torch.tensor([position]), (self.pool, self.pool.clone())
        state = (self.covered, self.table, self.owner, *pools)
        append(self.keys, self.keys, token, token, bits.view(1, 1, -1), at, *state, 4)
        assert torch.equal(self.pool[0, 0, 2, position % 4], token.flatten())
        expects = (self.covered[0, 0, :, 1] != NEVER).nonzero().flatten().tolist()
        # As summarize leaves it.
        self.covered[0, 0, :, 0] = bits
        self.covered[..., 1] = expected(self.keys, at + 1).unsqueeze(-1)
        return self.table.flatten().tolist(), self.owner.flatten().tolist(), expects


def one_row(table: list[int], owner: list[int]) -> Row:
    covered = torch.full((1, 1, 4, 2), NEVER)
    state = (torch.tensor(x, dtype=torch.int32).view(1, 1, -1) for x in (table, owner))
    return Row(torch.randn(1, 1, 16, 8), covered, *state, torch.full((1, 1, 3, 4, 8), torch.nan))


@BOTH
def test_by_hand(append: Callable[..., None]) -> None:
    # Nothing is known of this state, so all pages leave the pool.
    row = one_row([0, 2, 1, -1], [0, 2, 1])
    assert row.step(append, 5, 0b11) == ([-1] * 4, [0, 2, 1], [])
    # Page 0 was loaded; the tail was not, and is not in the pool by a step alone.
    row.table[0, 0, 0] = 0
    assert row.step(append, 6, 0b111) == ([0, -1, -1, -1], [0, 2, 1], [0, 2, 3])
    # Now it was loaded. Steps keep it, whichever of its earlier tokens they can attend.
    row.table[0, 0, 1] = 2
    assert row.step(append, 7, 0b1010) == ([0, 2, -1, -1], [0, 2, 1], [0, 1, 2, 3])
    # Token 8 opens page 2, which needs no loading; page 1 stands in the table, but has lost its slot.
    assert row.step(append, 8, 0b1) == ([0, 2, 2, -1], [0, 2, 2], [0, 1, 2, 3])
    assert row.step(append, 9, 0b11) == ([0, 2, 2, -1], [0, 2, 2], [0, 1, 2, 3])
    # A later token that can be attended now was never written into the slot.
    assert row.step(append, 10, 0b1111) == ([0, 2, -1, -1], [0, 2, 2], [0, 1, 3])
    row.table[0, 0, 2] = 2
    # It has been loaded, with all that the cache has of the page.
    assert row.step(append, 11, 0b1111) == ([0, 2, 2, -1], [0, 2, 2], [0, 1, 2, 3])
    # Page 3 is opened, but shows what the slot does not hold.
    assert row.step(append, 12, 0b101) == ([0, 2, 2, -1], [0, 2, 3], [0, 1, 2])
    # Another key before this token, or another place: nothing can be trusted.
    row.keys[0, 0, 12] = 0
    assert row.step(append, 13, 0b11) == ([-1] * 4, [0, 2, 3], [])
    row.table[0, 0] = torch.tensor([0, 1, -1, 2])
    assert row.step(append, 13, 0b11) == ([-1] * 4, [0, 2, 3], [])
    # Nor where a page is opened; but that it is needs nobody's trust.
    row.table[0, 0, 0] = 0
    assert row.step(append, 8, 0b1) == ([-1, -1, 2, -1], [0, 2, 2], [])
    assert row.step(append, 9, 0b11) == ([-1, -1, 2, -1], [0, 2, 2], [0, 1, 2, 3])


@BOTH
def test_a_page_in_another_slot_is_the_tail_no_longer(append: Callable[..., None]) -> None:
    row = one_row([-1] * 4, [-1] * 3)
    row.step(append, 7, 0b1111)
    row.table[0, 0, 2], row.owner[0, 0, 1] = 1, 2
    assert row.step(append, 8, 0b1) == ([-1, -1, 2, -1], [-1, 2, 2], [0, 1, 2, 3])
    row = one_row([-1] * 4, [-1] * 3)
    row.step(append, 7, 0b1111)
    row.table[0, 0, 2], row.owner[0, 0, 1] = 1, 2
    assert row.step(append, 8, 0b1001) == ([-1] * 4, [-1, 2, 2], [0, 1, 3])


@pytest.mark.parametrize("request_", [*REQUESTS, LONG], ids=str)
def test_op(request_: Request) -> None:
    check_append(HSA.append, request_, cases=15)


def test_opcheck() -> None:
    decoder = Decoder(Request())
    new, bits = decoder.write(), torch.full((1, 1, 12), -1)
    state = (decoder.covered, decoder.table, decoder.owner, *decoder.pools)
    for pool in decoder.pools:
        pool.zero_()
    args = (*decoder.caches, *new, bits, decoder.position, *(x.contiguous() for x in state), 16)
    torch.library.opcheck(HSA.append.default, args)
    rest = (decoder.summary.contiguous().zero_(), args[6].clone(), "quest", 16)
    tail = decoder.pools[0][:, :, -1].clone()
    args = (decoder.caches[0], bits, decoder.position, *rest, tail)
    torch.library.opcheck(HSA.summarize.default, args)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_decoding(request_: Request) -> None:
    check_decoding(EAGER, request_, steps=25)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_references(request_: Request) -> None:
    check_decoding(REFERENCES, request_, steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_long_decoding(request_: Request) -> None:
    check_decoding(EAGER, request_, steps=500)
    check_decoding(REFERENCES, request_, steps=100)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_the_tail_is_not_read_from_the_cache(request_: Request) -> None:
    check_nothing_is_read(EAGER, request_, steps=request_.page + 3)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Check]:
    pytest.importorskip("triton")
    with child_process() as run:
        yield run


def check_kernels(request: Request, steps: int, all_of_them: bool) -> None:
    """Without ``all_of_them`` pages are scored and attended by the ops: the interpreter takes its time."""
    kernels = KERNELS
    if not all_of_them:
        attend = HSA.sparse_attention
        apart = one_after_the_other(standalone.fetch, attend)
        kernels = replace(kernels, select=HSA.select, attend=attend, fetch_attend=apart)
    check_decoding(kernels, request, steps)
    check_nothing_is_read(kernels, request, steps=min(steps, request.page + 2))


@pytest.mark.parametrize("request_", [REQUESTS[0], REQUESTS[2], LONG], ids=str)
def test_append_kernel(interpreted: Check, request_: Request) -> None:
    interpreted(check_append, standalone.append, request_, cases=8)


def test_kernels(interpreted: Check) -> None:
    request = replace(REQUESTS[1], batch=2, kv_heads=1, dim=16, value_dim=16, events=0.4)
    interpreted(check_kernels, request, steps=6, all_of_them=False)
    interpreted(check_kernels, replace(request, group=1, selected=2), steps=1, all_of_them=True)


@pytest.mark.slow
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_long_decoding_by_kernels(interpreted: Check, request_: Request) -> None:
    request = replace(request_, dim=16, value_dim=16)
    interpreted(check_kernels, request, steps=25, all_of_them=True)


def some_pages(newest: int, request: Request) -> Tensor:
    """Ids of pages up to the newest."""
    ids = torch.full((request.selected,), -1, dtype=torch.int32)
    others = torch.randperm(newest)[: request.selected - 1].sort().values
    chosen = [*others.tolist(), newest]
    ids[: len(chosen)] = torch.tensor(chosen)
    return ids.expand(request.batch, request.kv_heads, -1).contiguous()


# Ids in place of a query, and instead of attention a look at the pool: C++ takes long to compile.
SHORT = replace(
    EAGER,
    select=lambda ids, summary, bits, *_: (ids, bits + 1),
    fetch_attend=one_after_the_other(
        HSA.fetch,
        lambda q, pool_keys, pool_values, ids, slots, *_: (pool_keys[:, :, -1, 0] + 1, slots + 1),
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_compiled(whole: bool) -> None:
    """In one graph on a CPU, in which neither pools nor caches, nor the tail, are copied."""
    request = Request(masks=("causal",), slots=7)
    decoder = Decoder(request)
    twin = copy.deepcopy(decoder)
    ops, selection = EAGER if whole else SHORT, decoder.selection()

    def step(
        q: Tensor,
        new: list[Tensor],
        bits: Tensor,
        host: list[Tensor],
        at: Tensor,
        state: list[Tensor],
    ) -> tuple[Tensor, ...]:
        return layer(ops, request, selection, q, new, bits, host, at, state)

    compiled = torch.compile(step, backend=inductor, dynamic=False, fullgraph=True)
    before = [x.data_ptr() for x in decoder.state()]
    source = ""
    for number in range(20):
        decoder.position += 1
        twin.position += 1
        new = decoder.write()
        for cache, other in zip(decoder.caches, twin.caches, strict=True):
            other.copy_(cache)
        bits = page_mask(torch.arange(request.capacity) <= decoder.position.view(1, 1, 1, 1), 16)
        q = torch.randn(2, 4, 1, 8) if whole else some_pages(int(twin.position) // 16, request)
        args = (q, new, bits, decoder.caches, decoder.position, decoder.state())
        if number:
            got = compiled(*args)
        else:
            got, (source,) = run_and_get_code(compiled, *args)
        want = step(*args[:3], twin.caches, twin.position, twin.state())
        torch.testing.assert_close(got, want, equal_nan=True)
        assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
        torch.testing.assert_close(decoder.state(), twin.state(), equal_nan=True)
    assert [x.data_ptr() for x in decoder.state()] == before
    code = re.sub(r"#.*", "", source)
    assert "copy_" not in code and "clone" not in code
    sizes = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", code)
    copied = ("2, 2, 7", "2, 2, 189", "2, 2, 16, 8", "2, 2, 12, 16")
    assert not [size for size in sizes if size.startswith(copied)]
    opaque = {f"hsa.{op}.default" for op in ("append", "summarize", "diff", "fetch")}
    assert opaque <= set(re.findall(r"hsa\.\w+\.default", code))
