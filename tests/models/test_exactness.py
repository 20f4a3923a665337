"""Spellings in which a part of attention is not what it seems at first: right all the same."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hsa_compile

from .left import inputs, write
from .plain import CAPACITY, dense
from .spellings import repeat

OPTIONS: dict[str, Any] = {"run": "eager", "policy": {"budget": 64, "page_size": 16}}
"""The budget covers the 61 tokens that are attended."""


def equal(step: Any, decisions: list[str]) -> None:
    torch._dynamo.reset()
    expected = step(*inputs())
    got = torch.compile(step, backend="hsa", options=OPTIONS)(*inputs())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    sites = hsa_compile.explain(step, *inputs(), options=OPTIONS).sites
    assert [site.decision for site in sites] == decisions, sites


def local_after_global(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    keep = keep.clone()
    out = dense(q, keys, values, keep)
    keep.logical_and_(torch.arange(CAPACITY) > 40)
    return out + dense(q, keys, values, keep)


def global_after_local(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    bias = torch.where(keep, 0.0, -math.inf)
    bias[..., :20] = -math.inf
    out = dense(q, keys, values, bias)
    bias[..., :20] = 0.0
    return out + dense(q, keys, values, bias)


@pytest.mark.parametrize("step", [local_after_global, global_after_local])
def test_a_mask_that_changes_between_two_attentions(step: Any) -> None:
    equal(step, ["sparse", "sparse"])


@pytest.mark.parametrize("fill", [-1e4, -1e9, -math.inf])
def test_a_row_that_is_filled_whole(fill: float) -> None:
    """A fill takes the place of scores: tokens that all have it are attended alike."""

    def step(q, k, v, keys, values, at, keep):
        write(keys, values, k, v, at)
        scores = q @ repeat(keys).mT / 4
        if fill > -math.inf:
            scores = scores.masked_fill(torch.tensor([False, True])[:, None, None, None], fill)
        return scores.masked_fill(~keep, -math.inf).softmax(-1) @ repeat(values)

    equal(step, ["sparse"])


@torch.library.custom_op("hsa_tests::softmax", mutates_args=())
def softmax(scores: Tensor, dim: int) -> Tensor:
    """With one more in the denominator."""
    return F.pad(scores, (0, 1)).softmax(dim)[..., :-1]


@torch.library.custom_op("hsa_tests::mul", mutates_args=())
def mul(scores: Tensor, factor: float) -> Tensor:
    return scores.sin() * factor


@torch.library.custom_op("hsa_tests::scaled_dot_product_attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.mT).relu() * mask) @ v


softmax.register_fake(lambda scores, dim: torch.empty_like(scores))
mul.register_fake(lambda scores, factor: torch.empty_like(scores))
attention.register_fake(lambda q, k, v, mask: torch.empty_like(q))


@pytest.mark.parametrize("name", ["softmax", "mul", "scaled_dot_product_attention"])
def test_operators_of_a_name_that_torch_has_too(name: str) -> None:
    own = torch.ops.hsa_tests

    def step(q, k, v, keys, values, at, keep):
        write(keys, values, k, v, at)
        if name == "scaled_dot_product_attention":
            return own.scaled_dot_product_attention(q, repeat(keys), repeat(values), keep)
        scores = q @ repeat(keys).mT
        scores = own.mul(scores, 0.25) if name == "mul" else scores * 0.25
        scores = scores.masked_fill(~keep, -math.inf)
        weights = own.softmax(scores, -1) if name == "softmax" else scores.softmax(-1)
        return weights @ repeat(values)

    equal(step, [])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        seen = torch.arange(keys.shape[2]) <= at
        return F.scaled_dot_product_attention(q, keys, values, seen.view(1, 1, 1, -1))


def test_autocast_around_a_step_that_runs_eagerly() -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend="hsa", options={**OPTIONS, "strict": True})
    x, at = torch.randn(2, 1, 64), torch.tensor([50])
    keys, values = torch.randn(2, 2, 4, 128, 16, dtype=torch.bfloat16).unbind()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = layer(x, keys.clone(), values.clone(), at)
        got = compiled(x, keys.clone(), values.clone(), at)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_partial_is_what_it_calls() -> None:
    compiled = torch.compile(Layer(), backend="hsa", options=OPTIONS)
    held = functools.partial(functools.partial(compiled))
    with torch.no_grad():
        held(torch.randn(2, 1, 64), *torch.randn(2, 2, 4, 128, 16).unbind(), torch.tensor([50]))
    assert [site.decision for site in hsa_compile.explain(held).sites] == ["sparse"]
    assert hsa_compile.stats(held).steps == 1
