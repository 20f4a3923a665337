"""Masks of sliding layers are wrong past the window, the more so when the prompt is padded.

transformers PR#35681, PR#48482. Right: alternating layers decode what eager mode decodes, and nothing outside of a
window is ever chosen.
"""

import pytest
import torch
from torch import Tensor

import hsa_compile

from ..models.helpers import Request, decode, new_cache, transformers
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
    sdpa,
    weights,
)

WINDOW = 8


def windowed(attend, padding: tuple[int, ...] = (0, 3)):
    """Attention under a window that ends at the newest token, in rows that begin after their padding."""

    def layer(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        tokens = torch.arange(keys.shape[2])
        newest = mask.sum() - 1
        begin = torch.tensor(padding)[: q.shape[0], None, None, None]
        return attend(q, keys, values, mask & (tokens > newest - WINDOW) & (tokens >= begin))

    return layer


@pytest.mark.parametrize("policy", [SPARSE, {**SPARSE, "budget": 16, "sink": 0, "recent": 1}])
def test_equals_eager_and_the_rule(policy: dict) -> None:
    """From below the window to far beyond it; two pages hold any window, so that a budget of three is lossless."""
    compiled = compile_hsa(Static(windowed(sdpa)), policy)
    for length in (3, 7, 8, 20, 95):
        shape = Shape(length=length, steps=4)
        got = run_static(compiled, shape)
        close(got, run_static(Static(windowed(rule(policy))), shape))
        if policy is SPARSE:
            close(got, run_static(Static(windowed(sdpa)), shape))
    assert decisions(compiled) == SPARSELY


def test_nothing_outside_the_window_is_chosen() -> None:
    """Sinks, too, count from the first token that can be attended."""
    shape = Shape(length=60, steps=20)
    compiled = compile_hsa(Static(windowed(sdpa)), {**SPARSE, "sink": 40, "recent": 64})
    shares = weights(compiled, shape)
    for i, row in enumerate(shares):
        newest = shape.length + i
        inside = torch.zeros(shape.capacity, dtype=torch.bool)
        inside[newest - WINDOW + 1 : newest + 1] = True
        assert (row[..., inside] > 0).all() and (row[..., ~inside] == 0).all()
    (layer,) = hsa_compile.stats(compiled).layers
    assert layer.tokens_read == layer.tokens_attendable == WINDOW * shape.steps


def tiny_gemma3():
    config = transformers.Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        initializer_range=0.1,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize(
    "kind", ["static", "dynamic", pytest.param("sliding", marks=pytest.mark.slow)]
)
def test_alternating_layers(kind: str) -> None:
    """Padded prompts of 20 tokens, in every kind of cache; the window's own cache may be left alone."""
    model, capacity = tiny_gemma3(), 64
    ids = torch.randint(3, 128, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(capacity) >= torch.tensor([0, 5, 14])[:, None]).long()
    asked = Request(ids * mask[:, :20], mask, steps=10)
    want = decode(model, model, kind, asked, cache=new_cache(model, kind, capacity))
    compiled = compile_hsa(model, {"budget": 40, "page_size": 16})
    got = decode(model, compiled, kind, asked, cache=new_cache(model, kind, capacity))
    assert torch.equal(got.tokens, want.tokens)
    close(got.logits, want.logits)
    by_layer = {
        i: {(s.decision, s.reason) for s in hsa_compile.explain(compiled).sites if s.index == i}
        for i in (0, 1)
    }
    assert by_layer[1] == SPARSELY
    assert all(decision == "sparse" or reason for decision, reason in by_layer[0])
    if kind == "dynamic":
        assert by_layer[0] == SPARSELY
        # The sliding layer reads its window and no more: 8 tokens, less where the row is that short.
        sliding = hsa_compile.stats(compiled).layers[0]
        assert sliding.tokens_read == sliding.tokens_attendable <= WINDOW * asked.steps
