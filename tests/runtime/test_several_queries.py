"""Steps of several tokens at once, as speculative decoding verifies drafts: one selection serves all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hsa_compile
from hsa_compile.lowering.limits import kernel_limits
from hsa_compile.runtime.growing import with_room_for

from ..field.helpers import rule as rule_of_one
from .helpers import HEADS, KV_HEADS, PAGE, POLICY, SIZE, Decoder, new_cache, prefill

LOSSLESS = {**POLICY, "budget": 112}
CAPACITY = 128

Attend = Callable[..., Tensor]


def rule(policy: dict[str, Any], scale: float | None = None) -> Attend:
    """The rule in plain PyTorch: selection over all heads of a group and all tokens, then dense attention of each."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, queries, _ = q.shape
        one = rule_of_one({**policy, "recent": max(policy["recent"], queries)}, scale)
        if mask is not None:
            mask = mask.expand(mask.shape[0], heads, queries, mask.shape[-1])
            mask = mask.reshape(mask.shape[0], heads * queries, 1, -1)
        out = one(q.reshape(batch, heads * queries, 1, -1), keys, values, mask)
        return out.view(batch, heads, queries, -1)

    return attend


def sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)


def causal(tokens: int, positions: Tensor) -> Tensor:
    return (torch.arange(tokens) <= positions[:, None])[None, None]


class Static(Decoder):
    """Writes L tokens at ``position [L]`` and attends to each up to its own."""

    def __init__(self, attend: Attend = sdpa) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        keys[:, :, position] = k
        values[:, :, position] = v
        return self.attend(q, keys, values, causal(keys.shape[2], position))


class Growing(Decoder):
    def __init__(self, attend: Attend = sdpa) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.qkv(x)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        tokens = keys.shape[2]
        at = torch.arange(x.shape[1]) + tokens - x.shape[1]
        return self.attend(q, keys, values, causal(tokens, at)), keys, values


@pytest.fixture(params=["no_grad", "inference_mode"])
def grad_mode(request: pytest.FixtureRequest):
    with getattr(torch, request.param)():
        yield request.param


def compiled(model: nn.Module, policy: dict[str, Any] = POLICY, run: str = "eager", **more: Any) -> Any:
    """A graph for each number of tokens: a number that varies is not rewritten."""
    torch._dynamo.reset()
    options = {"run": run, "policy": policy, "strict": True, **more}
    return torch.compile(model, backend="hsa", options=options)


def tokens(batch: int, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(batch, number, SIZE, dtype=dtype)
    torch._dynamo.mark_static(x, 1)
    return x


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Pair:
    """A static cache stepped by the compiled layer, and its twin stepped by the expected one."""

    def __init__(self, step: Any, expected: Any, length: int, batch: int = 2) -> None:
        self.step, self.expected, self.position, self.batch = step, expected, length, batch
        self.cache, self.twin = new_cache(batch), new_cache(batch)
        x = torch.randn(batch, length, SIZE)
        for cache in (self.cache, self.twin):
            prefill(expected, *cache, x)

    def check(self, number: int, keep: int | None = None) -> None:
        """A step of ``number`` tokens, of which ``keep`` are accepted."""
        x = tokens(self.batch, number)
        at = torch.arange(number) + self.position
        torch._dynamo.mark_static(at, 0)
        got = self.step(x, *self.cache, at)
        close(got, self.expected(x, *self.twin, at))
        torch.testing.assert_close(self.cache, self.twin, rtol=0, atol=0)
        self.position += number if keep is None else keep


@pytest.mark.parametrize("number", [2, 5, 16])
@pytest.mark.parametrize("policy", [LOSSLESS, POLICY], ids=["lossless", "sparse"])
def test_a_static_cache(grad_mode: str, number: int, policy: dict[str, Any]) -> None:
    step = compiled(Static(), policy)
    pair = Pair(step, Static(sdpa if policy is LOSSLESS else rule(policy)), 60)
    for _ in range(3):
        pair.check(number)
    (layer,) = hsa_compile.stats(step).layers
    seen = sum(60 + number * (i + 1) for i in range(3))
    assert layer.tokens_attendable == seen
    assert (layer.tokens_read < seen) == (policy is POLICY)


@pytest.mark.parametrize("number", [2, 5, 16])
@pytest.mark.parametrize("policy", [LOSSLESS, POLICY], ids=["lossless", "sparse"])
def test_a_growing_cache(grad_mode: str, number: int, policy: dict[str, Any]) -> None:
    step = compiled(Growing(), policy)
    grow(step, Growing(sdpa if policy is LOSSLESS else rule(policy)), [(number, number)] * 3)


def grow(step: Any, expected: Any, steps: list[tuple[int, int]], length: int = 60) -> None:
    x = torch.randn(2, length, SIZE)
    cache = tuple(t.contiguous() for t in expected.qkv(x)[1:])
    twin = tuple(t.clone() for t in cache)
    for number, keep in steps:
        x = tokens(2, number)
        got, *cache = step(x, *cache)
        want, *twin = expected(x, *twin)
        close(got, want)
        torch.testing.assert_close(cache, twin)
        rejected = number - keep
        if rejected:
            cache, twin = ([t[:, :, :-rejected] for t in held] for held in (cache, twin))


def rounds(seed: int, number: int = 16) -> list[tuple[int, int]]:
    """Drafts verified, some rejected, single tokens in between."""
    random = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(number):
        size = (1, 5, 5, 1, 3)[int(torch.randint(5, (), generator=random))]
        steps.append((size, int(torch.randint(1, size + 1, (), generator=random))))
    return steps


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("policy", [LOSSLESS, POLICY], ids=["lossless", "sparse"])
def test_drafts_in_a_static_cache(grad_mode: str, seed: int, policy: dict[str, Any]) -> None:
    """Graphs of one, three and five tokens share the state of one cache."""
    torch._dynamo.reset()
    pair = Pair(compiled(Static(), policy), Static(sdpa if policy is LOSSLESS else rule(policy)), 58)
    for number, keep in rounds(seed):
        pair.check(number, keep)
    if grad_mode == "no_grad":
        from hsa_compile.runtime.state import OWNERS, root_of

        assert len(OWNERS.of(root_of(pair.cache[0]))) == 1


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("policy", [LOSSLESS, POLICY], ids=["lossless", "sparse"])
def test_drafts_in_a_growing_cache(grad_mode: str, seed: int, policy: dict[str, Any]) -> None:
    step = compiled(Growing(), policy)
    grow(step, Growing(sdpa if policy is LOSSLESS else rule(policy)), rounds(seed), 58)
