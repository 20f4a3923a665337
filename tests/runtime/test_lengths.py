"""Caches of several lengths through one compiled model, which Dynamo compiles for any length from the second on."""

import pytest
import torch
from torch import Tensor

import hsa_compile
from tests.models.helpers import cache_argument, compile_hsa, tiny, transformers

POLICY = {"budget": 48, "page_size": 16, "sink": 1, "recent": 16, "pool": 1.5}
LENGTHS = (128, 100, 90)
PROMPT, STEPS = 80, 10


def decoded(kind: str, run: str = "eager", **policy: object) -> Tensor:
    """Logits of a request for each length, every layer of which is sparse; the last token that fits is the last."""
    model = tiny("llama")
    ids = torch.randint(3, 128, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(0))
    name = cache_argument(model)
    step = compile_hsa(model, {**POLICY, **policy}, run, strict=True)
    made = hsa_compile.HostCache if kind == "host" else transformers.StaticCache
    logits = []
    with torch.no_grad():
        for length in LENGTHS:
            cache = made(config=model.config, max_cache_len=length)
            model(ids[:, :PROMPT], **{name: cache})
            for at in range(PROMPT, PROMPT + STEPS):
                logits.append(step(ids[:, at : at + 1].clone(), **{name: cache}).logits)
            if length == PROMPT + STEPS:
                before = [layer.keys.clone() for layer in cache.layers]
                with pytest.raises(hsa_compile.CacheError, match=r"token 90 .* cache of 90 tokens"):
                    step(ids[:, :1].clone(), **{name: cache})
                for layer, was in zip(cache.layers, before, strict=True):
                    assert torch.equal(layer.keys, was)
    assert hsa_compile.stats(step).steps == len(LENGTHS) * STEPS
    return torch.stack(logits)


@pytest.mark.slow
def test_every_length_is_sparse_wherever_the_cache_is() -> None:
    expected = decoded("static")
    for kind, prefetch in (("static", "none"), ("host", "next_rank"), ("host", "cross_layer")):
        got = decoded(kind, placement="host", prefetch=prefetch)
        assert torch.equal(got, expected), (kind, prefetch)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    got = decoded("host", "inductor", placement="host", prefetch="cross_layer")
    torch.testing.assert_close(got, decoded("static"), rtol=1e-5, atol=1e-5)


def test_a_fraction_needs_one_length() -> None:
    with pytest.raises(
        Exception, match=r"budget that is a fraction takes caches of one length.*dynamic=False"
    ):
        decoded("static", placement="host", budget=0.3)
