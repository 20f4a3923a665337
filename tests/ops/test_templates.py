"""The templates of summaries and selection under Triton's interpreter, against the specifications of the ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hsa_compile import algorithms, ops  # noqa: F401
from hsa_compile.lowering import standalone
from hsa_compile.lowering.options import Config
from hsa_compile.ops.page_mask import page_mask, unpack
from hsa_compile.ops.select import FRACTION_UNIT, forced_pages, select_reference
from hsa_compile.ops.signs import signs_of, signs_width
from hsa_compile.ops.summarize import APART, per_kv_head, summarize

from .interpreted import Check, Shape, child_process, make_cache, make_mask, poison, state

pytest.importorskip("triton")
pytest.importorskip("numpy")


def check_summarize(
    shape: Shape, algorithm: str, dtype: torch.dtype, kind: str, token_major: bool
) -> None:
    mask = make_mask(kind, shape)
    keys = poison(make_cache(shape, shape.dim, dtype, token_major), mask, shape)
    bits = page_mask(mask, shape.page)
    position = torch.full((shape.batch if "batch" in kind else 1,), shape.tokens - 1)
    got, covered = state(shape, bits.shape[-1], algorithm, dtype)
    want, want_covered = state(shape, bits.shape[-1], algorithm, torch.float64)
    summarize(keys.double(), bits, position, want, want_covered, algorithm, shape.page)
    standalone.summarize(keys, bits, position, got, covered, algorithm, shape.page)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=2 * eps, atol=2 * eps)
    assert torch.equal(covered, want_covered)


def check_only_stale(shape: Shape) -> None:
    """The next step reads the page that it wrote into, one whose mask changed, and no other."""
    keys = torch.randn(shape.batch, shape.kv_heads, shape.tokens, shape.dim)
    mask = torch.ones(1, 1, 1, shape.tokens, dtype=torch.bool)
    bits = page_mask(mask, shape.page)
    summary, covered = state(shape, bits.shape[-1], "cuboid", torch.float32)
    position = torch.tensor([shape.tokens - 2])
    standalone.summarize(keys, bits, position, summary, covered, "cuboid", shape.page)
    before = summary.clone()
    mask[..., shape.page] = False
    bits = page_mask(mask, shape.page)
    edited = torch.where(torch.arange(shape.tokens).view(-1, 1) == position, keys, keys * 2)
    standalone.summarize(edited, bits, position + 1, summary, covered, "cuboid", shape.page)
    changed = (summary != before).any(-1).all(0).all(0).nonzero().flatten().tolist()
    assert changed == [1, (shape.tokens - 1) // shape.page]
    assert torch.equal(covered[0, 0, :, 0], bits[0, 0])
    assert (covered[..., 1] % 2**32 == shape.tokens).all()
    # A position that is not the one expected: everything is read again.
    before = summary.clone()
    standalone.summarize(keys * 3, bits, position, summary, covered, "cuboid", shape.page)
    assert (summary != before).any(-1).all()
    # The position expected, and before it another key than the one that was written there: likewise.
    before = summary.clone()
    standalone.summarize(keys * 4, bits, position + 1, summary, covered, "cuboid", shape.page)
    assert (summary != before).any(-1).all()


def check_several(shape: Shape, written: int, kind: str, kept: int, algorithm: str) -> None:
    """Steps of several tokens, some taken back, tokens apart, and a step that writes nothing: as the op has them."""
    mask = make_mask(kind, shape)
    keys = make_cache(shape, shape.dim, torch.float32, True)
    pages = -(-shape.tokens // shape.page)
    got, want = (state(shape, pages, algorithm, torch.float32) for _ in range(2))
    at = 9 + torch.arange(shape.batch if "batch" in kind else 1)
    token = torch.arange(shape.tokens)
    steps = [at + kept * i for i in range(4)] + [torch.full_like(at, APART), at]
    for i, position in enumerate(steps):
        seen = mask & (token < position.view(-1, 1, 1, 1) + written) if i < 4 else mask
        bits = page_mask(seen, shape.page)
        for b in range(shape.batch):
            first = int(position[b if len(position) > 1 else 0])
            here = slice(max(first, 0), max(first, 0) + written)
            keys[b, :, here] = torch.randn(shape.kv_heads, written, shape.dim)
        summarize(keys, bits, position, *want, algorithm, shape.page, None, written)
        standalone.summarize(keys, bits, position, *got, algorithm, shape.page, None, written)
        torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(got[1], want[1])
    # Nothing is written: what was left is found, and stale is only what the mask says.
    position = torch.full_like(at, shape.tokens)
    for op, held in ((summarize, want), (standalone.summarize, got)):
        op(keys, bits, position, *held, algorithm, shape.page, None, 0)
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
    before = got[0].clone()
    mask[..., 0] = ~mask[..., 0]
    bits = page_mask(mask, shape.page)
    edited = keys * 2
    edited[:, :, -1] = keys[:, :, -1]
    standalone.summarize(edited, bits, position, *got, algorithm, shape.page, None, 0)
    assert torch.equal(got[0][:, :, 1:], before[:, :, 1:])
    assert torch.equal(got[1][..., 1], want[1][..., 1])


def check_taken_back(shape: Shape, written: int) -> None:
    """Pages before the last step's tokens are not read again, in any block of pages."""
    keys = torch.randn(shape.batch, shape.kv_heads, shape.tokens, shape.dim)
    bits = page_mask(torch.ones(1, 1, 1, shape.tokens, dtype=torch.bool), shape.page)
    summary, covered = state(shape, bits.shape[-1], "cuboid", torch.float32)
    first = shape.tokens - 40
    rest = (bits, torch.tensor([first]), summary, covered, "cuboid", shape.page, None, 5)
    standalone.summarize(keys, *rest)
    before = summary.clone()
    edited = keys * 2
    edited[:, :, first - 1] = keys[:, :, first - 1]
    rest = (bits, torch.tensor([first + 2]), summary, covered, "cuboid", shape.page, None, written)
    standalone.summarize(edited, *rest)
    changed = (summary != before).any(-1).all(0).all(0).nonzero().flatten().tolist()
    assert changed == list(range(first // shape.page, (first + 1 + written) // shape.page + 1))
    # Another key there: everything is read again.
    rest = (bits, torch.tensor([first + 4]), summary, covered, "cuboid", shape.page, None, written)
    standalone.summarize(keys * 3, *rest)
    assert (summary != before).any(-1).all()


def check_select(
    shape: Shape,
    algorithm: str,
    dtype: torch.dtype,
    kind: str,
    reduce: str,
    slots: int = 4,
    fraction: float = 0.0,
    sink: int = 1,
    recent: int = 8,
    config: Config | None = None,
    tied: bool = False,
    more: int = 0,
    biased: bool = False,
    top_p: float = 1.0,
    floor: int = 0,
    head_pages: tuple[int, ...] = (),
    dense_below: float = 0.0,
) -> None:
    bits = page_mask(make_mask(kind, shape), shape.page)
    q = torch.randn(shape.batch, shape.heads, 1, shape.dim)
    # Sums of eighths are exact in any order: equal pages have equal scores, whatever multiplies them.
    q = (q.mul(8).round() / 8 if tied else q).to(dtype)
    if dense_below:  # every second KV head looks at little, the others at everything alike
        q.unflatten(1, (shape.kv_heads, -1))[:, ::2] *= 4
        q.unflatten(1, (shape.kv_heads, -1))[:, 1::2] *= 0.125
    summary, _ = state(shape, bits.shape[-1], algorithm, dtype)
    summary.copy_(torch.randn(summary.shape) if not tied else torch.ones(summary.shape))
    share = round(fraction * FRACTION_UNIT)
    budget = max(slots, forced_pages(sink, recent, shape.page))
    slots = bits.shape[-1] if fraction or dense_below else budget + 1
    bias = 3 * torch.randn(1, shape.heads, bits.shape[-1]) if biased else None
    rest = (algorithm, shape.page, slots, budget, share, sink, recent, reduce, more, bias)
    rest = (*rest, top_p, floor, head_pages, dense_below)
    ids, counts = select_reference(q.double(), summary.double(), bits, shape.scale, *rest)
    if dense_below and not tied:
        whole = counts[..., 0] == counts[..., 1]
        assert whole.any() and not whole.all(), "no case of it"
    # Pages that cannot be attended are not read.
    union = bits.expand(shape.batch, shape.heads, -1).unflatten(1, (shape.kv_heads, shape.group))
    summary.masked_fill_((union == 0).all(2).unsqueeze(-1), float("nan"))
    got, got_counts = standalone.select(q, summary, bits, shape.scale, *rest, config=config)
    assert torch.equal(got, ids), f"{got} instead of {ids}"
    assert torch.equal(got_counts, counts), f"{got_counts} instead of {counts}"


def check_nan_scores_rank_lowest() -> None:
    shape = Shape(batch=1, kv_heads=1, group=1)
    bits = torch.full((1, 1, 10), 0xFFFF)
    scores = torch.arange(10.0).view(1, 1, 10)
    scores[..., 5:9] = float("nan")
    q, summary = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 10, 16)
    for reduce in ("softmax_mean", "max"):
        ids, _ = standalone.select(
            q, summary, bits, shape.scale, "mean", 16, 4, 4, 0, 0, 1, reduce, scores=scores
        )
        assert ids.flatten().tolist() == [2, 3, 4, 9]


def check_one_page_dominates() -> None:
    """Where an fp32 softmax underflows, the others keep their order."""
    shape = Shape(batch=1, kv_heads=1, group=2)
    bits = torch.full((1, 1, 10), 0xFFFF)
    scores = torch.tensor([[-300.0, -100, -250, -150, -200, 500, -350, -400, -450, -500]]).repeat(
        2, 1
    )
    scores = (scores / shape.scale).unsqueeze(0)
    q, summary = torch.zeros(1, 2, 1, 16), torch.zeros(1, 1, 10, 16)
    ids, _ = standalone.select(
        q, summary, bits, shape.scale, "mean", 16, 5, 5, 0, 0, 1, "softmax_mean", scores=scores
    )
    assert ids.flatten().tolist() == [1, 3, 4, 5, 9]


def check_signs(shape: Shape, kind: str, dtype: torch.dtype) -> None:
    """Signs are those about the centre that was stored; pages that are not stale keep theirs."""
    mask = make_mask(kind, shape)
    keys = poison(make_cache(shape, shape.dim, dtype, True), mask, shape)
    bits = page_mask(mask, shape.page)
    summary, covered = state(shape, bits.shape[-1], "cuboid", dtype)
    signs = torch.full((*summary.shape[:3], signs_width(shape.page, shape.dim)), -7)
    rest = (bits, torch.tensor([shape.tokens - 2]), summary, covered, "cuboid", shape.page, None, 1)
    standalone.summarize(keys, *rest, signs)
    pages = keys.new_zeros((*keys.shape[:2], summary.shape[2] * shape.page, shape.dim))
    pages[:, :, : shape.tokens] = keys
    pages = pages.unflatten(2, (-1, shape.page))
    present = unpack(per_kv_head(bits, shape.batch, shape.kv_heads), shape.page)
    assert torch.equal(signs, signs_of(pages, present, summary))
    signs.fill_(-7)
    rest = (bits, torch.tensor([shape.tokens - 1]), *rest[2:])
    standalone.summarize(keys, *rest, signs)
    last = (shape.tokens - 1) // shape.page
    assert (signs[:, :, :last] == -7).all()
    assert torch.equal(signs[:, :, last:], signs_of(pages, present, summary)[:, :, last:])


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Check]:
    with child_process() as run:
        yield run


