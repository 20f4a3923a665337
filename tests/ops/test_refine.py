"""Selection of single tokens of selected pages: against its specification, by hand, and what it captures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hsa_compile.ops.refine import forced_tokens, refine_reference
from hsa_compile.ops.select import FRACTION_UNIT
from tests.ops.cases import Case, State, build, cases
from tests.ops.checks import HSA, TOLERANCE, inductor, traced

RANDOM = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def rule(case: Case, budget: int, tokens: int | None = None) -> tuple[object, ...]:
    """Arguments of ``refine`` behind the bias: a budget in tokens, or a quarter of the case's fraction."""
    unit, forced = int(case.fraction * FRACTION_UNIT / 4), forced_tokens(case.sink, case.recent)
    slots = max(budget, forced)
    if unit:
        tokens = case.length if tokens is None else tokens
        slots = (unit * tokens + FRACTION_UNIT - 1) // FRACTION_UNIT + forced
    kind = (case.sink, case.recent, case.group_reduce, case.softcap)
    return (case.scale, case.page_size, slots, budget, unit, *kind)


def token_ranks(state: State) -> Tensor:
    """Scores by which tokens compete, in fp64 and without a logarithm of sums: ``[B, Hkv, S]``."""
    case = state.case
    keys = state.keys.double().nan_to_num().repeat_interleave(case.group, 1)
    logits = case.scale * (state.q.double() @ keys.mT).squeeze(2)
    logits = case.softcap * torch.tanh(logits / case.softcap) if case.softcap else logits
    logits = logits if state.bias is None else logits + state.bias[:, :, 0].double()
    logits = logits.masked_fill(~state.seen, -math.inf)
    if case.group_reduce == "max":
        return logits.unflatten(1, (case.kv_heads, case.group)).amax(2)
    return (
        torch.softmax(logits, -1)
        .nan_to_num(0.0)
        .unflatten(1, (case.kv_heads, case.group))
        .sum(2)
        .log()
    )


def check(
    state: State, ids: Tensor, seen: Tensor, result: tuple[Tensor, Tensor], budget: int
) -> None:
    """Equal to the specification, but for tokens whose ranks are equal within rounding."""
    clean = state.keys.nan_to_num()
    rest = (ids, seen, state.bits, state.bias, *rule(state.case, budget))
    tokens, counts = refine_reference(state.q, clean, *rest)  # type: ignore[arg-type]
    assert result[0].dtype == torch.int32 and result[0].shape == tokens.shape
    assert torch.equal(result[1], counts)
    ranks = token_ranks(state)
    for at in (result[0] != tokens).any(-1).nonzero().tolist():
        got, want = (row[tuple(at)].tolist() for row in (result[0], tokens))
        assert got.count(-1) == want.count(-1) and len({*got}) == len({*want})
        swapped = ranks[tuple(at)][sorted({*got} ^ {*want})]
        assert not len(swapped) or swapped.max() - swapped.min() < 1e-4, (at, got, want)


@RANDOM
@given(cases(), st.integers(1, 60))
def test_tokens(case: Case, budget: int) -> None:
    case = replace(case, top_p=1.0)
    for dtype in (torch.float32, torch.float64):
        state = build(case, dtype)
        ids, seen = HSA.select(*state.selection())
        arguments = (state.q, state.keys, ids, seen, state.bits, state.bias, *rule(case, budget))
        check(state, ids, seen, HSA.refine(*arguments), budget)


def by_hand(reduce: str, **fields: object) -> list[list[int]]:
    """Two query heads, channels 0 and 1, over the 12 tokens of pages 0 and 2; page size 4 and 5 tokens of budget."""
    keys = torch.zeros(1, 1, 12, 2)
    keys[0, 0, :, 0] = torch.tensor([0.0, 9, 0, 5, 9, 9, 9, 9, 0, 4, 0, 0])
    keys[0, 0, :, 1] = torch.tensor([0.0, 0, 0, 0, 9, 9, 9, 9, 0, 0, 6, 0])
    q = torch.eye(2).view(1, 2, 1, 2)
    bits = torch.tensor([[[0b1111, 0b1111, 0b0111]]])
    ids, seen = torch.tensor([[[0, 2, -1]]], dtype=torch.int32), torch.tensor([[[7, 11]]])
    told = {"slots": 5, "budget": 5, "fraction": 0, "sink": 1, "recent": 1, **fields}
    tokens, counts = HSA.refine(q, keys, ids, seen, bits, None, 1.0, 4, *told.values(), reduce)
    assert counts[0, 0, 1] == 11 and counts[0, 0, 0] == (tokens >= 0).sum()
    return tokens[0, 0].tolist()


