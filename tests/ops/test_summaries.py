"""Summaries stay true to the keys through growth, crops, jumps, other padding and outside writes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hsa_compile import algorithms
from hsa_compile.ops.page_mask import page_mask
from hsa_compile.ops.summarize import APART, NEVER
from tests.ops.cases import Case, State, build
from tests.ops.checks import HSA, TOLERANCE, traced


def decode(
    state: State,
    position: Tensor | int,
    mask: Tensor,
    summary: Tensor,
    covered: Tensor,
    written: int = 1,
) -> None:
    """One step: the mask as it is at ``position``, and the op on the given state."""
    case = state.case
    at = torch.tensor([position]) if isinstance(position, int) else position
    HSA.summarize(
        state.keys,
        page_mask(mask, case.page_size),
        at,
        summary,
        covered,
        case.algorithm,
        case.page_size,
        written=written,
    )


def rebuilt(
    state: State, position: Tensor | int, mask: Tensor, written: int = 1
) -> tuple[Tensor, Tensor]:
    summary, covered = torch.zeros_like(state.summary), torch.full_like(state.covered, NEVER)
    decode(state, position, mask, summary, covered, written)
    return summary, covered


def causal(case: Case, position: int, begin: int = 0) -> Tensor:
    token = torch.arange(case.length)
    return ((token <= position) & (token >= begin)).view(1, 1, 1, -1)


@pytest.mark.parametrize("algorithm", algorithms.names())
@pytest.mark.parametrize(
    ("how", "kv_heads"),
    [("op", 8), ("traced", 2), pytest.param("op", 1, marks=pytest.mark.slow)],
)
def test_summaries_stay_true(algorithm: str, how: str, kv_heads: int) -> None:
    """Each step leaves what a rebuild gives, whatever happened to the cache before it.

    By the op exactly; in a compiled graph the page that is written into is summed up in another order.
    """
    case = Case(
        length=150, page_size=32, kv_heads=kv_heads, head_dim=64, mask="full", algorithm=algorithm
    )
    state = build(case)
    summary, covered = rebuilt(state, 40, causal(case, 40))
    update = torch.compile(decode, backend=traced, dynamic=False) if how == "traced" else decode
    tolerance = TOLERANCE if how == "traced" else {"rtol": 0, "atol": 0}

    def step(position: int, begin: int = 0) -> None:
        state.keys[:, :, position] = torch.randn_like(state.keys[:, :, position])
        at, mask = torch.tensor([position]), causal(case, position, begin)
        update(state, at, mask, summary, covered)
        expected = rebuilt(state, at, mask)
        torch.testing.assert_close(summary, expected[0], **tolerance)
        assert torch.equal(covered, expected[1])

    for position in range(41, 100):  # growth
        step(position)
    step(98)  # crop by one, another token at the same place
    step(98)  # the same position again
    step(140)  # a jump: pages in between were filled by others
    step(70)  # a crop by pages
    step(71, begin=5)  # padding that changed
    for position in range(72, 110):  # a window that moves
        step(position, begin=position - 35)
    state.keys.normal_()  # an outside write, which the owner of the state answers by forgetting it
    covered[..., 1] = NEVER
    step(110)
    state.keys[:, :, 149] = math.nan  # memory past the end shapes nothing
    step(111)
    assert summary.isfinite().all()


@pytest.mark.parametrize("algorithm", algorithms.names())
@pytest.mark.parametrize("how", ["op", pytest.param("traced", marks=pytest.mark.slow)])
def test_several_tokens_at_once(algorithm: str, how: str) -> None:
    """Steps of different numbers of tokens over one state, with tokens taken back in between."""
    case = Case(length=200, page_size=16, head_dim=32, mask="full", algorithm=algorithm)
    state = build(case)
    summary, covered = rebuilt(state, 40, causal(case, 40))
    update = torch.compile(decode, backend=traced, dynamic=False) if how == "traced" else decode
    tolerance = TOLERANCE if how == "traced" else {"rtol": 0, "atol": 0}
    at = 41
    for written, kept in [(5, 5), (5, 2), (1, 1), (5, 5), (16, 16), (16, 3), (1, 1), (2, 1)] * 2:
        here = slice(at, at + written)
        state.keys[:, :, here] = torch.randn_like(state.keys[:, :, here])
        position, mask = torch.tensor([at]), causal(case, at + written - 1)
        update(state, position, mask, summary, covered, written)
        expected = rebuilt(state, position, mask, written)
        torch.testing.assert_close(summary, expected[0], **tolerance)
        assert torch.equal(covered, expected[1])
        at += kept


@pytest.mark.parametrize("written", [1, 2, 5, 16])
def test_only_pages_with_new_tokens_are_read(written: int) -> None:
    """And none where nothing is written and all is found: what is left is then what was found."""
    case = Case(length=128, page_size=16, mask="full")
    state = build(case)
    full = torch.ones(1, 1, 1, case.length, dtype=torch.bool)
    summary, covered = rebuilt(state, 29, full)  # the next token is at 30
    state.keys[:, :, 30 : 30 + written].normal_()
    old, unread = summary.clone(), state.keys.clone()
    state.keys[:, :, :28] = state.keys[:, :, 48:] = math.nan
    decode(state, 30, full, summary, covered, written)
    touched = {page for at in range(30, 30 + written) for page in [at // 16]}
    for page in range(8):
        same = torch.equal(summary[:, :, page], old[:, :, page])
        assert same == (page not in touched)
    state.keys.copy_(unread)
    summary, covered = rebuilt(state, 60, full, 0)
    old, left = summary.clone(), covered.clone()
    state.keys[:, :, :59] = state.keys[:, :, 60:] = math.nan
    decode(state, 60, full, summary, covered, 0)
    assert torch.equal(summary, old) and torch.equal(covered, left)


@pytest.mark.parametrize("written", [1, 5, 16])
@pytest.mark.parametrize("kept", [1, 3, 5])
def test_tokens_that_were_taken_back(written: int, kept: int) -> None:
    """The next step reads the pages of the last one's tokens and of its own, and the key before all of them."""
    case = Case(length=128, page_size=16, mask="full")
    full = torch.ones(1, 1, 1, case.length, dtype=torch.bool)
    for first in (31, 60, 64):
        state = build(case)
        summary, covered = rebuilt(state, first, full, 5)
        old, at = summary.clone(), first + kept
        state.keys[:, :, first : at + written].normal_()
        pages = range(first // 16, (at + written - 1) // 16 + 1)
        unread = [p for p in range(8) if p not in pages]
        whole = state.keys.clone()
        for page in unread:
            state.keys[:, :, 16 * page : 16 * page + 16] = math.nan
        state.keys[:, :, first - 1] = whole[:, :, first - 1]
        decode(state, at, full, summary, covered, written)
        assert torch.equal(summary[:, :, unread], old[:, :, unread])
        read = list(pages)
        state.keys.copy_(whole)
        fresh, left = rebuilt(state, at, full, written)
        assert torch.equal(summary[:, :, read], fresh[:, :, read])
        assert torch.equal(covered, left)


def test_rows_that_were_taken_back_by_themselves() -> None:
    """One row meets what it expects, one what was left lately, the third is another request's."""
    case = Case(length=128, page_size=16, batch=3, mask="full")
    state = build(case)
    full = torch.ones(1, 1, 1, case.length, dtype=torch.bool)
    summary, covered = rebuilt(state, torch.tensor([40, 33, 40]), full, 5)
    old = summary.clone()
    state.keys[2].normal_()
    state.keys[:, :, 41:46].normal_()
    decode(state, 41, full, summary, covered, 5)
    fresh, left = rebuilt(state, 41, full, 5)
    assert torch.equal(summary, fresh) and torch.equal(covered, left)
    assert torch.equal(summary[:2, :, [0, 1, 3]], old[:2, :, [0, 1, 3]])
    assert (summary[2] != old[2]).any(-1).all()


def test_tokens_that_lie_apart() -> None:
    """Nobody expects that: all pages are summarised anew, and in the next step once more."""
    case = Case(length=128, page_size=16, mask="full")
    state = build(case)
    full = torch.ones(1, 1, 1, case.length, dtype=torch.bool)
    for written in (2, 16):
        summary, covered = rebuilt(state, 30, full)
        for position, count in [(APART, written), (APART, written), (31, 1), (32, written)]:
            before = summary.clone()
            state.keys.mul_(1.5)
            decode(state, position, full, summary, covered, count)
            assert (summary != before).any(-1).all()
            torch.testing.assert_close(summary, rebuilt(state, 50, full)[0])


def test_a_write_elsewhere_is_seen_by_its_position() -> None:
    case = Case(length=128, page_size=32, mask="full")
    state = build(case)
    summary, covered = rebuilt(state, 60, causal(case, 60))
    state.keys[:, :, :64].normal_()
    decode(state, 64, causal(case, 64), summary, covered)
    assert torch.equal(summary, rebuilt(state, 64, causal(case, 64))[0])


@pytest.mark.parametrize("how", ["op", "traced"])
def test_another_request_at_the_expected_position(how: str) -> None:
    """Nothing tells but the key before the new one: it is not the one that was written there."""
    update = torch.compile(decode, backend=traced, dynamic=False) if how == "traced" else decode
    case = Case(length=128, page_size=32, batch=2, mask="full")
    state = build(case)
    summary, covered = rebuilt(state, 60, causal(case, 60))
    state.keys[1, :, :61].normal_()
    state.keys[:, :, 61].normal_()
    update(state, torch.tensor([61]), causal(case, 61), summary, covered)
    expected = rebuilt(state, 61, causal(case, 61))
    torch.testing.assert_close(summary, expected[0], **TOLERANCE)
    assert torch.equal(covered, expected[1])


@pytest.mark.parametrize("how", ["op", "traced"])
def test_a_position_for_each_row(how: str) -> None:
    update = torch.compile(decode, backend=traced, dynamic=False) if how == "traced" else decode
    case = Case(length=128, page_size=32, batch=3, mask="full")
    state = build(case)
    token = torch.arange(case.length)
    position = torch.tensor([10, 31, 96])
    mask = (token <= position.view(-1, 1)).view(3, 1, 1, -1)
    summary, covered = rebuilt(state, position, mask)
    for _ in range(3):
        position = position + 1
        mask = (token <= position.view(-1, 1)).view(3, 1, 1, -1)
        state.keys[torch.arange(3), :, position] = torch.randn(3, case.kv_heads, case.head_dim)
        update(state, position, mask, summary, covered)
        expected = rebuilt(state, position, mask)
        assert torch.equal(summary, expected[0]) and torch.equal(covered, expected[1])
