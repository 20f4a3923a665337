"""A step that fails or is interrupted leaves the cache right, and the steps after it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hsa_compile
from hsa_compile.runtime import state
from tests.models.helpers import compile_hsa, decode, request, tiny

from .helpers import KV_HEADS, SIZE, Decoder, new_cache, prefill, reference_step
from .test_static_state import Pair, compiled, model

__all__ = ["model"]  # a fixture

_interrupts: list[bool] = []
"""Whether the next call of ``test_faults::between`` is interrupted."""


@torch.library.custom_op("hsa_test_faults::between", mutates_args=())
def between(x: Tensor) -> Tensor:
    if _interrupts and _interrupts.pop():
        raise KeyboardInterrupt
    return x.clone()


@between.register_fake
def _(x: Tensor) -> Tensor:
    return x.clone()


class TwoLayers(nn.Module):
    """Two decoders, between which a step can be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Decoder(0), Decoder(1)])

    def forward(self, x: Tensor, caches: list[Tensor], position: Tensor) -> Tensor:
        first = self.layers[0](x, *caches[:2], position)
        x = between(x + first.mean(1)[..., :SIZE])
        return self.layers[1](x, *caches[2:], position)


def expected(model: TwoLayers, x: Tensor, caches: list[Tensor], position: int) -> Tensor:
    first = reference_step(model.layers[0], x, *caches[:2], position)
    return reference_step(model.layers[1], x + first.mean(1)[..., :SIZE], *caches[2:], position)


@pytest.mark.parametrize(
    ("placement", "policy", "grad_mode"),
    [
        ("device", {}, torch.inference_mode),
        ("host", {}, torch.inference_mode),
        ("host", {"pool": 1.5, "prefetch": "next_rank"}, torch.no_grad),
    ],
    ids=["device", "host", "next_rank"],
)
def test_an_interrupt_between_layers(
    placement: str, policy: dict[str, object], grad_mode: Callable[[], object]
) -> None:
    """The first layer has written its token, the second has not; the step is taken again, or another one."""
    torch._dynamo.reset()
    model = TwoLayers()
    model.placement = placement  # type: ignore[assignment]
    step = compiled(model, **policy)  # type: ignore[arg-type]
    with grad_mode():  # type: ignore[attr-defined]
        caches = [part for _ in range(2) for part in new_cache(2)]
        for layer, at in zip(model.layers, (0, 2), strict=True):
            prefill(layer, *caches[at : at + 2], torch.randn(2, 90, SIZE))
        twins = [part.clone() for part in caches]
        position = 90
        for number in range(16):
            x = torch.randn(2, 1, SIZE)
            if number % 5 == 3:
                _interrupts.append(True)
                with pytest.raises(KeyboardInterrupt):
                    step(x, caches, torch.tensor([position]))
                if number % 2:
                    x = torch.randn(2, 1, SIZE)
            got = step(x, caches, torch.tensor([position]))
            torch.testing.assert_close(
                got, expected(model, x, twins, position), rtol=1e-5, atol=1e-5
            )
            position += 1


def test_device_memory_exhausted(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither summaries nor a pool could be allocated: the error is torch's, and the step can be taken again."""
    with torch.no_grad():
        pair = Pair(model, compiled(model))
        before = [part.clone() for part in pair.cache]
        allocate = state.PageState._allocate

        def refuse(*args: object) -> Tensor:
            raise torch.OutOfMemoryError("no memory is left")

        names = ["_allocate"] if model.placement == "device" else ["_allocate", "inputs"]
        for name in names:
            with monkeypatch.context() as patch:
                patch.setattr(state.PageState, name, refuse)
                with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
                    pair.step(torch.randn(2, 1, SIZE), *pair.cache, torch.tensor([pair.position]))
            for part, was in zip(pair.cache, before, strict=True):
                assert torch.equal(part, was)
        assert state.PageState._allocate is allocate
        pair.check(10)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_two_threads(placement: str) -> None:
    """One compiled model, a cache and a thread each: what each decodes alone."""
    model = tiny("llama")
    step = compile_hsa(
        model, {"budget": 32, "page_size": 16, "recent": 16, "placement": placement, "pool": 1}
    )
    asked = [request(2, seed=seed, steps=24) for seed in range(3)]
    alone = [decode(model, step, "static", one) for one in asked]
    together: dict[int, Tensor] = {}

    def run(number: int) -> None:
        torch.set_num_threads(1)
        together[number] = decode(model, step, "static", asked[number]).logits

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, one in enumerate(alone):
        torch.testing.assert_close(together[number], one.logits, rtol=1e-5, atol=1e-5)
    assert hsa_compile.stats(step).steps == 2 * 3 * 24


def test_a_cache_that_dies_during_a_request() -> None:
    """Its state goes with it, and the next one, perhaps at the same address, starts anew."""
    torch._dynamo.reset()
    model = Decoder()
    model.placement = "host"
    step = compiled(model)
    gc.collect()
    before = hsa_compile.summary_bytes(), hsa_compile.pool_bytes()
    with torch.no_grad():
        for _ in range(5):
            cache = new_cache(1)
            prefill(model, *cache, torch.randn(1, 60, SIZE))
            twin = [part.clone() for part in cache]
            for position in (60, 61):
                x = torch.randn(1, 1, SIZE)
                got = step(x, *cache, torch.tensor([position]))
                torch.testing.assert_close(got, reference_step(model, x, *twin, position))
            assert cache[0].shape[1] == KV_HEADS
            del cache
        gc.collect()
        assert (hsa_compile.summary_bytes(), hsa_compile.pool_bytes()) == before
