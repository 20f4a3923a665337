"""``HostCache``: a static cache made in host memory gives what a static or a growing cache gives."""

from __future__ import annotations

import copy
import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hsa_compile
from hsa_compile.errors import CacheError, HostMemoryError
from hsa_compile.runtime import host_memory, offload
from hsa_compile.runtime.host_memory import host_bytes
from tests.models.helpers import (
    CAPACITY,
    cache_argument,
    compile_hsa,
    decode,
    graphs_compiled,
    new_cache,
    request,
    tiny,
    transformers,
)

POLICY = {"budget": 48, "page_size": 16, "sink": 4, "recent": 16, "placement": "host"}
WHOLE = {"budget": 160, "page_size": 16, "placement": "host"}
CPU = torch.device("cpu")


def host_cache(model: Any, capacity: int = CAPACITY) -> Any:
    return hsa_compile.HostCache(model.config, max_cache_len=capacity)


def prefill(model: Any, cache: Any, asked: Any, start: int, end: int) -> Tensor:
    """Logits of tokens ``start`` to ``end``."""
    with torch.no_grad():
        return model(
            asked.ids[:, start:end],
            attention_mask=asked.mask[:, :end].clone(),
            position_ids=asked.positions[:, start:end].clone(),
            **{cache_argument(model): cache},
        ).logits


class Late(offload.Writer):
    """Does its work as late as it may: when it is joined."""

    def __init__(self) -> None:
        self.queued: list[tuple[Callable[[], object], tuple[Tensor, ...]]] = []
        self.most = 0

    def run(self, work: Callable[[], object], *reads: Tensor) -> None:
        self.queued.append((work, reads))
        self.most = max(self.most, len({id(one) for _, reads in self.queued for one in reads}))

    def join(self) -> None:
        while self.queued:
            self.queued.pop(0)[0]()


@pytest.fixture(params=[pytest.param("at once", marks=pytest.mark.slow), "late"], autouse=True)
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> offload.Writer:
    """Writes that wait until they are joined show every reader that does not."""
    made = Late() if request.param == "late" else offload.Writer()
    monkeypatch.setitem(offload._writers, CPU, made)
    return made


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    gc.collect()
    before = host_bytes().in_use
    yield
    torch._dynamo.reset()
    gc.collect()
    assert host_bytes().in_use == before


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3", pytest.param("gpt2", marks=pytest.mark.slow)]
)
def test_eager_logits(family: str, batch: int) -> None:
    """Prefill and steps, rows padded on the left, against both other caches."""
    model, asked = tiny(family), request(batch, steps=12)
    ours = decode(model, model, "static", asked, cache=host_cache(model))
    for kind in ("static", "sliding"):
        theirs = decode(model, model, kind, asked, ours.tokens)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("cuts", [(0, 41), (0, 3, 4, 20, 41)])
def test_prefill_in_chunks(family: str, cuts: tuple[int, ...]) -> None:
    """Exactly what a growing cache computes: attention gets tensors of the same shape and content."""
    model, asked = tiny(family), request(3)
    ours, theirs = host_cache(model), new_cache(model, "sliding")
    for start, end in itertools.pairwise(cuts):
        got, want = (prefill(model, cache, asked, start, end) for cache in (ours, theirs))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        if not mine.is_sliding:
            torch.testing.assert_close(mine.keys[:, :, :41], other.keys, rtol=1e-5, atol=1e-5)
            assert not mine.keys[:, :, 41:].any() and not mine.values[:, :, 41:].any()
            assert mine.keys.is_contiguous() and mine.keys.shape == (3, 2, CAPACITY, 16)


def test_the_first_chunk_is_not_copied(writer: offload.Writer) -> None:
    cache = hsa_compile.HostCache(tiny("llama").config, max_cache_len=64)
    k, v, more = torch.randn(2, 2, 10, 16), torch.randn(2, 2, 10, 16), torch.randn(2, 2, 5, 16)
    for layer in range(2):
        keys, values = cache.update(k, v, layer)
        assert keys is k and values is v
    keys, values = cache.update(more, more, 0)
    assert torch.equal(keys, torch.cat((k, more), 2))
    assert torch.equal(values, torch.cat((v, more), 2))
    assert torch.equal(cache.layers[0].keys[:, :, :15], keys)
    if isinstance(writer, Late):
        assert writer.most == 2, "keys and values of one layer are held at a time"


def test_nothing_is_read_from_the_device_while_the_cache_is_filled(monkeypatch: Any) -> None:
    """A first prefill knows that the cache is empty; a later one reads the lengths of all layers at once."""
    model, asked, reads = tiny("llama"), request(1), []
    cache = host_cache(model)
    there = type(cache.layers[0])._take_length

    def take(layer: Any) -> int:
        reads.append(layer._read is not None)
        return there(layer)

    monkeypatch.setattr(type(cache.layers[0]), "_take_length", take)
    prefill(model, cache, asked, 0, 20)
    prefill(model, cache, asked, 20, 41)
    assert reads == [True] * 4


