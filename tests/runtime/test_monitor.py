"""What a monitor measures is what dense attention says, and it changes nothing that the model computes."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsa_compile
from hsa_compile import LayerPolicy
from hsa_compile.runtime.monitor import Monitor

from ..models.helpers import compile_hsa, decode, request, tiny

HEADS, SIZE, CAPACITY, FIRST = 4, 16, 160, 120


class Layer(nn.Module):
    """One row and one KV head, so that there is nothing to draw."""

    def __init__(self, growing: bool, cap: float, masked: str) -> None:
        super().__init__()
        self.growing, self.cap, self.masked = growing, cap, masked
        self.one = nn.Parameter(torch.ones(()))

    def mask(self, tokens: int, at: Tensor) -> Tensor:
        keep = torch.arange(tokens) <= at
        if self.masked == "bias":
            slopes = torch.tensor([0.0, 0.01, 0.03, 0.1]).view(-1, 1, 1)
            return torch.where(keep, slopes * torch.arange(tokens), -math.inf)[None]
        return keep[None, None, None]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.growing:
            keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        else:
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
        scores = q @ keys.repeat_interleave(HEADS, 1).mT * SIZE**-0.5
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        mask = self.mask(keys.shape[2], at)
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        out = scores.softmax(-1) @ values.repeat_interleave(HEADS, 1)
        return out * self.one, keys, values


def watched_steps(
    layer: Layer, policy: LayerPolicy, run: str
) -> tuple[Any, list[tuple[Tensor, ...]]]:
    """Eight steps, and for each its output with the query, keys and values that it came from."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled, steps = compile_hsa(layer, policy, run, strict=True), []
    tokens = FIRST if layer.growing else CAPACITY
    keys, values = torch.randn(2, 1, 1, tokens, SIZE).unbind()
    # Some keys are met by every query, others are garbage that no one may look at.
    keys[:, :, 40:50] *= 3
    if not layer.growing:
        keys[:, :, FIRST:] = values[:, :, FIRST:] = math.nan
    with torch.no_grad():
        for i in range(8):
            q, (k, v) = 2 * torch.randn(1, HEADS, 1, SIZE), torch.randn(2, 1, 1, 1, SIZE).unbind()
            out, keys, values = compiled(q, k, v, keys, values, torch.tensor([FIRST + i]))
            steps.append((out.clone(), q, keys.clone(), values.clone()))
    return compiled, steps


@pytest.mark.parametrize("growing", [False, True], ids=["static", "growing"])
@pytest.mark.parametrize(
    ("cap", "masked", "placement", "run"),
    [
        (0.0, "", "device", "eager"),
        (0.0, "", "host", "eager"),
        (2.0, "bias", "device", "eager"),
        pytest.param(0.0, "", "device", "inductor", marks=pytest.mark.slow),
    ],
)
def test_it_is_what_dense_attention_says(
    growing: bool, cap: float, masked: str, placement: str, run: str
) -> None:
    """Output errors against attention to everything; recalls from the selection that reproduces the output."""
    rule = {"budget": 48, "page_size": 16, "sink": 4, "recent": 8, "placement": placement}
    layer = Layer(growing, cap, masked)
    _, plain = watched_steps(layer, LayerPolicy(**rule), run)
    compiled, steps = watched_steps(layer, LayerPolicy(**rule, monitor=2), run)
    # The first step of a growing cache has a graph of its own; the one for any length counts anew.
    observed = (0, 1, 3, 5, 7) if growing else (0, 2, 4, 6)
    errors = []
    for i, ((out, q, keys, values), (unwatched, *_)) in enumerate(zip(steps, plain, strict=True)):
        assert torch.equal(out, unwatched)
        if i in observed:
            known = slice(None, FIRST + i + 1)
            clean = (q.double(), *(x[:, :, known].double() for x in (keys, values)))
            scores = clean[0] @ clean[1].mT * SIZE**-0.5
            scores = cap * torch.tanh(scores / cap) if cap else scores
            mask = layer.mask(FIRST + i + 1, torch.tensor([FIRST + i]))
            dense = (scores + (mask if masked else 0.0)).softmax(-1) @ clean[2]
            errors.append(((out - dense).norm(dim=-1) / dense.norm(dim=-1)).flatten())
    (seen,) = hsa_compile.stats(compiled).layers
    assert seen.observed == len(observed) * HEADS
    assert seen.output_error == pytest.approx(torch.cat(errors).mean().item(), rel=1e-4)
    assert 0 < seen.recall_p5 <= seen.recall + 0.005 < 1


