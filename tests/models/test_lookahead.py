"""Which decoder families get a query that is guessed one layer early; all of them decode what they decode without."""

from __future__ import annotations

import pytest
import torch

import hsa_compile

from . import families
from .helpers import compile_hsa, decode, request

POLICY = {"budget": 48, "page_size": 16, "sink": 4, "recent": 16}
HOST = {**POLICY, "placement": "host", "prefetch": "cross_layer"}
FOUND = "its pages are fetched behind"
LEFT = "nothing is fetched ahead: the attention before it is left as it is"
"""A static cache of a sliding window is rolled, not written at a position."""

OUTCOMES = {
    "qwen3": FOUND,
    "gpt2": FOUND,
    "phi": FOUND,
    "olmo2": FOUND,
    "mixtral": FOUND,
    "gemma3_text": LEFT,
    "cohere": FOUND,
    "falcon": FOUND,
    "gemma2": LEFT,
    "gemma3n_text": LEFT,
    "gpt_neox": FOUND,
    "gptj": FOUND,
    "granite": FOUND,
    "llama": FOUND,
    "opt": FOUND,
    "phi3": FOUND,
    "qwen3_next": "nothing is fetched ahead: there is no attention before it",
    "stablelm": FOUND,
}
QUICK = ("gpt2", "phi", "olmo2")


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OUTCOMES],
)
def test_families(family: str) -> None:
    attention = "eager" if family in families.EAGER_ONLY else "sdpa"
    asked = request(2, length=60, steps=8, capacity=160)
    logits = []
    for policy in (POLICY, HOST):
        model = families.build(family, attention)
        step = compile_hsa(model, policy)
        cache = families.new_cache(model, "static", 160)
        logits.append(decode(model, step, "static", asked, cache=cache).logits)
    assert torch.equal(*logits)
    last = [site for site in hsa_compile.explain(step).sites if site.decision == "sparse"][-1]
    assert last.index == 1 and last.prefetch.startswith(OUTCOMES[family]), last.prefetch
    layer = hsa_compile.stats(step).layers[-1]
    assert (layer.pages_prefetched > 0) == (OUTCOMES[family] == FOUND)
