"""``hsa::select_accumulated`` against a plain loop over steps; by hand; compiled; its template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from hsa_compile.lowering import standalone
from hsa_compile.lowering.options import Config
from hsa_compile.ops.page_mask import page_mask
from hsa_compile.ops.select import select_reference
from hsa_compile.ops.summarize import NEVER, per_kv_head

from .cases import Case, assert_same_pages, build, page_ranks
from .checks import HSA, traced
from .interpreted import Check, Shape, child_process, make_mask, state

STEPS = 5


def by_rank(
    rank: Tensor, words: Tensor, page: int, *rule: int, more: int = 0
) -> tuple[Tensor, Tensor]:
    """Ids and counts of the rule of ``hsa::select`` for ranks ``[B, Hkv, P]`` that are known; words ``[B, Hkv, P]``."""
    one = rank.new_ones(*rank.shape[:2], 1, 1)
    rest = (1.0, "mean", page, *rule, "max", more)
    return select_reference(one, rank.unsqueeze(-1), words, *rest)


@pytest.mark.parametrize("decay", [0.7, 1.0])
@pytest.mark.parametrize(
    "case",
    [
        Case(length=301, algorithm="heavy_hitters", mask="full"),
        Case(length=301, algorithm="heavy_hitters", mask="per-head", group=4, slots=6),
        Case(length=301, algorithm="heavy_hitters", mask="empty-rows", fraction=0.5),
        Case(length=301, algorithm="heavy_hitters", additive="bias", group=3, token_major=True),
        Case(length=70, algorithm="heavy_hitters", mask="random", page_size=64, slots=12),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_against_a_loop(case: Case, decay: float, dtype: torch.dtype) -> None:
    given = build(case, dtype)
    total = torch.zeros(case.batch, case.kv_heads, case.pages, dtype=torch.float64)
    words, rule = per_kv_head(given.bits, case.batch, case.kv_heads), case.selection()
    for step in range(STEPS):
        given = replace(given, q=4 * torch.randn_like(given.q))
        total = decay * total + page_ranks(given).exp() / case.group
        arguments = (given.q, given.summary, given.bits, given.covered, decay)
        ids, counts = HSA.select_accumulated(*arguments, *rule, 2, given.page_bias)
        expected = by_rank(total, words, *rule[2:8], more=2)  # type: ignore[arg-type]
        if dtype == torch.float64:
            assert torch.equal(ids, expected[0]) and torch.equal(counts, expected[1]), step
        else:
            assert_same_pages(ids, expected[0], total.log())
        kept = given.covered[..., 2].view(torch.float64)
        torch.testing.assert_close(kept, total, rtol=1e-5, atol=1e-9)


def hot_page(decay: float, first: int, then: int) -> list[int]:
    """What one free slot holds, step by step: queries of page 3 for ``first`` steps, of page 6 ``then``.

    Ten full pages; page 9 is the newest. Each query finds all of the softmax in its page.
    """
    summary = torch.zeros(1, 1, 10, 2)
    summary[0, 0, 3, 0] = summary[0, 0, 6, 1] = 100.0
    bits, covered = torch.full((1, 1, 10), 0xFFFF), torch.zeros(1, 1, 10, 3, dtype=torch.int64)
    held = []
    for q in [[1.0, 0.0]] * first + [[0.0, 1.0]] * then:
        given = (torch.tensor(q).view(1, 1, 1, 2), summary, bits, covered, decay)
        rule = (1.0, "heavy_hitters", 16, 3, 2, 0, 0, 1, "softmax_mean")
        ids = HSA.select_accumulated(*given, *rule)[0].flatten().tolist()
        assert ids[1:] == [9, -1]
        held.append(ids[0])
    return held


def test_a_hot_page_stays_and_is_forgotten() -> None:
    """After 60 steps page 3 has 10 = 1 / (1 - 0.9); 0.9 ** k is below a half from k = 7 on, and page 6 has more."""
    assert hot_page(0.9, 60, 10) == [3] * 60 + [3] * 6 + [6] * 4
    # A plain sum forgets nothing: page 6 needs one step more than page 3 had.
    assert hot_page(1.0, 20, 22) == [3] * 20 + [3] * 20 + [6] * 2


def step(
    decay: float, case: Case, q: Tensor, keys: Tensor, bits: Tensor, at: Tensor, *held: Tensor
):
    summary, covered = held
    HSA.summarize(keys, bits, at, summary, covered, case.algorithm, case.page_size)
    return HSA.select_accumulated(q, summary, bits, covered, decay, *case.selection())


def test_compiled_it_is_the_same() -> None:
    """As Inductor gets it: summaries, what is accumulated and the selection, in place."""
    case = Case(length=200, algorithm="heavy_hitters", mask="full", group=2)
    given = build(case)
    states = [(torch.zeros_like(given.summary), torch.zeros_like(given.covered)) for _ in range(2)]
    for _, covered in states:
        covered[..., 1] = NEVER
    compiled = torch.compile(partial(step, 0.9, case), backend=traced, fullgraph=True)
    for at in range(190, 196):
        mask = (torch.arange(200) <= at).view(1, 1, 1, -1)
        q, position = torch.randn_like(given.q), torch.tensor([at])
        keys = given.keys.masked_fill(~mask.mT, 0.0)
        rest = (q, keys, page_mask(mask, 16), position)
        eager = step(0.9, case, *rest, *states[0])
        assert all(map(torch.equal, eager, compiled(*rest, *states[1])))
        assert torch.equal(states[0][1][..., :2], states[1][1][..., :2])
        kept = [covered[..., 2].view(torch.float64) for _, covered in states]
        torch.testing.assert_close(*kept)
        # Of the page that is written into only this step's share is there; its words show no later one.
        assert (kept[0][..., at // 16] < 1).all() and not kept[0][..., at // 16 + 1 :].any()


# The template.


def check_accumulated(shape: Shape, kind: str, config: Config | None, biased: bool = False) -> None:
    decay, page, pages = 0.8, shape.page, -(-shape.tokens // shape.page)
    bits = page_mask(make_mask(kind, shape), page)
    summary = torch.randn(shape.batch, shape.kv_heads, pages, shape.dim)
    _, covered = state(shape, pages, "heavy_hitters", torch.float32)
    covered[..., 2] = 0
    wanted = torch.zeros(shape.batch, shape.kv_heads, pages, 3, dtype=torch.int64)
    bias = torch.randn(*bits.shape) if biased else None
    rule = (shape.scale, "heavy_hitters", page, 5, 4, 0, 1, 8, "softmax_mean")
    for _ in range(2):
        q = 3 * torch.randn(shape.batch, shape.heads, 1, shape.dim)
        given = (q, summary, bits, *rule, 2, bias)
        got = standalone.select(*given, covered=covered, decay=decay, config=config)
        want = torch.ops.hsa.select_accumulated(*given[:3], wanted, decay, *rule, 2, bias)
        kept, expected = (x[..., 2].view(torch.float64) for x in (covered, wanted))
        torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-7)
        assert_same_pages(got[0], want[0], expected.log())
        assert torch.equal(got[1][..., 1], want[1][..., 1])
    assert (covered[..., :2] == -1).all()


def check_summarised_anew(shape: Shape, written: int) -> None:
    """Pages that are summarised anew have nothing, all others what they had."""
    keys, pages = torch.randn(shape.batch, shape.kv_heads, shape.tokens, shape.dim), 8
    words = torch.full((1, 1, pages), (1 << shape.page) - 1)
    summary, covered = state(shape, pages, "heavy_hitters", torch.float32)
    at = torch.tensor([(pages - 1) * shape.page + 3])
    rest = (summary, covered, "heavy_hitters", shape.page, None, written)
    standalone.summarize(keys, words, at, *rest)
    assert (covered[..., 2] == 0).all()
    covered[..., 2] = 7
    words[..., 2] = 1
    standalone.summarize(keys, words, at + (written == 1), *rest)
    assert covered[0, 0, :, 2].tolist() == [7, 7, 0, 7, 7, 7, 7, 0]
    covered[..., 2] = 7
    standalone.summarize(keys, words, at, *rest)
    # The same position again is a rewind; where drafts may be taken back it is what was expected.
    assert covered[-1, -1, :, 2].tolist() == ([7] * 7 + [0] if written > 1 else [0] * 8)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Check]:
    pytest.importorskip("triton")
    with child_process() as run:
        yield run


BLOCKS = Config({"WAYS": 2, "SINGLE": False, "BLOCK": 16}, 4)


@pytest.mark.parametrize("config", [None, BLOCKS], ids=["single", "blocks"])
@pytest.mark.parametrize(
    "kind",
    ["heads empty", *(pytest.param(k, marks=pytest.mark.slow) for k in ("row full", "batch left"))],
)
def test_template(interpreted: Check, kind: str, config: Config | None) -> None:
    interpreted(check_accumulated, Shape(tokens=16 * 20 + 3, kv_heads=1), kind, config)


def test_template_with_a_bias(interpreted: Check) -> None:
    shape = Shape(tokens=300, group=3, kv_heads=1, batch=1, page=32)
    interpreted(check_accumulated, shape, "heads", None, True)


@pytest.mark.parametrize("written", [1, 3])
def test_template_of_summaries(interpreted: Check, written: int) -> None:
    interpreted(check_summarised_anew, Shape(tokens=128), written)
