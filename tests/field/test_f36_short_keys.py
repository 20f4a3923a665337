"""Selecting k pages of fewer is "k out of range": short prompts, and the short keys of cross-attention.

native-sparse-attention-pytorch PR#18, fast-transformers#64. Right: no error, and eager's numbers, from the first token
on.
"""

import pytest
import torch
from torch import Tensor, nn

from .helpers import (
    SPARSELY,
    Growing,
    Shape,
    Static,
    check,
    close,
    compile_hsa,
    decisions,
    run_growing,
    run_static,
    sdpa,
    token,
)

EIGHT_PAGES = {"budget": 128, "page_size": 16}


def test_growing() -> None:
    compiled = compile_hsa(Growing(sdpa), EIGHT_PAGES)
    for length in (5, 0, 1, 15, 16, 17):
        shape = Shape(length=length, steps=3)
        close(run_growing(compiled, shape), run_growing(Growing(sdpa), shape))
    assert decisions(compiled) == SPARSELY


@pytest.mark.parametrize("policy", [EIGHT_PAGES, {"budget": 0.3, "page_size": 16}])
def test_growing_from_nothing(policy: dict) -> None:
    """One compiled layer from no token at all past two pages."""
    shape = Shape(length=0, steps=35)
    compiled = compile_hsa(Growing(sdpa), policy)
    got, want = run_growing(compiled, shape), run_growing(Growing(sdpa), shape)
    # Sinks and recent tokens alone fill the first pages, whatever the fraction.
    close(got, want)


def test_growing_from_a_cache_without_a_shape() -> None:
    """``torch.cat`` takes an empty one-dimensional tensor beside any other: so do caches that begin with one."""
    shape = Shape(length=0, steps=20)
    empty = torch.empty(0), torch.empty(0)
    want = run_growing(Growing(sdpa), shape, empty)
    close(run_growing(compile_hsa(Growing(sdpa), EIGHT_PAGES), shape, empty), want)


def test_static() -> None:
    compiled = compile_hsa(Static(sdpa), {**EIGHT_PAGES, "budget": 144})
    for length in (0, 1, 5, 15, 16, 17):
        shape = Shape(length=length, capacity=160)
        close(run_static(compiled, shape), run_static(Static(sdpa), shape))
    assert decisions(compiled) == SPARSELY


@pytest.mark.parametrize("capacity", [1, 5, 16, 17])
def test_a_static_cache_of_few_tokens(capacity: int) -> None:
    """Smaller than a page, smaller than what is always kept: the budget may be one token."""
    for budget in (1, 16):
        shape = Shape(length=capacity - 1, steps=1, capacity=capacity)
        check(sdpa, shape, {"budget": budget, "page_size": 16})


class Crossed(nn.Module):
    """Self-attention over a cache, then attention over the few keys of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Static(sdpa)

    def forward(self, q, k, v, keys, values, position, other_keys, other_values) -> Tensor:
        out = self.own(q, k, v, keys, values, position)
        return out + sdpa(q, other_keys, other_values, None)


@pytest.mark.parametrize("encoded", [1, 16])
def test_cross_attention(encoded: int) -> None:
    other = torch.randn(2, 2, encoded, 16), torch.randn(2, 2, encoded, 16)
    model, shape = Crossed(), Shape(length=5, capacity=160)
    policy = {**EIGHT_PAGES, "budget": 144}
    want = run_static(lambda *inputs: model(*inputs, *other), shape)
    compiled = compile_hsa(model, policy)
    close(run_static(lambda *inputs: compiled(*inputs, *other), shape), want)
    found = dict(decisions(compiled))
    assert set(found) == {"sparse", "dense"} and "within the budget" in found["dense"]


@torch.no_grad()
def test_a_first_token_without_a_cache() -> None:
    """A single token that attends to itself only: nothing to select from, and nothing to break."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, q, k, v):
            return sdpa(q, k, v, None) * self.one, k, v

    model, inputs = Alone(), token(Shape(), 0)
    compiled = compile_hsa(model, EIGHT_PAGES)
    close(compiled(*inputs)[0], model(*inputs)[0])
    assert decisions(compiled) == {("dense", "the cache holds 1 tokens, within the budget")}