def test_a_recall_by_hand() -> None:
    """Three pages of 16 tokens are all equal, one is read: a third of the softmax, whatever the query."""
    keys, values = torch.zeros(1, 1, 48, SIZE), torch.randn(1, 1, 48, SIZE)
    compiled = compile_hsa(
        Layer(False, 0.0, ""),
        LayerPolicy(budget=16, page_size=16, sink=0, recent=0, monitor=1),
    )
    with torch.no_grad():
        for at in (46, 47):
            k = torch.zeros(1, 1, 1, SIZE)
            compiled(torch.randn(1, HEADS, 1, SIZE), k, k, keys, values, torch.tensor([at]))
    (seen,) = hsa_compile.stats(compiled).layers
    assert seen.recall == pytest.approx((15 / 47 + 16 / 48) / 2)
    assert seen.recall_p5 == pytest.approx(15 / 47, abs=0.005)


@pytest.mark.parametrize(("kind", "times"), [("static", (3, 3)), ("dynamic", (4, 2))])
def test_everything_read_is_everything_captured(kind: str, times: tuple[int, int]) -> None:
    """Within the budget, with padded rows, in a model of two layers, which take turns."""
    model, asked = tiny("llama"), request(3, 60, 8, 200)
    compiled = compile_hsa(model, LayerPolicy(budget=96, page_size=16, monitor=3))
    decode(model, compiled, kind, asked)
    for layer, turns in zip(hsa_compile.stats(compiled).layers, times, strict=True):
        assert layer.observed == turns * 2
        assert layer.recall == pytest.approx(1, abs=1e-5) and layer.output_error < 1e-5
        assert layer.recall_p5 >= 0.99


def test_every_head_of_every_row_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds of three rows and two KV heads, for each layer."""
    seen: list[list[int]] = [[], []]
    observe = Monitor._observe

    def noted(monitor: Monitor, i: int, sample: Any) -> Tensor:
        seen[i].append(sample.keys.data_ptr())
        return observe(monitor, i, sample)

    monkeypatch.setattr(Monitor, "_observe", noted)
    model = tiny("llama")
    compiled = compile_hsa(model, LayerPolicy(budget=48, page_size=16, monitor=1))
    decode(model, compiled, "static", request(3, 60, 12, 200))
    for heads in seen:
        assert len(set(heads[:6])) == 6 and sorted(heads[:6]) == sorted(heads[6:12])


def test_nothing_is_measured_unasked() -> None:
    model = tiny("llama")
    compiled = compile_hsa(model, LayerPolicy(budget=48, page_size=16))
    decode(model, compiled, "static", request(1, 100, 3, 160))
    assert [layer.recall for layer in hsa_compile.stats(compiled).layers] == [None, None]
    assert "captured" not in str(hsa_compile.stats(compiled))


def test_a_bound_warns_once_a_layer() -> None:
    model = tiny("llama")
    policy = {
        "default": {"budget": 48, "page_size": 16, "recent": 8, "monitor": 1, "monitor_bound": 0.9},
        "layers": {1: {"monitor_bound": 0.01}},
    }
    compiled = compile_hsa(model, policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decode(model, compiled, "static", request(2, 140, 12, 190))
    messages = [str(one.message) for one in caught if "dense softmax" in str(one.message)]
    (message,) = messages
    assert message.startswith("layer 0 (model.layers.0.self_attn): the selected pages captured ")
    assert "below the bound of 90.0%" in message
    (first, second) = hsa_compile.stats(compiled).layers
    assert first.recall < 0.9 and second.recall > 0.01
    assert "captured" in str(hsa_compile.stats(compiled))


def test_several_query_tokens_are_heads() -> None:
    model, asked = tiny("llama"), request(2, 140, 4, 190)
    compiled = compile_hsa(model, LayerPolicy(budget=48, page_size=16, recent=8, monitor=1))
    from ..models.helpers import cache_argument, new_cache

    cache = new_cache(model, "static", 190)
    given = {cache_argument(model): cache}
    with torch.no_grad():
        model(asked.ids, **given)
        for _ in range(2):
            compiled(torch.randint(3, 128, (2, 3)), **given)
    for layer in hsa_compile.stats(compiled).layers:
        assert layer.observed == 2 * 2 * 3
        assert 0 < layer.recall < 1
