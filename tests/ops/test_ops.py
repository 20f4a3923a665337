"""Every op against its specification, and the specifications against cases worked out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsa_compile import algorithms
from hsa_compile.ops import aten
from hsa_compile.ops.page_mask import MASKED_BELOW, page_mask, unpack
from hsa_compile.ops.select import select_reference
from hsa_compile.ops.sparse_attention import sparse_attention_reference
from tests.ops.cases import Case, assert_same_pages, build, cases, page_ranks
from tests.ops.checks import HSA, TOLERANCE, attend, check_attention, check_select

RANDOM = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


# ------------------------------------------------------------------------------- by hand


def test_page_mask_by_hand() -> None:
    mask = torch.tensor([True, False, True, True, True]).view(1, 1, 1, 5)
    assert page_mask(mask, 4).tolist() == [[[0b1101, 0b0001]]]
    assert page_mask(torch.ones(1, 1, 1, 64, dtype=torch.bool), 64).tolist() == [[[-1]]]
    rows = torch.tensor(
        [
            [0.0, -math.inf, torch.finfo(torch.float32).min, -1e4, 1 - MASKED_BELOW],
            [-1e4, -1e4, -1e4, -1e4, -1e4],
            [torch.finfo(torch.float32).min] * 5,
            [5.0, -3.0, -1e9, 2.0, 0.0],
        ]
    )
    packed = page_mask(rows.view(2, 2, 1, 5), 8)
    assert packed.tolist() == [[[0b10001], [0b11111]], [[0b11111], [0b11011]]]
    assert unpack(packed, 8)[1, 1, 0].tolist() == [
        True,
        True,
        False,
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("name", algorithms.names())
def test_page_scores_by_hand(name: str) -> None:
    keys = torch.tensor([[1.0, -2.0], [3.0, 4.0], [math.nan, 100.0]])
    present = torch.tensor([[True], [True], [False]])
    q = torch.tensor([2.0, -1.0])
    # Quest: the best corner of [1, 3] x [-2, 4]. Cuboid: centre (2, 1), deviation (1, 3). Mean: the centre.
    expected = {
        "quest": 2 * 3 + 1 * 2,
        "cuboid": (4 - 1) + (2 * 1 + 1 * 3),
        "mean": 4 - 1,
        "heavy_hitters": 4 - 1,
        "streaming": 0,
    }
    score = algorithms.get(name)
    summary = score.summarize(keys, present)
    assert summary.shape[-1] == algorithms.summary_width(name, 2)
    assert float(score.expand_query(q) @ summary) == expected[name]


def test_quest_bounds_every_key() -> None:
    keys, q = torch.randn(50, 7, 16), torch.randn(16)
    score = algorithms.get("quest")
    bound = score.summarize(keys, torch.ones(50, 7, 1, dtype=torch.bool)) @ score.expand_query(q)
    assert (bound >= (keys @ q).amax(-1) - 1e-4).all()


def select_by_scores(
    scores: list[float], words: list[int], slots: int, **rule: object
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Ids and counts of the reference and of the op, for one head and pages of 4 tokens."""
    summary = torch.tensor(scores).view(1, 1, -1, 1)
    q, bits = torch.ones(1, 1, 1, 1), torch.tensor(words).view(1, 1, -1)
    fields = {"budget": slots, "fraction": 0, "sink": 0, "recent": 0, "reduce": "max", "more": 0}
    arguments = (1.0, "mean", 4, slots, *(fields | rule).values())
    found = [f(q, summary, bits, *arguments) for f in (select_reference, HSA.select)]
    return tuple(x.flatten().tolist() for pair in found for x in pair)  # type: ignore[return-value]


