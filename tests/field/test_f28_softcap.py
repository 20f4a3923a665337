"""A soft cap on the scores (Gemma 2) is dropped.

vllm-metal#665, vllm PR#5908. Right: a cap is applied where the model applies it, after the scale and before mask and
bias. Ranking of pages ignores it. A bias inside of the cap is not understood: such attention is left as it was.
"""

import pytest
import torch
from torch import Tensor

from ..models.helpers import decode, request, transformers
from .helpers import (
    LOSSLESS,
    SPARSELY,
    Shape,
    check,
    check_left,
    close,
    compile_hsa,
    decisions,
    repeat_kv,
    sites,
)

CAP = 5.0
LOUD = Shape(magnitude=4.0)
"""Keys and queries so large that scores exceed the cap by far."""


def capped(order: str):
    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        keys, values = (repeat_kv(t, 2) for t in (keys, values))
        scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25
        bias = torch.where(mask, torch.arange(keys.shape[2]) * 0.02, float("-inf"))
        if order == "bias before the cap":
            scores = scores + torch.arange(keys.shape[2]) * 0.02
        if order == "clamped":
            scores = scores.clamp(-CAP, CAP)
        else:
            scores = torch.tanh(scores / CAP) * CAP
        scores = scores + (bias if order == "bias after the cap" else torch.where(mask, 0.0, -1e9))
        return torch.matmul(torch.softmax(scores, -1), values)

    return attend


@pytest.mark.parametrize("order", ["no bias", "bias after the cap"])
def test_capped(order: str) -> None:
    assert decisions(check(capped(order), LOUD)) == SPARSELY


def test_a_bias_within_the_cap() -> None:
    check_left(capped("bias before the cap"), "scores are masked before `tanh` caps them", LOUD)


def test_any_other_function_of_the_scores() -> None:
    """The same kind: whatever stands between product and softmax is either understood or told."""
    check_left(capped("clamped"), "", LOUD)


@pytest.mark.slow
def test_gemma2() -> None:
    config = transformers.Gemma2Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        initializer_range=0.5,
        attn_logit_softcapping=CAP,
        sliding_window=64,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    asked = request(2, length=20, steps=2, capacity=64)
    want = decode(model, model, "dynamic", asked)
    compiled = compile_hsa(model, LOSSLESS)
    got = decode(model, compiled, "dynamic", asked)
    close(got.logits, want.logits)
    config.attn_logit_softcapping = None
    uncapped = transformers.Gemma2ForCausalLM(config).eval()
    uncapped.load_state_dict(model.state_dict())
    without = decode(uncapped, uncapped, "dynamic", asked, tokens=want.tokens)
    assert (without.logits - want.logits).abs().max() > 1e-2, "the cap made no difference"
    assert {(site.index, site.decision) for site in sites(compiled)} == {(0, "sparse")}
