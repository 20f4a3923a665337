"""``placement="host"``: the same results, bit for bit, as with the cache on the device, whatever leaves the pool."""

import copy
import gc
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hsa_compile
from tests.models.helpers import decode, request, tiny

from .helpers import HEADS, KV_HEADS, PAGE, SIZE, new_cache
from .test_static_state import full_rebuilds

POLICY = {"budget": 48, "page_size": PAGE, "sink": 4, "recent": 16}


def compiled(
    model: nn.Module,
    placement: str,
    pool: float = 1.0,
    prefetch: str = "none",
    ahead: float = 0.25,
    **options: object,
) -> nn.Module:
    policy = {**POLICY, "placement": placement, "pool": pool, "prefetch": prefetch, "ahead": ahead}
    options = {"run": "eager", "strict": True, "policy": policy} | options
    return torch.compile(model, backend="hsa", options=options)


Caches = list[tuple[Tensor, Tensor]]


class Attend(nn.Module):
    """One layer whose queries are given, so that a test chooses which pages are selected."""

    layers = 1

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    @staticmethod
    def inputs(batch: int, sharpness: float) -> tuple[Tensor, ...]:
        k, v = (torch.randn(batch, KV_HEADS, 1, SIZE) for _ in range(2))
        return torch.randn(batch, HEADS, 1, SIZE) * sharpness, k, v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, caches: Caches, position: Tensor) -> Tensor:
        ((keys, values),) = caches
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        mask = torch.arange(keys.shape[2]) <= position
        return nn.functional.scaled_dot_product_attention(
            q * self.one, keys, values, mask[None, None, None], enable_gqa=True
        )


