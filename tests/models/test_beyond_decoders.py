"""Models that are no text decoders, or not only: left as they are and right, or decoding like their language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hsa_compile
from hsa_compile import LayerPolicy

from .helpers import cache_argument, compile_hsa, request, tiny, transformers

POLICY = LayerPolicy(budget=16, page_size=16)
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = 100
"""The token that stands for a part of an image."""


class DiffusionTransformer(nn.Module):
    """Denoises ``x`` ``[B, N, 32]`` at time ``t`` under a text ``[B, M, 32]``: self-attention and cross-attention."""

    def __init__(self, layers: int = 2, size: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.time = heads, nn.Linear(1, size)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "own": nn.Linear(size, 3 * size),
                    "query": nn.Linear(size, size),
                    "text": nn.Linear(size, 2 * size),
                    "out": nn.Linear(size, size),
                }
            )
            for _ in range(layers)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        x = x + self.time(t)[:, None]
        for block in self.blocks:
            x = x + self.attend(*block["own"](x).chunk(3, -1))
            x = x + block["out"](self.attend(block["query"](x), *block["text"](text).chunk(2, -1)))
        return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.decoder(x, memory)


def clip() -> Any:
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)
    )


def wav2vec2() -> Any:
    return transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=32,
            conv_dim=(16, 16),
            conv_stride=(5, 4),
            conv_kernel=(10, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
        )
    )


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def text() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 100, (2, 9))}


def denoised(patches: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {
        "x": torch.randn(2, patches, 32),
        "t": torch.rand(2, 1),
        "text": torch.randn(2, 77, 32),
    }


UNTOUCHED: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "vit": (lambda: transformers.ViTModel(transformers.ViTConfig(**VISION)), pixels),
    "siglip": (
        lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VISION)),
        pixels,
    ),
    "clip": (clip, lambda: {**pixels(), **text()}),
    "bert": (lambda: transformers.BertModel(transformers.BertConfig(**TEXT)), text),
    "wav2vec2": (wav2vec2, lambda: {"input_values": torch.randn(2, 400)}),
    "diffusion transformer": (DiffusionTransformer, denoised(16)),
    "diffusion transformer, one patch": (DiffusionTransformer, denoised(1)),
    "nn.TransformerDecoder": (
        Decoder,
        lambda: {"x": torch.randn(2, 1, 32), "memory": torch.randn(2, 200, 32)},
    ),
    "nn.Transformer": (
        lambda: nn.Transformer(32, 4, 1, 1, 64, batch_first=True),
        lambda: {"src": torch.randn(2, 30, 32), "tgt": torch.randn(2, 3, 32)},
    ),
}
REASONS = (
    "query tokens: only steps of up to 16 are rewritten",
    "the keys are computed in this graph by `linear`: there is no KV cache behind them",
    "fused forward keeps no KV cache",
)


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.to_tuple()[0]


@pytest.mark.parametrize("name", UNTOUCHED)
def test_untouched(name: str) -> None:
    make, inputs = UNTOUCHED[name]
    torch.manual_seed(0)
    model, given = make().eval(), inputs()
    compiled = compile_hsa(model, POLICY)
    with torch.no_grad():
        torch.testing.assert_close(
            first(compiled(**given)), first(model(**given)), rtol=1e-5, atol=1e-5
        )
    sites = hsa_compile.explain(compiled).sites
    assert sites
    assert {site.decision for site in sites} == {"left"}
    assert all(any(reason in site.reason for reason in REASONS) for site in sites)


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(**VISION, projection_dim=16)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=vision,
            text_config=transformers.LlamaConfig(
                **TEXT, num_key_value_heads=2, initializer_range=0.1
            ),
            image_token_index=IMAGE,
            image_token_id=IMAGE,
            vision_feature_layer=-1,
            image_seq_length=16,
        )
    )


def gemma3() -> Any:
    layers = ["sliding_attention", "full_attention"]
    words = {**TEXT, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1}
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config={**words, "sliding_window": 48, "layer_types": layers},
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_id=IMAGE,
            image_token_index=IMAGE,
            boi_token_index=IMAGE + 1,
            eoi_token_index=IMAGE + 2,
        )
    )


@pytest.mark.parametrize(
    "make", [llava, pytest.param(gemma3, marks=pytest.mark.slow)], ids=["llava", "gemma3"]
)
def test_answers_about_an_image(make: Callable[[], Any]) -> None:
    """The prompt, with its image, is left; the steps behind it are rewritten, and the answer is the model's."""
    torch.manual_seed(0)
    model = make().eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, IMAGE, (2, 60))
    ids[:, 5 : 5 + (16 if make is llava else 4)] = IMAGE
    given = {"input_ids": ids, **pixels()}
    if make is gemma3:
        given["token_type_ids"] = (ids == IMAGE).long()
    how = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**given, **how)
    model.forward = compiled = compile_hsa(model.forward, LayerPolicy(budget=112, page_size=16))
    assert torch.equal(model.generate(**given, **how), expected)
    assert "sparse" in {site.decision for site in hsa_compile.explain(compiled).sites}
    assert hsa_compile.stats(compiled).steps == 23


def quantized_cache() -> Any:
    """A cache of transformers that keeps 8 bits a number, but for the last 16 tokens."""
    base = transformers.cache_utils.QuantizedLayer

    class EightBits(base):
        def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
            scale = tensor.abs().amax(-1, keepdim=True) / 127
            return (tensor / scale).round().to(torch.int8), scale

        def _dequantize(self, held: tuple[Tensor, Tensor]) -> Tensor:
            return held[0] * held[1]

    return transformers.Cache(layers=[EightBits(residual_length=16) for _ in range(2)])


def test_a_quantized_cache() -> None:
    """Its keys are computed in every step: there is no cache of keys to read less of."""
    model, asked = tiny("llama"), request(2, 60)
    compiled = compile_hsa(model, POLICY)
    results = []
    for step in (model, compiled):
        cache = {cache_argument(model): quantized_cache()}
        with torch.no_grad():
            model(asked.ids, **cache)
            results.append(
                torch.stack(
                    [step(asked.ids[:, i : i + 1].clone(), **cache).logits for i in range(20)]
                )
            )
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)
    sites = hsa_compile.explain(compiled).sites
    assert {site.decision for site in sites} == {"left"}
    assert all("concatenated" in site.reason for site in sites)
