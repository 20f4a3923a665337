"""Encoder-decoder models: decoding attends to keys of its own, and to those that were computed once of the encoder."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import hsa_compile
from hsa_compile import LayerPolicy

from .helpers import VOCABULARY, compile_hsa, graphs_compiled, transformers
from .reference import by_the_rule

PROMPT, STEPS, SOURCE, CAPACITY = 4, 8, 104, 144
WHOLE = LayerPolicy(budget=96, page_size=16)
"""More than any row attends, less than static caches and the encoder hold."""
PART = LayerPolicy(algorithm="cuboid", budget=48, page_size=16, sink=4, recent=16)
LENGTHS = (96, 61, 80)
"""Of the rows of a batch, in the encoder; the rest is padding."""

_TOKENS = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_BART = {
    **_TOKENS,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_model": 64,
    "init_std": 0.2,
}


def bart() -> Any:
    config = transformers.BartConfig(**_BART, max_position_embeddings=256)
    return transformers.BartForConditionalGeneration(config)


def marian() -> Any:
    config = transformers.MarianConfig(**_BART, max_position_embeddings=256)
    return transformers.MarianMTModel(config)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        **_BART, num_mel_bins=8, max_source_positions=SOURCE, max_target_positions=64
    )
    return transformers.WhisperForConditionalGeneration(config)


def t5() -> Any:
    config = transformers.T5Config(
        **_TOKENS,
        d_model=64,
        d_kv=16,
        d_ff=64,
        num_layers=2,  # static caches are made with as many layers as the encoder has
        num_decoder_layers=2,
        num_heads=4,
        initializer_factor=1.0,
    )
    return transformers.T5ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "bart": bart,
    "marian": marian,
    "whisper": whisper,
    "t5": t5,
}


def tiny(family: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    model.set_attn_implementation(attention)
    return model


@dataclass
class Source:
    """What the encoder makes of one request."""

    output: Any
    mask: dict[str, Tensor]


@torch.no_grad()
def encode(model: Any, batch: int, seed: int = 0) -> Source:
    random = torch.Generator().manual_seed(seed)
    if isinstance(model, transformers.WhisperForConditionalGeneration):
        features = torch.randn(batch, 8, 2 * SOURCE, generator=random)
        return Source(model.get_encoder()(features), {})
    mask = (torch.arange(SOURCE) < torch.tensor(LENGTHS[:batch])[:, None]).long()
    ids = torch.randint(3, VOCABULARY, (batch, SOURCE), generator=random) * mask
    return Source(model.get_encoder()(ids, attention_mask=mask), {"attention_mask": mask})


def new_cache(model: Any, kind: str) -> Any:
    if kind == "static":
        own, cross = (
            transformers.StaticCache(
                config=model.config.get_text_config(decoder=True), max_cache_len=n
            )
            for n in (CAPACITY, SOURCE)
        )
    else:
        own, cross = transformers.DynamicCache(), transformers.DynamicCache()
    return transformers.EncoderDecoderCache(own, cross)


@torch.no_grad()
def decode(
    model: Any,
    step: Callable[..., Any],
    source: Source,
    cache: Any,
    policy: LayerPolicy | None = None,
    seed: int = 3,
) -> Tensor:
    """Logits of steps that are fed given tokens; with a ``policy``, by its rule, but for the prompt."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    batch = source.output[0].shape[0]
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, PROMPT + STEPS), generator=random)
    given = {"encoder_outputs": source.output, "use_cache": True, name: cache, **source.mask}
    model(decoder_input_ids=ids[:, :PROMPT], **given)
    logits = []
    with contextlib.nullcontext() if policy is None else by_the_rule(model, policy):
        for at in range(PROMPT, PROMPT + STEPS):
            logits.append(
                step(decoder_input_ids=ids[:, at : at + 1].clone(), **given).logits[:, -1]
            )
    return torch.stack(logits)


def check(
    family: str,
    kind: str,
    batch: int,
    policy: LayerPolicy,
    attention: str = "sdpa",
    run: str = "eager",
) -> None:
    model = tiny(family, attention)
    compiled = compile_hsa(model, policy, run)
    cache = new_cache(model, kind)
    for seed in (0, 1):  # the second request is another one
        source = encode(model, batch, seed)
        dense = decode(model, model, source, new_cache(model, kind))
        expected = dense
        if policy is PART:
            expected = decode(model, model, source, new_cache(model, kind), policy)
            assert (expected - dense).abs().max() > 1e-3, "nothing was left out"
        got = decode(model, compiled, source, cache)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
        if kind == "static":
            cache.reset()  # the same tensors, for the next request
        else:
            cache = new_cache(model, kind)
    sites = hsa_compile.explain(compiled).sites
    crossed = [site for site in sites if site.cache.startswith("fixed")]
    assert len({site.path for site in crossed}) == 2
    assert all("encoder_attn" in site.path or "EncDecAttention" in site.path for site in crossed)
    # Whisper has no padding: its encoder output is beyond the budget.
    assert {site.decision for site in sites} == {"sparse"}
    layers = [s for s in hsa_compile.stats(compiled).layers if s.path == crossed[0].path]
    (layer,) = layers
    assert layer.steps == 2 * STEPS
    attendable = SOURCE if family == "whisper" else sum(LENGTHS[:batch]) / batch
    assert layer.tokens_attendable / layer.steps == attendable
    assert graphs_compiled() <= (2 if kind == "static" else 4)


