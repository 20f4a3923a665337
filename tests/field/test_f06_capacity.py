"""A cache that was passed in overruns, and the error is an assertion on the device.

transformers#39593. Right: a readable error on the host before anything is written; two turns of a conversation within
the capacity equal one.
"""

import pytest
import torch

import hsa_compile
from hsa_compile.passes import positions

from ..models.helpers import cache_argument, new_cache, transformers
from .helpers import (
    LOSSLESS,
    SPARSELY,
    Shape,
    Static,
    close,
    compile_hsa,
    decisions,
    token,
)
from .helpers import (
    new_cache as plain_cache,
)


def tiny_gemma3():
    config = transformers.Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        initializer_range=0.1,
        sliding_window=512,
        layer_types=["full_attention", "full_attention"],
        pad_token_id=0,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(config).eval()


IDS = torch.randint(3, 128, (1, 80), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_gemma3_with_its_cache() -> None:
    """Two turns of prompt and answer equal one pass over the whole text; the token after the last slot is refused."""
    model = tiny_gemma3()
    name, capacity = cache_argument(model), 40
    want = model(IDS[:, :capacity]).logits
    compiled = compile_hsa(model, {"budget": 32, "page_size": 16, "recent": 16})
    cache = new_cache(model, "static", capacity)
    at = 0
    for prompt, answer in ((9, 5), (7, 4)):
        got = [model(IDS[:, at : at + prompt], **{name: cache}).logits]
        at += prompt
        for _ in range(answer):
            got.append(compiled(IDS[:, at : at + 1].clone(), **{name: cache}).logits)
            at += 1
        logits = torch.cat(got, 1)
        close(logits, want[:, at - logits.shape[1] : at])
    assert decisions(compiled) == SPARSELY
    model(IDS[:, at:capacity], **{name: cache})
    held = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(hsa_compile.CacheError, match=r"token 40 .* 40 tokens"):
        compiled(IDS[:, 40:41].clone(), **{name: cache})
    for layer, was in zip(cache.layers, held):
        close(layer.keys, was)


@pytest.mark.parametrize("run", ["eager"])
@torch.no_grad()
def test_capacity_16_written_17_times(run: str) -> None:
    """A cache within the budget is left dense, and the model's own write is the one that objects, on a CPU."""
    shape = Shape(length=15, capacity=16)
    compiled = compile_hsa(Static(), LOSSLESS, run)
    cache = plain_cache(shape)
    compiled(*token(shape, 15), *cache, torch.tensor([15]))
    before = [t.clone() for t in cache]
    with pytest.raises((IndexError, RuntimeError), match="16 is out of bounds"):
        compiled(*token(shape, 16), *cache, torch.tensor([16]))
    for held, was in zip(cache, before):
        close(held, was)
    assert {decision for decision, _ in decisions(compiled)} == {"dense"}


@pytest.mark.parametrize("position", [128, 5000, -1])
@torch.no_grad()
def test_positions_that_do_not_exist(position: int) -> None:
    """Behind the end, far behind it, and before the beginning; the cache is usable afterwards."""
    shape = Shape(length=90)
    compiled = compile_hsa(Static(), LOSSLESS)
    cache = plain_cache(shape)
    compiled(*token(shape, 90), *cache, torch.tensor([90]))
    before = [t.clone() for t in cache]
    with pytest.raises(hsa_compile.CacheError, match=rf"token {position} .* 128 tokens"):
        compiled(*token(shape, 91), *cache, torch.tensor([position]))
    for held, was in zip(cache, before):
        close(held, was)
    want = Static()(*token(shape, 91), *before, torch.tensor([91]))
    close(compiled(*token(shape, 91), *cache, torch.tensor([91])), want)


@torch.no_grad()
def test_layers_of_different_capacity() -> None:
    """The smaller cache overruns first: the error names its capacity, not that of the layer before it."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Static(), Static()])

        def forward(self, q, k, v, first, second, position):
            out = self.layers[0](q, k, v, *first, position)
            return self.layers[1](q + out, k, v, *second, position)

    large, small = Shape(capacity=256), Shape(capacity=128)
    compiled = compile_hsa(Two(), {"budget": 112, "page_size": 16})
    caches = plain_cache(large), plain_cache(small)
    compiled(*token(large, 90), *caches, torch.tensor([90]))
    before = [t.clone() for cache in caches for t in cache]
    with pytest.raises(hsa_compile.CacheError, match=r"token 128 .* 128 tokens"):
        compiled(*token(large, 128), *caches, torch.tensor([128]))
    for held, was in zip((t for cache in caches for t in cache), before):
        close(held, was)


@torch.no_grad()
def test_a_look_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does: the position is read at a cache's first step, after writes of others, and near the end."""
    monkeypatch.setattr(positions, "checked_in_graph", lambda device: False)
    reads: list[int] = []
    compute = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda held: reads.append(int(held)) or compute(held))
    shape = Shape(length=90)
    compiled = compile_hsa(Static(), LOSSLESS)
    cache = plain_cache(shape)
    for at in range(90, 128):
        compiled(*token(shape, at), *cache, torch.tensor([at]))
    assert reads == [90]
    before = [t.clone() for t in cache]
    for _ in range(2):
        with pytest.raises(hsa_compile.CacheError, match=r"token 128 .* 128 tokens"):
            compiled(*token(shape, 128), *cache, torch.tensor([128]))
    for held, was in zip(cache, before):
        close(held, was)
    cache[0][:, :, 100:].zero_()
    want = Static()(*token(shape, 100), *(t.clone() for t in cache), torch.tensor([100]))
    close(compiled(*token(shape, 100), *cache, torch.tensor([100])), want)
    compiled(*token(shape, 101), *cache, torch.tensor([101]))
    assert reads == [90, 128, 128, 100]
    with pytest.raises(hsa_compile.CacheError, match=r"token 300 .* 128 tokens"):
        compiled(*token(shape, 0), *plain_cache(shape), torch.tensor([300]))


@torch.no_grad()
def test_a_position_that_the_model_counts_is_read_before_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformers counts in the cache: what is read is what the write will see."""
    monkeypatch.setattr(positions, "checked_in_graph", lambda device: False)
    test_gemma3_with_its_cache()
