"""Means of the pages that are left out follow keys and values, however the cache is touched between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hsa_compile

from .helpers import SIZE, Decoder, reference_step
from .test_growing import Growing, expected, prefix
from .test_static_state import Pair, compiled, full_rebuilds


class Estimated(Pair):
    """The reference lets the means of what is left out take part."""

    rule = staticmethod(functools.partial(reference_step, estimates=True))


@pytest.fixture(params=["device", "host"])
def model(request: pytest.FixtureRequest) -> Decoder:
    torch._dynamo.reset()
    model = Decoder()
    model.placement = request.param
    return model


@pytest.fixture(params=["no_grad", "inference_mode"])
def grad_mode(request: pytest.FixtureRequest):
    with getattr(torch, request.param)():
        yield request.param


@pytest.fixture
def step(model: Decoder) -> Callable[..., Tensor]:
    """Quest keeps no mean of keys, so that of keys is kept beside it."""
    return compiled(model, unselected="centroids")


def test_growth_and_what_happens_between(
    model: Decoder, step: Callable[..., Tensor], grad_mode: str
) -> None:
    pair = Estimated(model, step, length=60)
    pair.check(8)
    # Tokens written eagerly, some of them taken back.
    pair.write(torch.randn(2, 20, SIZE), pair.position)
    pair.position += 12
    pair.check(3)
    pair.position -= 25
    pair.check(18)
    # Another request of the same length, and one that is shorter.
    for length in (pair.position, 50):
        pair.both(lambda k, v: (k.zero_(), v.zero_()))
        pair.write(torch.randn(2, length, SIZE), 0)
        pair.position = length
        pair.check(3)


def test_the_estimate_differs_from_none(model: Decoder, step: Callable[..., Tensor]) -> None:
    """The other tests of this file would otherwise prove nothing."""
    with torch.no_grad():
        pair = Estimated(model, step)
        x, at = torch.randn(2, 1, SIZE), torch.tensor([90])
        dropped = reference_step(model, x, *pair.twin, 90)
        assert (step(x, *pair.cache, at) - dropped).abs().max() > 1e-2


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
def test_an_edit_of_one_of_the_two(model: Decoder, step: Callable[..., Tensor], which: int) -> None:
    with torch.no_grad():
        pair = Estimated(model, step)
        pair.check(2)
        pair.both(lambda *cache: cache[which][:, :, 20:50].neg_())
        pair.check(2)
        # One that torch does not count.
        pair.both(lambda *cache: cache[which].data[:, :, 20:50].mul_(3))
        hsa_compile.invalidate(pair.cache[which])
        pair.check(2)


@torch.no_grad()
def test_rows_that_take_turns(model: Decoder, step: Callable[..., Tensor]) -> None:
    """Two caches, and rows of one swapped in place, as a beam search does."""
    pairs = [Estimated(model, step, length) for length in (70, 90)]
    rows = torch.tensor([1, 0])
    for turn in range(6):
        pairs[turn % 2].check(2)
        pairs[0].both(lambda k, v: (k.copy_(k[rows]), v.copy_(v[rows])))


def test_a_step_reads_one_page_of_each(model: Decoder, step: Callable[..., Tensor]) -> None:
    with torch.no_grad():
        pair = Estimated(model, step)
        pair.check(3)
        with full_rebuilds() as seen:
            pair.check(20)
        assert not seen


@pytest.mark.parametrize("placement", ["device", "host"])
@torch.no_grad()
def test_a_growing_cache(placement: str) -> None:
    torch._dynamo.reset()
    model = Growing()
    model.placement = placement
    step = compiled(model, unselected="centroids")
    cache = prefix(model, 60)
    twin = tuple(t.clone() for t in cache)
    for turn in range(24):
        if turn == 18:  # tokens are taken back
            cache, twin = ([t[:, :, :70] for t in held] for held in (cache, twin))
        x = torch.randn(2, 1, SIZE)
        out, *cache = step(x, *cache)
        want, *twin = expected(model, x, *twin, estimates=True)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
