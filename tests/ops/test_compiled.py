"""The ops in one graph through Inductor, as C++ on a CPU."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from hsa_compile.ops.summarize import NEVER
from tests.ops.cases import Case, build
from tests.ops.checks import HSA, TOLERANCE, check_attention, check_select, inductor, traced

COMPILED = [
    Case(
        length=65,
        page_size=64,
        head_dim=72,
        mask="per-head",
        algorithm="cuboid",
        slots=1,
        softcap=1.5,
    ),
    Case(
        length=200,
        group=16,
        mask="empty-rows",
        additive="bias",
        group_reduce="max",
        algorithm="mean",
        token_major=True,
    ),
]


def step(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    position: Tensor,
    summary: Tensor,
    covered: Tensor,
    case: Case,
) -> tuple[Tensor, ...]:
    """One layer's step in ops."""
    bits = HSA.page_mask(mask, case.page_size)
    HSA.summarize(keys, bits, position, summary, covered, case.algorithm, case.page_size)
    added = None if bias is None else HSA.page_bias(bias, case.page_size)
    ids, counts = HSA.select(q, summary, bits, *case.selection(keys.shape[2]), 0, added)
    out, lse = HSA.sparse_attention(
        q, keys, values, ids, None, bits, bias, case.scale, case.page_size, case.softcap
    )
    return ids, counts, out, lse


def check_step(
    compiled: object,
    case: Case,
    any_length: bool = False,
) -> None:
    """Run a step on summaries that cover nothing yet, and compare all that comes of it."""
    state = build(case)
    covered = torch.full_like(state.covered, NEVER)
    summary = torch.zeros_like(state.summary)
    if any_length:
        for grows in (state.keys, state.values, summary, covered):
            torch._dynamo.mark_dynamic(grows, 2)
        torch._dynamo.mark_dynamic(state.mask, 3)
    ids, counts, out, lse = compiled(  # type: ignore[operator]
        state.q,
        state.keys,
        state.values,
        state.mask,
        state.bias,
        state.position,
        summary,
        covered,
        case,
    )
    torch.testing.assert_close(summary, state.summary, equal_nan=True, **TOLERANCE)
    check_select(replace(state, summary=summary), (ids, counts))
    check_attention(state, ids, (out, lse))


@pytest.mark.parametrize(
    "case", COMPILED, ids=lambda case: f"{case.mask}-{case.group}x{case.head_dim}"
)
def test_compiled(case: Case) -> None:
    check_step(torch.compile(step, backend=inductor, dynamic=False), case)


def test_nothing_of_full_length_is_copied() -> None:
    case = Case(length=2000, batch=1, kv_heads=3, group=2, value_dim=16, token_major=True)
    state = build(case)
    by_page = torch.zeros(case.pages, 1, 3, state.summary.shape[3]).permute(1, 2, 0, 3)
    coverage = torch.zeros(case.pages, 1, 3, 2, dtype=torch.int64).permute(1, 2, 0, 3)
    arguments = (state.q, state.keys, state.values, state.mask, None, state.position)
    compiled = torch.compile(step, backend=inductor, dynamic=False)
    _, (code,) = run_and_get_code(compiled, *arguments, by_page, coverage, case)
    torch.testing.assert_close(by_page, state.summary, **TOLERANCE)
    sizes = [
        math.prod(int(n) for n in shape.split(",") if n.strip())
        for shape in re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", code)
    ]
    assert sizes and max(sizes) < by_page.numel() < state.keys.numel()


@pytest.mark.parametrize(
    ("backend", "fraction"),
    [pytest.param(inductor, 0.0, marks=pytest.mark.slow), (traced, 0.0), (traced, 0.25)],
)
def test_compiled_once_for_every_length(backend: object, fraction: float) -> None:
    """Lengths on both sides of the budget; the slots are a number, or follow the length as fractions do."""
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    case = Case(length=900, batch=3, slots=6, fraction=fraction)
    check_step(compiled, case, any_length=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (500, 40, 97, 33):
            check_step(compiled, replace(case, length=length, seed=length), any_length=True)
