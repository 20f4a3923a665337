"""The whole pipeline on a GPU: templates, CUDA graphs, state. Skipped where there is none."""

import gc
import inspect

import pytest
import torch
from torch import Tensor

import hsa_compile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
transformers = pytest.importorskip("transformers")


def tiny_llama(dtype: torch.dtype, layers: int = 2, size: int = 64):
    config = transformers.LlamaConfig(
        hidden_size=4 * size,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval().to("cuda", dtype)


def cache_argument(model) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Decode:
    """A prefilled cache and the logits of teacher-forced steps."""

    def __init__(
        self, model, kind: str, batch: int, prompt: int, capacity: int, seed: int = 0
    ) -> None:
        self.model, self.name = model, cache_argument(model)
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 256, (batch, capacity), generator=generator).cuda()
        self.at = prompt
        static = kind == "static"
        self.cache = (
            transformers.StaticCache(config=model.config, max_cache_len=capacity)
            if static
            else transformers.DynamicCache()
        )
        model(self.tokens[:, :prompt], **{self.name: self.cache})

    def step(self, function) -> Tensor:
        logits = function(
            self.tokens[:, self.at : self.at + 1].clone(), **{self.name: self.cache}
        ).logits
        self.at += 1
        return logits


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("batch", [1, 3])
def test_lossless_equals_eager(kind: str, mode: str | None, batch: int) -> None:
    torch._dynamo.reset()
    model = tiny_llama(torch.float32)
    options = {"policy": {"budget": 480, "page_size": 16}, "strict": True}
    if mode is not None:
        options["mode"] = mode
    compiled = torch.compile(model, backend="hsa", options=options)
    with torch.no_grad():
        ours = Decode(model, kind, batch, 400, 512)
        theirs = Decode(model, kind, batch, 400, 512)
        for _ in range(40):
            got, want = ours.step(compiled).clone(), theirs.step(model)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert {site.decision for site in hsa_compile.explain(compiled).sites} == {"sparse"}


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("more", [{}, {"budget": [192, 64]}, {"dense_below": 0.128}], ids=str)
def test_sparse_equals_the_eager_ops(kind: str, more: dict[str, object]) -> None:
    """Templates against the same rewritten graph run without Inductor (the ATen ops)."""
    model = tiny_llama(torch.float32)
    policy = {"budget": 128, "page_size": 16, "recent": 32, **more}
    results = []
    with torch.no_grad():
        for run in ("eager", "inductor"):
            torch._dynamo.reset()
            compiled = torch.compile(
                model, backend="hsa", options={"policy": policy, "run": run, "strict": True}
            )
            decode = Decode(model, kind, 2, 1000, 1100)
            results.append(torch.stack([decode.step(compiled) for _ in range(20)]))
        dense = Decode(model, kind, 2, 1000, 1100)
        exact = torch.stack([dense.step(model) for _ in range(20)])
    assert (results[0] - exact).abs().max() > 1e-3
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_low_precision_is_as_close_to_fp32_as_eager(kind: str, dtype: torch.dtype) -> None:
    """Within the budget: the error against fp32 is at most twice that of eager in the same dtype."""
    torch._dynamo.reset()
    exact, model = tiny_llama(torch.float32), tiny_llama(dtype)
    compiled = torch.compile(
        model, backend="hsa", options={"policy": {"budget": 992, "page_size": 32}, "strict": True}
    )
    with torch.no_grad():
        runs = [Decode(m, kind, 2, 900, 1024) for m in (exact, model, model)]
        wants, eager, ours = (
            torch.stack([run.step(function).float() for _ in range(20)])
            for run, function in zip(runs, (exact, model, compiled), strict=True)
        )
    assert (ours - wants).norm() <= 2 * (eager - wants).norm()


def test_cuda_graphs_are_used() -> None:
    """No skip of CUDA graphs, no recompilation, no growth of memory, no move of the cache."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = tiny_llama(torch.bfloat16, layers=4)
    compiled = torch.compile(
        model,
        backend="hsa",
        options={
            "policy": {"budget": 256, "page_size": 32},
            "mode": "reduce-overhead",
            "strict": True,
        },
    )
    with torch.no_grad():
        decode = Decode(model, "static", 2, 1000, 2048)
        for _ in range(8):
            decode.step(compiled)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        addresses = [layer.keys.data_ptr() for layer in decode.cache.layers]
        for _ in range(40):
            decode.step(compiled)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= held + (1 << 20)
        assert [layer.keys.data_ptr() for layer in decode.cache.layers] == addresses
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1


def test_two_caches_and_freeing() -> None:
    torch._dynamo.reset()
    model = tiny_llama(torch.float32)
    policy = {"budget": 128, "page_size": 16, "recent": 32}
    with torch.no_grad():
        compiled = {
            run: torch.compile(
                model, backend="hsa", options={"policy": policy, "run": run}, dynamic=False
            )
            for run in ("inductor",)
        }["inductor"]
        together = [Decode(model, "static", 1, 500, 1024, seed) for seed in (1, 2)]
        got: list[list[Tensor]] = [[], []]
        for turn in range(12):
            for i in (0, 1) if turn % 2 else (1, 0):
                got[i].append(together[i].step(compiled).clone())
        for i, seed in enumerate((1, 2)):
            alone = Decode(model, "static", 1, 500, 1024, seed)
            for want in got[i]:
                torch.testing.assert_close(alone.step(compiled), want, rtol=1e-5, atol=1e-5)
        del together, alone
        gc.collect()
    assert hsa_compile.summary_bytes() == 0


@pytest.mark.parametrize("placement", ["device", "host"])
def test_an_overrun_is_an_error_before_the_write(placement: str) -> None:
    """Not an assertion on the device, after which nothing works any more."""
    torch._dynamo.reset()
    model = tiny_llama(torch.float32)
    policy = {"budget": 128, "page_size": 16, "recent": 32, "placement": placement}
    compiled = torch.compile(
        model, backend="hsa", options={"policy": policy, "mode": "reduce-overhead"}
    )
    with torch.no_grad():
        decode = Decode(model, "static", 2, 240, 256)
        for _ in range(16):
            decode.step(compiled)
        before = [layer.keys.clone() for layer in decode.cache.layers]
        decode.at = 0
        for _ in range(2):
            with pytest.raises(hsa_compile.CacheError, match=r"token 256 .* 256 tokens"):
                decode.step(compiled)
        for layer, was in zip(decode.cache.layers, before, strict=True):
            assert torch.equal(layer.keys, was)
        decode.cache.reset()
        model(decode.tokens[:, :200], **{decode.name: decode.cache})
        decode.at = 200
        assert decode.step(compiled).isfinite().all()