def test_by_hand() -> None:
    """Token 0 is the sink and 10 the newest; then the best of 1 (9), 3 (5), 9 (4); 2 and 8 tie, 11 is masked."""
    assert by_hand("max") == [0, 10, 1, 3, 9]
    assert by_hand("max", slots=6, budget=6) == [0, 10, 1, 3, 9, 2]
    assert by_hand("max", slots=9, budget=9) == [0, 10, 1, 3, 9, 2, 8, -1, -1]
    assert by_hand("max", budget=1) == [0, 10, -1, -1, -1]
    assert by_hand("max", slots=6, sink=2, recent=3, budget=1) == [0, 1, 8, 9, 10, -1]
    # Three elevenths of 11 tokens, rounded up.
    assert by_hand("max", fraction=3 * FRACTION_UNIT // 11 + 1) == [0, 10, 1, 3, -1][:5]


def test_heads_that_agree_on_nothing_share_the_budget() -> None:
    """Of the first head token 1 has nearly all, of the second token 10: by shares both outrank the first's 3."""
    assert by_hand("softmax_mean", sink=0, recent=0, budget=2)[:2] == [10, 1]


@pytest.mark.parametrize("reduce", ["softmax_mean", "max"])
def test_it_captures_more_than_pages(reduce: str) -> None:
    """Of random keys, 64 tokens as 4 pages, and chosen one by one out of 12 pages: the mean over 32 rows."""
    case = Case(
        length=512,
        batch=8,
        kv_heads=4,
        head_dim=32,
        mask="full",
        algorithm="cuboid",
        group_reduce=reduce,
    )
    state = build(case)
    shares = []
    logits = case.scale * (state.q @ state.keys.repeat_interleave(2, 1).mT)
    dense = torch.softmax(logits, -1).squeeze(2).unflatten(1, (4, 2))
    for pages in (4, 12):
        wanted = replace(case, slots=pages, sink=4, recent=8)
        arguments = list(wanted.selection())
        arguments[3] = pages  # no slot for one page more
        ids, seen = HSA.select(state.q, state.summary, state.bits, *arguments)
        if pages == 4:
            tokens = (ids.unsqueeze(-1) * 16 + torch.arange(16)).flatten(2)
        else:
            rest = (state.bits, None, *rule(wanted, 64))
            tokens, _ = HSA.refine(state.q, state.keys, ids, seen, *rest)
        assert tokens.shape[-1] == 64 and tokens.min() >= 0
        chosen = tokens.long().unsqueeze(2).expand(-1, -1, 2, -1)
        shares.append(dense.gather(-1, chosen).sum(-1).mean())
    assert shares[1] > 1.5 * shares[0]


def step(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, summary: Tensor, case: Case, budget: int
):
    bits = HSA.page_mask(mask, case.page_size)
    ids, seen = HSA.select(q, summary, bits, *case.selection(keys.shape[2]))
    tokens, counts = HSA.refine(q, keys, ids, seen, bits, None, *rule(case, budget, keys.shape[2]))
    words = HSA.page_mask(mask, 1)
    out, _ = HSA.sparse_attention(q, keys, values, tokens, None, words, None, case.scale, 1)
    return tokens, counts, out


@pytest.mark.parametrize(
    ("backend", "fraction"),
    [
        (traced, 0.0),
        pytest.param(traced, 0.6, marks=pytest.mark.slow),
        pytest.param(inductor, 0.6, marks=pytest.mark.slow),
    ],
)
def test_compiled_once_for_every_length(backend: object, fraction: float) -> None:
    """Lengths on both sides of the budget and of the first selection."""
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    case, budget = Case(length=900, batch=3, slots=6, fraction=fraction, algorithm="cuboid"), 40
    with torch._dynamo.config.patch(error_on_recompile=False):
        run(compiled, case, budget)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (500, 40, 97, 33):
            run(compiled, replace(case, length=length, seed=length), budget)


def run(compiled: object, case: Case, budget: int) -> None:
    state = build(case)
    for grows in (state.keys, state.values, state.summary):
        torch._dynamo.mark_dynamic(grows, 2)
    torch._dynamo.mark_dynamic(state.mask, 3)
    arguments = (state.q, state.keys, state.values, state.mask, state.summary, case, budget)
    tokens, counts, out = compiled(*arguments)  # type: ignore[operator]
    want = step(*arguments)
    assert torch.equal(tokens[..., : want[0].shape[-1]], want[0]) and torch.equal(counts, want[1])
    torch.testing.assert_close(out, want[2], **TOLERANCE)
