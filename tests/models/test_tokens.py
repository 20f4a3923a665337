"""Selection of single tokens, in models: by the rule beyond the budget, dense attention within it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import hsa_compile
from hsa_compile import LayerPolicy

from .helpers import cache_argument, compile_hsa, decode, new_cache, request, tiny
from .reference import by_the_rule
from .test_sparse import KINDS, check, fed, policy


def two_stage(**fields: Any) -> LayerPolicy:
    base = {"granularity": "two_stage", "budget": 24, "first_stage": 2.5, "recent": 8}
    return policy(**{**base, **fields})


SLOW = pytest.mark.slow


def token(**fields: Any) -> LayerPolicy:
    return policy(**{"granularity": "token", "budget": 24, "recent": 8, **fields})


@pytest.mark.parametrize(
    ("kind", "group_reduce"),
    [
        ("static", "softmax_mean"),
        ("dynamic", "max"),
        pytest.param("static", "max", marks=SLOW),
        pytest.param("dynamic", "softmax_mean", marks=SLOW),
    ],
)
def test_pages_and_then_tokens(kind: str, group_reduce: str) -> None:
    check("llama", kind, two_stage(group_reduce=group_reduce))


@pytest.mark.parametrize("kind", [pytest.param("static", marks=SLOW), "dynamic"])
def test_a_fraction_of_what_each_row_attends(kind: str) -> None:
    check("llama", kind, two_stage(budget=0.2, algorithm="quest"))


@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=SLOW)])
def test_more_tokens_are_always_read_than_the_budget_buys(kind: str) -> None:
    check("llama", kind, two_stage(budget=4, sink=3, recent=5))


@pytest.mark.parametrize(
    ("family", "kind", "attention"),
    [
        pytest.param("mistral", "dynamic", "sdpa", marks=SLOW),
        pytest.param("gpt2", "static", "eager", marks=SLOW),
        pytest.param("gemma3", "dynamic", "sdpa", marks=SLOW),
    ],
)
def test_other_models(family: str, kind: str, attention: str) -> None:
    check(family, kind, two_stage(), attention)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [24, 0.2])
def test_with_inductor(kind: str, budget: float) -> None:
    check("llama", kind, two_stage(budget=budget), run="inductor")


@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=SLOW)])
def test_within_the_budget_all_is_read(kind: str) -> None:
    """Static caches hold more than the budget here, or they would be left dense."""
    model, asked = tiny("llama"), request(3, 60, 20, 120)
    dense = decode(model, model, kind, asked, fed()[:, :20])
    compiled = compile_hsa(model, two_stage(budget=80, first_stage=1.0))
    got = decode(model, compiled, kind, asked, fed()[:, :20])
    torch.testing.assert_close(got.logits, dense.logits, rtol=0, atol=1e-5)
    for layer in hsa_compile.stats(compiled).layers:
        assert layer.tokens_read == layer.tokens_attendable > 0


def test_the_budget_is_counted_in_tokens() -> None:
    model, asked = tiny("llama"), request(2, 100, 6, 140)
    compiled = compile_hsa(model, two_stage(budget=21))
    decode(model, compiled, "static", asked)
    for layer in hsa_compile.stats(compiled).layers:
        assert layer.tokens_read == 21 * layer.steps


def test_monitors_measure_it() -> None:
    """Tokens of the same number capture more of the softmax than pages do."""
    model, asked, recall = tiny("llama"), request(3, 120, 8, 160), {}
    for granularity in ("page", "two_stage", "token"):
        layer = policy(granularity=granularity, budget=32, recent=8, monitor=1)
        compiled = compile_hsa(model, layer)
        decode(model, compiled, "static", asked, fed())
        recall[granularity] = [one.recall for one in hsa_compile.stats(compiled).layers]
    assert all(p < min(more) for p, *more in zip(*recall.values(), strict=True)), recall


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("static", {}),
        ("dynamic", {"budget": 0.2, "group_reduce": "max"}),
        pytest.param("static", {"budget": 0.2}, marks=SLOW),
        pytest.param("dynamic", {"page_size": 32}, marks=SLOW),
        pytest.param("dynamic", {"budget": 4, "sink": 3, "recent": 5}, marks=SLOW),
    ],
)
def test_tokens_by_signs(kind: str, fields: dict[str, Any]) -> None:
    check("llama", kind, token(**fields))


@SLOW
@pytest.mark.parametrize(("kind", "budget"), [("static", 24), ("dynamic", 0.2)])
def test_signs_with_inductor(kind: str, budget: float) -> None:
    check("llama", kind, token(budget=budget), run="inductor")


@pytest.mark.parametrize("granularity", ["two_stage", "token"])
def test_several_query_tokens(granularity: str) -> None:
    """Three at a time are heads of their groups, and each reads at least itself."""
    layer = policy(granularity=granularity, budget=24, recent=1, monitor=1)
    model, asked = tiny("llama"), request(2, 100, 0, 140)
    ids = torch.randint(3, 128, (2, 9))
    logits = []
    for step in (compile_hsa(model, layer), model):
        cache, seen = new_cache(model, "static", 140), []
        given = {cache_argument(model): cache}
        with (
            by_the_rule(model, layer) if step is model else contextlib.nullcontext(),
            torch.no_grad(),
        ):
            for span in (asked.ids, *ids.split(3, 1)):
                called = model if span is asked.ids else step
                seen.append(called(span, **given).logits[:, -3:])
        logits.append(torch.cat(seen, 1))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
