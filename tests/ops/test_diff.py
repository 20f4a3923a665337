"""``hsa::diff`` against its specification, against a model of the rule, and by hand."""

from __future__ import annotations

import pytest
import torch

import hsa_compile.ops  # noqa: F401
from hsa_compile.ops.diff import MISSING, diff_reference

from .pools import (
    CacheShape,
    Diff,
    PoolShape,
    PoolState,
    check_diff,
    make_caches,
    make_pools,
    new_state,
)

HSA = torch.ops.hsa
BOTH = pytest.mark.parametrize("diff", [diff_reference, HSA.diff], ids=["reference", "op"])


def one_row(table: list[int], owner: list[int], used: list[int], clock: int) -> PoolState:
    rows = (torch.tensor(x, dtype=torch.int32).view(1, 1, -1) for x in (table, owner, used))
    return PoolState(*rows, torch.tensor([[clock]], dtype=torch.int32))


def run(
    diff: Diff, state: PoolState, ids: list[int], position: int
) -> tuple[list[int], list[list[int]], list[int]]:
    """Slots, loads, and hits, loads and evictions."""
    slots, loads, counts = run_ahead(diff, state, ids, [], position)
    assert counts[3] == 0
    return slots, loads, counts[:3]


def run_ahead(
    diff: Diff, state: PoolState, ids: list[int], others: list[int], position: int
) -> tuple[list[int], list[list[int]], list[int]]:
    pages = torch.tensor([*ids, *others], dtype=torch.int32).view(1, 1, -1)
    given = (pages, torch.tensor([position]), 4, *state.tensors(), len(others))
    slots, loads, counts = diff(*given)
    missing = slots >= MISSING
    named = pages[missing].tolist()
    assert sorted(named) == sorted(page for page, _ in loads[0, 0].tolist() if page >= 0)
    slots = slots - MISSING * missing
    return slots[0, 0].tolist(), loads[0, 0].tolist(), counts[0, 0].tolist()


NONE = [-1, -1]


@BOTH
def test_by_hand(diff: Diff) -> None:
    state = one_row([-1] * 8, [-1] * 5, [0] * 5, 0)
    # An empty pool; token 21 is of page 5, which has the last slot.
    assert run(diff, state, [0, 2, 5], 21) == ([0, 1, 4], [[0, 0], [2, 1], [5, 4]], [0, 3, 0])
    assert state.owner.tolist() == [[[0, 2, -1, -1, 5]]]
    # Empty slots go before the page not used in this step; the tail is where it was.
    assert run(diff, state, [0, 4, 5], 22) == ([0, 2, 4], [[4, 2], NONE, NONE], [2, 1, 0])
    assert run(diff, state, [4, 6, 7], 22) == ([2, 1, 3], [[6, 1], [7, 3], NONE], [1, 2, 1])
    # Page 0 was used least recently. Padding takes no slot.
    assert run(diff, state, [1, 5, -1], 23) == ([0, 4, -1], [[1, 0], NONE, NONE], [1, 1, 1])
    assert state.table.tolist() == [[[-1, 0, -1, -1, 2, 4, 1, 3]]]
    assert state.used.tolist() == [[[7, 5, 5, 5, 7]]] and state.clock.tolist() == [[4]]
    # Token 24 is of page 6: in the pool, where it is left. Page 5 has lost its slot, so it must be loaded.
    assert run(diff, state, [4, 5, 6], 24) == ([2, 3, 1], [[5, 3], NONE, NONE], [2, 1, 1])
    assert state.table.tolist() == [[[-1, 0, -1, -1, 2, 3, 1, -1]]]


