"""Page scores of a user's own: what is refused, and that they are used as they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import hsa_compile
from hsa_compile import LayerPolicy, PageKernel, PageScore, algorithms, register_algorithm
from hsa_compile.lowering import standalone
from hsa_compile.ops.page_mask import page_mask
from hsa_compile.ops.select import select_reference

from .models.helpers import compile_hsa, decode, request, tiny
from .models.reference import by_the_rule
from .ops.interpreted import Check, child_process


def farthest(keys: Tensor, present: Tensor) -> Tensor:
    """The mean of a page and its largest distance from it, by channel."""
    centre = keys.masked_fill(~present, 0).sum(-2) / present.sum(-2)
    away = (keys - centre.unsqueeze(-2)).abs().masked_fill(~present, 0).amax(-2)
    return torch.cat((centre, away), -1)


def reach(q: Tensor) -> Tensor:
    return torch.cat((q, 0.5 * q.abs()), -1)


FARTHEST = PageScore(
    "farthest",
    2,
    farthest,
    reach,
    PageKernel(
        summary="""
part_0 = tl.sum(tile, 0) / count
part_1 = tl.max(tl.where(read, tl.abs(tile - part_0[None, :]), 0.0), 0)
""",
        query="met = 0.5 * tl.abs(query) if part == 1 else query",
    ),
)


@pytest.fixture
def registered() -> Iterator[PageScore]:
    register_algorithm(FARTHEST)
    yield FARTHEST
    del algorithms._ALGORITHMS["farthest"], algorithms._OWN["farthest"]


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        ("static", "eager"),
        ("dynamic", "eager"),
        pytest.param("static", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_model_decodes_by_it(registered: PageScore, kind: str, run: str) -> None:
    layer = LayerPolicy(algorithm="farthest", budget=64, page_size=16, sink=4, recent=16)
    model, asked = tiny("llama"), request(3, 140, 8, 190)
    tokens = torch.randint(3, 128, (3, 8), generator=torch.Generator().manual_seed(7))
    with by_the_rule(model, layer):
        expected = decode(model, model, kind, asked, tokens)
    other = decode(model, compile_hsa(model, replace(layer, algorithm="mean")), kind, asked, tokens)
    torch._dynamo.reset()
    compiled = compile_hsa(model, layer, run)
    got = decode(model, compiled, kind, asked, tokens)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-5)
    assert (got.logits - other.logits).abs().max() > 1e-3, "the mean would have done"
    assert "farthest budget=64" in hsa_compile.explain(compiled).sites[0].policy


def check_kernels() -> None:
    """In a process of its own, under Triton's interpreter: what its lines of Triton give is what its functions do."""
    register_algorithm(FARTHEST)
    keys = torch.randn(2, 2, 250, 24)
    mask = (torch.arange(250) >= torch.tensor([[0], [37]]))[:, None, None]
    keys.masked_fill_(~mask.mT, float("nan"))
    bits = page_mask(mask, 16)
    shape = (2, 2, bits.shape[-1])
    want, got = ((torch.zeros(*shape, 48), torch.full((*shape, 2), -1)) for _ in range(2))
    at = torch.tensor([249])
    torch.ops.hsa.summarize(keys, bits, at, *want, "farthest", 16)
    standalone.summarize(keys, bits, at, *got, "farthest", 16)
    torch.testing.assert_close(got[0], want[0])
    q = torch.randn(2, 4, 1, 24)
    rest = (0.2, "farthest", 16, 6, 5, 0, 1, 8, "softmax_mean")
    ids, _ = standalone.select(q, got[0], bits, *rest)
    assert torch.equal(ids, select_reference(q.double(), want[0].double(), bits, *rest)[0])


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Check]:
    with child_process() as run:
        yield run


def test_its_kernels(interpreted: Check) -> None:
    interpreted(check_kernels)


def test_registered_twice(registered: PageScore) -> None:
    register_algorithm(replace(FARTHEST))
    with pytest.raises(
        hsa_compile.HsaError, match=r"name 'farthest' is taken; valid: a name other"
    ):
        register_algorithm(replace(FARTHEST, expand_query=lambda q: torch.cat((q, q), -1)))


def test_no_cache_answers_for_it(registered: PageScore) -> None:
    """The same name may be other code in another process; what is built in is known by the sources."""
    mine = algorithms.identity(["mean", "farthest", "dense"])
    assert mine.startswith("farthest=") and algorithms.identity(["mean", "dense"]) == ""
    del algorithms._ALGORITHMS["farthest"]
    register_algorithm(FARTHEST)
    assert algorithms.identity(["farthest"]) != mine


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "three_level"}, "name 'three_level' is taken"),
        ({"name": "mean"}, r"name 'mean' is taken; valid: a name other than 'dense', 'cuboid'"),
        ({"name": "no name"}, r"name 'no name' is not valid; valid: letters, digits"),
        ({"parts": 0}, r"farthest: parts 0 is not valid; valid: an int from 1 to 4"),
        ({"parts": 1}, r"summarize returned \[2, 3, 12\] .*valid: \[2, 3, 6\]"),
        ({"expand_query": lambda q: q}, r"expand_query returned \[2, 3, 6\] .*valid: \[2, 3, 12\]"),
        ({"expand_query": lambda q: None}, r"expand_query returned NoneType"),
        (
            {"summarize": lambda keys, present: farthest(keys, present).softmax(-1)},
            r"farthest: summarize mixes channels; valid: a function of each channel",
        ),
        (
            {"summarize": lambda keys, present: farthest(keys, present).log()},
            r"summarize returned numbers that are not finite",
        ),
    ],
    ids=range(9),
)
def test_what_is_refused(changed: dict[str, object], message: str) -> None:
    before = algorithms.names()
    with pytest.raises(hsa_compile.HsaError, match=message):
        register_algorithm(replace(FARTHEST, **changed))
    assert algorithms.names() == before


def test_streaming_reads_sinks_and_a_window() -> None:
    """By hand: 160 tokens, pages of 16, 64 tokens to buy: the sinks' page and the last three."""
    bits = torch.full((1, 1, 10), 0xFFFF)
    summary, q = torch.zeros(1, 2, 10, 0), torch.randn(1, 4, 1, 8)
    ids, counts = torch.ops.hsa.select(
        q, summary, bits, 0.3, "streaming", 16, 5, 4, 0, 4, 16, "softmax_mean"
    )
    assert ids[0].tolist() == [[0, 7, 8, 9, -1]] * 2
    assert counts[0].tolist() == [[64, 160]] * 2
