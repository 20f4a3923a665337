"""Budgets that adapt, step by step: page sizes by length, a budget for each KV head, rows read whole, growth."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hsa_compile
from hsa_compile.errors import PolicyError
from tests.models.helpers import compile_hsa

SHORT, LONG = 32_768, 98_304
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
@pytest.mark.parametrize(("tokens", "page"), [(SHORT, 16), (SHORT + 1, 32), (LONG + 1, 64)])
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


# A budget for each KV head


@pytest.mark.parametrize("growing", [False, True])
@torch.no_grad()
def test_heads_read_what_their_budgets_buy(growing: bool) -> None:
    """Each head what it reads under its own budget for all: the heads of the model, the pool, the counters."""

    def decode(budget: object, placement: str = "device", **more: Any) -> tuple[Tensor, Any]:
        policy = {"budget": budget, "page_size": 16, "recent": 16, "placement": placement, **more}
        compiled, found = compile_hsa(Attention(growing), policy), []
        _, _, _, keys, values, _ = step(200 if growing else 208, 200)
        for at in range(200, 206):
            q, k, v, *_ = step(1, 0, seed=at)
            out = compiled(q, k, v, keys, values, torch.tensor([at]))
            if growing:
                out, keys, values = out
            found.append(out)
        return torch.cat(found, 2), hsa_compile.stats(compiled).layers[-1]

    (wide, much), (narrow, little) = decode(96), decode(32)
    out, counted = decode([96, 32])
    assert torch.equal(out[:, :2], wide[:, :2]) and torch.equal(out[:, 2:], narrow[:, 2:])
    assert counted.tokens_read == (much.tokens_read + little.tokens_read) / 2
    pooled, held = decode([96, 32], "host", pool=1.5, prefetch="next_rank")
    assert torch.equal(pooled, out) and held.pages_hit > 0
    assert held.tokens_read == counted.tokens_read


@torch.no_grad()
def test_every_budget_must_cover_to_read_everything() -> None:
    inputs = step(128, 127)
    options = [{"policy": {"budget": each, "page_size": 16}} for each in ([128, 127], [128, 112])]
    within, part = (
        hsa_compile.explain(Attention(), *inputs, options=one).sites[0] for one in options
    )
    assert (within.decision, part.decision) == ("dense", "sparse")
    assert "within the budget" in within.reason
    # 2 KV heads; of each of 8 pages 2 x 16 numbers in fp32 and 24 bytes of words; 8 and 7 pages of keys and values.
    read = sympy.sympify(part.bytes_sparse, {"S": sympy.Integer(128)})
    assert read == 2 * 8 * (128 + 24) + (8 + 7) * 16 * 2 * 64


@pytest.mark.parametrize("budget", [[64], [64, 32, 16]], ids=str)
@torch.no_grad()
def test_another_number_of_kv_heads_is_an_error(budget: list[int]) -> None:
    compiled = compile_hsa(Attention(), {"budget": budget, "page_size": 16})
    inputs = step(128, 5)
    before = inputs[3].clone()
    with pytest.raises(Exception) as raised:
        compiled(*inputs)
    assert isinstance(raised.value.inner_exception, PolicyError)
    said = str(raised.value.inner_exception)
    assert "policy: layer 0" in said and "which has 2 KV heads" in said
    assert f"budget {budget} is not valid; valid: 2 ints" in said
    assert said.endswith(f"this has {len(budget)}")
    assert torch.equal(inputs[3], before)
    # A layer that does not select has no use for it.
    dense = {"default": {"budget": budget}, "layers": {0: "dense"}}
    assert compile_hsa(Attention(), dense)(*inputs).shape == (1, HEADS, 1, SIZE)


# Read whole


@pytest.mark.parametrize("growing", [False, True])
@torch.no_grad()
def test_a_flat_row_is_read_whole_and_no_other(growing: bool) -> None:
    """Keys of one page point along an axis: a query that asks for them reads the budget, one across it everything."""
    policy = {"budget": 32, "page_size": 16, "sink": 0, "recent": 0, "dense_below": 0.6}
    compiled = compile_hsa(Attention(growing), policy)
    tokens = 250
    keys = torch.zeros(1, KV_HEADS, tokens if growing else tokens + 6, SIZE)
    keys[:, :, 32:48, 0] = 1.0
    values = step(keys.shape[2], 0)[4]
    read = []
    for at in range(tokens, tokens + 5):
        asked = at % 2
        q, k = torch.zeros(1, HEADS, 1, SIZE), torch.zeros(1, KV_HEADS, 1, SIZE)
        q[..., 1 - asked] = 64.0
        q[:, 2:] = 0.0
        q[:, 2:, :, 0] = 64.0  # the second KV head is always asked for what it has
        before = sum(one.tokens_read for one in hsa_compile.stats(compiled).layers)
        inputs = (q, k, k, keys.clone(), values.clone(), torch.tensor([at]))
        out = compiled(*inputs)
        out, keys, values = out if growing else (out, *inputs[3:5])
        read.append(sum(one.tokens_read for one in hsa_compile.stats(compiled).layers) - before)
        known = slice(None, at + 1)
        dense = F.scaled_dot_product_attention(
            q, keys[:, :, known], values[:, :, known], enable_gqa=True
        )
        # What is left out weighs e^-16 of the page that is asked for.
        torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)
    # Of the two heads: one reads all, the other two pages, the last of which is that of the newest token.
    few = [16 + at + 1 - at // 16 * 16 for at in range(tokens, tokens + 5)]
    want = [few[i] if (tokens + i) % 2 else (few[i] + tokens + i + 1) / 2 for i in range(5)]
    assert read == pytest.approx(want)


@pytest.mark.parametrize("growing", [False, True])
@torch.no_grad()
def test_everything_is_read_below_a_share_of_one(growing: bool) -> None:
    policy = {"budget": 32, "page_size": 16, "dense_below": 1.0}
    compiled, plain = compile_hsa(Attention(growing), policy), Attention(growing)
    _, _, _, keys, values, _ = step(200 if growing else 211, 200)
    for at in range(200, 206):
        q, k, v, *_ = step(1, 0, seed=at)
        rest = (q, k, v, keys.clone(), values.clone(), torch.tensor([at]))
        out, want = compiled(*rest), plain(q, k, v, keys, values, torch.tensor([at]))
        if growing:
            (out, *_), (want, keys, values) = out, want
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    for counted in hsa_compile.stats(compiled).layers:
        assert counted.tokens_read == counted.tokens_attendable


# Growth


@pytest.mark.parametrize("placement", ["device", "host"])
@torch.no_grad()
def test_a_budget_grows_on_a_change_of_topic(placement: str) -> None:
    """A topic that is on one page is read with the least; a query that sees all pages alike grows to the most."""
    policy = {"budget": 128, "min_budget": 32, "top_p": 0.9, "page_size": 16, "sink": 0}
    policy |= {"recent": 0, "placement": placement, "pool": 1.5}
    compiled = compile_hsa(Attention(), policy)
    tokens, keys = 250, torch.zeros(1, KV_HEADS, 256, SIZE)
    keys[:, :, 32:48, 0] = 1.0
    cache = (keys, step(256, 0)[4])
    read, rates, loaded = [], [], []
    for at, axis in enumerate((0, 0, 1, 1, 0), tokens):
        q, k = torch.zeros(1, HEADS, 1, SIZE), torch.zeros(1, KV_HEADS, 1, SIZE)
        q[..., axis] = 64.0
        compiled(q, k, k, *cache, torch.tensor([at]))
        (counted,) = hsa_compile.stats(compiled).layers
        read.append(counted.tokens_read - sum(read))
        rates.append(counted.hit_rate)
        loaded.append(counted.pages_loaded)
    newest = [at + 1 - 240 for at in range(tokens, tokens + 5)]
    pages = (2, 2, 8, 8, 2)
    assert read == pytest.approx([16 * (n - 1) + last for n, last in zip(pages, newest)])
    if placement == "host":
        # A topic that stays is in the pool; what it grows by is loaded once, and the old topic is there still.
        assert loaded[0] == loaded[1] < loaded[2] == loaded[3] == loaded[4]
        assert rates[1] > rates[2] < rates[3] < rates[4]
    else:
        assert rates == [None] * 5