@BOTH
def test_the_tail_has_the_last_slot(diff: Diff) -> None:
    """Whatever was there, and however recently it was used; pages after the tail are loaded after it."""
    state = one_row([0, 3, -1, -1, -1], [0, -1, -1, 1], [5, 0, 0, 6], 7)
    assert run(diff, state, [0, 2, 3], 9) == ([0, 3, 1], [[2, 3], [3, 1], NONE], [1, 2, 0])
    assert state.owner.tolist() == [[[0, 3, -1, 2]]]
    # A tail that is not selected leaves its slot to nobody.
    state = one_row([0, 1, -1, -1, -1], [0, 1, 2, 3], [1, 2, 0, 0], 7)
    assert run(diff, state, [2, 3, 4], 1) == ([0, 1, 2], [[2, 0], [3, 1], [4, 2]], [0, 3, 2])
    assert state.owner.tolist() == [[[2, 3, 4, 3]]]
    # Given up by the tail, selected again: loaded, elsewhere.
    state = one_row([-1, 2, 0], [2, -1, 1], [3, 0, 6], 7)
    assert run(diff, state, [1, 2], 9) == ([1, 0], [[1, 1], NONE], [1, 1, 0])
    assert state.owner.tolist() == [[[2, 1, 1]]]


@BOTH
def test_dead_slots_go_first(diff: Diff) -> None:
    # Page 1 went stale: slot 2 still names it, but was used last.
    state = one_row([0, -1, 1, -1, -1], [0, 2, 1, -1], [5, 6, 7, 0], 8)
    assert run(diff, state, [0, 3, -1], 17) == ([0, 2, -1], [[3, 2], NONE, NONE], [1, 1, 0])
    assert state.table.tolist() == [[[0, -1, 1, 2, -1]]]
    # A stale page that is selected is loaded, here into the dead slot that still names it.
    state = one_row([0, -1, 1, -1, -1], [0, 2, 1, -1], [5, 6, 7, 0], 8)
    assert run(diff, state, [1, 2, -1], 17) == ([2, 1, -1], [[1, 2], NONE, NONE], [1, 1, 0])
    # A page may be in the pool while another, dead, slot names it too; that slot is not its slot.
    state = one_row([-1, 0, -1, -1, -1], [1, 1, 0, -1], [5, 9, 7, 0], 9)
    assert run(diff, state, [0, 1, 3], 17) == ([1, 0, 2], [[0, 1], [3, 2], NONE], [1, 2, 0])
    assert state.owner.tolist() == [[[1, 0, 3, -1]]] and state.table.tolist() == [
        [[1, 0, -1, 2, -1]]
    ]


@BOTH
def test_a_tail_that_is_resident_stays(diff: Diff) -> None:
    state = one_row([0, 2, -1], [0, -1, 1], [3, 3, 3], 4)
    assert run(diff, state, [0, 1], 4) == ([0, 2], [NONE, NONE], [2, 0, 0])


@BOTH
def test_entries_that_do_not_name_each_other_are_not_resident(diff: Diff) -> None:
    # The table was longer: slot 0 holds page 9, and slot 1 is named by a page that it does not hold.
    state = one_row([-1, 1, 2], [9, 2, 2, -1], [9, 9, 9, 9], 9)
    assert run(diff, state, [1, 2, -1], 1) == ([0, 2, -1], [[1, 0], NONE, NONE], [1, 1, 0])
    assert state.table.tolist() == [[[-1, 0, 2]]] and state.owner.tolist() == [[[1, 2, 2, -1]]]


def test_a_pool_that_is_too_small_is_refused() -> None:
    state = one_row([-1] * 4, [-1] * 3, [0] * 3, 0)
    with pytest.raises(ValueError, match="pool of 3 slots cannot hold a selection of 3 pages"):
        run(HSA.diff, state, [0, 1, 2], 9)


@BOTH
def test_pages_for_the_next_step(diff: Diff) -> None:
    state = one_row([-1] * 9, [-1] * 6, [0] * 6, 0)
    # Page 5 is the tail. Others are loaded behind the selected ones; hits, loads, evictions, ahead, first hits.
    assert run_ahead(diff, state, [0, 5], [1, 7], 21) == (
        [0, 5, 1, 2],
        [[0, 0], [5, 5], [1, 1], [7, 2]],
        [0, 2, 0, 2, 0],
    )
    assert state.used[..., :-1].tolist() == [[[1, 0, 0, 0, 0]]]
    # One of them is selected: a hit, and its first. The other is asked for again, page 0 is not.
    assert run_ahead(diff, state, [1, 5], [7, -1], 22) == (
        [1, 5, 2, -1],
        [NONE] * 4,
        [2, 0, 0, 0, 1],
    )
    assert state.used[..., :-1].tolist() == [[[1, 3, 2, 0, 0]]]
    # Empty slots first, then page 0, older than page 7; page 1 was selected before, and its age says so.
    assert run_ahead(diff, state, [2, 5], [1, 3], 22) == (
        [3, 5, 1, 4],
        [[2, 3], [3, 4], NONE, NONE],
        [1, 1, 0, 1, 0],
    )
    assert state.used[..., :-1].tolist() == [[[1, 5, 2, 5, 4]]]
    # Page 3 was loaded in vain, and goes before pages 1 and 2; a tail among the others is left out.
    assert run_ahead(diff, state, [4, 6], [5, 8], 23) == (
        [0, 2, -1, 4],
        [[4, 0], [6, 2], [8, 4], NONE],
        [0, 2, 3, 1, 0],
    )
    assert state.table.tolist() == [[[-1, 1, 3, -1, 0, 5, 2, -1, 4]]]


