"""Summaries stay true to the keys through growth, crops, jumps, other padding and outside writes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hsa_compile import algorithms
from hsa_compile.ops.page_mask import page_mask
from hsa_compile.ops.summarize import NEVER
from tests.ops.cases import Case, State, build
from tests.ops.checks import HSA, TOLERANCE, traced


def decode(
    state: State, position: Tensor | int, mask: Tensor, summary: Tensor, covered: Tensor
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
    )


def rebuilt(state: State, position: Tensor | int, mask: Tensor) -> tuple[Tensor, Tensor]:
    summary, covered = torch.zeros_like(state.summary), torch.full_like(state.covered, NEVER)
    decode(state, position, mask, summary, covered)
    return summary, covered


def causal(case: Case, position: int, begin: int = 0) -> Tensor:
    token = torch.arange(case.length)
    return ((token <= position) & (token >= begin)).view(1, 1, 1, -1)


@pytest.mark.parametrize("algorithm", algorithms.names())
@pytest.mark.parametrize(("how", "kv_heads"), [("op", 1), ("op", 8), ("traced", 2)])
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