@pytest.mark.parametrize("algorithm", algorithms.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_summaries(interpreted: Check, algorithm: str, dtype: torch.dtype) -> None:
    interpreted(check_summarize, Shape(dim=24), algorithm, dtype, "row", False)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (Shape(dim=72, page=32, tokens=70), "heads"),
        (Shape(dim=80, page=64, tokens=150), "batch empty"),
        (Shape(dim=16, page=16, tokens=1), "row full"),
        (Shape(dim=16, page=16, tokens=15), "row full"),
        (Shape(dim=16, page=16, tokens=17), "batch left"),
        (Shape(dim=256, page=32, tokens=64), "heads empty"),
    ],
    ids=str,
)
def test_summaries_of_masked_caches(interpreted: Check, shape: Shape, kind: str) -> None:
    interpreted(check_summarize, shape, "cuboid", torch.bfloat16, kind, True)
    interpreted(check_summarize, shape, "quest", torch.float32, kind, False)


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [
        (Shape(dim=64, page=16, tokens=50), "batch full", torch.float32),
        (Shape(dim=72, page=32, tokens=70), "row full", torch.bfloat16),
        (Shape(dim=24, page=64, tokens=70), "heads", torch.float16),
    ],
    ids=str,
)
def test_signs(interpreted: Check, shape: Shape, kind: str, dtype: torch.dtype) -> None:
    interpreted(check_signs, shape, kind, dtype)