@pytest.mark.parametrize(
    "shape",
    [
        PoolShape(selected=4, more=3, slots=8),
        PoolShape(selected=6, slots=9, early=True),
        PoolShape(selected=5, more=2, slots=16, pages=60, batch=3, early=True),
        PoolShape(selected=5, more=2, slots=16, pages=200, batch=3, page_major=True),
        PoolShape(selected=1, more=9, slots=12, pages=14, batch=1),
        PoolShape(selected=33, more=33, slots=100, pages=400, batch=1),
        PoolShape(selected=1, slots=2, pages=4),
        PoolShape(selected=1, slots=4, pages=3, batch=1),
        PoolShape(selected=6, slots=7),
        PoolShape(batch=3),
        PoolShape(selected=7, slots=28, pages=300, batch=3, page_major=True),
        PoolShape(selected=20, slots=33, pages=12, batch=1, kv_heads=3),
        PoolShape(selected=33, slots=34, pages=100, batch=3, kv_heads=1, page_major=True),
        PoolShape(selected=96, slots=192, pages=2000, batch=1, page=64),
    ],
    ids=str,
)
def test_decoding(shape: PoolShape) -> None:
    check_diff(HSA.diff, shape, steps=120)
    check_diff(HSA.diff, shape, steps=30, stale=0.5)


def test_opcheck() -> None:
    shape = PoolShape()
    ids = torch.arange(6, dtype=torch.int32).expand(2, 2, 6).contiguous()
    state = new_state(shape)
    state.used.zero_()
    torch.library.opcheck(
        HSA.diff.default,
        (ids, torch.tensor([99]), shape.page, *state.tensors()),
    )


@pytest.mark.parametrize("rows", [1, 2])
def test_opcheck_of_what_is_loaded_ahead(rows: int) -> None:
    """``rows``: of positions."""
    shape = PoolShape(page=16)
    cache = CacheShape(tokens=shape.pages * 16 - 5, dim=8, value_dim=16, slots=shape.slots)
    caches, pools = ([x.float() for x in make(cache)] for make in (make_caches, make_pools))
    state = new_state(shape)
    state.used.zero_()
    q, summary = torch.randn(2, 4, 1, 8), torch.randn(2, 2, shape.pages, 16)
    bits, position = torch.full((1, 1, shape.pages), -1), torch.arange(99, 99 + rows)
    rule = (0.3, "cuboid", 16, shape.selected, 5, 0, 4, 16, "softmax_mean")
    given = (q, summary, bits, position, *caches, *state.tensors(), *pools, *rule)
    torch.library.opcheck(HSA.prefetch_select.default, given)
    held, counts = HSA.prefetch_select(*given)
    assert counts[..., 3].eq(shape.selected - 1).all(), "all but the tail, if that is selected"
    for marks in ((state.table,), (state.table, counts)):
        torch.library.opcheck(HSA.join_prefetch.default, ([held, q], *marks))
    ids = torch.arange(8, dtype=torch.int32).expand(2, 2, 8).contiguous()
    _, loads, counts = HSA.diff(ids, position, 16, *new_state(shape).tensors(), 3)
    given = (*caches, loads, counts, *pools, 16)
    # What it returns is garbage, which is not to be compared.
    torch.library.opcheck(
        HSA.prefetch.default, given, test_utils=("test_schema", "test_faketensor")
    )