@pytest.mark.parametrize("reduce", ["max", "softmax_mean"])
@pytest.mark.parametrize(
    ("scores", "words", "slots", "rule", "ids", "counts"),
    [
        # The newest page is always in, and counts.
        ([5, 9, 7, 1, 0], [15, 15, 15, 15, 1], 3, {}, [1, 2, 4], [9, 17]),
        # Ties go to the lower index; zero and minus zero are a tie.
        ([3, 3, 3, 3, 3], [15] * 5, 3, {}, [0, 1, 4], [12, 20]),
        ([0.0, -0.0, 0.0, -1, -1], [15] * 5, 3, {}, [0, 1, 4], [12, 20]),
        # Sinks count from the first attendable token: tokens 6 to 9, on pages 1 and 2.
        ([9, 0, 0, 8, 7, 0], [0, 12, 15, 15, 15, 3], 4, {"sink": 4}, [1, 2, 3, 5], [12, 16]),
        # The last 3 tokens reach back into page 3; forced pages exceed the budget.
        ([9, 9, 9, 0, 0], [15, 15, 15, 15, 3], 2, {"budget": 1, "recent": 3}, [3, 4], [6, 18]),
        # Pages without attendable tokens are not selected, however large their score.
        ([1, 99, 2], [15, 0, 15], 3, {}, [0, 2, -1], [8, 8]),
        ([1, 2], [0, 0], 2, {}, [-1, -1], [0, 0]),
        # Half of 13 tokens: two pages of four.
        ([1, 5, 2, 0], [15, 15, 15, 1], 4, {"fraction": 32768}, [1, 3, -1, -1], [5, 13]),
        # 8 tokens in three pages, and the budget buys two: a row within its budget keeps all.
        ([1, 9, 2, 0], [0, 12, 15, 3], 3, {"budget": 2}, [1, 2, 3], [8, 8]),
        # 9 tokens: one too many.
        ([1, 9, 2, 0], [0, 14, 15, 3], 3, {"budget": 2}, [1, 3, -1], [5, 9]),
        # All of 6 tokens, as a fraction.
        ([1, 9, 2, 0], [0, 8, 15, 1], 4, {"fraction": 65536}, [1, 2, 3, -1], [6, 6]),
        # More slots than pages.
        ([1, 2], [15, 15], 4, {}, [0, 1, -1, -1], [8, 8]),
        # The two that just missed, ascending; ties go to the lower index; not counted.
        ([5, 3, 7, 1, 3, 3, 0], [15] * 7, 2, {"more": 2}, [2, 6, 0, 1], [8, 28]),
        # Fewer are left than asked for, and the empty page is none of them.
        ([5, 3, 7, 9, 0], [15, 15, 15, 0, 3], 2, {"more": 3}, [2, 4, 0, 1, -1], [6, 14]),
        # A row within its budget leaves none.
        ([1, 9, 2, 0], [0, 12, 15, 3], 3, {"budget": 2, "more": 1}, [1, 2, 3, -1], [8, 8]),
        # Forced beyond the budget: the rest is next, though there is a free slot.
        (
            [9, 8, 9, 0, 0],
            [15] * 5,
            3,
            {"budget": 1, "recent": 5, "more": 1},
            [3, 4, -1, 0],
            [8, 20],
        ),
    ],
)
def test_select_by_hand(
    scores: list[float],
    words: list[int],
    slots: int,
    rule: dict[str, object],
    ids: list[int],
    counts: list[int],
    reduce: str,
) -> None:
    found = select_by_scores(scores, words, slots, **rule, reduce=reduce)
    assert found == (ids, counts, ids, counts)


# ----------------------------------------------------------------- against the references