def test_only_stale_pages_are_summarised(interpreted: Check) -> None:
    interpreted(check_only_stale, Shape(tokens=16 * 70))


@pytest.mark.parametrize(
    ("shape", "written", "kind", "kept"),
    [
        (Shape(tokens=100), 5, "batch full", 2),
        (Shape(tokens=100, dim=24, page=32), 16, "row full", 13),
        (Shape(tokens=100, group=6), 3, "heads full", 3),
        pytest.param(Shape(tokens=100), 5, "row full", 5, marks=pytest.mark.slow),
        pytest.param(Shape(tokens=130, page=64), 2, "batch full", 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_summaries_of_several_tokens(
    interpreted: Check, shape: Shape, written: int, kind: str, kept: int
) -> None:
    interpreted(check_several, shape, written, kind, kept, "cuboid")
    interpreted(check_several, shape, written, kind, kept, "quest")


@pytest.mark.parametrize(
    "written",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow), 16],
)
def test_tokens_that_were_taken_back(interpreted: Check, written: int) -> None:
    interpreted(check_taken_back, Shape(tokens=16 * 70), written)
    interpreted(check_taken_back, Shape(tokens=16 * 70 - 9, batch=1), written)


@pytest.mark.parametrize("reduce", ["softmax_mean", "max"])
@pytest.mark.parametrize("algorithm", algorithms.names())
def test_selection(interpreted: Check, algorithm: str, reduce: str) -> None:
    interpreted(check_select, Shape(tokens=250), algorithm, torch.float32, "row", reduce)


@pytest.mark.parametrize(
    "kind", ["row full", "batch", "batch left", "heads", "heads empty", "batch empty"]
)
def test_selection_under_masks(interpreted: Check, kind: str) -> None:
    interpreted(check_select, Shape(tokens=250), "cuboid", torch.float32, kind, "softmax_mean")
    interpreted(
        check_select, Shape(tokens=250), "cuboid", torch.float32, kind, "max", sink=20, recent=1
    )


@pytest.mark.parametrize(
    "shape",
    [
        Shape(dim=64, group=1, kv_heads=3),
        Shape(dim=72, group=3, page=32, tokens=200),
        Shape(dim=80, group=4, page=64, tokens=400, batch=1),
        Shape(dim=96, group=16, kv_heads=1, batch=1),
        Shape(dim=128, group=8, kv_heads=1, batch=1),
        Shape(dim=256, group=2, kv_heads=1),
        *(Shape(tokens=n, batch=1) for n in (1, 15, 16, 17)),
        *(Shape(tokens=n, batch=1, page=64) for n in (1, 63, 64, 65)),
    ],
    ids=str,
)
def test_selection_of_shapes(interpreted: Check, shape: Shape) -> None:
    interpreted(check_select, shape, "quest", torch.bfloat16, "batch full", "softmax_mean")
    interpreted(check_select, shape, "cuboid", torch.float16, "heads", "softmax_mean")


@pytest.mark.parametrize("reduce", ["softmax_mean", "max"])
def test_selection_with_a_bias(interpreted: Check, reduce: str) -> None:
    for kind in ("batch", "heads"):
        interpreted(
            check_select, Shape(tokens=250), "mean", torch.float32, kind, reduce, biased=True
        )


@pytest.mark.parametrize("fraction", [0.01, 0.3, 1.0])
def test_selection_of_a_fraction(interpreted: Check, fraction: float) -> None:
    shape = Shape(tokens=250)
    interpreted(
        check_select, shape, "mean", torch.float32, "batch", "softmax_mean", fraction=fraction
    )


@pytest.mark.parametrize(
    "sink", [0, 17, 40, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))]
)
@pytest.mark.parametrize(
    "recent", [0, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))]
)
def test_sinks_and_recent_tokens(interpreted: Check, sink: int, recent: int) -> None:
    shape = Shape(tokens=180, batch=1)
    interpreted(
        check_select,
        shape,
        "mean",
        torch.float32,
        "batch",
        "softmax_mean",
        slots=3,
        sink=sink,
        recent=recent,
    )


