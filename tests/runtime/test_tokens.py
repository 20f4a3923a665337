"""Single tokens by an index: it follows the cache that it describes as the summaries do, however it is touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hsa_compile
from hsa_compile import LayerPolicy

from ..models import reference
from .helpers import SIZE, Decoder, new_cache
from .test_static_state import Pair

POLICY = LayerPolicy(granularity="token", budget=24, page_size=16, sink=2, recent=8)


class Tokens(Pair):
    """The reference reads what the cache holds, and knows nothing of its past."""

    def check(self, steps: int = 1) -> None:
        for _ in range(steps):
            x, at = torch.randn(self.batch, 1, SIZE), self.position
            got = self.step(x, *self.cache, torch.tensor([at]))
            q, k, v = self.model.qkv(x)
            keys, values = self.twin
            keys[:, :, at], values[:, :, at] = k[:, :, 0], v[:, :, 0]
            mask = (torch.arange(keys.shape[2]) <= at)[None, None, None]
            want = reference.sparse_attention(q, keys, values, mask, SIZE**-0.5, POLICY)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            self.position += 1


@pytest.fixture(params=["no_grad", "inference_mode"], autouse=True)
def grad_mode(request: pytest.FixtureRequest):
    with getattr(torch, request.param)():
        yield request.param


@pytest.fixture
def model() -> Decoder:
    torch._dynamo.reset()
    return Decoder()


def compiled(model: Decoder) -> Callable[..., Tensor]:
    options = {"run": "eager", "policy": POLICY, "strict": True}
    return torch.compile(model, backend="hsa", options=options)


def test_growth_an_eager_chunk_and_a_crop(model: Decoder) -> None:
    pair = Tokens(model, compiled(model), length=50)
    pair.check(20)
    pair.write(torch.randn(2, 20, SIZE), pair.position)
    pair.position += 20
    pair.check(5)
    pair.position -= 37
    pair.check(20)


def test_another_request(model: Decoder) -> None:
    """As long as the last one had become, shorter, and with the rows in another order."""
    pair = Tokens(model, compiled(model))
    pair.check(3)
    for length in (pair.position, 60):
        pair.both(lambda k, v: (k.zero_(), v.zero_()))
        pair.write(torch.randn(2, length, SIZE), 0)
        pair.position = length
        pair.check(3)
    order = torch.tensor([1, 0])
    pair.both(lambda k, v: (k.copy_(k[order]), v.copy_(v[order])))
    pair.check(3)


def test_caches_taking_turns(model: Decoder) -> None:
    step = compiled(model)
    pairs = [Tokens(model, step, length, batch) for length, batch in ((70, 2), (90, 2), (80, 3))]
    for turn in range(6):
        pairs[turn % 3].check()
        pairs[0].check()


def test_an_edit_that_is_told(model: Decoder) -> None:
    pair = Tokens(model, compiled(model))
    pair.check(2)
    pair.both(lambda k, v: k.data[:, :, :90].mul_(-1))
    assert hsa_compile.invalidate(pair.cache[0]) == 1
    pair.check(2)


def test_pages_and_tokens_of_one_cache(model: Decoder) -> None:
    """Another policy has a summary of its own, and what it writes is seen."""
    step = compiled(model)
    torch._dynamo.reset()
    options = {"run": "eager", "policy": {"budget": 32, "page_size": 16}, "strict": True}
    other = torch.compile(model, backend="hsa", options=options)
    pair = Tokens(model, step)
    for _ in range(3):
        pair.check()
        x = torch.randn(2, 1, SIZE)
        other(x, *pair.cache, torch.tensor([pair.position]))
        _, k, v = model.qkv(x)
        pair.twin[0][:, :, pair.position], pair.twin[1][:, :, pair.position] = (
            k[:, :, 0],
            v[:, :, 0],
        )
        pair.position += 1


def test_the_index_is_counted(model: Decoder) -> None:
    before = hsa_compile.summary_bytes()
    pair = Tokens(model, compiled(model))
    pair.check()
    # 2 rows x 2 KV heads x 8 pages: 2 x 16 fp32 of summary, two words of coverage, and a word a token
    assert hsa_compile.summary_bytes() - before == 2 * 2 * 8 * (2 * 16 * 4 + 2 * 8 + 16 * 8)
    assert new_cache(2)[0].nbytes == 2 * 2 * 8 * 16 * 16 * 4
