"""``HostCache`` on a GPU: never whole on the device, written beside the computation, read only after it was written."""

import gc
import itertools

import pytest
import torch
from torch import Tensor

import hsa_compile
from hsa_compile.runtime import offload
from hsa_compile.runtime.host_memory import host_bytes

from .test_cuda_decode import cache_argument, tiny_llama, transformers

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("nothing_left"),
]

POLICY = {"budget": 128, "page_size": 16, "recent": 32, "pool": 1.0, "placement": "host"}
CAPACITY = 4096


def compiled(model, mode: str | None = None):
    options = {"policy": POLICY, "strict": True} | ({} if mode is None else {"mode": mode})
    return torch.compile(model, backend="hsa", options=options)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, length), generator=generator).cuda()


def call(function, model, ids: Tensor, cache) -> Tensor:
    return function(ids, **{cache_argument(model): cache}).logits


def device_stream() -> torch.cuda.Stream:
    made = offload.writer(torch.device("cuda", torch.cuda.current_device()))
    return made.stream  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(0, 700), (0, 300, 301, 700)])
def test_prefill_equals_that_of_a_growing_cache(dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    """The same kernels on tensors of the same shape, and the same content in the end; single tokens read everything."""
    model, ids = tiny_llama(dtype), tokens(3, 700)
    ours = hsa_compile.HostCache(model.config, max_cache_len=1024)
    theirs = transformers.DynamicCache(config=model.config)
    exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    with torch.no_grad():
        for start, end in itertools.pairwise(cuts):
            got, want = (call(model, model, ids[:, start:end], one) for one in (ours, theirs))
            if len(cuts) == 2:
                assert torch.equal(got, want)
            torch.testing.assert_close(got, want, **exact)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert mine.keys.is_cuda
        torch.testing.assert_close(mine.keys[:, :, :700], other.keys, **exact)
        torch.testing.assert_close(mine.values[:, :, :700], other.values, **exact)
        assert not mine.keys[:, :, 700:].any() and not mine.values[:, :, 700:].any()
    assert host_bytes().pinned == 2 * 2 * 3 * 2 * 1024 * 64 * dtype.itemsize


def test_the_cache_is_never_on_the_device() -> None:
    """Sixteen layers: a prefill needs what it needs without a cache, and the keys and values of two layers."""
    model = tiny_llama(torch.bfloat16, layers=16)
    ids = tokens(4, 3000)
    layer = 2 * 4 * 2 * 3000 * 64 * 2

    def peak(**how) -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            model(ids, logits_to_keep=1, **how)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    peak(use_cache=False)  # libraries allocate their workspaces
    bare = peak(use_cache=False)
    cache = hsa_compile.HostCache(model.config, max_cache_len=CAPACITY)
    held = torch.cuda.memory_allocated()
    assert peak(**{cache_argument(model): cache}) <= bare + 2 * layer + (2 << 20)
    assert torch.cuda.memory_allocated() <= held + (1 << 20), "nothing is held afterwards"
    assert host_bytes().in_use == 16 * 2 * 4 * 2 * CAPACITY * 64 * 2


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_steps_equal_those_of_a_static_cache_on_the_host(mode: str | None) -> None:
    """Bit for bit from the same content, in one graph, CUDA graphs included."""
    from torch._dynamo.utils import counters

    model, ids = tiny_llama(torch.bfloat16), tokens(3, 800)
    with torch.no_grad():
        like = hsa_compile.HostCache(model.config, max_cache_len=1024)
        call(model, model, ids[:, :700], like)
        both = []
        for ours in (True, False):
            torch._dynamo.reset()
            counters.clear()
            step = compiled(model, mode)
            if ours:
                cache = hsa_compile.HostCache(model.config, max_cache_len=1024)
                call(model, model, ids[:, :700], cache)
            else:
                cache = transformers.StaticCache(config=model.config, max_cache_len=1024)
                call(model, model, ids[:, :700], cache)
                for layer, other in zip(cache.layers, like.layers, strict=True):
                    layer.keys.copy_(other.keys)
                    layer.values.copy_(other.values)
            addresses = [layer.keys.data_ptr() for layer in cache.layers]
            logits = [
                call(step, model, ids[:, i : i + 1].clone(), cache).clone() for i in range(700, 800)
            ]
            both.append(torch.stack(logits))
            assert counters["stats"]["unique_graphs"] == 1
            assert counters["inductor"]["cudagraph_skips"] == 0
            if ours:
                assert addresses == [layer.keys.data_ptr() for layer in cache.layers]
        assert torch.equal(both[0], both[1])


def test_races() -> None:
    """200 requests on one cache and others, with delays in either stream: each reads what it wrote."""
    model = tiny_llama(torch.float32)
    step = compiled(model)
    side = device_stream()
    with torch.no_grad():
        want = []
        for seed in range(5):
            cache = hsa_compile.HostCache(model.config, max_cache_len=1024)
            ids = tokens(2, 640, seed)
            parts = [
                call(model, model, ids[:, :500], cache),
                call(model, model, ids[:, 500:630], cache),
            ]
            torch.cuda.synchronize()
            parts += [call(step, model, ids[:, i : i + 1].clone(), cache) for i in range(630, 636)]
            torch.cuda.synchronize()
            want.append((ids, parts, [layer.values[:, :, :636].clone() for layer in cache.layers]))
        kept = hsa_compile.HostCache(model.config, max_cache_len=1024)
        for number in range(200):
            ids, parts, content = want[number % 5]
            cache = kept if number % 3 else hsa_compile.HostCache(model.config, max_cache_len=1024)
            if number % 3:
                cache.reset()
            if number % 2:
                with torch.cuda.stream(side):
                    torch.cuda._sleep(4_000_000)
            else:
                torch.cuda._sleep(4_000_000)
            got = [call(model, model, ids[:, :500], cache)]
            if number % 4 == 3:
                with torch.cuda.stream(side):
                    torch.cuda._sleep(4_000_000)
            got.append(call(model, model, ids[:, 500:630], cache))
            got += [call(step, model, ids[:, i : i + 1].clone(), cache) for i in range(630, 636)]
            for mine, theirs in zip(got, parts, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            for layer, values in zip(cache.layers, content, strict=True):
                torch.testing.assert_close(layer.values[:, :, :636], values, rtol=1e-5, atol=1e-5)
            del cache


def test_a_call_that_breaks_off() -> None:
    """Between two layers, with a write still under way: reading and going on wait for it."""
    model, ids, side = tiny_llama(torch.float32), tokens(2, 700), device_stream()
    cache, fresh = (hsa_compile.HostCache(model.config, max_cache_len=1024) for _ in range(2))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        want = call(model, model, ids, fresh)
        for _ in range(2):
            hook = model.model.layers[1].register_forward_pre_hook(stop)
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)
            with pytest.raises(KeyboardInterrupt):
                call(model, model, ids, cache)
            hook.remove()
            assert torch.equal(cache.layers[0].keys[:, :, :700], fresh.layers[0].keys[:, :, :700])
            cache.reset()
        assert torch.equal(call(model, model, ids, cache), want)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_generate(mode: str | None) -> None:
    """``generate`` compiles the steps with what it is given, and gives the tokens of a growing cache."""
    model, ids = tiny_llama(torch.float32), tokens(2, 300)
    model.generation_config.eos_token_id = None
    how = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 40,
        "do_sample": False,
        "pad_token_id": 0,
    }
    how["attention_mask"][1, :17] = 0
    expected = model.generate(ids, **how)
    options = {"policy": {**POLICY, "budget": 352}} | ({} if mode is None else {"mode": mode})
    config = transformers.CompileConfig(backend="hsa", mode=None, fullgraph=False, options=options)
    for _ in range(2):
        cache = hsa_compile.HostCache(model.config, max_cache_len=512)
        got = model.generate(ids, **how, compile_config=config, past_key_values=cache)
        assert torch.equal(got, expected)
    assert {site.decision for site in hsa_compile.explain(model).sites} == {"sparse"}
    del model.__dict__["_compiled_call"]
