"""Summaries follow the cache that they describe, however it is touched between steps."""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import hsa_compile
from hsa_compile.ops import summarize

from .helpers import POLICY, SIZE, Decoder, new_cache, prefill, reference_step


@pytest.fixture(params=["device", "host"])
def model(request: pytest.FixtureRequest) -> Decoder:
    """With the cache where it was, and in the host tier, of which a pool as small as can be is kept."""
    torch._dynamo.reset()
    model = Decoder()
    model.placement = request.param
    return model


def compiled(model: Decoder, **policy: object) -> Callable[..., Tensor]:
    return torch.compile(
        model,
        backend="hsa",
        options={
            "run": "eager",
            "policy": {**POLICY, "placement": model.placement, "pool": 1, **policy},
            "strict": True,
        },
    )


class Pair:
    """A cache stepped by the compiled model, and its twin stepped by the reference."""

    rule = staticmethod(reference_step)

    def __init__(
        self, model: Decoder, step: Callable[..., Tensor], length: int = 90, batch: int = 2
    ) -> None:
        self.model, self.step, self.position, self.batch = model, step, length, batch
        self.cache, self.twin = new_cache(batch), new_cache(batch)
        self.both(lambda k, v: None)
        self.write(torch.randn(batch, length, SIZE), 0)

    def both(self, change: Callable[[Tensor, Tensor], object]) -> None:
        for cache in (self.cache, self.twin):
            change(*cache)

    def write(self, x: Tensor, start: int) -> None:
        self.both(lambda k, v: prefill(self.model, k, v, x, start))

    def check(self, steps: int = 1) -> None:
        for _ in range(steps):
            x = torch.randn(self.batch, 1, SIZE)
            got = self.step(x, *self.cache, torch.tensor([self.position]))
            want = self.rule(self.model, x, *self.twin, self.position)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            self.position += 1


@pytest.fixture(params=["no_grad", "inference_mode"])
def grad_mode(request: pytest.FixtureRequest):
    with getattr(torch, request.param)():
        yield request.param


def test_growth_token_by_token(model: Decoder, grad_mode: str) -> None:
    Pair(model, compiled(model)).check(30)


def test_sparse_differs_from_dense(model: Decoder) -> None:
    """The budget is below the length: the tests of this file would otherwise prove nothing."""
    with torch.no_grad():
        pair = Pair(model, compiled(model))
        x, at = torch.randn(2, 1, SIZE), torch.tensor([90])
        dense = model(x, *(t.clone() for t in pair.cache), at)
        assert (pair.step(x, *pair.cache, at) - dense).abs().max() > 1e-3


def test_eager_chunk_between_steps(model: Decoder, grad_mode: str) -> None:
    pair = Pair(model, compiled(model), length=60)
    pair.check(3)
    pair.write(torch.randn(2, 20, SIZE), pair.position)
    pair.position += 20
    pair.check(5)


def test_crop_and_continue(model: Decoder, grad_mode: str) -> None:
    """Only the length changes, as with ``StaticCache.crop``: no write tells about it."""
    pair = Pair(model, compiled(model))
    pair.check(5)
    pair.position -= 20
    pair.check(30)


def test_crop_by_one_and_rewrite(model: Decoder, grad_mode: str) -> None:
    pair = Pair(model, compiled(model))
    for _ in range(6):
        pair.check(2)
        pair.position -= 1


def test_rejected_draft_tokens(model: Decoder, grad_mode: str) -> None:
    """Five tokens written eagerly, three rolled back, others written over them."""
    pair = Pair(model, compiled(model))
    pair.check(2)
    pair.write(torch.randn(2, 5, SIZE), pair.position)
    pair.position += 2
    pair.check(6)


def test_outside_write_at_the_same_length(model: Decoder) -> None:
    """Beam reorder, zeroing, editing: the version counter tells."""
    with torch.no_grad():
        pair = Pair(model, compiled(model))
        pair.check(2)
        order = torch.tensor([1, 0])
        pair.both(lambda k, v: (k.copy_(k[order]), v.copy_(v[order])))
        pair.check(2)
        pair.both(lambda k, v: k[:, :, 20:50].neg_())
        pair.check(2)


