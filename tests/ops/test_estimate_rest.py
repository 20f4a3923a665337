"""The estimate of what was not selected: by hand, against its specification, and what it is for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from hsa_compile.ops.estimate_rest import estimate_rest_reference
from hsa_compile.ops.sparse_attention import sparse_attention_reference
from tests.ops.cases import Case, State, build, cases
from tests.ops.checks import HSA, TOLERANCE, attend, inductor, traced
from tests.ops.test_ops import RANDOM


def means_of(state: State, cache: Tensor) -> Tensor:
    """The mean of each page's tokens, by the op."""
    case = state.case
    means = cache.new_zeros((case.batch, case.kv_heads, case.pages, cache.shape[3]))
    covered = torch.full((*means.shape[:3], 2), -1)
    HSA.summarize(cache, state.bits, state.position, means, covered, "mean", case.page_size)
    return means


def operands(state: State, ids: Tensor, prototypes: int = 0) -> tuple[object, ...]:
    """Arguments of ``estimate_rest`` behind attention to the pages ``ids``."""
    out, lse = HSA.sparse_attention(*attend(state, ids))
    means = means_of(state, state.keys), means_of(state, state.values)
    bias, case = state.page_bias, state.case
    return (state.q, *means, ids, state.bits, bias, out, lse, case.scale, case.softcap, prototypes)


def check(result: tuple[Tensor, Tensor], arguments: tuple[object, ...]) -> None:
    expected = estimate_rest_reference(*arguments)  # type: ignore[arg-type]
    for got, want in zip(result, expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, **TOLERANCE)


@given(cases())
@RANDOM
def test_against_the_specification(case: Case) -> None:
    if case.additive == "-10000" and case.mask in ("nothing", "empty-rows"):
        case = replace(
            case, additive="-inf"
        )  # rows of -10,000 are attended, with sums of that size
    state = build(case)
    ids, _ = HSA.select(*state.selection())
    for prototypes in (0, 3, 100):
        arguments = operands(state, ids, prototypes)
        check(HSA.estimate_rest(*arguments), arguments)


def test_a_page_by_hand() -> None:
    """Three pages of two tokens, the middle one is read; of the last one token counts."""
    q = torch.tensor([2.0, 0.0]).view(1, 1, 1, 2)
    keys = torch.tensor([[1.0, 5.0], [0.0, 0.0], [0.5, 7.0]]).view(1, 1, 3, 2)
    values = torch.tensor([[1.0], [9.0], [4.0]]).view(1, 1, 3, 1)
    bits = torch.tensor([[[0b11, 0b11, 0b01]]])
    out, lse = torch.tensor([[[[9.0]]]]), torch.tensor([[[math.log(2.0)]]])
    ids = torch.tensor([[[1, -1]]], dtype=torch.int32)
    weights = torch.tensor([2 * math.e**2, 2.0, math.e], dtype=torch.float64)
    for prototypes in (0, 2):
        result = HSA.estimate_rest(q, keys, values, ids, bits, None, out, lse, 1.0, 0.0, prototypes)
        assert result[1].item() == pytest.approx(math.log(weights.sum()))
        expected = (weights @ torch.tensor([1.0, 9.0, 4.0]).double() / weights.sum()).item()
        assert result[0].item() == pytest.approx(expected)
    # One prototype of both: their mean key is (2.5 / 3) along q, their mean value 6 / 3.
    together = HSA.estimate_rest(q, keys, values, ids, bits, None, out, lse, 1.0, 0.0, 1)
    weight = 3 * math.exp(2 * 2.5 / 3)
    assert together[0].item() == pytest.approx((2 * 9 + weight * 2) / (2 + weight))
    assert together[1].item() == pytest.approx(math.log(2 + weight))


def test_a_page_moves_to_the_nearest_prototype() -> None:
    """Pages 0, 1 | 2, 3 have the means 1 and 9; page 2 then joins the first, and each is one key again."""
    keys = torch.tensor([0.0, 2.0, 1.0, 17.0]).view(1, 1, 4, 1)
    values = torch.tensor([1.0, 2.0, 6.0, 10.0]).view(1, 1, 4, 1)
    bits, ids = torch.full((1, 1, 4), 0b1111), torch.full((1, 1, 1), -1, dtype=torch.int32)
    nothing = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -math.inf)
    q = torch.tensor([[[[0.1]]]])
    out, lse = HSA.estimate_rest(q, keys, values, ids, bits, None, *nothing, 1.0, 0.0, 2)
    first, second = 12 * math.exp(0.1), 4 * math.exp(1.7)
    assert out.item() == pytest.approx((first * 3 + second * 10) / (first + second))
    assert lse.item() == pytest.approx(math.log(first + second))


