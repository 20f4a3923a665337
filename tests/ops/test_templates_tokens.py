"""The templates that choose single tokens under Triton's interpreter, against the specifications of the ops."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from hsa_compile import ops  # noqa: F401
from hsa_compile.lowering import options, standalone
from hsa_compile.ops.page_mask import page_mask, unpack
from hsa_compile.ops.refine import forced_tokens, refine_reference
from hsa_compile.ops.select import FRACTION_UNIT
from hsa_compile.ops.select_tokens import select_tokens_reference
from hsa_compile.ops.signs import signs_of
from hsa_compile.ops.summarize import per_kv_head

from .interpreted import Check, Shape, child_process, make_cache, make_mask, poison

pytest.importorskip("triton")
pytest.importorskip("numpy")


def exact(*size: int) -> Tensor:
    """Eighths, whose products and sums are exact in fp32: every order of adding them ranks alike, ties included."""
    return torch.randint(-16, 17, size) / 8


def some_pages(shape: Shape, pages: int) -> Tensor:
    """About half of the pages, others in each row, ascending and padded, as a selection names them."""
    ids = torch.full((shape.batch, shape.kv_heads, pages), -1, dtype=torch.int32)
    for row in ids.view(-1, pages):
        some = torch.randperm(pages)[: max(1, pages // 2)].sort().values
        row[: len(some)] = some
    return ids


def sorted_rows(tokens: Tensor) -> Tensor:
    last = torch.iinfo(torch.int32).max
    return torch.where(tokens < 0, last, tokens).sort(-1).values


def check_tokens(
    shape: Shape,
    kind: str,
    reduce: str = "softmax_mean",
    budget: int = 40,
    fraction: float = 0.0,
    sink: int = 4,
    recent: int = 8,
    softcap: float = 0.0,
    biased: str = "",
    signs: bool = False,
    known: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Chosen of named pages by their keys, or with ``signs`` of all pages by these."""
    mask = make_mask(kind, shape)
    keys = exact(shape.batch, shape.kv_heads, shape.tokens, shape.dim)
    bits = page_mask(mask, shape.page)
    pages = bits.shape[-1]
    q = exact(shape.batch, shape.heads, 1, shape.dim).to(dtype)
    seen = unpack(per_kv_head(bits, shape.batch, shape.kv_heads), shape.page)
    attendable = seen.sum((-1, -2))
    bias = None
    if biased:
        rows = {"row": (1, 1), "batch": (shape.batch, 1), "heads": (shape.batch, shape.heads)}
        bias = exact(*rows[biased], 1, shape.tokens).to(dtype)
    share = round(fraction * FRACTION_UNIT)
    slots = max(budget, forced_tokens(sink, recent))
    if share:
        slots = -(-share * shape.tokens // FRACTION_UNIT) + forced_tokens(sink, recent)
    # A scale of 1 / 8 keeps products exact.
    rule = (0.125, shape.page, slots, budget, share, sink, recent, reduce, softcap)
    if signs:
        centre = exact(shape.batch, shape.kv_heads, pages, shape.dim)
        summary = torch.cat((centre, exact(*centre.shape).abs()), -1).to(dtype)
        padded = keys.new_zeros((*keys.shape[:2], pages * shape.page, shape.dim))
        padded[:, :, : shape.tokens] = keys
        held = signs_of(padded.unflatten(2, (-1, shape.page)), seen, summary)
        want = select_tokens_reference(q.double(), summary, held, bits, bias, *rule)
        # What nobody attends is not read.
        summary.masked_fill_(~seen.any(-1).unsqueeze(-1), float("nan"))
        got = standalone.select_tokens(q, summary, held, bits, bias, *rule, known_tokens=known)
    else:
        ids = some_pages(shape, pages)
        counts = torch.stack((attendable - 1, attendable), -1)
        want = refine_reference(q.double(), keys.to(dtype), ids, counts, bits, bias, *rule)
        cache = make_cache(shape, shape.dim, dtype, True)
        cache.copy_(poison(keys, mask, shape))
        got = standalone.refine(q, cache, ids, counts, bits, bias, *rule, known_tokens=known)
    assert torch.equal(got[1], want[1]), f"{got[1]} instead of {want[1]}"
    assert torch.equal(sorted_rows(got[0]), sorted_rows(want[0])), (
        f"{got[0]} instead of {want[0].sort(-1).values}"
    )
    places = torch.arange(slots).expand_as(got[0])
    assert torch.equal(got[0] >= 0, places < got[1][..., :1])


def check_blocks(shape: Shape, kind: str, reduce: str, signs: bool, known: bool) -> None:
    """Where a block does not hold all tokens."""
    with mock.patch.object(options, "SINGLE_BLOCK_PAGES", 64):
        check_tokens(shape, kind, reduce, signs=signs, known=known)


def check_what_a_score_cannot_say() -> None:
    """Scores that overflow to -inf, and nan, are scores: the tokens can be chosen, after all others."""
    shape = Shape(batch=1, kv_heads=1, group=1, tokens=32)
    bits = page_mask(torch.ones(1, 1, 1, 32, dtype=torch.bool), 16)
    q = torch.full((1, 1, 1, 16), 2.0**70)
    keys = torch.zeros(1, 1, 32, 16)
    keys[0, 0, 3], keys[0, 0, 5], keys[0, 0, 7] = -(2.0**70), 1.0, float("nan")
    bias = torch.zeros(1, 1, 1, 32)
    bias[..., 9] = float("-inf")
    for budget, chosen in ((2, {5, 31}), (29, {*range(32)} - {3, 7, 9}), (32, {*range(32)})):
        rule = (1.0, 16, budget, budget, 0, 0, 1, "max")
        ids = torch.tensor([[[0, 1]]], dtype=torch.int32)
        counts = torch.tensor([[[32, 32]]])
        got, read = standalone.refine(q, keys, ids, counts, bits, bias, *rule)
        assert {*got.flatten().tolist()} == chosen, (shape, got)
        assert read.tolist() == [[[budget, 32]]]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Check]:
    with child_process() as run:
        yield run


