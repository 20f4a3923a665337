"""A stored prefix is changed by the first text that continues it.

vmlx#198. Right: copies of a prefix continue independently, and the prefix stays as it was.
"""

import copy

import pytest
import torch

from ..models.helpers import cache_argument, new_cache, tiny
from .helpers import (
    SPARSE,
    SPARSELY,
    Growing,
    Shape,
    close,
    compile_hsa,
    decisions,
    one_layer,
    rule,
    token,
)
from .helpers import new_cache as plain_cache

POLICY = {**SPARSE, "budget": 32, "recent": 4}


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@torch.no_grad()
def test_tiny(kind: str) -> None:
    """Two suffixes by turns over deep copies of one prefix, of which the last tokens were decoded here."""
    model = one_layer(tiny("llama"))
    compiled, name = compile_hsa(model, POLICY), cache_argument(model)
    random = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 128, (1, 70), generator=random)
    suffixes = torch.randint(3, 128, (2, 8), generator=random)

    def step(cache, token: torch.Tensor) -> torch.Tensor:
        return compiled(token.view(1, 1).clone(), **{name: cache}).logits

    def prefix():
        cache = new_cache(model, kind)
        model(ids[:, :66], **{name: cache})
        for at in range(66, 70):
            step(cache, ids[:, at])
        return cache

    alone = []
    for suffix in suffixes:
        cache = prefix()
        alone.append([step(cache, token) for token in suffix])
    stored = prefix()
    before = [(layer.keys.clone(), layer.values.clone()) for layer in stored.layers]
    twins = [copy.deepcopy(stored) for _ in suffixes]
    together = [[], []]
    for i in range(suffixes.shape[1]):
        for row in (0, 1) if i % 2 else (1, 0):
            together[row].append(step(twins[row], suffixes[row, i]))
    for got, want in zip(together, alone):
        close(torch.cat(got), torch.cat(want))
    for layer, (keys, values) in zip(stored.layers, before):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    assert int(stored.get_seq_length()) == 70
    assert decisions(compiled) == SPARSELY


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_growing_without_a_copy(mode: str) -> None:
    """The tensors themselves are kept and continued three times, twice from the same length."""
    shape = Shape()
    with getattr(torch, mode)():
        compiled, expected = compile_hsa(Growing(), POLICY), Growing(rule(POLICY))
        cache = [t[:, :, :90] for t in plain_cache(shape)]
        for at in range(90, 94):
            _, *cache = compiled(*token(shape, at), *cache)
        before = [t.clone() for t in cache]
        for seed in (1, 2, 3):
            ours, theirs = list(cache), [t.clone() for t in before]
            for at in range(94, 99):
                inputs = token(Shape(seed=seed), at)
                got, *ours = compiled(*inputs, *ours)
                want, *theirs = expected(*inputs, *theirs)
                close(got, want)
            for held, other in zip(ours, theirs):
                close(held, other)
        for held, was in zip(cache, before):
            assert torch.equal(held, was)
    assert decisions(compiled) == SPARSELY
