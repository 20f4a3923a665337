"""Draft tokens that were rejected stay in a static cache.

transformers#30312, #32946. Right: write five, take three back, write others, and everything is as if the rejected ones
had never been: summaries of their pages are rebuilt.
"""

import pytest
import torch

from ..models.helpers import cache_argument, new_cache, tiny
from .helpers import (
    SPARSE,
    SPARSELY,
    Growing,
    Shape,
    Static,
    close,
    compile_hsa,
    decisions,
    one_layer,
    rule,
    token,
)
from .helpers import new_cache as plain_cache

POLICY = {**SPARSE, "budget": 32, "recent": 4}
PROMPT = 61
"""Five drafts cross the border of a page, and so do the three that are taken back."""


def take_back(cache, tokens: int) -> None:
    for layer in cache.layers:
        if hasattr(layer, "crop"):
            layer.crop(-tokens)
        else:  # static layers of older releases
            layer.cumulative_length.sub_(tokens)


@pytest.mark.parametrize(
    ("kind", "drafts"),
    [
        ("static", "at once"),
        ("dynamic", "compiled"),
        pytest.param("static", "compiled", marks=pytest.mark.slow),
        pytest.param("dynamic", "at once", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_tiny(kind: str, drafts: str) -> None:
    model = one_layer(tiny("llama"))
    compiled, name = compile_hsa(model, POLICY), cache_argument(model)
    ids = torch.randint(3, 128, (1, 100), generator=torch.Generator().manual_seed(2))

    def feed(cache, tokens: torch.Tensor) -> list[torch.Tensor]:
        return [
            compiled(tokens[:, i : i + 1].clone(), **{name: cache}).logits
            for i in range(tokens.shape[1])
        ]

    rolled, fresh = new_cache(model, kind), new_cache(model, kind)
    for cache in (rolled, fresh):
        model(ids[:, :PROMPT], **{name: cache})
        feed(cache, ids[:, PROMPT : PROMPT + 2])
    draft = torch.cat((ids[:, 63:65], 130 - ids[:, 65:68]), 1).clamp(3, 127)
    if drafts == "compiled":
        feed(rolled, draft)
    else:
        model(draft, **{name: rolled})
    take_back(rolled, 3)
    if drafts == "compiled":
        feed(fresh, ids[:, 63:65])
    else:
        model(ids[:, 63:65], **{name: fresh})
    got, want = feed(rolled, ids[:, 65:85]), feed(fresh, ids[:, 65:85])
    close(torch.cat(got), torch.cat(want))
    assert decisions(compiled) == SPARSELY


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_static(mode: str) -> None:
    """The length alone moves, and no write tells of it: one token, three, more than a page, many pages."""
    shape = Shape()
    with getattr(torch, mode)():
        compiled, expected = compile_hsa(Static(), POLICY), Static(rule(POLICY))
        for taken_back in (1, 3, 40):
            cache, twin = plain_cache(shape), plain_cache(shape)
            rest = 95 - taken_back
            for seed, (first, count) in enumerate(((90, 5), (rest, 5), (rest, 3), (rest + 3, 14))):
                for at in range(first, first + count):
                    inputs, position = token(Shape(seed=seed), at), torch.tensor([at])
                    got = compiled(*inputs, *cache, position)
                    close(got, expected(*inputs, *twin, position))


@torch.no_grad()
def test_static_written_elsewhere_in_between() -> None:
    """Verified drafts are written by an eager pass over several tokens, then fewer of them are kept."""
    shape = Shape()
    compiled, expected = compile_hsa(Static(), POLICY), Static(rule(POLICY))
    cache, twin, at = plain_cache(shape), plain_cache(shape), 90
    for turn in range(6):
        for held, other in zip(cache, twin):
            drafts = torch.randn(2, 2, 5, 16)
            held[:, :, at : at + 5] = drafts
            other[:, :, at : at + 5] = drafts
        at += turn % 5
        inputs, position = token(Shape(seed=turn), at), torch.tensor([at])
        close(compiled(*inputs, *cache, position), expected(*inputs, *twin, position))
        at += 1


@torch.no_grad()
def test_growing() -> None:
    """A shorter view of what was returned, and other tokens after it; the longer view is still what it was."""
    shape = Shape()
    compiled, expected = compile_hsa(Growing(), POLICY), Growing(rule(POLICY))
    cache = [t[:, :, :90] for t in plain_cache(shape)]
    for at in range(90, 95):
        _, *cache = compiled(*token(shape, at), *cache)
    longer = cache
    copies = [t.clone() for t in longer]
    cache = [t[:, :, :-3] for t in longer]
    twin = [t.clone() for t in cache]
    for at in range(92, 99):
        inputs = token(Shape(seed=9), at)
        got, *cache = compiled(*inputs, *cache)
        want, *twin = expected(*inputs, *twin)
        close(got, want)
        close(cache[0], twin[0])
    for held, was in zip(longer, copies):
        assert torch.equal(held, was)
