"""Steps of several tokens, and attention to keys that are only read, through the templates. On a GPU only."""

import pytest
import torch
from torch import Tensor

import hsa_compile

from ..runtime.test_only_read import Cross
from .test_cuda_decode import Decode, tiny_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PART = {"budget": 128, "page_size": 16, "recent": 32}
ROUNDS = ((1, 1), (5, 3), (5, 5), (5, 1), (1, 1), (5, 4), (1, 1), (5, 5))
"""Tokens of a step, and how many of them stay."""


def compiled(model, run: str = "inductor", mode: str | None = None, **policy: object):
    torch._dynamo.reset()
    options: dict[str, object] = {"policy": policy, "run": run, "strict": True}
    return torch.compile(
        model, backend="hsa", options=options | ({} if mode is None else {"mode": mode})
    )


def verified(model, step, kind: str, batch: int = 2) -> Tensor:
    """Logits of steps of several tokens, some of which are taken back."""
    decode = Decode(model, kind, batch, 500, 640)
    logits = []
    with torch.no_grad():
        for number, keep in ROUNDS:
            ids = decode.tokens[:, decode.at : decode.at + number].clone()
            torch._dynamo.mark_static(ids, 1)
            logits.append(step(ids, **{decode.name: decode.cache}).logits.clone())
            decode.at += keep
            if keep < number and kind == "dynamic":
                decode.cache.crop(decode.at)
            elif keep < number:
                for layer in decode.cache.layers:
                    layer.cumulative_length.fill_(decode.at)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_several_tokens_within_the_budget(kind: str, mode: str | None) -> None:
    model = tiny_llama(torch.float32)
    got = verified(model, compiled(model, mode=mode, budget=600, page_size=16), kind)
    torch.testing.assert_close(got, verified(model, model, kind), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_several_tokens_are_as_sparse_as_the_eager_ops(kind: str) -> None:
    model = tiny_llama(torch.float32)
    got, want = (
        verified(model, compiled(model, run, **PART), kind) for run in ("inductor", "eager")
    )
    assert (want - verified(model, model, kind)).abs().max() > 1e-3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_keys_that_are_only_read(tokens: int, masked: bool) -> None:
    """The output of an encoder: 1500 frames, as the rule of the eager ops has it; another one after it."""
    model = Cross().cuda()
    mask = (torch.arange(1500) < torch.tensor([1500, 700])[:, None])[:, None, None].cuda()
    results = []
    for run in ("inductor", "eager"):
        step = compiled(model, run, **PART)
        torch.manual_seed(0)
        outs = []
        with torch.no_grad():
            for _ in range(2):
                memory = torch.randn(2, 2, 2, 1500, 64, device="cuda").unbind()
                for _ in range(3):
                    q = torch.randn(2, 8, tokens, 64, device="cuda")
                    outs.append(step(q, *memory, mask if masked else None).clone())
        results.append(torch.stack(outs))
        assert {site.decision for site in hsa_compile.explain(step).sites} == {"sparse"}
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