def test_lengths_that_others_change() -> None:
    """After a reset, a crop and a length set by hand, the next prefill begins where the device says."""
    model, asked = tiny("llama"), request(2)
    cache, fresh = host_cache(model), host_cache(model)
    want = prefill(model, fresh, asked, 0, 41)
    prefill(model, cache, request(2, seed=4), 0, 30)
    cache.reset()
    assert not cache.layers[0].keys.any()
    torch.testing.assert_close(prefill(model, cache, asked, 0, 41), want)
    cache.crop(-11)
    torch.testing.assert_close(
        prefill(model, cache, asked, 30, 41), want[:, 30:], rtol=1e-5, atol=1e-5
    )
    for layer in cache.layers:
        layer.cumulative_length.fill_(12)
    torch.testing.assert_close(
        prefill(model, cache, asked, 12, 41), want[:, 12:], rtol=1e-5, atol=1e-5
    )
    assert int(cache.get_seq_length()) == 41


class Stop(BaseException):
    pass


def test_a_call_that_breaks_off() -> None:
    """Between two layers: what was written can be read, and after a rollback all goes on."""
    model, asked = tiny("llama"), request(2)
    cache, fresh = host_cache(model), host_cache(model)
    want = prefill(model, fresh, asked, 0, 41)
    prefill(model, cache, asked, 0, 20)

    def stop(*_: object) -> None:
        raise Stop

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        prefill(model, cache, asked, 20, 41)
    hook.remove()
    assert torch.equal(cache.layers[0].keys[:, :, :41], fresh.layers[0].keys[:, :, :41])
    for layer in cache.layers:
        layer.cumulative_length.fill_(20)
    torch.testing.assert_close(
        prefill(model, cache, asked, 20, 41), want[:, 20:], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("run", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sparse_steps_equal_those_of_a_static_cache(run: str) -> None:
    """Bit for bit, in one graph, over two requests and a second turn in each."""
    model, asked = tiny("llama"), request(3, steps=10)
    both = []
    for made in (host_cache, lambda model: new_cache(model, "static")):
        step, logits = compile_hsa(model, POLICY, run, strict=True), []
        for seed in range(2):
            cache = made(model)
            prompt = request(3, length=70, seed=seed)
            prefill(model, cache, prompt, 0, 60)
            if not isinstance(cache, hsa_compile.HostCache):
                _fill_like(model, cache, prompt, 60)
            for at in range(60, 75):
                with torch.no_grad():
                    logits.append(
                        step(
                            asked.ids[:, at % 40 : at % 40 + 1].clone(),
                            attention_mask=prompt.mask,
                            position_ids=prompt.positions[:, at : at + 1].clone(),
                            **{cache_argument(model): cache},
                        ).logits
                    )
        assert graphs_compiled() == 1
        both.append(torch.stack(logits))
    assert torch.equal(both[0], both[1])


def _fill_like(model: Any, cache: Any, asked: Any, end: int) -> None:
    """The content that a HostCache has after the prefill: a static cache sums over masked tokens in another order."""
    like = host_cache(model)
    prefill(model, like, asked, 0, end)
    for layer, other in zip(cache.layers, like.layers, strict=True):
        layer.keys.copy_(other.keys)
        layer.values.copy_(other.values)


def test_eager_and_compiled_calls_take_turns() -> None:
    """Steps advance the length on the device alone; a chunk after them is written behind what they wrote."""
    model, asked = tiny("llama"), request(2, length=60)
    step = compile_hsa(model, WHOLE)
    cache, other = host_cache(model), new_cache(model, "dynamic")
    for start, end in ((0, 30), (30, 31), (31, 32), (32, 50), (50, 51), (51, 52)):
        call = step if end - start == 1 else model
        mask = asked.mask if end - start == 1 else asked.mask[:, :end]
        with torch.no_grad():
            got = call(
                asked.ids[:, start:end].clone(),
                attention_mask=mask.clone(),
                position_ids=asked.positions[:, start:end].clone(),
                **{cache_argument(model): cache},
            ).logits
        want = prefill(model, other, asked, start, end)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", ["made within", "made before"])
@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiled_prefill(early: bool, mask: str) -> None:
    """In two chunks; one graph a shape where the memory is there before."""
    model, asked = tiny("llama"), request(2, length=42)
    step = compile_hsa(model, WHOLE)
    cache, other = host_cache(model), new_cache(model, "dynamic")
    if early:
        cache.early_initialization(2, 2, 16, torch.float32, CPU)
    for start, end in ((0, 20), (20, 41), (41, 42)):
        seen = asked.mask[:, :end].clone()
        if mask == "made before" and end - start > 1:
            length, _ = cache.get_mask_sizes(end - start, 0)
            causal = torch.arange(length) <= torch.arange(start, end)[:, None]
            seen = (causal & (seen[:, None, None, :length] > 0)).contiguous()
        with torch.no_grad():
            got = step(
                asked.ids[:, start:end].clone(),
                attention_mask=seen,
                position_ids=asked.positions[:, start:end].clone(),
                **{cache_argument(model): cache},
            ).logits
        want = prefill(model, other, asked, start, end)
        seen_rows = asked.mask[:, start:end].bool()
        torch.testing.assert_close(got[seen_rows], want[seen_rows], rtol=1e-5, atol=1e-5)
    if early:
        assert not torch._dynamo.utils.counters["graph_break"]


def test_layers_that_are_no_longer_compiled_follow_the_mask_of_the_graph() -> None:
    """Dynamo stops compiling a frame that it compiled too often; masks made before are then of the whole cache."""
    model, asked = tiny("llama"), request(2)
    cache, other = host_cache(model), new_cache(model, "static")
    frame = model.model.layers[1].forward
    model.model.layers[1].forward = torch.compiler.disable(frame)
    step = compile_hsa(model, WHOLE)
    for start, end in ((0, 20), (20, 41)):
        got = prefill(step, cache, asked, start, end)
        want = prefill(model, other, asked, start, end)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def generate(model: Any, batch: int = 2, **how: Any) -> Tensor:
    asked = request(batch, length=40)
    model.generation_config.eos_token_id = None
    torch.manual_seed(5)
    return model.generate(
        input_ids=asked.ids,
        attention_mask=asked.mask[:, :40].clone(),
        **{"max_new_tokens": 12, "do_sample": False, **how},
    )


HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 16},
}