def test_reset_and_second_prompt(model: Decoder, grad_mode: str) -> None:
    pair = Pair(model, compiled(model))
    pair.check(3)
    pair.both(lambda k, v: (k.zero_(), v.zero_()))
    pair.write(torch.randn(2, 70, SIZE), 0)
    pair.position = 70
    pair.check(3)


def test_storage_swapped_under_the_tensor(model: Decoder) -> None:
    with torch.no_grad():
        pair = Pair(model, compiled(model))
        pair.check(2)
        fresh = torch.randn_like(pair.cache[0])
        pair.cache[0].data = fresh
        pair.twin[0].data = fresh.clone()
        pair.check(2)


def test_two_caches_interleaved(model: Decoder, grad_mode: str) -> None:
    step = compiled(model)
    pairs = [Pair(model, step, length) for length in (70, 90, 80)]
    for turn in range(8):
        pairs[turn % 3].check()
        pairs[0].check()


def test_two_policies_on_one_cache(model: Decoder) -> None:
    """Two compiled models share a cache; each must see what the other has written."""
    with torch.no_grad():
        first = compiled(model)
        torch._dynamo.reset()
        other = compiled(model, algorithm="mean")
        pair = Pair(model, first)
        for _ in range(4):
            pair.check()
            x, at = torch.randn(2, 1, SIZE), torch.tensor([pair.position])
            other(x, *pair.cache, at)
            pair.both(lambda k, v: None)
            reference_step(model, x, *pair.twin, pair.position)
            pair.position += 1


def test_another_request_up_to_the_expected_position(model: Decoder, grad_mode: str) -> None:
    """The cache is reset and filled with another prompt, exactly as long as the last request had become."""
    pair = Pair(model, compiled(model))
    pair.check(3)
    pair.both(lambda k, v: (k.zero_(), v.zero_()))
    pair.write(torch.randn(2, pair.position, SIZE), 0)
    pair.check(3)
    swapped = torch.tensor([1, 0])  # rows reordered in place, as beam search may
    pair.both(lambda k, v: (k.copy_(k[swapped]), v.copy_(v[swapped])))
    pair.check(3)


def test_writes_that_no_counter_sees(model: Decoder) -> None:
    with torch.no_grad():
        pair = Pair(model, compiled(model))
        pair.check(2)
        pair.both(lambda k, v: k.data[:, :, :90].mul_(-1))
        pair.both(lambda k, v: k.numpy()[:, :, 90:92].fill(0.5))
        pair.check(2)


def test_deepcopied_prefix(model: Decoder) -> None:
    with torch.no_grad():
        step = compiled(model)
        first = Pair(model, step)
        first.check(2)
        second = copy.copy(first)
        second.cache, second.twin = copy.deepcopy(first.cache), copy.deepcopy(first.twin)
        for _ in range(4):
            first.check()
            second.check()


def test_freed_with_the_cache(model: Decoder) -> None:
    with torch.no_grad():
        gc.collect()
        before = hsa_compile.summary_bytes()
        pair = Pair(model, compiled(model))
        pair.check(2)
        held = hsa_compile.summary_bytes() - before
        # 2 rows x 2 KV heads x 8 pages, 2 x 16 fp32 of summary and two words of coverage
        assert held == 2 * 2 * 8 * (2 * 16 * 4 + 2 * 8)
        pair.cache = pair.twin
        gc.collect()
        assert hsa_compile.summary_bytes() == before


def test_no_copy_of_the_cache(model: Decoder) -> None:
    with torch.no_grad():
        pair = Pair(model, compiled(model))
        addresses = [t.data_ptr() for t in pair.cache]
        pair.check(3)
        assert [t.data_ptr() for t in pair.cache] == addresses


