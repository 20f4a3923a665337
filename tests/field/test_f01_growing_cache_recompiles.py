"""Every step compiles anew, because the cache has grown by one; at the limit everything runs in eager mode, silently.

transformers#37908, accelerate#3543. Right: a handful of compilations for any number of lengths, eager's logits at every
step, and every step is rewritten.
"""

import pytest
import torch

import hsa_compile
from hsa_compile.runtime import growing

from ..models.helpers import decode, request, tiny
from .helpers import (
    SPARSE,
    SPARSELY,
    Growing,
    Shape,
    close,
    compile_hsa,
    decisions,
    graphs,
    rule,
    run_growing,
    sdpa,
)

LIMIT = {"recompile_limit": 8, "fail_on_recompile_limit_hit": True}


def test_tiny() -> None:
    """Prefill 16, decode 32; then another request, longer than the first."""
    model = tiny("llama")
    compiled = compile_hsa(model, {"budget": 112, "page_size": 16})
    with torch._dynamo.config.patch(**LIMIT):
        for length, steps in ((16, 32), (53, 6)):
            asked = request(3, length=length, steps=steps, seed=length)
            want = decode(model, model, "dynamic", asked)
            got = decode(model, compiled, "dynamic", asked)
            assert torch.equal(got.tokens, want.tokens)
            close(got.logits, want.logits)
    assert graphs() <= 3
    assert decisions(compiled) == SPARSELY
    assert hsa_compile.stats(compiled).steps == 38


@pytest.mark.parametrize("budget", [48, 0.5])
def test_one_layer(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of many lengths, one after the other, over many pages and past the room of their first buffer."""
    monkeypatch.setattr(growing, "_SPARE_TOKENS", 16)
    policy = {**SPARSE, "budget": budget}
    compiled, steps, counts = compile_hsa(Growing(sdpa), policy), 0, []
    with torch._dynamo.config.patch(**LIMIT):
        for length, more in ((60, 4), (17, 3), (100, 30), (2, 16), (62, 2)):
            shape = Shape(length=length, steps=more, capacity=length + more, seed=length)
            got, want = run_growing(compiled, shape), run_growing(Growing(rule(policy)), shape)
            close(got, want)
            steps += more
            counts.append(graphs())
    assert counts[2] <= 3, "lengths above a page"
    # Lengths within the first page may take graphs of their own, but no more than one each for a cache of the
    # model's making and one of ours.
    assert counts[-1] <= 5
    assert hsa_compile.stats(compiled).steps == steps
