"""Slots of a static cache that were never written are attended, and the model writes gibberish.

transformers#30400, PR#30414. Right: whatever they hold, tokens and logits are those of a growing cache.
"""

import math

import pytest
import torch

from ..models.helpers import decode, new_cache, request, tiny
from .helpers import (
    SPARSE,
    SPARSELY,
    Shape,
    Static,
    close,
    compile_hsa,
    decisions,
    rule,
    run_static,
)
from .helpers import new_cache as plain_cache

PROMPT, CAPACITY = 5, 64


def poisoned(step, cache, fill: float):
    """``step``, before the first call of which the slots after the prompt are filled."""
    pending = [True]

    def call(*args, **kwargs):
        if pending:
            pending.clear()
            for layer in cache.layers:
                layer.keys[:, :, PROMPT:] = fill
                layer.values[:, :, PROMPT:] = fill
        return step(*args, **kwargs)

    return call


def test_tiny() -> None:
    """Prompt 5, capacity 64, 20 tokens; slots hold garbage and, which eager mode would not survive, nan."""
    model = tiny("llama")
    asked = request(2, length=PROMPT, steps=20, capacity=CAPACITY)
    asked.mask.fill_(1)
    asked.ids.clamp_(min=3)
    want = decode(model, model, "dynamic", asked)
    compiled = compile_hsa(model, {"budget": 48, "page_size": 16})
    for fill in (1e4, math.nan):
        cache = new_cache(model, "static", CAPACITY)
        got = decode(model, poisoned(compiled, cache, fill), "static", asked, cache=cache)
        assert torch.equal(got.tokens, want.tokens)
        close(got.logits, want.logits)
    assert decisions(compiled) == SPARSELY


@pytest.mark.parametrize("algorithm", ["quest", "cuboid"])
def test_selection_reads_no_unwritten_slot(algorithm: str) -> None:
    """Above the budget: the last page is half garbage, and its summary holds none of it."""
    policy, shape = {**SPARSE, "algorithm": algorithm}, Shape(steps=8)
    want = run_static(Static(rule(policy)), shape)
    compiled = compile_hsa(Static(), policy)
    for fill in (0.0, 1e30, math.nan):
        cache = plain_cache(shape)
        for held in cache:
            held[:, :, shape.length :] = fill
        close(run_static(compiled, shape, cache), want)