@pytest.mark.parametrize("named", ["view", "dict", "all"])
def test_an_uncounted_edit_that_is_told(model: Decoder, grad_mode: str, named: str) -> None:
    """Earlier tokens change behind the last one; nothing but the call tells."""
    step = compiled(model)
    pair, other = Pair(model, step), Pair(model, step)
    for each in (pair, other):
        each.check(3)
    assert hsa_compile.invalidate(new_cache(1)) == 0
    pair.both(lambda k, v: k.data[:, :, :90].mul_(-1))
    pair.both(lambda k, v: v.data[:, :, :90].mul_(-1))
    told = {"view": (pair.cache[1][:, 0],), "dict": ({"values": pair.cache},), "all": ()}[named]
    known = hsa_compile.invalidate(*told)
    # Without a pool nothing depends on the values.
    assert known == {"view": int(model.placement == "host"), "dict": 1}.get(named, known)
    if known:
        pair.check(3)
    other.check(3)


def test_what_cannot_be_invalidated() -> None:
    with pytest.raises(TypeError, match=r"Hugging Face caches.* not str"):
        hsa_compile.invalidate([torch.zeros(2), "model"])
    assert hsa_compile.invalidate(nn.Linear(2, 2), []) == 0


def test_overrun_is_an_error_and_writes_nothing(model: Decoder) -> None:
    with torch.no_grad():
        pair = Pair(model, compiled(model), length=128)
        before = [t.clone() for t in pair.cache]
        with pytest.raises(hsa_compile.CacheError, match=r"token 128 .* 128 tokens.*>= 129"):
            pair.step(torch.randn(2, 1, SIZE), *pair.cache, torch.tensor([128]))
        for held, was in zip(pair.cache, before, strict=True):
            torch.testing.assert_close(held, was, rtol=0, atol=0)


@pytest.mark.parametrize("position", [-1, -28, -128])
def test_positions_from_the_end(model: Decoder, position: int) -> None:
    """Indexing counts a negative position from the end, and so does the rewritten attention."""

    class FromTheEnd(Decoder):
        def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            keys[:, :, position] = k
            values[:, :, position] = v
            mask = torch.arange(keys.shape[2]) <= position + keys.shape[2]
            return nn.functional.scaled_dot_product_attention(
                q, keys, values, mask[None, None, None], enable_gqa=True
            )

    with torch.no_grad():
        other = FromTheEnd()
        step, cache, twin = compiled(other), new_cache(2), new_cache(2)
        prefix = torch.randn(2, 128, SIZE)
        for held in (cache, twin):
            prefill(other, *held, prefix)
        for at in range(position, min(position + 3, 0)):
            x = torch.randn(2, 1, SIZE)
            want = reference_step(other, x, *twin, 128 + at)
            got = step(x, *cache, torch.tensor([at]))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(cache, twin)
        with pytest.raises(hsa_compile.CacheError, match=r"token -129 "):
            step(x, *cache, torch.tensor([-129]))


@pytest.mark.parametrize("from_end", [False, True], ids=["from the start", "from the end"])
def test_a_part_of_a_longer_buffer_is_read(model: Decoder, from_end: bool) -> None:
    """A position counts in what is written, not in what is read; behind that part, a write changes nothing of it."""
    held, read = 160, 128

    class Part(Decoder):
        placement = model.placement

        def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            keys[:, :, position] = k
            values[:, :, position] = v
            mask = torch.arange(read) <= position % held
            return nn.functional.scaled_dot_product_attention(
                q, keys[:, :, :read], values[:, :, :read], mask[None, None, None], enable_gqa=True
            )

    with torch.no_grad():
        other = Part()
        step, cache, twin = compiled(other), new_cache(2, held), new_cache(2, held)
        prefix = torch.randn(2, 120, SIZE)
        for written in (cache, twin):
            prefill(other, *written, prefix)
        for at in [*range(120, 132), 110]:
            x = torch.randn(2, 1, SIZE)
            want = reference_step(other, x, *twin, at, read)
            got = step(x, *cache, torch.tensor([at - held if from_end else at]))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(cache, twin)
        with pytest.raises(hsa_compile.CacheError, match=f"token {held} "):
            step(x, *cache, torch.tensor([held]))


