"""Pages loaded ahead of their selection: nothing changes but when they are loaded, and what is counted is that."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hsa_compile
from hsa_compile.ops import prefetch_select
from hsa_compile.stats import LayerStats
from tests.models.helpers import compile_hsa, decode, request, tiny

from .helpers import HEADS, KV_HEADS, PAGE, SIZE, new_cache
from .test_host_tier import POLICY, Attend, Caches, Twins

WIDTH = 32
NEXT: dict[str, Any] = {"prefetch": "next_rank", "ahead": 0.5}
CROSS: dict[str, Any] = {"prefetch": "cross_layer"}
FIRST = "there is no attention before it"
FOUND = "its pages are fetched behind"
NONE = "nothing is fetched ahead: "


class Layer(nn.Module):
    """Attention and a feed-forward part, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        self.feed = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv(self.norm(x)).view(x.shape[0], 1, -1, SIZE).transpose(1, 2)
        return heads.split((HEADS, KV_HEADS, KV_HEADS), 1)  # type: ignore[return-value]

    def query(self, q: Tensor) -> Tensor:
        return 3 * q

    def read(self, cache: Tensor) -> Tensor:
        return cache

    def mask(self, keep: Tensor) -> Tensor:
        return keep

    def attend(
        self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor, keep: Tensor
    ) -> Tensor:
        q, k, v = self.project(x)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        attended = F.scaled_dot_product_attention(
            self.query(q), self.read(keys), self.read(values), self.mask(keep), enable_gqa=True
        )
        return self.out(attended.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, *cache: Tensor) -> Tensor:
        x = x + self.attend(x, *cache)
        return x + self.feed(x)


class Stack(nn.Module):
    """Layers over caches that are passed in. The later ones may be of another class."""

    layers = 3
    first: type[Layer] = Layer
    later: type[Layer] = Layer
    tokens = 256
    """How many of them attention reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [self.first(), *(self.later() for _ in range(self.layers - 1))]
        self.blocks = nn.ModuleList(blocks)

    @staticmethod
    def inputs(batch: int, sharpness: float) -> tuple[Tensor, ...]:
        return (torch.randn(batch, 1, WIDTH) * sharpness,)

    def forward(self, x: Tensor, caches: Caches, position: Tensor) -> Tensor:
        keep = (torch.arange(self.tokens) <= position)[None, None, None]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, *cache, position, keep)
        return x


def stack(later: type[Layer]) -> type[Stack]:
    """Two layers, the second of its own class."""
    return type(later.__name__, (Stack,), {"later": later, "layers": 2})


class AtOnce(Layer):
    """Attention and the feed-forward part are added in one go: nothing follows the attention's sum."""

    def forward(self, x: Tensor, *cache: Tensor) -> Tensor:
        return x + (self.feed(x) + self.attend(x, *cache))


class AllAtOnce(Stack):
    layers, first, later = 2, AtOnce, AtOnce


class ReadsAPart(Layer):
    """Attention reads the first tokens of a larger cache; a position behind them counts as the last of them."""

    def read(self, cache: Tensor) -> Tensor:
        return cache[:, :, :200]


class PartsRead(Stack):
    layers, first, later, tokens = 2, ReadsAPart, ReadsAPart, 200


class OneTensor(Twins):
    """All caches are parts of one tensor."""

    def allocate(self, capacity: int) -> Caches:
        shape = (self.model.layers, 2, self.batch, KV_HEADS, capacity, SIZE)
        return [(keys, values) for keys, values in torch.full(shape, 1e4)]


def explained(step: nn.Module) -> list[str]:
    """What ``explain`` says of each layer's prefetch."""
    return [site.prefetch for site in hsa_compile.explain(step).sites]