@pytest.mark.parametrize("policy", [WHOLE, PART], ids=["lossless", "sparse"])
@pytest.mark.parametrize(
    ("family", "kind", "batch"),
    [
        ("bart", "static", 3),
        ("t5", "dynamic", 3),
        ("whisper", "dynamic", 1),
        pytest.param("bart", "dynamic", 1, marks=pytest.mark.slow),
        pytest.param("t5", "static", 1, marks=pytest.mark.slow),
        pytest.param("whisper", "static", 3, marks=pytest.mark.slow),
        pytest.param("bart", "static", 1, marks=pytest.mark.slow),
        pytest.param("bart", "dynamic", 3, marks=pytest.mark.slow),
        pytest.param("t5", "static", 3, marks=pytest.mark.slow),
        pytest.param("t5", "dynamic", 1, marks=pytest.mark.slow),
        pytest.param("whisper", "static", 1, marks=pytest.mark.slow),
        pytest.param("whisper", "dynamic", 3, marks=pytest.mark.slow),
        pytest.param("marian", "static", 3, marks=pytest.mark.slow),
        pytest.param("marian", "dynamic", 3, marks=pytest.mark.slow),
    ],
)
def test_decoding(family: str, kind: str, batch: int, policy: LayerPolicy) -> None:
    if family == "whisper" and policy is WHOLE:
        policy = LayerPolicy(budget=SOURCE - 8, page_size=16, sink=SOURCE)  # every page is forced
    check(family, kind, batch, policy)


@pytest.mark.parametrize("policy", [WHOLE, PART], ids=["lossless", "sparse"])
@pytest.mark.parametrize("family", ["bart", pytest.param("t5", marks=pytest.mark.slow)])
def test_attention_written_out(family: str, policy: LayerPolicy) -> None:
    check(family, "dynamic", 3, policy, "eager")


@pytest.mark.slow
def test_with_inductor() -> None:
    check("bart", "static", 3, PART, run="inductor")


@pytest.mark.parametrize(("policy", "whole"), [(WHOLE, True), (PART, False)])
def test_a_monitor_of_keys_that_are_only_read(policy: LayerPolicy, whole: bool) -> None:
    model, outs = tiny("bart"), []
    for monitor in (0, 1):
        compiled = compile_hsa(model, dataclasses.replace(policy, monitor=monitor))
        outs.append(decode(model, compiled, encode(model, 3), new_cache(model, "static")))
    assert torch.equal(*outs)
    layers = [one for one in hsa_compile.stats(compiled).layers if "encoder_attn" in one.path]
    assert len(layers) == 2
    for layer in layers:
        assert layer.observed > 0
        if whole:
            assert layer.recall == pytest.approx(1, abs=1e-5) and layer.output_error < 1e-5
        else:
            assert 0 < layer.recall < 1 - 1e-3 and layer.output_error > 1e-3


def test_layers_are_told_apart_by_their_paths() -> None:
    """Own keys are all read, those of the encoder by a budget of their own."""
    model = tiny("bart")
    layers = {
        "default": "dense",
        "layers": {"*.encoder_attn": {"preset": "quest", "budget": 48, "page_size": 16}},
    }
    compiled = compile_hsa(model, layers)
    decode(model, compiled, encode(model, 2), new_cache(model, "static"))
    found = {(s.path.rsplit(".", 1)[1], s.decision) for s in hsa_compile.explain(compiled).sites}
    assert found == {("self_attn", "dense"), ("encoder_attn", "sparse")}


@pytest.mark.parametrize("family", ["bart", pytest.param("t5", marks=pytest.mark.slow)])
def test_generate(family: str) -> None:
    """Greedy, and beams, which reorder the keys of the encoder too."""

    def texts(model: Any, beams: int) -> Tensor:
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(3, VOCABULARY, (2, SOURCE), generator=random)
        mask = (torch.arange(SOURCE) < torch.tensor(LENGTHS[:2])[:, None]).long()
        how = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
        return model.generate(ids * mask, attention_mask=mask, **how)

    model, other = tiny(family), tiny(family)
    compiled = other.forward = compile_hsa(other.forward, WHOLE)
    for beams in (1, 3):
        assert torch.equal(texts(other, beams), texts(model, beams))
    crossed = [s for s in hsa_compile.explain(compiled).sites if s.cache.startswith("fixed")]
    assert crossed and {site.decision for site in crossed} == {"sparse"}