def test_numbers_from_the_end(model: Decoder) -> None:
    """The same with a position that is a number, which is symbolic once it has changed."""

    class Numbered(Decoder):
        placement = model.placement

        def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
            q, k, v = self.qkv(x)
            keys[:, :, position] = k[:, :, 0]
            values[:, :, position] = v[:, :, 0]
            mask = torch.arange(keys.shape[2]) <= position + keys.shape[2]
            return nn.functional.scaled_dot_product_attention(
                q, keys, values, mask[None, None, None], enable_gqa=True
            )

    with torch.no_grad():
        other = Numbered()
        policy = {**POLICY, "placement": model.placement}
        step = torch.compile(other, backend="hsa", options={"run": "eager", "policy": policy})
        cache, twin = new_cache(2), new_cache(2)
        prefix = torch.randn(2, 128, SIZE)
        for held in (cache, twin):
            prefill(other, *held, prefix)
        for at in range(-30, -25):
            x = torch.randn(2, 1, SIZE)
            # A negative constant is left as it is.
            sparse = at > -30
            want = reference_step(other, x, *twin, 128 + at) if sparse else other(x, *twin, at)
            torch.testing.assert_close(step(x, *cache, at), want, rtol=1e-5, atol=1e-5)


def test_a_position_reshaped_twice(model: Decoder) -> None:
    class Scalar(Decoder):
        placement = model.placement

        def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            keys.index_copy_(2, position.reshape(1), k)
            values.index_copy_(2, position.reshape(1), v)
            mask = torch.arange(keys.shape[2]) <= position
            return nn.functional.scaled_dot_product_attention(
                q, keys, values, mask[None, None, None], enable_gqa=True
            )

    with torch.no_grad():
        other = Scalar()
        step, cache, twin = compiled(other), new_cache(2), new_cache(2)
        prefix = torch.randn(2, 90, SIZE)
        for held in (cache, twin):
            prefill(other, *held, prefix)
        for at in range(90, 93):
            x = torch.randn(2, 1, SIZE)
            want = reference_step(other, x, *twin, at)
            got = step(x, *cache, torch.tensor(at).reshape(1)[0])
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Twice(Decoder):
    """Two attentions over one cache in one step, the second under a mask of its own or the same one."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        keys[:, :, position] = k
        values[:, :, position] = v
        token = torch.arange(keys.shape[2])
        mask = (token <= position)[None, None, None]
        other = mask & (token > position - 70) if self.own else mask
        attend = nn.functional.scaled_dot_product_attention
        first = attend(q, keys, values, mask, enable_gqa=True)
        return first + attend(q * 2, keys, values, other, enable_gqa=True)


@pytest.mark.parametrize("own", [False, True])
def test_two_attentions_over_one_cache(own: bool) -> None:
    """Each page is summarised once a mask, and only where it is stale."""
    torch._dynamo.reset()
    with torch.no_grad():
        model = Twice(own)
        step = compiled(model)
        keys, values = new_cache(2)
        prefill(model, keys, values, torch.randn(2, 100, SIZE))
        gc.collect()
        before = hsa_compile.summary_bytes()
        step(torch.randn(2, 1, SIZE), keys, values, torch.tensor([100]))
        held = hsa_compile.summary_bytes() - before
        assert held == (2 if own else 1) * 2 * 2 * 8 * (2 * 16 * 4 + 2 * 8)
        for at in range(101, 108):
            x = torch.randn(2, 1, SIZE)
            fresh = [t.clone() for t in (keys, values)]
            with full_rebuilds() as rebuilt:
                got = step(x, keys, values, torch.tensor([at]))
                assert not rebuilt
            want = step(x, *fresh, torch.tensor([at]))
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@contextlib.contextmanager
def full_rebuilds() -> Iterator[list[int]]:
    """Numbers of pages that ``summarize`` gathers beside the one written into, where those are most of them."""
    seen: list[int] = []
    original = summarize._refresh_pages

    def counted(keys: Tensor, words: Tensor, stale: Tensor, *rest: object) -> None:
        seen.extend([int(stale.sum())] if stale.float().mean() > 0.5 else [])
        original(keys, words, stale, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summarize, "_refresh_pages", counted)
        yield seen