@pytest.mark.parametrize("mask", ["full", "padding", "empty-rows", "window"])
def test_all_selected_is_what_it_was(mask: str) -> None:
    state = build(Case(length=75, mask=mask, group=3))
    ids = torch.arange(5, dtype=torch.int32).expand(2, 2, 5).contiguous()
    for prototypes in (0, 4):
        arguments = operands(state, ids, prototypes)
        out, lse = HSA.estimate_rest(*arguments)
        assert torch.equal(out, arguments[6]) and torch.equal(lse, arguments[7])


@pytest.mark.parametrize("prototypes", [0, 64])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_exact_where_the_keys_of_a_page_are_equal(prototypes: int, softcap: float) -> None:
    """Whatever the values, and whatever part of a page can be attended; three pages of 19 are read."""
    state = build(Case(length=301, batch=3, group=2, mask="padding", softcap=softcap))
    first = state.keys.nan_to_num()[:, :, 150:151]
    keys = first + torch.randn(3, 2, 19, 16).repeat_interleave(16, 2)[:, :, :301]
    seen = state.seen.unflatten(1, (2, 2)).any(2).unsqueeze(-1)
    state = replace(state, keys=torch.where(seen, keys, math.nan))
    ids = torch.tensor([3, 10, 17], dtype=torch.int32).expand(3, 2, 3).contiguous()
    whole = torch.arange(19, dtype=torch.int32).expand(3, 2, 19).contiguous()
    clean = replace(state, keys=keys, values=state.values.nan_to_num())
    dense = sparse_attention_reference(*attend(clean, whole))  # type: ignore[arg-type]
    estimated = HSA.estimate_rest(*operands(state, ids, prototypes))
    for got, want in zip(estimated, dense, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize(("prototypes", "gains"), [(0, 4), (32, 1.2)])
def test_less_is_lost_of_keys_in_clusters(prototypes: int, gains: float) -> None:
    """Pages are drawn from 24 clusters of keys and values, in any order; one in eight is read."""
    case = Case(length=4096, batch=1, kv_heads=2, group=4, head_dim=64, value_dim=64, mask="full")
    state = build(case)
    of_page = torch.randint(0, 24, (256,)).repeat_interleave(16)
    keys, values = torch.randn(2, 24, 64)[:, of_page] + 0.5 * torch.randn(2, 1, 2, 4096, 64)
    q = keys[:, :, torch.randint(0, 4096, (4,))].flatten(1, 2).unsqueeze(2)
    state = replace(state, q=q, keys=keys, values=values)
    ids = torch.arange(0, 256, 8, dtype=torch.int32).expand(1, 2, 32).contiguous()
    whole = torch.arange(256, dtype=torch.int32).expand(1, 2, 256).contiguous()
    dense, _ = sparse_attention_reference(*attend(state, whole))  # type: ignore[arg-type]
    arguments = operands(state, ids, prototypes)
    estimated, _ = HSA.estimate_rest(*arguments)

    def error(out: Tensor) -> float:
        return ((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean().item()

    assert error(estimated) * gains < error(arguments[6])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_rounding(dtype: torch.dtype) -> None:
    state = build(Case(length=301, group=4, mask="full", slots=3), dtype)
    ids, _ = HSA.select(*state.selection())
    for prototypes in (0, 100):
        arguments = operands(state, ids, prototypes)
        out, lse = HSA.estimate_rest(*arguments)
        want, total = estimate_rest_reference(*arguments)  # type: ignore[arg-type]
        assert out.dtype == dtype and lse.dtype == torch.float32
        # Weights, the estimate and the result are rounded once each; prototypes, of values up to 4, once more.
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(out.float(), want.float(), rtol=2 * step, atol=4 * step)
        torch.testing.assert_close(lse, total, rtol=0, atol=8 * step if prototypes else 1e-5)


@pytest.mark.parametrize("prototypes", [0, 5])
@pytest.mark.parametrize(
    "backend", [traced, pytest.param(inductor, marks=pytest.mark.slow)], ids=["traced", "inductor"]
)
def test_compiled_once_for_every_length(backend: object, prototypes: int) -> None:
    def run(*arguments: object) -> tuple[Tensor, Tensor]:
        return HSA.estimate_rest(*arguments)

    compiled = torch.compile(run, backend=backend, fullgraph=True)  # type: ignore[call-overload]
    case = Case(length=900, batch=3, slots=6, additive="bias", mask="per-head", softcap=2.0)
    for length in (900, 500, 97, 33):
        state = build(replace(case, length=length, seed=length))
        ids, _ = HSA.select(*state.selection())
        arguments = operands(state, ids, prototypes)
        for grows in (arguments[1], arguments[2], arguments[4], arguments[5]):
            torch._dynamo.mark_dynamic(grows, 2)
        with torch._dynamo.config.patch(error_on_recompile=length != 900):
            check(compiled(*arguments), arguments)
