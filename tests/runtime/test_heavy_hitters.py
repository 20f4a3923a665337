"""What is accumulated follows the tokens that it is about: it outlives no reset, crop, rewind or other request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hsa_compile
from hsa_compile.ops.page_mask import page_mask
from hsa_compile.ops.select import forced_pages, select_reference
from hsa_compile.ops.sparse_attention import sparse_attention_reference
from hsa_compile.ops.summarize import per_kv_head

from ..models import helpers
from ..models.helpers import compile_hsa, decode, request, tiny
from .helpers import HEADS, KV_HEADS, PAGE, SIZE, Decoder, new_cache, prefill
from .test_several_queries import Static

DECAY = 0.9
POLICY = {
    "algorithm": "heavy_hitters",
    "decay": DECAY,
    "budget": 6 * PAGE,
    "page_size": PAGE,
    "sink": 4,
    "recent": 16,
}
CAPACITY = 256
PAGES = CAPACITY // PAGE


class Sharp(Decoder):
    """Queries that prefer some pages to others."""

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Decoder.qkv(self, x)
        return 6 * q, k, v


class Several(Static):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return Sharp.qkv(self, x)  # type: ignore[arg-type]


class Loop:
    """The rule in plain PyTorch, in double precision: a loop over steps that keeps a sum a page."""

    def __init__(self, batch: int) -> None:
        self.total = torch.zeros(batch, KV_HEADS, PAGES, dtype=torch.float64)
        self.begin = CAPACITY

    def forget(self) -> None:
        self.total.zero_()

    def step(
        self, model: Decoder, x: Tensor, keys: Tensor, values: Tensor, position: int
    ) -> Tensor:
        q, k, v = model.qkv(x)
        batch, queries = x.shape[:2]
        end, group = position + queries, HEADS // KV_HEADS * queries
        keys[:, :, position:end], values[:, :, position:end] = k, v
        mask = torch.arange(CAPACITY) <= torch.arange(position, end)[:, None]
        mask = mask.expand(1, HEADS, queries, -1).reshape(1, HEADS * queries, 1, -1)
        bits, q = page_mask(mask, PAGE), q.flatten(1, 2).unsqueeze(2)
        words = per_kv_head(bits, batch, KV_HEADS)
        # Pages written into, by this step or by one of whose tokens some may have been taken back.
        self.total[:, :, min(position, self.begin) // PAGE :] = 0
        self.begin = position if queries > 1 else CAPACITY
        seen = torch.arange(CAPACITY) < end
        paged = keys.double().masked_fill(~seen[:, None], 0).unflatten(2, (PAGES, PAGE))
        mean = paged.sum(3) / seen.view(PAGES, PAGE).sum(1).clamp(min=1)[:, None]
        logits = q[:, :, 0].double().unflatten(1, (KV_HEADS, group)) @ mean.mT * SIZE**-0.5
        sees = (bits != 0).expand(batch, -1, -1).unflatten(1, (KV_HEADS, group))
        share = logits.masked_fill(~sees, -torch.inf).softmax(-1).mean(2)
        self.total = DECAY * self.total + share
        one, slots = torch.ones(batch, KV_HEADS, 1, 1), max(6, forced_pages(4, 16, PAGE))
        ids, _ = select_reference(
            *(one.double(), self.total.unsqueeze(-1), words, 1.0, "mean", PAGE),
            *(slots, 6, 0, 4, 16, "max"),
        )
        rest = (ids, None, bits, None, SIZE**-0.5, PAGE)
        out = sparse_attention_reference(q, keys, values, *rest)[0]
        return out.view(batch, HEADS, queries, -1)


def compiled(model: nn.Module, **more: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {"run": "eager", "policy": {**POLICY, **more}, "strict": True}
    return torch.compile(model, backend="hsa", options=options)


class Pair:
    """A cache stepped by the compiled model, and its twin stepped by the loop."""

    def __init__(
        self,
        step: Callable[..., Tensor],
        model: Decoder,
        length: int = 200,
        batch: int = 2,
        queries: int = 1,
    ) -> None:
        self.step, self.model, self.batch, self.queries = step, model, batch, queries
        self.cache, self.twin = new_cache(batch, CAPACITY), new_cache(batch, CAPACITY)
        self.loop = Loop(batch)
        self.position = 0
        self.write(length)

    def both(self, change: Callable[[Tensor, Tensor], object]) -> None:
        """Something that happens to the cache; nothing is remembered of what was attended."""
        for cache in (self.cache, self.twin):
            change(*cache)
        self.loop.forget()

    def write(self, length: int) -> None:
        x = torch.randn(self.batch, length, SIZE)
        self.both(lambda k, v: prefill(self.model, k, v, x, self.position))
        self.position += length

    def back(self, tokens: int) -> None:
        self.position -= tokens
        self.loop.forget()

    def check(self, steps: int = 5) -> None:
        for _ in range(steps):
            x = torch.randn(self.batch, self.queries, SIZE)
            torch._dynamo.mark_static(x, 1)
            at = torch.arange(self.position, self.position + self.queries)
            got = self.step(x, *self.cache, at)
            want = self.loop.step(self.model, x, *self.twin, self.position)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            self.position += self.queries


@pytest.fixture(params=["no_grad", "inference_mode"])
def grad_mode(request: pytest.FixtureRequest):
    with getattr(torch, request.param)():
        yield request.param


@pytest.mark.parametrize("placement", ["device", "host"])
def test_nothing_is_remembered_of_another_past(grad_mode: str, placement: str) -> None:
    model = Sharp()
    step = compiled(model, placement=placement, pool=1, monitor=2)
    pair = Pair(step, model)
    pair.check(12)
    pair.back(1)  # the last step once more
    pair.check()
    pair.back(10)  # a crop
    pair.check()
    pair.write(18)  # a chunk of the prompt that is not compiled
    pair.check(2)
    pair.both(lambda k, v: (k.zero_(), v.zero_()))
    pair.position = 0
    pair.write(190)  # another request, in the same cache
    pair.check()
    if grad_mode == "no_grad":
        pair.both(lambda k, v: (k.copy_(k.flip(0)), v.copy_(v.flip(0))))
        pair.check(3)
    alone = Pair(step, model, batch=1)
    alone.check()


def test_the_past_matters() -> None:
    """Steps that forget what was before them would not pass."""
    model = Sharp()
    with torch.no_grad():
        pair = Pair(compiled(model), model)
        pair.check(8)
        pair.loop.forget()
        with pytest.raises(AssertionError):
            pair.check(3)


def test_host_equals_device_bit_for_bit() -> None:
    model = Sharp()
    with torch.no_grad():
        runs = []
        for placement, more in (("device", {}), ("host", {"prefetch": "next_rank", "pool": 1.25})):
            torch.manual_seed(3)
            step, cache, outs = (
                compiled(model, placement=placement, **more),
                new_cache(2, CAPACITY),
                [],
            )
            prefill(model, *cache, torch.randn(2, 200, SIZE))
            for at in range(200, 240):
                outs.append(step(torch.randn(2, 1, SIZE), *cache, torch.tensor([at])))
                if at == 220:
                    cache[0][:, :, 30].neg_()
            runs.append(torch.stack(outs))
    assert torch.equal(*runs)


def test_drafts_that_are_taken_back(grad_mode: str) -> None:
    """What three queries attended counts whether their tokens stay or not; pages written since do not."""
    model = Several()
    pair = Pair(compiled(model), model, queries=3)
    for kept in (3, 1, 2, 1, 3, 3):
        pair.check(1)
        pair.position -= 3 - kept
    pair.back(10)
    pair.check(2)


class Twice(Sharp):
    """Two attentions over one cache, whose queries differ."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        keys[:, :, position] = k
        values[:, :, position] = v
        mask = (torch.arange(keys.shape[2]) <= position[:, None])[None, None]
        return torch.cat(
            [
                F.scaled_dot_product_attention(one, keys, values, mask, enable_gqa=True)
                for one in (q, -q)
            ]
        )


