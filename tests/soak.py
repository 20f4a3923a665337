"""Random lives of KV caches: what is drawn, how it is run, and what every step must give.

A ``Life`` is a layer, a policy and a list of events: decode steps, chunks of prefill, and everything else that people
do to a cache between steps. Two caches (requests) live beside each other and take turns. After every step the output
must be that of the rule on the content of the cache, and the content itself that of an eager twin.

    HSA_SOAK=2000 HSA_TEST_SEED=1 pytest tests/test_soak.py
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hsa_compile
from hsa_compile import LayerPolicy, algorithms
from tests.models.reference import sparse_attention

CAPACITIES = (70, 96, 150)
EVENTS = {
    "step": 10,
    "chunk": 2,
    "crop": 2,
    "reset": 1,
    "reorder": 1,
    "overwrite": 1,
    "swap": 3,
    "deepcopy": 1,
    "told": 1,
}
"""What may happen next, and how often."""


POOLS = ((1, "none"), (1.3, "none"), (1.3, "next_rank"), (2, "none"), (2, "next_rank"))


@dataclass(frozen=True)
class Life:
    seed: int
    batch: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    capacity: int
    growing: bool
    mask: str
    spelling: str
    grad_mode: str
    policy: LayerPolicy
    events: tuple[str, ...]


def draw(seed: int) -> Life:
    pick = random.Random(seed)
    growing = pick.random() < 0.4
    budget: int | float = pick.choice((16, 32, 48, 64, 200, 0.2, 0.5))
    pool, prefetch = pick.choice(POOLS)
    algorithm = pick.choice(("quest", "cuboid", "mean", "streaming", "three_level"))
    group_reduce = pick.choice(("softmax_mean", "max"))
    # Shares are estimated by the mean of softmax alone; none that a number of equal pages reaches exactly.
    scored = algorithm in algorithms.names() and algorithm != "streaming"
    # Tokens by signs are left out: of few channels many are alike, and rounding would tell them apart.
    single = "page"
    if pick.random() < 0.25 and (scored or algorithm == "three_level"):
        single = "two_stage" if scored else "token"
    pages = single == "page"
    estimated = scored and pages and group_reduce == "softmax_mean"
    policy = LayerPolicy(
        algorithm=algorithm,
        budget=budget,
        page_size=pick.choice((8, 16, 32, 64)),
        sink=pick.choice((0, 1, 4, 20)),
        recent=pick.choice((0, 1, 8, 40)),
        group_reduce=group_reduce,
        top_p=pick.choice((1.0, 0.37, 0.83)) if estimated else 1.0,
        min_budget=0,
        # A share of a length that no graph knows is not for the host.
        placement="device"
        if not pages or (growing and isinstance(budget, float))
        else pick.choice(("device", "host")),
        pool=pool,
        prefetch="none" if not pages or algorithm == "three_level" else prefetch,
        unselected="drop"
        if not pages or algorithm == "three_level"
        else pick.choice(("drop", "centroids")),
        prototypes=pick.choice((1, 3, 64)),
        granularity=single,
        first_stage=pick.choice((1.0, 2.5)),
    )
    events = pick.choices(tuple(EVENTS), tuple(EVENTS.values()), k=pick.randint(6, 24))
    return Life(
        seed=seed,
        batch=pick.choice((1, 1, 2, 3)),
        kv_heads=pick.choice((1, 2, 3)),
        group=pick.choice((1, 2, 4)),
        dim=pick.choice((8, 16, 24)),
        value_dim=pick.choice((8, 16)),
        capacity=pick.choice(CAPACITIES),
        growing=growing,
        mask=pick.choice(("none", "padding", "window", "additive", "per head", "lowest")),
        spelling=pick.choice(("sdpa", "matmul", "sink", "cap")),
        grad_mode=pick.choice(("no_grad", "inference_mode")),
        policy=policy,
        events=("chunk", "step", *events, "step", "step"),
    )


def keep_of(life: Life, tokens: int, position: int) -> Tensor:
    """What may be attended: ``[B or 1, H or 1, 1, S]``, never nothing."""
    at = torch.arange(tokens)
    keep = (at <= position).view(1, 1, 1, -1)
    if life.mask in ("padding", "additive", "lowest"):
        begin = torch.tensor([0, 5, 17][: life.batch]).clamp(max=position)
        keep = keep & (at >= begin[:, None, None, None])
    if life.mask == "window":
        keep = keep & (at > position - 40)
    if life.mask == "per head":
        heads = torch.arange(life.kv_heads * life.group).view(1, -1, 1, 1)
        keep = keep & (at > position - 20 - 13 * heads)
    return keep


def mask_of(life: Life, keep: Tensor) -> Tensor | None:
    """The mask as the model gives it."""
    if life.mask == "none" and life.growing:
        return None
    if life.mask == "additive":
        bias = torch.linspace(-1, 1, keep.shape[-1], dtype=torch.float64)
        return torch.where(keep, bias, -torch.inf)
    if life.mask == "lowest":
        return torch.where(keep, 0.0, torch.finfo(torch.float32).min).double()
    return keep


class Layer(nn.Module):
    """Writes one token into a cache and attends it: in place, or by concatenation."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self.life = life
        self.sinks = torch.linspace(-1, 2, life.kv_heads * life.group).double().view(1, -1, 1, 1)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        position: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.life.growing:
            keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        else:
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
        return self.attend(q, keys, values, mask), keys, values

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        life = self.life
        if life.spelling == "sdpa":
            return F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, enable_gqa=life.group > 1
            )
        keys, values = (x.repeat_interleave(life.group, 1) for x in (keys, values))
        scores = q @ keys.mT * life.dim**-0.5
        if life.spelling == "cap":
            scores = torch.tanh(scores / 0.8) * 0.8
        if mask is not None:
            bias = mask.dtype != torch.bool
            scores = scores + mask if bias else scores.masked_fill(~mask, -torch.inf)
        if life.spelling == "sink":
            joined = torch.cat([scores, self.sinks.expand(q.shape[0], -1, -1, -1)], -1)
            return joined.softmax(-1)[..., :-1] @ values
        return scores.softmax(-1) @ values


