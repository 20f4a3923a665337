"""``hsa::diff`` against its specification, against a model of the rule, and by hand."""

from __future__ import annotations

import pytest
import torch

import hsa_compile.ops  # noqa: F401
from hsa_compile.ops.diff import diff_reference

from .pools import Diff, PoolShape, PoolState, check_diff, new_state

HSA = torch.ops.hsa
BOTH = pytest.mark.parametrize("diff", [diff_reference, HSA.diff], ids=["reference", "op"])


def one_row(table: list[int], owner: list[int], used: list[int], clock: int) -> PoolState:
    rows = (torch.tensor(x, dtype=torch.int32).view(1, 1, -1) for x in (table, owner, used))
    return PoolState(*rows, torch.tensor([[clock]], dtype=torch.int32))


def run(
    diff: Diff, state: PoolState, ids: list[int], position: int
) -> tuple[list[int], list[list[int]], list[int]]:
    pages = torch.tensor(ids, dtype=torch.int32).view(1, 1, -1)
    slots, loads, counts = diff(pages, torch.tensor([position]), 4, *state.tensors())
    return slots[0, 0].tolist(), loads[0, 0].tolist(), counts[0, 0].tolist()


NONE = [-1, -1]


@BOTH
def test_by_hand(diff: Diff) -> None:
    state = one_row([-1] * 8, [-1] * 4, [0] * 4, 0)
    # An empty pool; token 21 is the second of page 5, which must be loaded like the others.
    assert run(diff, state, [0, 2, 5], 21) == ([0, 1, 2], [[0, 0], [2, 1], [5, 2]], [0, 3, 0])
    assert state.owner.tolist() == [[[0, 2, 5, -1]]]
    # The empty slot goes before the page not used in this step.
    assert run(diff, state, [0, 4, 5], 22) == ([0, 3, 2], [[4, 3], NONE, NONE], [2, 1, 0])
    # Page 2 was used least recently. Padding takes no slot.
    assert run(diff, state, [1, 5, -1], 23) == ([1, 2, -1], [[1, 1], NONE, NONE], [1, 1, 1])
    assert state.table.tolist() == [[[0, 1, -1, -1, 3, 2, -1, -1]]]
    assert state.used.tolist() == [[[1, 2, 2, 1]]] and state.clock.tolist() == [[3]]
    # Token 24 opens page 6: it takes the later of the two slots, and there is nothing to load but page 3.
    assert run(diff, state, [3, 5, 6], 24) == ([0, 2, 3], [[3, 0], NONE, NONE], [2, 1, 2])
    assert state.table.tolist() == [[[-1, 1, -1, 0, -1, 2, 3, -1]]]
    # The next token of that page finds it in the pool.
    assert run(diff, state, [1, 3, 6], 25) == ([1, 0, 3], [NONE] * 3, [3, 0, 0])


@BOTH
def test_dead_slots_go_first(diff: Diff) -> None:
    # Page 1 went stale: slot 2 still names it, but was used last.
    state = one_row([0, -1, 1, -1], [0, 2, 1], [5, 6, 7], 8)
    assert run(diff, state, [0, 3, -1], 13) == ([0, 2, -1], [[3, 2], NONE, NONE], [1, 1, 0])
    assert state.table.tolist() == [[[0, -1, 1, 2]]]
    # A stale page that is selected is loaded, here into the dead slot that still names it.
    state = one_row([0, -1, 1, -1], [0, 2, 1], [5, 6, 7], 8)
    assert run(diff, state, [1, 2, -1], 13) == ([2, 1, -1], [[1, 2], NONE, NONE], [1, 1, 0])
    # A page may be in the pool while another, dead, slot names it too; that slot is not its slot.
    state = one_row([-1, 0, -1, -1], [1, 1, 0], [5, 9, 7], 9)
    assert run(diff, state, [0, 1, 3], 13) == ([1, 0, 2], [[0, 1], [3, 2], NONE], [1, 2, 0])
    assert state.owner.tolist() == [[[1, 0, 3]]] and state.table.tolist() == [[[1, 0, -1, 2]]]


@BOTH
def test_an_opened_page_that_is_resident_stays(diff: Diff) -> None:
    state = one_row([0, 1, -1], [0, 1], [3, 3], 4)
    assert run(diff, state, [0, 1], 4) == ([0, 1], [NONE, NONE], [2, 0, 0])


@BOTH
def test_entries_that_do_not_name_each_other_are_not_resident(diff: Diff) -> None:
    # The table was longer: slot 0 holds page 9, and slot 1 is named by a page that it does not hold.
    state = one_row([-1, 1, 2], [9, 2, 2], [9, 9, 9], 9)
    assert run(diff, state, [1, 2, -1], 9) == ([0, 2, -1], [[1, 0], NONE, NONE], [1, 1, 0])
    assert state.table.tolist() == [[[-1, 0, 2]]] and state.owner.tolist() == [[[1, 2, 2]]]


def test_a_pool_that_is_too_small_is_refused() -> None:
    state = one_row([-1] * 4, [-1] * 2, [0] * 2, 0)
    with pytest.raises(ValueError, match="pool of 2 slots cannot hold a selection of 3 pages"):
        run(HSA.diff, state, [0, 1, 2], 9)


@pytest.mark.parametrize(
    "shape",
    [
        PoolShape(selected=1, slots=1, pages=5),
        PoolShape(selected=1, slots=4, pages=3, batch=1),
        PoolShape(selected=6, slots=6),
        PoolShape(batch=3),
        PoolShape(selected=7, slots=28, pages=300, batch=3, page_major=True),
        PoolShape(selected=20, slots=33, pages=12, batch=1, kv_heads=3),
        PoolShape(selected=33, slots=33, pages=100, batch=3, kv_heads=1, page_major=True),
        PoolShape(selected=96, slots=192, pages=2000, batch=1, page=64),
    ],
    ids=str,
)
def test_decoding(shape: PoolShape) -> None:
    check_diff(HSA.diff, shape, steps=300)
    check_diff(HSA.diff, shape, steps=50, stale=0.5)


def test_opcheck() -> None:
    shape = PoolShape()
    ids = torch.arange(6, dtype=torch.int32).expand(2, 2, 6).contiguous()
    state = new_state(shape)
    state.used.zero_()
    torch.library.opcheck(
        HSA.diff.default,
        (ids, torch.tensor([99]), shape.page, *state.tensors()),
    )