@pytest.mark.parametrize("placement", ["device", "host"])
def test_two_attentions_to_one_cache(placement: str) -> None:
    model, first, second = Twice(), Sharp(), Sharp()
    second.qkv = lambda x: [part * sign for part, sign in zip(first.qkv(x), (-1, 1, 1))]  # type: ignore[method-assign, assignment]
    step = compiled(model, placement=placement)
    with torch.no_grad():
        cache, twin = new_cache(2, CAPACITY), new_cache(2, CAPACITY)
        loops = Loop(2), Loop(2)
        for held in (cache, twin):
            torch.manual_seed(1)
            prefill(first, *held, torch.randn(2, 200, SIZE))
        for at in range(200, 212):
            x = torch.randn(2, 1, SIZE)
            got = step(x, *cache, torch.tensor([at]))
            wants = [
                loop.step(one, x, *twin, at)
                for loop, one in zip(loops, (first, second), strict=True)
            ]
            torch.testing.assert_close(got, torch.cat(wants), rtol=1e-5, atol=1e-5)


class Cross(nn.Module):
    def forward(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def test_a_cache_that_is_only_read_is_left() -> None:
    model = Cross()
    step = torch.compile(model, backend="hsa", options={"policy": POLICY, "run": "eager"})
    memory = torch.randn(2, 2, KV_HEADS, 120, SIZE)
    q = torch.randn(2, HEADS, 1, SIZE)
    with torch.no_grad():
        torch.testing.assert_close(step(q, *memory.unbind()), model(q, *memory.unbind()))
    site = hsa_compile.explain(step).sites[0]
    assert site.decision == "left"
    assert site.reason.startswith("algorithm 'heavy_hitters' takes caches that a step writes")


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_within_the_budget_nothing_is_lost(kind: str) -> None:
    model, asked = tiny("llama"), request(3, steps=16)
    policy = {**POLICY, "budget": 64}
    expected = decode(model, model, kind, asked)
    step = compile_hsa(model, policy)
    for _ in range(2):
        got = decode(model, step, kind, asked)
        torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-5)
    assert {site.decision for site in hsa_compile.explain(step).sites} == {"sparse"}


def test_another_request_of_a_model_decodes_as_the_first() -> None:
    """A padded batch beyond the budget: in a cache that was reset, and in a new one."""
    model, asked = tiny("llama"), request(3, 100, 8, 160)
    step = compile_hsa(model, {**POLICY, "budget": 64})
    cache = helpers.new_cache(model, "static", 160)
    first = decode(model, step, "static", asked, cache=cache)
    cache.reset()
    decode(model, step, "static", request(3, 100, 8, 160, seed=5), cache=cache)
    cache.reset()
    again = decode(model, step, "static", asked, cache=cache)
    assert torch.equal(again.logits, first.logits)
    torch._dynamo.reset()
    grown = decode(model, compile_hsa(model, {**POLICY, "budget": 64}), "dynamic", asked)
    torch.testing.assert_close(grown.logits, first.logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_inductor_computes_the_same(kind: str) -> None:
    model, asked = tiny("llama"), request(3, 100, 8, 160)
    policy = {**POLICY, "budget": 64}
    expected = decode(model, compile_hsa(model, policy), kind, asked)
    got = decode(model, compile_hsa(model, policy, "inductor"), kind, asked)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-5)
