"""``placement="host"`` on a GPU: the cache in pinned memory, the same logits bit for bit, nothing left behind."""

import contextlib
import gc
import warnings
from collections.abc import Iterator

import pytest
import torch

import hsa_compile
from hsa_compile.runtime import streams
from hsa_compile.runtime.host_memory import host_bytes

from .test_cuda_decode import Decode, tiny_llama

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("nothing_left"),
]

POLICY = {"budget": 128, "page_size": 16, "recent": 32, "pool": 1.0}


def compiled(model, placement: str, mode: str | None, **policy: object):
    options = {"policy": {**POLICY, "placement": placement, **policy}, "strict": True}
    return torch.compile(
        model, backend="hsa", options=options | ({} if mode is None else {"mode": mode})
    )


def parts(decode: Decode) -> list[torch.Tensor]:
    return [part for layer in decode.cache.layers for part in (layer.keys, layer.values)]


def disturbed(model, step, placement: str) -> torch.Tensor:
    """Logits of 300 steps, with a crop, another request, values edited alone and a deliberately slow stream between."""
    decode = Decode(model, "static", 3, 700, 1100)
    logits = []
    for number in range(300):
        if number == 60:
            for part in parts(decode)[1::2]:
                part[:, :, 100:300].mul_(-1)
        if number == 100:
            decode.at -= 150
            for layer in decode.cache.layers:
                layer.cumulative_length.fill_(decode.at)
        if number == 160:
            decode.cache.reset()
            decode.at = 650
            model(decode.tokens[:, 50:700], **{decode.name: decode.cache})
        if number % 7 == 0:
            torch.cuda._sleep(3_000_000)
        logits.append(decode.step(step).clone())
    if placement == "host":
        for layer in hsa_compile.stats(step).layers:
            assert layer.pages_loaded and layer.pages_evicted and layer.pages_hit
    return torch.stack(logits)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_identical(mode: str | None, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model = tiny_llama(dtype)
    both = []
    for placement in ("device", "host"):
        torch._dynamo.reset()
        with torch.no_grad():
            both.append(disturbed(model, compiled(model, placement, mode), placement))
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("prefetch", ["next_rank", "cross_layer"])
def test_prefetch_changes_nothing(
    mode: str | None, prefetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also where copies ahead take longer than what they run beside."""
    model = tiny_llama(torch.bfloat16, layers=3)
    expected = None
    fork = streams.beside

    @contextlib.contextmanager
    def slowly(device: torch.device) -> Iterator[None]:
        with fork(device):
            torch.cuda._sleep(1_000_000)
            yield

    for policy, beside in (
        ({}, fork),
        ({"placement": "host", "pool": 1.5, "prefetch": prefetch}, fork),
        ({"placement": "host", "pool": 1.5, "prefetch": prefetch}, slowly),
    ):
        torch._dynamo.reset()
        monkeypatch.setattr(streams, "beside", beside)
        placement = policy.pop("placement", "device")
        with torch.no_grad():
            step = compiled(model, placement, mode, **policy)
            got = disturbed(model, step, placement)
        expected = got if expected is None else expected
        assert torch.equal(got, expected)
        layers = hsa_compile.stats(step).layers[placement == "host" and prefetch == "cross_layer" :]
        assert all((layer.prefetched_used > 0) == bool(policy) for layer in layers)


def test_a_cache_that_grows() -> None:
    """Bit for bit, past the room of the first buffer and after a crop; in host memory from the first step."""
    model = tiny_llama(torch.bfloat16)
    both = []
    for placement in ("device", "host"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch.no_grad():
            step = compiled(model, placement, None)
            decode = Decode(model, "dynamic", 2, 400, 1100)
            size = sum(part.nbytes for part in parts(decode))
            before = torch.cuda.memory_allocated()
            logits = []
            for number in range(320):
                if number == 300:
                    decode.cache.crop(500)
                    decode.at = 500
                logits.append(decode.step(step).clone())
                if number == 0 and placement == "host":
                    extra = hsa_compile.pool_bytes() + hsa_compile.summary_bytes()
                    assert before - torch.cuda.memory_allocated() >= size - extra - (1 << 20)
                    assert host_bytes().in_use >= size
            both.append(torch.stack(logits))
            if placement == "host":
                for layer in hsa_compile.stats(step).layers:
                    assert layer.pages_loaded and layer.pages_hit > layer.pages_loaded
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
            del decode
    assert torch.equal(both[0], both[1])


def test_the_cache_is_moved() -> None:
    """Its memory on the device is freed; the tensors are the same objects, and eager code reads what was written."""
    torch._dynamo.reset()
    model = tiny_llama(torch.bfloat16)
    with torch.no_grad():
        decode, twin = (Decode(model, "static", 2, 3000, 4096) for _ in range(2))
        size = sum(part.nbytes for part in parts(decode))
        held = parts(decode)
        before = torch.cuda.memory_allocated()
        step, dense = compiled(model, "host", None), model
        decode.step(step)
        twin.step(dense)
        freed = before - torch.cuda.memory_allocated()
        extra = hsa_compile.pool_bytes() + hsa_compile.summary_bytes()
        assert freed >= size - extra - (1 << 20)
        assert host_bytes().in_use == host_bytes().pinned >= size
        for mine, theirs, was in zip(parts(decode), parts(twin), held, strict=True):
            assert mine is was
            torch.testing.assert_close(mine[:, :, :3000], theirs[:, :, :3000], rtol=0, atol=0)
        # Eager steps on the same cache are right, and so are sparse ones after them.
        wide = compiled(model, "host", None, budget=4000)
        got, want = decode.step(model), twin.step(model)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        got, want = decode.step(wide), twin.step(model)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        del held, mine, theirs, was


def test_cuda_graphs_and_memory() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_llama(torch.bfloat16)
    with torch.no_grad():
        step, decode = (
            compiled(model, "host", "reduce-overhead"),
            Decode(model, "static", 2, 700, 1100),
        )
        for _ in range(8):
            decode.step(step)
        held = torch.cuda.memory_allocated()
        for _ in range(50):
            decode.step(step)
        assert torch.cuda.memory_allocated() == held
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_two_requests_alternate() -> None:
    """Each has its own pool; the second is made, and the first dies, while decoding goes on."""
    torch._dynamo.reset()
    model = tiny_llama(torch.float32)
    with torch.no_grad():
        step = compiled(model, "host", "reduce-overhead")
        wanted = compiled(model, "device", None)
        pairs = [
            tuple(Decode(model, "static", 2, 500 + 60 * seed, 1100, seed) for _ in range(2))
            for seed in range(2)
        ]
        for number in range(40):
            for ours, theirs in pairs:
                got = ours.step(step).clone()
                torch.testing.assert_close(got, theirs.step(wanted), rtol=1e-5, atol=1e-5)
            if number == 20:
                pairs.append(tuple(Decode(model, "static", 2, 444, 1100, 9) for _ in range(2)))
                del pairs[0], ours, theirs
                gc.collect()
        del pairs, ours, theirs


def test_shared_memory_stays_with_a_warning() -> None:
    torch._dynamo.reset()
    model = tiny_llama(torch.float32)
    with torch.no_grad():
        decode, twin = (Decode(model, "static", 2, 600, 1100) for _ in range(2))
        alias = decode.cache.layers[0].keys.detach()
        step = compiled(model, "host", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = decode.step(step).clone()
        assert any("shares its memory with other tensors" in str(w.message) for w in caught)
        torch._dynamo.reset()
        want = twin.step(compiled(model, "device", None))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert alias.data_ptr() == decode.cache.layers[0].keys.data_ptr()
        del alias