@pytest.mark.parametrize("how", list(HOW))
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_generate(family: str, how: str) -> None:
    model = tiny(family)
    expected = generate(model, **HOW[how])
    cache = host_cache(model, 64)
    assert torch.equal(generate(model, **HOW[how], **{cache_argument(model): cache}), expected)


@pytest.mark.parametrize("how", ["greedy", pytest.param("sampling", marks=pytest.mark.slow)])
def test_generate_compiles_its_steps(how: str) -> None:
    """As a user writes it; the prefill stays eager."""
    model = tiny("llama")
    expected = generate(model, **HOW[how])
    config = transformers.CompileConfig(
        backend="hsa",
        mode=None,
        fullgraph=False,
        options={"policy": {**WHOLE, "budget": 48}, "run": "eager"},
    )
    config._compile_all_devices = True
    torch._dynamo.reset()
    for _ in range(2):
        cache = host_cache(model, 64)
        got = generate(model, **HOW[how], **{cache_argument(model): cache}, compile_config=config)
        assert torch.equal(got[:, :48], expected[:, :48])
    assert {site.decision for site in hsa_compile.explain(model).sites} == {"sparse"}
    assert hsa_compile.stats(model).steps == 22


@pytest.mark.slow
@pytest.mark.parametrize("how", ["greedy", "chunks"])
@pytest.mark.parametrize("early", [True, False])
def test_generate_with_a_compiled_forward(early: bool, how: str) -> None:
    model = tiny("llama")
    expected = generate(model, **HOW[how])
    model.forward = compile_hsa(model.forward, WHOLE)
    cache = host_cache(model, 64)
    if early:
        cache.early_initialization(2, 2, 16, torch.float32, CPU)
    assert torch.equal(generate(model, **HOW[how], **{cache_argument(model): cache}), expected)


def test_a_copy_is_in_host_memory_too() -> None:
    """The usual way to begin several texts with one prompt."""
    model, asked = tiny("llama"), request(2)
    before = host_bytes().in_use
    cache = host_cache(model)
    prefill(model, cache, asked, 0, 30)
    held = host_bytes().in_use - before
    twin = copy.deepcopy(cache)
    assert host_bytes().in_use - before == 2 * held
    assert all(hasattr(layer.keys, "_dynamo_static_input_type") for layer in twin.layers)
    assert hasattr(twin.layers[0].cumulative_length, "_dynamo_static_input_type")
    want = prefill(model, cache, asked, 30, 41)
    cache.reset()
    assert torch.equal(prefill(model, twin, asked, 30, 41), want)


