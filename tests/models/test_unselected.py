"""Pages that are left out take part as means: models decode as with the rule in the place of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hsa_compile
from hsa_compile import LayerPolicy

from . import plain, test_flex, test_plain
from .flex import SPELLINGS as FLEX
from .helpers import compile_hsa, decode, new_cache, request, tiny
from .plain import Decoder, Write
from .reference import by_the_rule
from .spellings import SPELLINGS
from .test_several_queries import Spelled, ruled, spelled_steps
from .test_sparse import KINDS, check, policy

PART = policy(budget=48, unselected="centroids")
LEVELS = policy(algorithm="three_level", budget=64, recent=8, prototypes=3)
TOKENS = replace(LEVELS, granularity="token", budget=40)
WHOLE = LayerPolicy(budget=144, page_size=16, unselected="centroids")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("static", {}),
        ("dynamic", {"algorithm": "quest", "budget": 0.4}),
        *(
            pytest.param(kind, more, marks=pytest.mark.slow)
            for kind, more in (
                ("dynamic", {}),
                ("static", {"algorithm": "mean", "top_p": 0.5, "min_budget": 16}),
                ("static", {"placement": "host", "algorithm": "quest", "prefetch": "next_rank"}),
                ("static", {"algorithm": "streaming"}),
                ("dynamic", {"algorithm": "streaming"}),
                ("dynamic", {"placement": "host", "algorithm": "quest", "prefetch": "next_rank"}),
                ("static", {"placement": "host", "prefetch": "cross_layer"}),
            )
        ),
    ],
    ids=str,
)
def test_every_selection(kind: str, more: dict[str, Any]) -> None:
    """Three rows, padded."""
    check("llama", kind, policy(unselected="centroids", **more))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("dynamic", {}),
        *(
            pytest.param(kind, more, marks=pytest.mark.slow)
            for kind in KINDS
            for more in ({"recent": 24}, {"budget": 0.4, "prototypes": 64}, {"placement": "host"})
        ),
    ],
    ids=str,
)
def test_three_levels(kind: str, more: dict[str, Any]) -> None:
    """Three rows, padded: a window and sinks, pages at even distances, and prototypes of all others."""
    check("llama", kind, replace(LEVELS, **more))


@pytest.mark.parametrize(
    ("kind", "more", "run"),
    [
        ("static", {}, "eager"),
        ("dynamic", {"budget": 0.4, "prototypes": 64}, "eager"),
        pytest.param("dynamic", {}, "eager", marks=pytest.mark.slow),
        pytest.param("static", {"budget": 0.3, "sink": 0}, "eager", marks=pytest.mark.slow),
        *(pytest.param(kind, {}, "inductor", marks=pytest.mark.slow) for kind in KINDS),
    ],
    ids=str,
)
def test_three_levels_of_tokens(kind: str, more: dict[str, Any], run: str) -> None:
    """Single tokens at even distances; of their pages the others are in the prototypes."""
    check("llama", kind, replace(TOKENS, **more), run=run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [PART, replace(PART, algorithm="streaming"), LEVELS], ids=str)
def test_with_inductor(kind: str, layer: LayerPolicy) -> None:
    check("llama", kind, layer, run="inductor")


@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layer", [WHOLE, LEVELS, TOKENS], ids=["centroids", "three", "three of tokens"]
)
def test_lossless_within_the_budget(kind: str, layer: LayerPolicy) -> None:
    model, asked = tiny("llama"), request(3, 60, 24, 160)
    compiled = compile_hsa(model, replace(layer, budget=96))
    got, expected = (decode(model, step, kind, asked).logits for step in (compiled, model))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert all(site.decision == "sparse" for site in hsa_compile.explain(compiled).sites)


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(PART, id="centroids"),
        pytest.param(LEVELS, id="prototypes", marks=pytest.mark.slow),
    ],
)
def test_requests_of_other_padding_in_one_cache(layer: LayerPolicy) -> None:
    """The second request is as long as the first had become, and its rows begin elsewhere; the cache is not reset."""
    model = tiny("llama")
    compiled = compile_hsa(model, layer)
    cache = new_cache(model, "static", 160)
    for seed, length, rows in ((0, 80, slice(None)), (1, 88, torch.tensor([2, 0, 1]))):
        asked = request(3, length, 8, 160, seed)
        asked = replace(asked, ids=asked.ids[rows], mask=asked.mask[rows])
        with by_the_rule(model, layer):
            expected = decode(model, model, "static", asked)
        for held in cache.layers:  # where the next tokens go is counted there in some releases
            if isinstance(getattr(held, "cumulative_length", None), Tensor):
                held.cumulative_length.zero_()
        got = decode(model, compiled, "static", asked, expected.tokens, cache)
        torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-5)


# How attention and its cache are written


@pytest.mark.parametrize(
    "name",
    ["mask_by_row_and_head", "mask_and_bias", "soft_cap_then_bias", "cap_and_sinks"],
)
@pytest.mark.parametrize(
    "part", [PART, LEVELS, TOKENS], ids=["centroids", "prototypes", "of tokens"]
)
def test_several_query_tokens(name: str, part: LayerPolicy) -> None:
    """Masks that differ between heads and tokens, biases, soft caps, sinks."""
    spelling = next(spelling for spelling in SPELLINGS if spelling.name == name)
    eager = spelled_steps(Spelled(spelling.function))
    whole = replace(part, budget=WHOLE.budget)
    for layer, expected in ((whole, eager), (part, spelled_steps(Spelled(ruled(spelling, part))))):
        compiled = compile_hsa(Spelled(spelling.function), layer, strict=True)
        torch.testing.assert_close(spelled_steps(compiled), expected, rtol=0, atol=1e-5)
    assert (eager - expected).abs().max() > 1e-3, "nothing was left out"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["everything", "sinks_by_the_sum"])
def test_flex_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_flex, "PART", PART)
    monkeypatch.setattr(test_flex, "WHOLE", WHOLE)
    test_flex.check(next(spelling for spelling in FLEX if spelling.name == name), "eager")


@pytest.mark.parametrize(
    "make",
    [
        lambda: plain.decoder(Write(plain.functional_slice, "int", replaces=True)),
        lambda: Decoder([plain.HalvesBlock(2) for _ in range(2)]),
        lambda: Decoder([plain.LenderBlock(2)]),
        lambda: Decoder([plain.PrefixBlock(4) for _ in range(2)], "int"),
        lambda: Decoder([plain.CountingBlock(2, early=False) for _ in range(2)]),
        lambda: Decoder([plain.GrowingBlock(2) for _ in range(2)]),
    ],
    ids=["functional", "halves", "two attentions", "rows of a buffer", "counted", "growing"],
)
def test_caches(make: Callable[[], Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what Quest keeps of keys their mean is kept."""
    layer = replace(PART, algorithm="quest")
    monkeypatch.setattr(test_plain, "PART", layer)
    test_plain.check(lambda: make().eval(), 3, layer)


def test_a_monitor_tells_what_was_selected_and_what_came_of_it() -> None:
    """Recall is that of the selection alone, the error that of the estimate, too."""
    model, seen = tiny("llama"), []
    for unselected in ("drop", "centroids"):
        compiled = compile_hsa(model, replace(PART, unselected=unselected, monitor=1))
        asked = request(2, 140, 1, 190)
        decode(model, compiled, "static", asked)
        seen.append(hsa_compile.stats(compiled).layers[0])
    assert seen[0].recall == pytest.approx(seen[1].recall) and seen[0].recall < 0.95
    assert seen[1].output_error < 0.7 * seen[0].output_error