BOTH = pytest.mark.parametrize("signs", [False, True], ids=["keys", "signs"])
KEYS = pytest.mark.parametrize(
    "signs", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["keys", "signs"]
)


@BOTH
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (Shape(tokens=250, dim=72, page=32, group=3), "batch left"),
        (Shape(tokens=100, dim=24, page=8), "heads empty"),
        *(
            pytest.param(shape, kind, marks=pytest.mark.slow)
            for shape, kind in (
                (Shape(tokens=250), "row"),
                (Shape(tokens=150, dim=80, page=64, batch=1), "heads"),
                (Shape(tokens=60, dim=64, page=4, group=1), "batch empty"),
                (Shape(tokens=31, dim=256, page=1, kv_heads=1), "row full"),
                (Shape(tokens=15, dim=128, batch=1), "row full"),
            )
        ),
    ],
    ids=str,
)
def test_masks_and_shapes(interpreted: Check, shape: Shape, kind: str, signs: bool) -> None:
    for reduce in ("softmax_mean", "max"):
        interpreted(check_tokens, shape, kind, reduce, signs=signs)


@KEYS
@pytest.mark.parametrize("biased", ["heads", pytest.param("row", marks=pytest.mark.slow)])
def test_caps_and_biases(interpreted: Check, biased: str, signs: bool) -> None:
    shape = Shape(tokens=200)
    interpreted(check_tokens, shape, "heads", "max", biased=biased, signs=signs)
    interpreted(check_tokens, shape, "row", "max", softcap=3.0, biased=biased, signs=signs)


@KEYS
def test_budgets(interpreted: Check, signs: bool) -> None:
    shape = Shape(tokens=200)
    interpreted(check_tokens, shape, "batch", budget=3, sink=5, recent=9, signs=signs)
    interpreted(check_tokens, shape, "batch", budget=1, sink=0, recent=0, signs=signs)
    interpreted(check_tokens, shape, "row", budget=500, signs=signs)
    interpreted(check_tokens, shape, "heads", budget=0, fraction=0.2, signs=signs)
    interpreted(check_tokens, shape, "row full", budget=0, fraction=1.0, signs=signs)


@KEYS
def test_blocks_that_are_looped_over(interpreted: Check, signs: bool) -> None:
    shape = Shape(tokens=333)
    interpreted(check_blocks, shape, "heads", "softmax_mean", signs, True)
    interpreted(check_blocks, shape, "batch left", "max", signs, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(interpreted: Check, dtype: torch.dtype) -> None:
    interpreted(check_tokens, Shape(tokens=250, dim=64), "heads", "max", dtype=dtype)
    interpreted(check_tokens, Shape(tokens=250, dim=64), "row", "max", dtype=dtype, signs=True)


def test_what_a_score_cannot_say(interpreted: Check) -> None:
    interpreted(check_what_a_score_cannot_say)