@dataclass
class Cache:
    """A cache under the compiled layer, its twin that is written eagerly, and how far both are filled."""

    keys: Tensor
    values: Tensor
    twin_keys: Tensor
    twin_values: Tensor
    length: int = 0

    @property
    def pairs(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return (self.keys, self.twin_keys), (self.values, self.twin_values)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, self.twin_keys, self.twin_values

    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Other tensors in the place of all four."""
        self.keys, self.values, self.twin_keys, self.twin_values = map(change, self.tensors)


@dataclass
class Run:
    life: Life
    random: torch.Generator = field(default_factory=torch.Generator)
    steps: int = 0

    def __post_init__(self) -> None:
        self.random.manual_seed(self.life.seed)
        self.layer = Layer(self.life)
        options = {"policy": self.life.policy, "run": "eager", "strict": True}
        torch._dynamo.reset()
        self.compiled = torch.compile(self.layer, backend="hsa", options=options)
        self.caches = [self.new_cache(), self.new_cache()]

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def new_cache(self) -> Cache:
        """Poisoned where nothing was written; a growing one is empty."""
        life = self.life
        tokens = 0 if life.growing else life.capacity

        def empty(size: int) -> Tensor:
            shape = (life.batch, life.kv_heads, tokens, size)
            return torch.full(shape, 1e4, dtype=torch.float64)

        sizes = (life.dim, life.value_dim, life.dim, life.value_dim)
        return Cache(*(empty(size) for size in sizes))

    def live(self) -> None:
        with getattr(torch, self.life.grad_mode)():
            for at, event in enumerate(self.life.events):
                try:
                    getattr(self, event)(self.caches[0])
                except AssertionError as error:
                    raise AssertionError(f"event {at}, {event}, of {self.life}") from error

    # -- events

    def step(self, cache: Cache) -> None:
        life, at = self.life, cache.length
        if at == life.capacity:
            return
        q = self.tensor(life.batch, life.kv_heads * life.group, 1, life.dim)
        k, v = (
            self.tensor(life.batch, life.kv_heads, 1, size) for size in (life.dim, life.value_dim)
        )
        tokens = at + 1 if life.growing else life.capacity
        keep = keep_of(life, tokens, at)
        mask = mask_of(life, keep)
        given = None if mask is None else mask.clone()
        position = torch.tensor([at])
        out, cache.keys, cache.values = self.compiled(
            q, k, v, cache.keys, cache.values, position, given
        )
        if life.growing:
            cache.twin_keys = torch.cat((cache.twin_keys, k), 2)
            cache.twin_values = torch.cat((cache.twin_values, v), 2)
        else:
            cache.twin_keys[:, :, at], cache.twin_values[:, :, at] = k[:, :, 0], v[:, :, 0]
        cache.length += 1
        self.steps += 1
        for held, twin in cache.pairs:
            assert torch.equal(held, twin), "the content of the cache"
        rule = sparse_attention(
            *(q, cache.twin_keys, cache.twin_values, mask, life.dim**-0.5, life.policy),
            softcap=0.8 if life.spelling == "cap" else 0.0,
            sink=self.layer.sinks if life.spelling == "sink" else None,
        )
        # What is left out is merged by log-sum-exps, which are fp32.
        atol = 1e-6 if life.policy.estimates else 1e-9
        torch.testing.assert_close(out, rule, rtol=1e-6, atol=atol)
        budget = life.policy.budget
        if isinstance(budget, int) and int(keep.sum(-1).max()) <= budget and life.mask != "lowest":
            dense = self.layer.attend(q, cache.twin_keys, cache.twin_values, mask)
            torch.testing.assert_close(out, dense, rtol=1e-6, atol=1e-9)

    def chunk(self, cache: Cache) -> None:
        """Tokens that are written eagerly."""
        life = self.life
        count = min(self.number(1, 50), life.capacity - cache.length)
        k, v = (
            self.tensor(life.batch, life.kv_heads, count, size)
            for size in (life.dim, life.value_dim)
        )
        if life.growing:
            cache.keys, cache.twin_keys = (torch.cat((t, k), 2) for t in cache.pairs[0])
            cache.values, cache.twin_values = (torch.cat((t, v), 2) for t in cache.pairs[1])
        else:
            span = slice(cache.length, cache.length + count)
            for held, new in zip(cache.pairs, (k, v), strict=True):
                for tensor in held:
                    tensor[:, :, span] = new
        cache.length += count

    def crop(self, cache: Cache) -> None:
        """Back to fewer tokens: a static cache keeps what it holds behind them."""
        cache.length = self.number(0, cache.length)
        if self.life.growing:
            cache.replace(lambda tensor: tensor[:, :, : cache.length])

    def reset(self, cache: Cache) -> None:
        if self.life.growing:
            self.caches[0] = self.new_cache()
            return
        for tensor in cache.tensors:
            tensor.zero_()
        cache.length = 0

    def reorder(self, cache: Cache) -> None:
        rows = torch.randperm(self.life.batch, generator=self.random)
        if self.life.growing:
            cache.replace(lambda tensor: tensor[rows])
        else:
            for tensor in cache.tensors:
                tensor.copy_(tensor[rows])

    def overwrite(self, cache: Cache) -> None:
        """Earlier tokens change in place; where torch does not count that, it is told."""
        end = self.number(0, cache.length)
        shape = (self.life.batch, self.life.kv_heads, end)
        k, v = self.tensor(*shape, self.life.dim), self.tensor(*shape, self.life.value_dim)
        for held, new in zip(cache.pairs, (k, v), strict=True):
            for tensor in held:
                tensor[:, :, :end] = new
        if self.life.grad_mode == "inference_mode":
            hsa_compile.invalidate(cache.keys, cache.values)

    def swap(self, cache: Cache) -> None:
        """The other request's turn."""
        self.caches.reverse()

    def deepcopy(self, cache: Cache) -> None:
        """The other request becomes a second continuation of this one."""
        self.caches[1] = copy.deepcopy(cache)

    def told(self, cache: Cache) -> None:
        """Through ``.data``, which nothing counts."""
        for tensor in cache.tensors:
            tensor.data[:, :, : cache.length].mul_(-1)
        hsa_compile.invalidate(cache.keys, cache.values)

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.random))