class Twins:
    """Two equal lists of caches, one decoded with each placement; every step compares what comes of them."""

    def __init__(
        self,
        pool: float,
        batch: int,
        capacity: int,
        seed: int,
        model: type[nn.Module] = Attend,
        **options: object,
    ) -> None:
        self.random, self.batch, self.model = random.Random(seed), batch, model()
        self.steps = []
        for placement in ("device", "host"):
            torch._dynamo.reset()
            if placement == "host":
                self.steps.append(compiled(copy.deepcopy(self.model), placement, pool, **options))
            else:
                run = {key: options[key] for key in options.keys() & {"run"}}
                self.steps.append(compiled(self.model, placement, pool, **run))
        self.caches: list[Caches] = [self.allocate(capacity) for _ in range(2)]
        self.position = 0
        self.fill(0, capacity // 2)

    def allocate(self, capacity: int) -> Caches:
        return [new_cache(self.batch, capacity) for _ in range(self.model.layers)]

    def both(self, change: Callable[[Tensor, Tensor], object]) -> None:
        for caches in self.caches:
            for keys, values in caches:
                change(keys, values)

    def fill(self, start: int, end: int) -> None:
        k, v = (torch.randn(self.batch, KV_HEADS, end - start, SIZE) for _ in range(2))
        self.both(
            lambda keys, values: (keys[:, :, start:end].copy_(k), values[:, :, start:end].copy_(v))
        )
        self.position = end

    def step(self) -> None:
        inputs = self.model.inputs(self.batch, self.random.choice((0.5, 4)))
        at = torch.tensor([self.position])
        device, host = (
            step(*inputs, caches, at) for step, caches in zip(self.steps, self.caches, strict=True)
        )
        assert torch.equal(device, host), f"step at {self.position}"
        self.position += 1

    def decode(self, steps: int, end: int = 255) -> None:
        """Steps, and now and then something that happens to caches between them."""
        for _ in range(steps):
            if self.random.random() < 0.1 or self.position >= end - 5:
                self.disturb()
            self.position = min(self.position, end)
            self.step()

    def disturb(self) -> None:
        """Something that happens to caches between steps."""
        length, kind = self.position, self.random.randrange(8)
        rows = torch.randperm(self.batch)
        start = self.random.randrange(length)
        if kind == 0:  # a shorter continuation
            self.position = max(1, length - self.random.randrange(40))
        elif kind == 1:  # a second turn, prefilled eagerly
            self.fill(length, max(length, min(length + self.random.randrange(1, 40), 250)))
        elif kind == 2:  # beam reorder in place
            self.both(lambda keys, values: (keys.copy_(keys[rows]), values.copy_(values[rows])))
        elif kind == 3:  # another request
            self.fill(0, self.random.randrange(60, 200))
        elif kind == 4:  # another request of the same length
            self.fill(0, length)
        elif kind == 5:  # values alone are edited
            self.both(lambda keys, values: values[:, :, start : start + 9].mul_(-2))
        elif kind == 6:  # keys alone are edited
            self.both(lambda keys, values: keys[:, :, start : start + 9].mul_(-2))


@pytest.mark.parametrize(("pool", "batch", "seed"), [(1.0, 2, 0), (1.0, 1, 1), (2.0, 3, 2)])
def test_bit_identical_over_hundreds_of_steps(pool: float, batch: int, seed: int) -> None:
    with torch.no_grad():
        twins = Twins(pool, batch, 256, seed)
        twins.decode(250)
        (layer,) = hsa_compile.stats(twins.steps[1]).layers
        assert layer.pages_loaded and (layer.pages_evicted or pool > 1)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    with torch.no_grad():
        twins = Twins(1.0, 2, 256, 3, run="inductor")
        for _ in range(12):
            twins.step()
        twins.disturb()
        for _ in range(5):
            twins.step()


def test_while_all_fits_nothing_moves_twice() -> None:
    """160 tokens are 10 pages; a pool of four times the selection holds them all after their first use."""
    with torch.no_grad():
        twins = Twins(4.0, 1, 320, 4)
        for _ in range(60):
            twins.step()
        (layer,) = hsa_compile.stats(twins.steps[1]).layers
        assert layer.pages_evicted == 0
        # Each page at most once a KV head; those that decoding filled are loaded once they are no longer the tail.
        assert layer.pages_loaded <= KV_HEADS * 14


def test_counters() -> None:
    """Hits and loads are the pages selected; bytes are those of keys and values of the pages loaded."""
    with torch.no_grad():
        twins = Twins(1.0, 2, 256, 5)
        for _ in range(20):
            twins.step()
        stats = hsa_compile.stats(twins.steps[1])
        (layer,) = stats.layers
        assert layer.pages_hit + layer.pages_loaded == 20 * 2 * KV_HEADS * 3
        assert layer.bytes_loaded == layer.pages_loaded * 2 * PAGE * SIZE * 4
        assert 0 < layer.hit_rate < 1
        assert "pool hits" in str(stats)
        (other,) = hsa_compile.stats(twins.steps[0]).layers
        assert other.hit_rate is None and other.tokens_read == layer.tokens_read


def test_pools_are_freed_with_the_cache() -> None:
    with torch.no_grad():
        gc.collect()
        before = hsa_compile.pool_bytes()
        twins = Twins(1.0, 2, 256, 6)
        twins.step()
        # 3 pages and the one more of rows within their budget, and the tail's; keys and values in fp32; table of 16
        # pages, owner and used of 5 slots, and the clock.
        rows = 2 * KV_HEADS
        held = rows * (5 * PAGE * 2 * SIZE * 4 + 4 * (16 + 2 * 5 + 1))
        assert hsa_compile.pool_bytes() - before == held
        twins.caches.clear()
        gc.collect()
        assert hsa_compile.pool_bytes() == before


def test_no_page_is_rebuilt_while_a_request_decodes() -> None:
    with torch.no_grad():
        twins = Twins(1.0, 2, 256, 7)
        twins.step()
        for _ in range(40):
            with full_rebuilds() as rebuilt:
                twins.step()
            assert not rebuilt


@pytest.mark.parametrize(
    ("kind", "cache", "prefetch"),
    [
        ("llama", "static", "next_rank"),
        ("gpt2", "static", "cross_layer"),
        ("gpt2", "dynamic", "next_rank"),
        pytest.param("llama", "static", "none", marks=pytest.mark.slow),
        pytest.param("gpt2", "static", "none", marks=pytest.mark.slow),
        pytest.param("llama", "dynamic", "none", marks=pytest.mark.slow),
    ],
)
def test_models(kind: str, cache: str, prefetch: str) -> None:
    """Two layers, three rows of different lengths: the same logits and tokens."""
    model, asked = tiny(kind, "sdpa"), request(3, length=60, steps=24, capacity=128)
    runs = []
    for placement in ("device", "host"):
        torch._dynamo.reset()
        step = compiled(model, placement, 1.5, prefetch)
        runs.append(decode(model, step, cache, asked))
    assert torch.equal(runs[0].logits, runs[1].logits)
    assert (hsa_compile.stats(step).layers[1].prefetched_used > 0) == (prefetch != "none")


def test_a_query_is_not_guessed_where_the_cache_grows() -> None:
    model, asked = tiny("llama", "sdpa"), request(1, length=60, steps=4, capacity=128)
    step = compiled(model, "host", prefetch="cross_layer")
    want = decode(model, compiled(copy.deepcopy(model), "device"), "dynamic", asked)
    torch._dynamo.reset()
    got = decode(model, step, "dynamic", asked)
    assert torch.equal(got.logits, want.logits)
    sites = hsa_compile.explain(step).sites
    assert {site.prefetch for site in sites} == {"nothing is fetched ahead: its cache grows"}


class Replaced(Attend):
    """The same with a cache that is replaced, as functional code does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, caches: Caches, position: Tensor) -> object:
        ((keys, values),) = caches
        keys, values = keys.index_copy(2, position, k), values.index_copy(2, position, v)
        mask = torch.arange(keys.shape[2]) <= position
        out = nn.functional.scaled_dot_product_attention(
            q * self.one, keys, values, mask[None, None, None], enable_gqa=True
        )
        return out, [(keys, values)]


def test_a_cache_that_is_replaced_is_left_with_a_reason() -> None:
    torch._dynamo.reset()
    model = Replaced()
    step = compiled(model, "host", strict=False)
    keys, values = (torch.randn(2, KV_HEADS, 256, SIZE) for _ in range(2))
    with torch.no_grad():
        given = (*model.inputs(2, 1.0), [(keys, values)], torch.tensor([100]))
        torch.testing.assert_close(step(*given), model(*given), rtol=1e-5, atol=1e-5)
    (site,) = hsa_compile.explain(step).sites
    assert site.reason.endswith("replaced by a new tensor at every step"), site.reason