# Results


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "pool", "batch", "seed", "policy"),
    [
        (Attend, 1.5, 2, 0, NEXT),
        (Attend, 2.0, 1, 1, {**NEXT, "ahead": 1}),
        (Stack, 1.5, 2, 2, NEXT),
        (Stack, 1.0, 2, 3, CROSS),
        (Stack, 2.0, 3, 4, CROSS),
        (PartsRead, 1.0, 2, 5, CROSS),
        (AllAtOnce, 1.0, 2, 7, CROSS),
        (PartsRead, 1.5, 2, 6, NEXT),
    ],
)
def test_bit_identical_whatever_happens_to_the_cache(
    model: type[nn.Module], pool: float, batch: int, seed: int, policy: dict[str, Any]
) -> None:
    torch._dynamo.utils.counters.clear()
    twins = Twins(pool, batch, 256, seed, model, **policy)
    twins.decode(60)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one for each placement"
    layers = hsa_compile.stats(twins.steps[1]).layers
    for layer in layers[policy is CROSS :]:
        assert 0 < layer.prefetched_used <= layer.pages_prefetched
    if policy is CROSS:
        assert layers[0].pages_prefetched == 0
        assert all(text.startswith(FOUND) for text in explained(twins.steps[1])[1:])


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "policy"),
    [
        pytest.param(Attend, NEXT, marks=pytest.mark.slow),
        pytest.param(stack(Layer), CROSS, marks=pytest.mark.slow),
    ],
)
def test_compiled_by_inductor(model: type[nn.Module], policy: dict[str, Any]) -> None:
    twins = Twins(1.5, 2, 256, 7, model, run="inductor", **policy)
    twins.decode(40)
    assert hsa_compile.stats(twins.steps[1]).layers[-1].prefetched_used


@torch.inference_mode()
@pytest.mark.parametrize("policy", [NEXT, CROSS], ids=["next_rank", "cross_layer"])
def test_requests_whose_caches_stand_elsewhere_in_their_tensors(policy: dict[str, Any]) -> None:
    """Two requests, one compiled step; a later layer's pages are those of the cache of the call, wherever it begins.

    In inference mode, where no version counter that the caches share sends every page out of the pools.
    """
    torch._dynamo.utils.counters.clear()
    twins = OneTensor(1.0 if policy is CROSS else 1.5, 2, 256, 8, PartsRead, **policy)
    requests = [(twins.caches, twins.position)]
    twins.caches = [
        [(values, keys) for keys, values in reversed(twins.allocate(256))] for _ in range(2)
    ]
    twins.fill(0, 150)
    requests.append((twins.caches, twins.position))
    for number in range(30):
        twins.caches, twins.position = requests[number % 2]
        twins.step()
        requests[number % 2] = twins.caches, twins.position
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert hsa_compile.stats(twins.steps[1]).layers[1].pages_prefetched