@pytest.mark.parametrize("slots", [1, 3, 9, 20])
def test_ties_go_to_the_lower_index(interpreted: Check, slots: int) -> None:
    shape = Shape(tokens=250)
    for config in (None, Config({"WAYS": 2, "SINGLE": False, "BLOCK": 16}, 4)):
        interpreted(
            check_select, shape, "mean", torch.float32, "row full", "softmax_mean",
            slots=slots, sink=0, tied=True, config=config,
        )  # fmt: skip


@pytest.mark.parametrize("ways", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["heads", *(pytest.param(k, marks=pytest.mark.slow) for k in ("batch", "row full"))]
)
def test_selection_in_blocks(interpreted: Check, ways: int, kind: str) -> None:
    """What runs where all pages do not fit one block, or their number is not known."""
    config = Config({"WAYS": ways, "SINGLE": False, "BLOCK": 16}, 4)
    shape = Shape(tokens=16 * 50 + 3, batch=1)
    for reduce in ("softmax_mean", "max"):
        interpreted(
            check_select,
            shape,
            "cuboid",
            torch.float32,
            kind,
            reduce,
            slots=9,
            sink=20,
            recent=20,
            config=config,
        )


@pytest.mark.parametrize(
    ("single", "more"),
    [
        (False, 5),
        *(
            pytest.param(single, more, marks=pytest.mark.slow)
            for single, more in ((True, 5), (True, 1), (True, 200), (False, 1), (False, 200))
        ),
    ],
)
def test_pages_that_just_missed(interpreted: Check, single: bool, more: int) -> None:
    config = None if single else Config({"WAYS": 2, "SINGLE": False, "BLOCK": 16}, 4)
    rest = {"config": config, "more": more}
    shape, dtype = Shape(tokens=400), torch.float32
    for kind, reduce in (("row full", "max"), ("batch", "softmax_mean"), ("heads empty", "max")):
        interpreted(check_select, shape, "cuboid", dtype, kind, reduce, slots=9, **rest)
    for slots in (1, 24, 25):
        interpreted(
            check_select, shape, "mean", dtype, "batch", "softmax_mean",
            slots=slots, sink=0, tied=slots % 2 == 0, **rest,
        )  # fmt: skip
    for tokens in (1, 16, 17):
        interpreted(
            check_select, Shape(tokens=tokens), "mean", dtype, "batch", "softmax_mean", **rest
        )
    interpreted(check_select, shape, "mean", dtype, "batch", "softmax_mean", fraction=0.3, **rest)