@RANDOM
@given(cases())
def test_page_mask(case: Case) -> None:
    case = replace(case, head_dim=1, value_dim=1)
    state = build(case)
    mask = state.mask
    if mask.dtype != torch.bool:
        mask = mask.double() - mask.double().amax(-1, keepdim=True) > -MASKED_BELOW
    for b, h in itertools.product(range(mask.shape[0]), range(mask.shape[1])):
        words = [0] * case.pages
        for token in mask[b, h, 0].nonzero().flatten().tolist():
            words[token // case.page_size] |= 1 << (token % case.page_size)
        assert [
            w % 2**64 for w in HSA.page_mask(state.mask, case.page_size)[b, h].tolist()
        ] == words


@pytest.fixture(params=["eager", "as traced"], scope="module")
def spelling(request: pytest.FixtureRequest) -> object:
    """Both spellings of the products: the one that eager mode runs, and the one that Inductor sees."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "as traced":
            patch.setattr(aten, "_is_traced", lambda x: True)
        yield request.param


@RANDOM
@given(case=cases(), more=st.integers(1, 20))
def test_pages_that_just_missed(spelling: object, case: Case, more: int) -> None:
    """They do not change the selection, and are those of the specification."""
    state = build(case)
    (alone, counted), (ids, counts) = (HSA.select(*state.selection(m)) for m in (0, more))
    slots = alone.shape[-1]
    assert torch.equal(ids[..., :slots], alone) and torch.equal(counts, counted)
    expected, _ = select_reference(*state.selection(more))
    if torch.equal(alone, expected[..., :slots]):
        assert_same_pages(ids[..., slots:], expected[..., slots:], page_ranks(state))


def test_the_bias_of_a_page_by_hand() -> None:
    """The mean of e^mask over what can be attended; 0 exactly where the mask only hides."""
    low = torch.finfo(torch.float32).min
    hides = torch.tensor([low, 0, 0, 0, 0, -math.inf, low, low]).view(1, 1, 1, 8)
    assert torch.equal(HSA.page_bias(hides, 3), torch.zeros(1, 1, 3))
    line = torch.tensor([-3.0, -2, -1, 0]).view(1, 1, 1, 4)
    want = [math.log((math.exp(-3) + math.exp(-2)) / 2), math.log((math.exp(-1) + 1) / 2)]
    torch.testing.assert_close(HSA.page_bias(line, 2), torch.tensor(want).view(1, 1, 2))
    # A row that is the same throughout is attended, whatever its value.
    assert torch.equal(
        HSA.page_bias(torch.full((1, 1, 1, 5), -1e4), 4)[0, 0], torch.full((2,), -1e4)
    )


@RANDOM
@given(case=cases())
def test_select(spelling: str, case: Case) -> None:
    state = build(case)
    check_select(state, HSA.select(*state.selection()))


@RANDOM
@given(case=cases())
def test_sparse_attention(spelling: str, case: Case) -> None:
    state = build(case)
    ids, _ = select_reference(*state.selection())
    check_attention(state, ids, HSA.sparse_attention(*attend(state, ids)))


@pytest.mark.parametrize("filled", [0, 1, 7])
def test_slots_that_no_row_fills(filled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row fills more than the others, one none; where the op is whole, as it is under Inductor too."""
    monkeypatch.setattr(aten, "_is_traced", lambda x: False)
    state = build(Case(length=301, mask="full"))
    ids = torch.full((2, 2, state.case.pages), -1, dtype=torch.int32)
    ids[0, 0, :filled], ids[1, :, :2] = (
        torch.arange(filled, dtype=torch.int32),
        torch.tensor([3, 9]),
    )
    check_attention(state, ids, HSA.sparse_attention(*attend(state, ids), True))


@RANDOM
@given(cases())
def test_lossless_within_the_budget(case: Case) -> None:
    case = replace(case, slots=case.pages, fraction=0.0, softcap=0.0, uneven=False)
    state = build(case)
    ids, counts = HSA.select(*state.selection())
    assert torch.equal(counts[..., 0], counts[..., 1])
    out, _ = HSA.sparse_attention(*attend(state, ids))
    clean = [x.nan_to_num().repeat_interleave(case.group, 1) for x in (state.keys, state.values)]
    seen = state.seen.unsqueeze(2)
    bias = torch.zeros(()) if state.bias is None else state.bias
    mask = torch.where(seen, bias, -math.inf)
    dense = torch.nn.functional.scaled_dot_product_attention(state.q, *clean, attn_mask=mask)
    torch.testing.assert_close(out, dense.masked_fill(~seen.any(-1, keepdim=True), 0), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype, spelling: str) -> None:
    for case in (
        Case(length=301, head_dim=64),
        Case(length=301, additive="bias", mask="per-head", softcap=2.0),
    ):
        state = build(case, dtype)
        ids, counts = HSA.select(*state.selection())
        check_select(state, (ids, counts))
        out, lse = HSA.sparse_attention(*attend(state, ids))
        fine = [
            x.double() if x is not None and x.is_floating_point() else x
            for x in attend(state, ids)[:7]
        ]
        exact, log_sum = sparse_attention_reference(
            *(x if x is None or not x.is_floating_point() else x.nan_to_num() for x in fine),
            case.scale,
            case.page_size,
            case.softcap,
        )
        # Accumulated in fp32 or fp64, so nothing but the last rounding is lost.
        unit = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
        torch.testing.assert_close(out.double(), exact, rtol=unit, atol=max(1e-12, unit * 1e-2))
        torch.testing.assert_close(lse, log_sum, **TOLERANCE)


@RANDOM
@given(cases())
def test_summaries_cover_what_can_be_attended(case: Case) -> None:
    """The op's summaries (built by ``build``) are the algorithm's, page by page."""
    state = build(case)
    seen = state.seen.unflatten(1, (case.kv_heads, case.group)).any(2)
    score = algorithms.get(case.algorithm)
    for b, h, page in itertools.product(range(case.batch), range(case.kv_heads), range(case.pages)):
        span = slice(page * case.page_size, (page + 1) * case.page_size)
        tokens = state.keys[b, h, span][seen[b, h, span]]
        expected = torch.zeros_like(state.summary[b, h, page])
        if len(tokens):
            expected = score.summarize(tokens, torch.ones(len(tokens), 1, dtype=torch.bool))
        torch.testing.assert_close(state.summary[b, h, page], expected, **TOLERANCE)


# --------------------------------------------------------------------------------- opcheck


@pytest.mark.parametrize(
    "name", ["page_mask", "page_bias", "summarize", "select", "sparse_attention"]
)
def test_opcheck(name: str) -> None:
    case = Case(length=70, slots=3)
    state = build(case)
    state = replace(state, keys=state.keys.nan_to_num(), values=state.values.nan_to_num())
    ids, _ = HSA.select(*state.selection())
    arguments = {
        "page_mask": (state.mask, case.page_size),
        "summarize": (
            *(state.keys, state.bits, state.position, state.summary, state.covered),
            *(case.algorithm, case.page_size),
        ),
        "select": state.selection(),
        "page_bias": (state.mask.double(), case.page_size),
        "sparse_attention": attend(state, ids),
    }
    torch.library.opcheck(getattr(HSA, name).default, arguments[name])