# The guess


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_guess_is_the_later_layers_query_of_the_earlier_stream(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its norm, projection, norm of heads and rotary embedding; the stream after the attention before.

    All that can be attended is selected, so that the stream is that of the model.
    """
    model, asked = tiny(kind, "sdpa"), request(3, length=60, steps=1, capacity=128)
    guesses: list[Tensor] = []
    select = prefetch_select.aten.select

    def watched(q: Tensor, *rest: object, **more: object) -> object:
        guesses.append(q.clone())
        return select(q, *rest, **more)

    monkeypatch.setattr(prefetch_select.aten, "select", watched)
    policy = {"budget": 96, "page_size": PAGE, "placement": "host", **CROSS}
    decode(model, compile_hsa(model, policy), "static", asked)
    streams: list[Tensor] = []
    layer = model.model.layers[1]
    norm = model.model.layers[0].post_attention_layernorm
    hook = norm.register_forward_pre_hook(lambda module, given: streams.append(given[0]))
    decode(model, model, "static", asked)
    hook.remove()
    stream = streams[-1]
    q = layer.self_attn.q_proj(layer.input_layernorm(stream)).unflatten(-1, (4, -1))
    if kind == "qwen3":
        q = layer.self_attn.q_norm(q)
    cos, sin = model.model.rotary_emb(stream, asked.positions[:, 60:61])
    q = q.transpose(1, 2)
    first, second = q.chunk(2, -1)
    expected = q * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    (guess,) = guesses
    torch.testing.assert_close(guess, expected)


@torch.no_grad()
def test_a_guess_that_is_right_hides_every_load() -> None:
    """Once the summaries are there: a layer that adds nothing leaves the stream as the next one finds it."""

    class Idle(Layer):
        def forward(self, x: Tensor, *cache: Tensor) -> Tensor:
            return x + 0 * self.attend(x, *cache)

    twins = Twins(2.0, 2, 256, 9, type("Idle", (Stack,), {"layers": 2, "first": Idle}), **CROSS)
    loaded = []
    for _ in range(20):
        twins.step()
        loaded.append(hsa_compile.stats(twins.steps[1]).layers[1].pages_loaded)
    first, second = hsa_compile.stats(twins.steps[1]).layers
    assert loaded[-1] == loaded[0] < first.pages_loaded
    assert second.prefetched_used and second.hidden_share > first.hidden_share == 0


# What is declined


class WritesItsQuery(Layer):
    def query(self, q: Tensor) -> Tensor:
        q = 3 * q
        q[..., :4] = q[..., 4:8]
        return q


class TripledInPlace(Layer):
    def query(self, q: Tensor) -> Tensor:
        return torch.mul(q, 3).mul_(2)


class TripledInto(Layer):
    def query(self, q: Tensor) -> Tensor:
        return torch.mul(q, 3, out=torch.empty_like(q))


@torch.library.custom_op("hsa_tests::triple", mutates_args={"q"})
def triple(q: Tensor) -> None:
    q.mul_(3)


class TripledByAnOp(Layer):
    def query(self, q: Tensor) -> Tensor:
        q = q + 0
        triple(q)
        return q


class Random(Layer):
    def query(self, q: Tensor) -> Tensor:
        return F.dropout(q, 0.0, training=True)


class AsIfRandom(Layer):
    def query(self, q: Tensor) -> Tensor:
        return 3 * F.dropout(q, 0.5, training=False)


class NoStream(Layer):
    def forward(self, x: Tensor, *cache: Tensor) -> Tensor:
        return self.attend(x, *cache)


class LateMask(Layer):
    def mask(self, keep: Tensor) -> Tensor:
        return keep & True


class AttendsTwice(Layer):
    def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Tensor, keep: Tensor) -> Tensor:
        x = super().forward(x, keys, values, at, keep)
        q = self.query(self.project(x)[0])
        again = F.scaled_dot_product_attention(q, keys, values, keep, enable_gqa=True)
        return x + self.out(again.transpose(1, 2).flatten(2))


class Flat(AtOnce):
    """Takes the stream for contiguous, which it is from the second layer on."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().project(x.view(-1).view(x.shape))


class BeginsWithAPart(Stack):
    layers, first, later = 2, AtOnce, Flat

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return super().forward(x.repeat(1, 1, 2)[..., :WIDTH], *rest)


class Sideways(Stack):
    """The second layer is told what the first attended, beside the stream."""

    layers = 2

    def forward(self, x: Tensor, caches: Caches, position: Tensor) -> Tensor:
        keep = (torch.arange(self.tokens) <= position)[None, None, None]
        attended = self.blocks[0].attend(x, *caches[0], position, keep)
        x = x + attended
        return x + self.blocks[1].attend(x + attended, *caches[1], position, keep)


class Scaled(Stack):
    """The stream is scaled between the layers, and there is no feed-forward part."""

    layers = 2

    def forward(self, x: Tensor, caches: Caches, position: Tensor) -> Tensor:
        keep = (torch.arange(self.tokens) <= position)[None, None, None]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = 0.5 * x + block.attend(x, *cache, position, keep)
        return x


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (stack(WritesItsQuery), r"its query is made of \w+, which is written in place"),
        (stack(TripledInPlace), r"its query is made of \w+, which is written in place"),
        (stack(TripledInto), r"its query is made of \w+, which is written in place"),
        (stack(TripledByAnOp), r"its query is made of \w+, which is written in place"),
        (stack(Random), r"its query is random \(\w+\)"),
        (stack(AsIfRandom), ""),
        (stack(NoStream), "no residual stream was found around the attention"),
        (stack(LateMask), "its mask is made after the attention before it"),
        (BeginsWithAPart, "the residual stream changes its shape between the layers"),
        (Sideways, "its query is made of more than the residual stream"),
        (Scaled, "no residual stream was found around the attention"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_no_lookahead(model: type[nn.Module], reason: str) -> None:
    """It is said, nothing is loaded ahead, and nothing else is different."""
    twins = Twins(1.5, 2, 256, 10, model, **CROSS)
    for _ in range(4):
        twins.step()
    first, second = explained(twins.steps[1])
    assert first == NONE + FIRST
    assert re.match(NONE + reason if reason else FOUND, second), second
    (_, layer) = hsa_compile.stats(twins.steps[1]).layers
    assert (layer.pages_prefetched == 0) == bool(reason)


@torch.no_grad()
@pytest.mark.parametrize("policy", [NEXT, CROSS], ids=["next_rank", "cross_layer"])
def test_two_attentions_over_one_cache(policy: dict[str, Any]) -> None:
    """They share a pool, in which the second would meet pages on their way."""

    class Middle(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1] = AttendsTwice()

    twins = Twins(1.5, 2, 256, 11, Middle, **policy)
    for _ in range(4):
        twins.step()
    shared = NONE + "another attention reads the same cache"
    before = NONE + "another attention reads the cache of the attention before it"
    cross = policy is CROSS
    want = [NONE + FIRST, shared, shared, before] if cross else ["", shared, shared, ""]
    assert explained(twins.steps[1]) == want
    ahead = [layer.pages_prefetched > 0 for layer in hsa_compile.stats(twins.steps[1]).layers]
    assert ahead == [not cross, False, False, not cross]


@torch.no_grad()
def test_what_the_layer_before_is() -> None:
    """Dense by policy, or left: then there is nothing to be early for."""

    class Decays(Layer):
        def read(self, cache: Tensor) -> Tensor:
            return cache.mul_(0.99)

    host = {**POLICY, "placement": "host", **CROSS}
    left = type("Left", (Stack,), {"layers": 2, "first": Decays})
    for model, layers, reason in (
        (stack(Layer)(), {"0": "dense"}, "the attention before it reads no pool"),
        (stack(Layer)(), {"0": {"placement": "device"}}, "the attention before it reads no pool"),
        (left(), {}, "the attention before it is left as it is"),
    ):
        given = (torch.randn(2, 1, WIDTH), [new_cache(2, 256) for _ in range(2)])
        options = {"policy": {"default": host, "layers": layers}}
        sites = hsa_compile.explain(model, *given, torch.tensor([99]), options=options).sites
        assert [site.prefetch for site in sites] == ["", NONE + reason]


@torch.no_grad()
def test_no_next_rank_where_every_page_fits() -> None:
    given = Attend.inputs(2, 1.0), [new_cache(2, 64)], torch.tensor([60])
    options = {"policy": {**POLICY, "placement": "host", **NEXT}}
    (site,) = hsa_compile.explain(Attend(), *given[0], *given[1:], options=options).sites
    assert site.decision == "sparse"
    assert site.prefetch == NONE + "the selection has room for every page"


# Counts


@torch.no_grad()
def test_next_ranks_counted_by_hand() -> None:
    """Keys are alike within a page, and each query likes four pages: two are selected beside the tail, two are next."""
    liked = {0: (3, 5, 7, 1), 1: (7, 3, 9, 2), 2: (9, 4, 6, 8)}
    ((keys, values),) = caches = [new_cache(1, 256)]
    keys[:], values[:] = 0, 1
    for channel, pages in liked.items():
        for score, page in zip((9, 8, 7, 6), pages, strict=True):
            keys[:, :, page * PAGE : (page + 1) * PAGE, channel] = score
    policy = {**POLICY, "sink": 0, "recent": 1, "placement": "host", "pool": 1.5, **NEXT}
    step = torch.compile(Attend(), backend="hsa", options={"policy": policy, "run": "eager"})
    new = torch.zeros(2, 1, KV_HEADS, 1, SIZE)
    for number, channel in enumerate((0, 1, 1, 0, 2)):
        q = torch.zeros(1, HEADS, 1, SIZE)
        q[..., channel] = 1
        step(q, *new, caches, torch.tensor([200 + number]))
    (layer,) = hsa_compile.stats(step).layers
    # A selection has 4 slots (one more than 3 pages), so 2 pages are loaded ahead, into a pool of 6 and the tail's.
    #   selected   loaded   ahead   evicted   selected for the first time since they were loaded ahead
    #   3 5 12     3 5 12   1 7
    #   3 7 12              2 9               7
    #   3 7 12
    #   3 5 12
    #   4 9 12     4        6 8     3 pages   9
    assert layer.pages_loaded == 4 * KV_HEADS
    assert layer.pages_hit == 11 * KV_HEADS
    assert layer.pages_prefetched == 6 * KV_HEADS
    assert layer.pages_evicted == 3 * KV_HEADS
    assert layer.prefetched_used == 2 * KV_HEADS
    assert layer.hidden_share == 2 / 6
    assert layer.hit_rate == 11 / 15
    assert layer.bytes_loaded == 10 * KV_HEADS * 2 * PAGE * SIZE * 4
    assert re.search(r"hidden.*33\.3%", str(hsa_compile.stats(step)), re.DOTALL)


def test_nothing_is_hidden_where_nothing_is_loaded() -> None:
    layer = LayerStats(0, "", 1, 1.0, 1.0)
    assert layer.hidden_share is None