def test_under_inference_mode() -> None:
    model, asked = tiny("llama"), request(2)
    want = [prefill(model, cache := host_cache(model), asked, 0, 20)]
    want.append(prefill(model, cache, asked, 20, 41))
    with torch.inference_mode():
        cache = host_cache(model)
        got = [prefill(model, cache, asked, 0, 20), prefill(model, cache, asked, 20, 41)]
    assert torch.equal(torch.cat(got, 1), torch.cat(want, 1))


def test_memory_is_counted_and_given_back() -> None:
    gc.collect()
    before = host_bytes().in_use
    cache = hsa_compile.HostCache(tiny("llama").config, max_cache_len=1024)
    k = torch.randn(1, 2, 8, 16)
    for layer in range(2):
        cache.update(k, k, layer)
    assert host_bytes().in_use - before == 4 * 2 * 1024 * 16 * 4
    del cache
    assert host_bytes().in_use == before, "without waiting for the garbage collector"


def test_host_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host_bytes().in_use
    cache = hsa_compile.HostCache(tiny("llama").config, max_cache_len=1024)
    k = torch.randn(1, 2, 8, 16)
    cache.update(k, k, 0)
    there, calls = host_memory.HostPool.allocate, []

    def allocate(pool: Any, nbytes: int) -> Any:
        calls.append(nbytes)
        if len(calls) == 2:
            raise HostMemoryError("no more")
        return there(pool, nbytes)

    held = host_bytes().in_use
    with monkeypatch.context() as patch:
        patch.setattr(host_memory.HostPool, "allocate", allocate)
        with pytest.raises(HostMemoryError):
            cache.update(k, k, 1)
    gc.collect()
    assert host_bytes().in_use == held and not cache.layers[1].is_initialized
    assert cache.update(k, k, 1)[0] is k, "it goes on once there is memory"
    del cache
    gc.collect()
    assert host_bytes().in_use == before


def test_errors_come_before_anything_changes() -> None:
    cache = hsa_compile.HostCache(tiny("llama").config, max_cache_len=64)
    k = torch.randn(3, 2, 40, 16)
    for layer in range(2):
        cache.update(k, k, layer)
    held = cache.layers[0].keys.clone()
    for length in (1, 4):
        with pytest.raises(CacheError, match="batch of 3 and was given one of 2"):
            cache.update(k[:2, :, :length], k[:2, :, :length], 0)
    with pytest.raises(CacheError, match="float16"):
        cache.update(k[:, :, :2].half(), k[:, :, :2].half(), 0)
    with pytest.raises(CacheError, match="40 tokens do not fit behind the 40"):
        cache.update(k, k, 0)
    with pytest.raises(CacheError, match="batch_repeat_interleave"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(CacheError, match="batch_select_indices"):
        cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(CacheError, match="cannot be reordered"):
        cache.reorder_cache(torch.tensor([0, 1]))
    with pytest.raises(CacheError, match="negative"):
        cache.crop(3)
    assert int(cache.get_seq_length()) == 40 and torch.equal(cache.layers[0].keys, held)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(cache.layers[1].values, held[[2, 0, 0]])
    with pytest.raises(CacheError, match="no layer of this model"):
        hsa_compile.HostCache(tiny("mistral").config, max_cache_len=64)


def test_transformers_is_imported_when_it_is_needed() -> None:
    script = (
        "import sys; sys.modules['transformers'] = None; import hsa_compile\n"
        "try: hsa_compile.HostCache\n"
        "except ImportError as error: assert 'hsa-compile[transformers]' in str(error); print('asked for')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "asked for", done.stderr
    with pytest.raises(AttributeError, match="no attribute 'HostCaches'"):
        _ = hsa_compile.HostCaches


def test_what_does_not_fit() -> None:
    """One token more by an eager step, more tokens cropped than are held, lengths that are none: nothing changes."""
    model = tiny("llama")
    ids = torch.randint(3, 128, (1, 40))
    cache = hsa_compile.HostCache(model.config, 40)
    name = cache_argument(model)
    with torch.no_grad():
        model(ids, **{name: cache})
        before = [layer.keys.clone() for layer in cache.layers]
        with pytest.raises(hsa_compile.CacheError, match=r"1 tokens do not fit behind the 40 "):
            model(ids[:, :1], **{name: cache})
        with pytest.raises(hsa_compile.CacheError, match=r"crop\(-41\) removes more than the 40 "):
            cache.crop(-41)
    for layer, was in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, was) and int(layer.cumulative_length) == 40
    for length in (0, -3, 12.5, True, "9"):
        with pytest.raises(hsa_compile.CacheError, match=f"max_cache_len {length!r} is not valid"):
            hsa_compile.HostCache(model.config, length)
    with pytest.raises(hsa_compile.CacheError, match="config 'LlamaForCausalLM' is not valid"):
        hsa_compile.HostCache(model, 40)
