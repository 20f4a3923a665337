"""Caches or compiled code end up on the wrong GPU where the layers of a model are spread over several.

transformers#32624, pytorch#91777. Right: what belongs to a layer (summaries, pool, counters) is where its cache is.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsa_compile

from ..models.helpers import cache_argument, tiny
from ..models.helpers import new_cache as model_cache
from .helpers import (
    LOSSLESS,
    SPARSELY,
    Shape,
    Static,
    close,
    compile_hsa,
    decisions,
    new_cache,
    token,
)

SHAPE = Shape(size=64, value_size=64)


class Spread(nn.Module):
    """Two layers, each with its cache on its own device."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.layers = nn.ModuleList(Static().to(device) for device in devices)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], at: Tensor) -> Tensor:
        out = q
        for layer, device, (keys, values) in zip(
            self.layers, self.devices, zip(caches[::2], caches[1::2], strict=True), strict=True
        ):
            given = (x.to(device) for x in (out, k, v))
            out = layer(*given, keys, values, at.to(device))
        return out


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("placement", ["device", "host"])
@torch.no_grad()
def test_a_layer_a_gpu(placement: str) -> None:
    devices = [torch.device("cuda", i) for i in (1, 0)]
    caches, twins = ([t.to(d) for d in devices for t in new_cache(SHAPE)] for _ in range(2))
    model = Spread(devices)
    compiled = compile_hsa(model, {**LOSSLESS, "placement": placement}, "inductor")
    for at in range(90, 96):
        inputs, position = [t.to(devices[0]) for t in token(SHAPE, at)], torch.tensor([at])
        got = compiled(*inputs, caches, position.to(devices[0]))
        close(got, model(*inputs, twins, position.to(devices[0])))
        assert got.device == devices[-1]
    assert decisions(compiled) == SPARSELY
    assert {held.device for held in caches} == set(devices)
    assert hsa_compile.stats(compiled).steps == 6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@torch.no_grad()
def test_a_device_map(kind: str) -> None:
    """A model that accelerate spread over two GPUs decodes what it decodes on one."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny("llama").cuda()
    name = cache_argument(model)
    ids = torch.randint(3, 128, (2, 60), generator=torch.Generator().manual_seed(0)).cuda()

    def logits(step: Callable[..., Any]) -> Tensor:
        cache = model_cache(model, kind, 128)
        model(ids[:, :40], **{name: cache})
        steps = [step(ids[:, at : at + 1].clone(), **{name: cache}).logits for at in range(40, 60)]
        return torch.stack([one.to("cuda:0") for one in steps])

    expected = logits(model)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    accelerate.dispatch_model(model, places)
    compiled = compile_hsa(model, {"budget": 112, "page_size": 16}, "inductor")
    torch.testing.assert_close(logits(compiled), expected, rtol=1e-4, atol=1e-4)
