"""Beyond the budget a compiled model decodes what the model itself does with the rule in the place of attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import hsa_compile
from hsa_compile import LayerPolicy, algorithms

from .helpers import Request, compile_hsa, decode, new_cache, request, tiny
from .reference import by_the_rule

LENGTH, STEPS = 100, 24
KINDS = ("static", "dynamic")
OF_ONE_STEP = [name for name in algorithms.names() if not algorithms.get(name).accumulates]
"""Page scores that the rule, which keeps no history, can follow."""


def policy(**fields: Any) -> LayerPolicy:
    base = {"algorithm": "cuboid", "budget": 64, "page_size": 16, "sink": 4, "recent": 16}
    return LayerPolicy(**{**base, **fields})


def asked(length: int = LENGTH) -> Request:
    """Three rows; a static cache for them ends in a page that is not full."""
    return request(3, length, STEPS, length + 45)


def fed() -> Tensor:
    """The tokens of the decode steps: given, so that one step's error cannot hide behind another token."""
    return torch.randint(3, 128, (3, STEPS), generator=torch.Generator().manual_seed(7))


def check(
    family: str,
    kind: str,
    layer: LayerPolicy,
    attention: str = "sdpa",
    run: str = "eager",
    length: int = LENGTH,
) -> None:
    model = tiny(family, attention)
    with by_the_rule(model, layer):
        expected = decode(model, model, kind, asked(length), fed())
    dense = decode(model, model, kind, asked(length), fed())
    compiled = compile_hsa(model, layer, run)
    got = decode(model, compiled, kind, asked(length), fed())
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-5)
    assert (got.logits - dense.logits).abs().max() > 1e-3, "nothing was left out"
    sites = hsa_compile.explain(compiled).sites
    assert [(site.index, site.decision) for site in sites] == [(0, "sparse"), (1, "sparse")]
    for counted in hsa_compile.stats(compiled).layers:
        assert counted.tokens_read < 0.7 * counted.tokens_attendable


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("algorithm", "group_reduce"), itertools.product(OF_ONE_STEP, ("softmax_mean", "max"))
)
def test_every_rule(kind: str, algorithm: str, group_reduce: str) -> None:
    check("llama", kind, policy(algorithm=algorithm, group_reduce=group_reduce))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [0.3, 0.55])
def test_a_fraction_is_of_what_each_row_attends(kind: str, budget: float) -> None:
    check("llama", kind, policy(budget=budget))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("top_p", "algorithm"), [(0.3, "cuboid"), (0.75, "mean"), (0.75, "quest"), (0.97, "mean")]
)
def test_a_share_of_the_softmax(kind: str, top_p: float, algorithm: str) -> None:
    """Rows stop where the estimate reaches it, each KV head by itself; the budget is the most."""
    layer = policy(algorithm=algorithm, budget=96, top_p=top_p, min_budget=32, recent=8)
    check("llama", kind, layer, length=160)


def test_a_share_reads_less_than_the_budget() -> None:
    model, read = tiny("llama"), []
    for top_p in (0.2, 0.45, 1.0):
        compiled = compile_hsa(model, policy(budget=128, top_p=top_p, min_budget=0, recent=8))
        decode(model, compiled, "static", asked(160), fed())
        read.append(sum(layer.tokens_read for layer in hsa_compile.stats(compiled).layers))
    assert read[0] < 0.8 * read[1] < 0.64 * read[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"top_p": 0.6, "min_budget": 32}], ids=str)
def test_a_budget_for_each_kv_head(kind: str, more: dict[str, Any]) -> None:
    check("llama", kind, policy(budget=[32, 80], recent=8, **more), length=160)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "more",
    [
        {"budget": 64, "dense_below": 0.37},
        {"budget": 0.4, "dense_below": 0.38},
        {"budget": [96, 48], "dense_below": 0.27},
        {"budget": 96, "top_p": 0.7, "min_budget": 32, "dense_below": 0.47},
    ],
    ids=str,
)
def test_rows_that_hold_too_little_are_read_whole(kind: str, more: dict[str, Any]) -> None:
    check("llama", kind, policy(recent=8, **more), length=160)


@pytest.mark.parametrize("kind", KINDS)
def test_forced_pages_beyond_the_budget(kind: str) -> None:
    check("llama", kind, policy(budget=16, sink=20, recent=20))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_forced_but_the_newest_page(kind: str) -> None:
    check("llama", kind, policy(budget=32, sink=0, recent=0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [32, 64])
def test_other_page_sizes(kind: str, page_size: int) -> None:
    layer = policy(page_size=page_size, budget=3 * page_size, recent=8)
    check("llama", kind, layer, length=6 * page_size)


@pytest.mark.parametrize(
    ("family", "kind", "attention"),
    [
        ("gpt2", "static", "eager"),
        ("mistral", "dynamic", "sdpa"),
        pytest.param("gpt2", "dynamic", "eager", marks=pytest.mark.slow),
        pytest.param("llama", "static", "eager", marks=pytest.mark.slow),
        pytest.param("mistral", "dynamic", "eager", marks=pytest.mark.slow),
        pytest.param("qwen3", "static", "sdpa", marks=pytest.mark.slow),
        pytest.param("phi3", "dynamic", "sdpa", marks=pytest.mark.slow),
        pytest.param("neox", "static", "sdpa", marks=pytest.mark.slow),
        pytest.param("gemma3", "dynamic", "sdpa", marks=pytest.mark.slow),
    ],
)
def test_other_models(family: str, kind: str, attention: str) -> None:
    check(family, kind, policy(budget=32, recent=8), attention)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"top_p": 0.6, "min_budget": 16},
        {"algorithm": "streaming"},
        {"budget": [32, 64]},
        {"dense_below": 0.5},
    ],
)
def test_with_inductor(kind: str, more: dict[str, Any]) -> None:
    check("llama", kind, policy(**more), run="inductor")


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_of_a_batch_equals_its_single_run(kind: str) -> None:
    model = tiny("llama")
    compiled = compile_hsa(model, policy(budget=0.4))
    tokens = fed()
    together = decode(model, compiled, kind, asked(), tokens)
    for row in range(3):
        alone = decode(model, compiled, kind, asked().row(row), tokens[row : row + 1])
        torch.testing.assert_close(alone.logits[0], together.logits[row], rtol=0, atol=1e-5)


def test_layers_follow_their_own_policies() -> None:
    """A dense first layer reads everything; the second follows the rule."""
    model = tiny("llama")
    layers = {
        "default": {"algorithm": "mean", "budget": 48, "page_size": 16},
        "layers": {0: "dense"},
    }
    compiled = compile_hsa(model, layers)
    decode(model, compiled, "static", asked(), fed())
    sites = hsa_compile.explain(compiled).sites
    assert [(site.index, site.decision) for site in sites] == [(0, "dense"), (1, "sparse")]
    assert [layer.index for layer in hsa_compile.stats(compiled).layers] == [1]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_an_edit_that_is_told(kind: str) -> None:
    """``hsa_compile.invalidate`` takes the cache itself; a cache that no step has met is none of its business."""
    model = tiny("llama")
    asked = request(1, steps=4)
    compiled = compile_hsa(model, LayerPolicy(budget=48, page_size=16))
    cache, fresh = (new_cache(model, kind) for _ in range(2))
    decode(model, compiled, kind, asked, cache=cache)
    assert hsa_compile.invalidate(fresh) == 0
    # One a layer, also where the first trace took the length for a constant.
    assert hsa_compile.invalidate(cache) == 2