@pytest.mark.parametrize(
    "top_p", [0.83, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.02, 0.37, 0.999))]
)
@pytest.mark.parametrize("single", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_selection_that_stops_at_a_share(interpreted: Check, single: bool, top_p: float) -> None:
    config = None if single else Config({"WAYS": 4, "SINGLE": False, "BLOCK": 16}, 4)
    rest = {"config": config, "top_p": top_p, "slots": 30}
    for shape, kind in (
        (Shape(tokens=803), "batch"),
        (Shape(tokens=803, group=1), "row full"),
        (Shape(tokens=803, group=3, batch=1), "heads empty"),
        (Shape(tokens=250), "batch left"),
    ):
        interpreted(check_select, shape, "cuboid", torch.float32, kind, "softmax_mean", **rest)
    shape = Shape(tokens=803, group=4)
    rest = {**rest, "floor": 5, "sink": 40, "recent": 70}
    for more, biased in ((0, True), (4, False)):
        interpreted(
            check_select, shape, "mean", torch.float32, "row", "softmax_mean",
            more=more, biased=biased, **rest,
        )  # fmt: skip


def test_a_share_of_equal_pages(interpreted: Check) -> None:
    """50 pages of a fiftieth each: 0.37 of them is 19, the always selected first, then by index."""
    for config in (None, Config({"WAYS": 2, "SINGLE": False, "BLOCK": 16}, 4)):
        interpreted(
            check_select, Shape(tokens=800), "mean", torch.float32, "row full", "softmax_mean",
            slots=30, sink=0, tied=True, config=config, top_p=0.37,
        )  # fmt: skip


@pytest.mark.parametrize("single", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_budget_for_each_kv_head(interpreted: Check, single: bool) -> None:
    """Also one of a single page, one that the row is within, and with a share as well."""
    config = None if single else Config({"WAYS": 2, "SINGLE": False, "BLOCK": 16}, 4)
    rest = {"config": config, "slots": 24, "head_pages": (24, 1, 9)}
    for shape, kind, more in (
        (Shape(tokens=803, kv_heads=3), "batch", {}),
        (Shape(tokens=330, kv_heads=3, group=3), "row full", {"sink": 0, "recent": 0}),
        (Shape(tokens=803, kv_heads=3, group=1), "row", {"top_p": 0.6, "floor": 3, "more": 4}),
        (Shape(tokens=803, kv_heads=3), "row full", {"tied": True, "sink": 0}),
    ):
        interpreted(
            check_select, shape, "mean", torch.float32, kind, "softmax_mean", **rest, **more
        )


@pytest.mark.parametrize("single", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_that_hold_too_little_take_every_page(interpreted: Check, single: bool) -> None:
    """By budgets, by heads and by shares, with ties, among empty rows, and with none left that just missed."""
    config = None if single else Config({"WAYS": 2, "SINGLE": False, "BLOCK": 16}, 4)
    for shape, kind, below, more in (
        (Shape(tokens=803, kv_heads=3), "batch", 0.7, {"slots": 20}),
        (Shape(tokens=803, kv_heads=3), "heads empty", 0.7, {"slots": 20, "more": 4}),
        (Shape(tokens=803, kv_heads=3), "row", 0.6, {"head_pages": (24, 1, 9), "slots": 24}),
        (Shape(tokens=803, batch=4, group=1), "row full", 0.7, {"slots": 22, "top_p": 0.8}),
    ):
        interpreted(
            check_select, shape, "mean", torch.float32, kind, "softmax_mean",
            config=config, dense_below=below, **more,
        )  # fmt: skip
    # 20 of 50 equal pages.
    for below in (0.39, 0.41):
        interpreted(
            check_select, Shape(tokens=800), "mean", torch.float32, "row full", "softmax_mean",
            slots=20, tied=True, config=config, dense_below=below,
        )  # fmt: skip


def test_nan_scores_rank_lowest(interpreted: Check) -> None:
    interpreted(check_nan_scores_rank_lowest)


def test_order_survives_one_dominant_page(interpreted: Check) -> None:
    interpreted(check_one_page_dominates)
