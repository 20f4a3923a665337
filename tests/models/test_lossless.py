"""Within the budget every page is selected: a compiled model decodes what the model decodes eagerly.

Static caches are larger than the budget, and what is written into them is not: that is where all pages are selected
at run time (a cache that fits into the budget is left dense at compile time).
"""

from __future__ import annotations

import pytest
import torch

import hsa_compile

from .helpers import (
    CAPACITY,
    PROMPT,
    STEPS,
    WINDOW,
    compile_hsa,
    decode,
    graphs_compiled,
    request,
    tiny,
)

BUDGET = 112
POLICY = {"budget": BUDGET, "page_size": 16}
assert PROMPT + STEPS <= BUDGET < CAPACITY

EIGHT = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "neox", "olmo")
# What of the matrix is not slow: families for each (batch, attention).
QUICK = {
    (3, "sdpa"): ("llama", "qwen3", "mistral", "gpt2"),
    (1, "sdpa"): ("llama",),
    (3, "eager"): ("llama",),
}


def matrix() -> list[object]:
    cases = []
    for batch, attention in (*QUICK, (1, "eager")):
        for family in (*EIGHT, "gemma", "gemma3"):
            for kind in ("static", "dynamic"):
                quick = family in QUICK.get((batch, attention), ())
                marks = () if quick else pytest.mark.slow
                cases.append(pytest.param(family, kind, batch, attention, marks=marks))
    return cases


def slides(family: str, layer: int) -> bool:
    return family == "mistral" or (family == "gemma3" and layer == 0)


def check_decisions(compiled: object, family: str, kind: str) -> None:
    """Both layers were rewritten, except those whose cache holds nothing but a sliding window."""
    sites = hsa_compile.explain(compiled).sites
    for layer in (0, 1):
        mine = {(site.decision, site.reason) for site in sites if site.index == layer}
        if kind == "static" and slides(family, layer):
            assert mine == {
                ("dense", f"the cache holds {WINDOW} tokens, within the budget"),
                ("left", "the whole cache of the keys is overwritten"),
            }
        elif kind == "sliding" and slides(family, layer):
            assert mine == {
                ("left", "only a part of the concatenated keys is kept (a sliding window)")
            }
        else:
            assert mine == {("sparse", "")}, f"layer {layer}"


def check(family: str, kind: str, batch: int, attention: str, run: str) -> None:
    model = tiny(family, attention)
    asked = request(batch)
    expected = decode(model, model, kind, asked)
    compiled = compile_hsa(model, POLICY, run)
    got = decode(model, compiled, kind, asked)
    assert torch.equal(got.tokens, expected.tokens)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-5)
    check_decisions(compiled, family, kind)
    sliding = kind != "dynamic" and any(slides(family, layer) for layer in (0, 1))
    # Dynamo follows the integer with which such a layer counts: not yet full, then full.
    assert graphs_compiled() <= (4 if sliding else {"static": 1, "dynamic": 3}[kind])
    rewritten = kind == "dynamic" or not slides(family, 1)
    assert hsa_compile.stats(compiled).steps == (STEPS if rewritten else 0)


@pytest.mark.parametrize(("family", "kind", "batch", "attention"), matrix())
def test_decoding_equals_eager(family: str, kind: str, batch: int, attention: str) -> None:
    check(family, kind, batch, attention, "eager")


@pytest.mark.parametrize("family", ["mistral", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_dynamic_cache_that_knows_the_window(family: str) -> None:
    check(family, "sliding", 3, "sdpa", "eager")


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param("llama", "static", marks=pytest.mark.slow),
        pytest.param("llama", "dynamic", marks=pytest.mark.slow),
        pytest.param("qwen3", "static", marks=pytest.mark.slow),
        pytest.param("mistral", "dynamic", marks=pytest.mark.slow),
        pytest.param("gpt2", "dynamic", marks=pytest.mark.slow),
        pytest.param("gemma3", "static", marks=pytest.mark.slow),
    ],
)
def test_decoding_with_inductor_equals_eager(family: str, kind: str) -> None:
    check(family, kind, 3, "sdpa", "inductor")
