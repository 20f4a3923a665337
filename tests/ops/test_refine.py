"""Selection of single tokens, of selected pages or by signs: against specifications, by hand, what it captures."""

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
from hsa_compile.ops.select_tokens import select_tokens_reference
from hsa_compile.ops.summarize import NEVER
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


def token_ranks(state: State, keys: Tensor) -> Tensor:
    """Scores by which tokens compete, in fp64 and without a logarithm of sums: ``[B, Hkv, S]``."""
    case = state.case
    keys = keys.double().nan_to_num().repeat_interleave(case.group, 1)
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


def check(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], ranks: Tensor) -> None:
    """Equal to the specification, but for tokens whose ranks are equal within rounding."""
    (got_tokens, got_counts), (tokens, counts) = result, expected
    assert got_tokens.dtype == torch.int32 and got_tokens.shape == tokens.shape
    assert torch.equal(got_counts, counts)
    for at in (got_tokens != tokens).any(-1).nonzero().tolist():
        got, want = (row[tuple(at)].tolist() for row in (got_tokens, tokens))
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
        rest = (ids, seen, state.bits, state.bias, *rule(case, budget))
        expected = refine_reference(state.q, state.keys.nan_to_num(), *rest)
        check(HSA.refine(state.q, state.keys, *rest), expected, token_ranks(state, state.keys))


def signs_by_loops(state: State) -> Tensor:
    """``signs [B, Hkv, P, T * W]`` from the keys and the summary, bit by bit."""
    case, size = state.case, state.case.head_dim
    words = -(-size // 64)
    signs = torch.zeros(
        case.batch, case.kv_heads, case.pages, case.page_size * words, dtype=torch.int64
    )
    attended = state.seen.unflatten(1, (case.kv_heads, case.group)).any(2)
    for b, h, t in attended.nonzero().tolist():
        page, at = divmod(t, case.page_size)
        above = state.keys[b, h, t].double() > state.summary[b, h, page, :size].double()
        for word in range(words):
            number = sum(1 << i for i, bit in enumerate(above[64 * word :][:64].tolist()) if bit)
            signs[b, h, page, at * words + word] = number - ((number >> 63) << 64)
    return signs


@settings(RANDOM, max_examples=15)
@given(cases(), st.integers(1, 60))
def test_tokens_by_signs(case: Case, budget: int) -> None:
    """Built with the summaries, and chosen by: keys that are one deviation above or below the centre of their page."""
    case = replace(case, algorithm="cuboid", top_p=1.0)
    for dtype in (torch.float32, torch.float64):
        state = build(case, dtype)
        covered = torch.full_like(state.covered, NEVER)
        summary, signs = torch.zeros_like(state.summary), torch.full_like(signs_by_loops(state), -1)
        rest = (state.position, summary, covered, "cuboid", case.page_size, None, 1, signs)
        HSA.summarize(state.keys, state.bits, *rest)
        assert torch.equal(summary, state.summary)
        assert torch.equal(signs, signs_by_loops(state))
        centre, deviation = (x.repeat_interleave(case.page_size, 2) for x in summary.chunk(2, -1))
        above = state.keys > centre[:, :, : case.length]
        keys = (
            centre[:, :, : case.length] + torch.where(above, 1, -1) * deviation[:, :, : case.length]
        )
        arguments = (state.q, summary, signs, state.bits, state.bias, *rule(case, budget))
        expected = select_tokens_reference(*arguments)  # type: ignore[arg-type]
        check(HSA.select_tokens(*arguments), expected, token_ranks(state, keys))


def by_hand(reduce: str, **fields: object) -> list[list[int]]:
    """Two query heads, channels 0 and 1, over the 12 tokens of pages 0 and 2; page size 4 and 5 tokens of budget.

    The tokens in ascending order, which is not promised.
    """
    keys = torch.zeros(1, 1, 12, 2)
    keys[0, 0, :, 0] = torch.tensor([0.0, 9, 0, 5, 9, 9, 9, 9, 0, 4, 0, 0])
    keys[0, 0, :, 1] = torch.tensor([0.0, 0, 0, 0, 9, 9, 9, 9, 0, 0, 6, 0])
    q = torch.eye(2).view(1, 2, 1, 2)
    bits = torch.tensor([[[0b1111, 0b1111, 0b0111]]])
    ids, seen = torch.tensor([[[0, 2, -1]]], dtype=torch.int32), torch.tensor([[[7, 11]]])
    told = {"slots": 5, "budget": 5, "fraction": 0, "sink": 1, "recent": 1, **fields}
    tokens, counts = HSA.refine(q, keys, ids, seen, bits, None, 1.0, 4, *told.values(), reduce)
    assert counts[0, 0, 1] == 11 and counts[0, 0, 0] == (tokens >= 0).sum()
    found = tokens[0, 0].tolist()
    chosen = [token for token in found if token >= 0]
    assert found[len(chosen) :] == [-1] * (len(found) - len(chosen))
    return sorted(chosen)


def test_by_hand() -> None:
    """Token 0 is the sink and 10 the newest; then the best of 1 (9), 3 (5), 9 (4); 2 and 8 tie, 11 is masked."""
    assert by_hand("max") == [0, 1, 3, 9, 10]
    assert by_hand("max", slots=6, budget=6) == [0, 1, 2, 3, 9, 10]
    assert by_hand("max", slots=9, budget=9) == [0, 1, 2, 3, 8, 9, 10]
    assert by_hand("max", budget=1) == [0, 10]
    assert by_hand("max", slots=6, sink=2, recent=3, budget=1) == [0, 1, 8, 9, 10]
    # Three elevenths of 11 tokens, rounded up.
    assert by_hand("max", fraction=3 * FRACTION_UNIT // 11 + 1) == [0, 1, 3, 10]


def test_heads_that_agree_on_nothing_share_the_budget() -> None:
    """Of the first head token 1 has nearly all, of the second token 10: by shares both outrank the first's 3."""
    assert by_hand("softmax_mean", sink=0, recent=0, budget=2) == [1, 10]


@pytest.mark.parametrize("reduce", ["softmax_mean", "max"])
def test_it_captures_more_than_pages(reduce: str) -> None:
    """Of random keys, 64 tokens as 4 pages, by signs, and out of 12 pages by their keys: the mean over 32 rows."""
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
    logits = case.scale * (state.q @ state.keys.repeat_interleave(2, 1).mT)
    dense = torch.softmax(logits, -1).squeeze(2).unflatten(1, (4, 2))

    def share(tokens: Tensor) -> Tensor:
        assert tokens.shape[-1] == 64 and tokens.min() >= 0
        chosen = tokens.long().unsqueeze(2).expand(-1, -1, 2, -1)
        return dense.gather(-1, chosen).sum(-1).mean()

    def pages(count: int) -> tuple[Tensor, Tensor]:
        arguments = list(case.selection())
        arguments[3] = arguments[4] = count
        return HSA.select(state.q, state.summary, state.bits, *arguments)

    by_page = (pages(4)[0].unsqueeze(-1) * 16 + torch.arange(16)).flatten(2)
    by_signs, _ = HSA.select_tokens(
        *(state.q, state.summary, signs_by_loops(state), state.bits, None, *rule(case, 64))
    )
    refined, _ = HSA.refine(state.q, state.keys, *pages(12), state.bits, None, *rule(case, 64))
    shares = [float(share(tokens)) for tokens in (by_page, refined, by_signs)]
    assert shares[1] > 1.4 * shares[0] and shares[2] > 1.4 * shares[0], shares


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
