"""Caches that the model grows by concatenation: buffers, prefixes, freeing, compile counts."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hsa_compile
from hsa_compile.runtime.growing import token_major_strides, with_room_for

from .helpers import HEADS, KV_HEADS, POLICY, SIZE, Decoder, reference_step


class Growing(Decoder):
    """The same layer over a cache that is concatenated and returned."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.qkv(x)
        keys, values = torch.cat((keys, k), -2), torch.cat((values, v), -2)
        out = nn.functional.scaled_dot_product_attention(
            q, keys, values, enable_gqa=HEADS != KV_HEADS
        )
        return out, keys, values


@pytest.fixture(params=["device", "host"])
def model(request: pytest.FixtureRequest) -> Growing:
    torch._dynamo.reset()
    model = Growing()
    model.placement = request.param
    return model


def compiled(model: Growing) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    policy = {**POLICY, "placement": model.placement, "pool": 1.0}
    return torch.compile(
        model, backend="hsa", options={"run": "eager", "policy": policy, "strict": True}
    )


@pytest.fixture(params=["no_grad", "inference_mode"])
def grad_mode(request: pytest.FixtureRequest):
    with getattr(torch, request.param)():
        yield request.param


def prefix(model: Growing, length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    _, k, v = model.qkv(torch.randn(batch, length, SIZE))
    return k.contiguous(), v.contiguous()


def expected(
    model: Growing, x: Tensor, keys: Tensor, values: Tensor, estimates: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule on a cache padded with one free slot."""
    room = (keys.shape[0], KV_HEADS, 1, SIZE)
    keys = torch.cat((keys, torch.zeros(room)), 2)
    values = torch.cat((values, torch.zeros(room)), 2)
    padded = -keys.shape[2] % 16
    wide = [nn.functional.pad(t, (0, 0, 0, padded)) for t in (keys, values)]
    out = reference_step(model, x, *wide, keys.shape[2] - 1, estimates=estimates)
    return out, wide[0][:, :, : keys.shape[2]], wide[1][:, :, : keys.shape[2]]


def run(
    model: Growing, step: Callable, cache: tuple[Tensor, Tensor], steps: int
) -> tuple[Tensor, Tensor]:
    """Decode and compare; returns the cache. Eager truth is kept in plain tensors."""
    twin = tuple(t.clone() for t in cache)
    for _ in range(steps):
        x = torch.randn(cache[0].shape[0], 1, SIZE)
        out, *cache = step(x, *cache)  # type: ignore[assignment]
        want, *twin = expected(model, x, *twin)  # type: ignore[assignment]
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(cache, twin, strict=True):
            torch.testing.assert_close(ours, theirs)
    return tuple(cache)  # type: ignore[return-value]


def test_growth_over_many_pages(model: Growing, grad_mode: str) -> None:
    """Past the spare capacity of the first buffer, in a bounded number of compilations."""
    from torch._dynamo.utils import counters

    counters.clear()
    run(model, compiled(model), prefix(model, 60), 300)
    assert counters["stats"]["unique_graphs"] <= 3


def test_no_concatenation(model: Growing, grad_mode: str) -> None:
    step = compiled(model)
    cache = run(model, step, prefix(model, 60), 2)
    addresses = {t.data_ptr() for t in cache}
    cache = run(model, step, cache, 5)
    # `run` clones for its twin only: the compiled step kept its buffers
    assert {t.data_ptr() for t in cache} == addresses


def test_two_continuations_of_one_prefix(model: Growing, grad_mode: str) -> None:
    step = compiled(model)
    shared = run(model, step, prefix(model, 70), 3)
    before = [t.clone() for t in shared]
    first = run(model, step, shared, 4)
    second = run(model, step, shared, 4)
    run(model, step, first, 2)
    run(model, step, second, 2)
    for held, was in zip(shared, before, strict=True):
        torch.testing.assert_close(held, was, rtol=0, atol=0)


def test_deepcopied_prefix(model: Growing) -> None:
    with torch.no_grad():
        step = compiled(model)
        cache = run(model, step, prefix(model, 70), 3)
        twin = copy.deepcopy(cache)
        run(model, step, cache, 3)
        run(model, step, twin, 3)


def test_crop_reorder_and_edit(model: Growing, grad_mode: str) -> None:
    step = compiled(model)
    cache = run(model, step, prefix(model, 90), 5)
    cropped = tuple(t[:, :, :75] for t in cache)
    cache = run(model, step, cropped, 4)
    cache = tuple(t.index_select(0, torch.tensor([1, 0])) for t in cache)
    cache = run(model, step, cache, 4)
    cache = tuple(t[:1] for t in cache)
    run(model, step, cache, 3)


def test_edit_in_place_between_steps(model: Growing) -> None:
    with torch.no_grad():
        step = compiled(model)
        cache = run(model, step, prefix(model, 90), 3)
        cache[0][:, :, 20:60].neg_()
        run(model, step, cache, 3)


def test_freed_with_the_cache(model: Growing, grad_mode: str) -> None:
    gc.collect()
    before = hsa_compile.summary_bytes(), hsa_compile.pool_bytes()
    step = compiled(model)
    cache = run(model, step, prefix(model, 90), 3)
    assert hsa_compile.summary_bytes() > before[0]
    assert (hsa_compile.pool_bytes() > before[1]) == (model.placement == "host")
    del cache
    gc.collect()
    assert (hsa_compile.summary_bytes(), hsa_compile.pool_bytes()) == before


def test_pages_stay_in_the_pool_while_it_grows(model: Growing, grad_mode: str) -> None:
    """Its table grows with the cache; what a step selected is there for the next, in the buffer and past it."""
    if model.placement == "device":
        pytest.skip("nothing is loaded")
    step = compiled(model)
    cache = run(model, step, prefix(model, 60), 2)
    (before,) = hsa_compile.stats(step).layers
    cache = run(model, step, cache, 240)  # the buffer had room for 256 more
    (after,) = hsa_compile.stats(step).layers
    loaded, hit = (getattr(after, n) - getattr(before, n) for n in ("pages_loaded", "pages_hit"))
    assert hit > loaded > 0
    run(model, step, cache, 40)


def test_only_the_newest_view_grows_in_place() -> None:
    old = torch.randn(2, 3, 5, 4)
    with torch.no_grad():
        first = with_room_for(old)
        assert first.shape == (2, 3, 6, 4)
        assert first.stride() == token_major_strides(2, 3, 4)
        torch.testing.assert_close(first[:, :, :5], old)
        second = with_room_for(first)
        assert second.data_ptr() == first.data_ptr()
        assert with_room_for(first).data_ptr() != first.data_ptr()
        assert with_room_for(second[:1]).data_ptr() != first.data_ptr()
