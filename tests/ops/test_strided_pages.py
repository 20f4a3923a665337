"""Pages by position: by hand, and against the specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from hsa_compile.ops.strided_pages import strided_pages_reference
from tests.ops.cases import Case, build, cases
from tests.ops.checks import HSA, inductor, traced
from tests.ops.test_ops import RANDOM


def arguments(case: Case) -> tuple[object, ...]:
    _, _, page_size, slots, budget, unit, sink, recent, _ = case.selection()
    return (
        *(build(case).bits, case.batch, case.kv_heads),
        *(page_size, slots, budget, unit, sink, recent),
    )


def check(result: tuple[torch.Tensor, ...], given: tuple[object, ...]) -> None:
    for got, want in zip(result, strided_pages_reference(*given), strict=True):  # type: ignore[arg-type]
        assert got.dtype == want.dtype and torch.equal(got, want)


@given(cases())
@RANDOM
def test_against_the_specification(case: Case) -> None:
    given = arguments(case)
    check(HSA.strided_pages(*given), given)


@pytest.mark.parametrize(
    ("words", "slots", "budget", "sink", "recent", "ids", "counts"),
    [
        # The newest page is always in; three of the nine before it are the middles of thirds.
        ([15] * 9 + [1], 5, 4, 0, 0, [1, 4, 7, 9, -1], [13, 37]),
        # One of seven: the fourth. Sinks and a window of five tokens take the others.
        ([15] * 10, 5, 4, 4, 5, [0, 4, 8, 9, -1], [16, 40]),
        # Of pages 2, 3, 5, 6, 7 (4 is empty; 1 has the sink, 8 the newest token) two: the second and the fourth.
        ([0, 8, 15, 15, 0, 15, 15, 15, 3], 5, 4, 1, 0, [1, 3, 6, 8, -1], [11, 23]),
        # Forced beyond the budget: nothing is left to spread.
        ([15] * 6, 4, 1, 4, 8, [0, 4, 5, -1], [12, 24]),
        # Within the budget all are in, be it one page more than it buys.
        ([12, 15, 3], 3, 2, 0, 0, [0, 1, 2], [8, 8]),
        ([0, 0], 2, 1, 4, 4, [-1, -1], [0, 0]),
    ],
)
def test_by_hand(
    words: list[int],
    slots: int,
    budget: int,
    sink: int,
    recent: int,
    ids: list[int],
    counts: list[int],
) -> None:
    given = (torch.tensor(words).view(1, 1, -1), 2, 3, 4, slots, budget, 0, sink, recent)
    for found in (strided_pages_reference(*given), HSA.strided_pages(*given)):
        assert found[0].tolist() == [[ids] * 3] * 2
        assert found[1].tolist() == [[counts] * 3] * 2


@pytest.mark.parametrize(
    "backend", [traced, pytest.param(inductor, marks=pytest.mark.slow)], ids=["traced", "inductor"]
)
def test_compiled_once_for_every_length(backend: object) -> None:
    def run(*given: object) -> tuple[torch.Tensor, ...]:
        return HSA.strided_pages(*given)

    compiled = torch.compile(run, backend=backend, fullgraph=True)  # type: ignore[call-overload]
    case = Case(length=900, batch=3, slots=6, mask="per-head")
    for length in (900, 500, 97, 40):
        given = arguments(replace(case, length=length, seed=length))
        torch._dynamo.mark_dynamic(given[0], 2)
        with torch._dynamo.config.patch(error_on_recompile=length != 900):
            check(compiled(*given), given)
