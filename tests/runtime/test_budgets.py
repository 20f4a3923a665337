"""Budgets that adapt, step by step: page sizes by length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hsa_compile
from tests.models.helpers import compile_hsa

LONG = 65_536
HEADS, KV_HEADS, SIZE = 4, 2, 16


class Attention(nn.Module):
    """One decode step over a cache that is written in place, or that grows."""

    def __init__(self, growing: bool = False) -> None:
        super().__init__()
        self.growing = growing

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor
    ) -> Any:
        if self.growing:
            keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
            return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True), keys, values
        keys[:, :, position] = k
        values[:, :, position] = v
        mask = torch.arange(keys.shape[2]) <= position[:, None]
        return F.scaled_dot_product_attention(q, keys, values, mask[None, None], enable_gqa=True)


def step(tokens: int, at: int, seed: int = 0) -> tuple[Tensor, ...]:
    """A query, a new key and value, and a cache of ``tokens`` in which ``at`` is written next."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, 1), (KV_HEADS, 1), (KV_HEADS, 1), (KV_HEADS, tokens), (KV_HEADS, tokens)]
    tensors = [torch.randn(1, heads, length, SIZE, generator=make) for heads, length in shapes]
    return (*tensors, torch.tensor([at]))


# Page sizes


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize(("tokens", "page"), [(LONG, 32), (LONG + 1, 64)])
@torch.no_grad()
def test_a_long_cache_has_larger_pages(tokens: int, page: int, placement: str) -> None:
    found = []
    for size in ("auto", page):
        policy = {"budget": 256, "page_size": size, "placement": placement}
        compiled = compile_hsa(Attention(), policy)
        found.append([compiled(*step(tokens, at)) for at in (tokens - 2, tokens - 1)])
        (site,) = hsa_compile.explain(compiled).sites
        assert f"budget=256 page={page} sink" in site.policy
        (counted,) = hsa_compile.stats(compiled).layers
        assert 256 - page < counted.tokens_read / 2 <= 256
    for auto, given in zip(*found, strict=True):
        assert torch.equal(auto, given)


@torch.no_grad()
def test_a_cache_of_unknown_length_has_smaller_pages() -> None:
    """One that grows, from its first step; and a static one once there were two lengths of it."""
    growing = hsa_compile.explain(
        Attention(growing=True), *step(LONG + 9, 0), options={"policy": {"budget": 256}}
    )
    assert "page=32" in growing.sites[0].policy
    compiled = compile_hsa(Attention(), {"budget": 256})
    for tokens in (LONG + 64, LONG + 128, LONG + 64):
        compiled(*step(tokens, tokens - 1))
    pages = [site.policy.split()[2] for site in hsa_compile.explain(compiled).sites]
    assert pages == ["page=64", "page=32"]


@torch.no_grad()
def test_two_page_sizes_of_one_cache() -> None:
    """The graph for one length and the graph for any describe a cache apart; a step of either sees what was edited."""
    policy = {"budget": 128, "recent": 0, "sink": 0}
    compiled = compile_hsa(Attention(), policy)
    q, k, v, keys, values, _ = step(LONG + 64, 0)
    other = step(LONG + 128, 5)
    whole = [compiled(q, k, v, keys, values, torch.tensor([9000]))]
    compiled(*other)
    keys[:, :, 5000:5032], values[:, :, 5000:5032] = 3 * q[:, ::2], 7.0
    whole.append(compiled(q, k, v, keys, values, torch.tensor([9001])))
    assert (whole[0] - whole[1]).abs().max() > 1
    again = []
    for size in (32, 64):
        fresh = compile_hsa(Attention(), {**policy, "page_size": size})
        again.append(fresh(q, k, v, keys, values, torch.tensor([9001])))
    assert any(torch.allclose(whole[1], one, rtol=1e-5, atol=1e-5) for one in again)
