"""Steps of several tokens at once, as speculative decoding verifies drafts: one selection serves all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hsa_compile
from hsa_compile.lowering.limits import kernel_limits
from hsa_compile.runtime.growing import with_room_for

from ..field.helpers import rule as rule_of_one
from .helpers import HEADS, KV_HEADS, POLICY, SIZE, Decoder, new_cache, prefill
from .test_static_state import full_rebuilds

LOSSLESS = {**POLICY, "budget": 112}
CAPACITY = 128

Attend = Callable[..., Tensor]


def rule(policy: dict[str, Any], scale: float | None = None) -> Attend:
    """The rule in plain PyTorch: selection over all heads of a group and all tokens, then dense attention of each."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, queries, _ = q.shape
        one = rule_of_one({**policy, "recent": max(policy["recent"], queries)}, scale)
        if mask is not None:
            mask = mask.expand(mask.shape[0], heads, queries, mask.shape[-1])
            mask = mask.reshape(mask.shape[0], heads * queries, 1, -1)
        out = one(q.reshape(batch, heads * queries, 1, -1), keys, values, mask)
        return out.view(batch, heads, queries, -1)

    return attend


def sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)


def causal(tokens: int, positions: Tensor) -> Tensor:
    return (torch.arange(tokens) <= positions[:, None])[None, None]


class Static(Decoder):
    """Writes L tokens at ``position [L]`` and attends to each up to its own."""

    def __init__(self, attend: Attend = sdpa) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        keys[:, :, position] = k
        values[:, :, position] = v
        return self.attend(q, keys, values, causal(keys.shape[2], position))


class Growing(Decoder):
    def __init__(self, attend: Attend = sdpa) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.qkv(x)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        tokens = keys.shape[2]
        at = torch.arange(x.shape[1]) + tokens - x.shape[1]
        return self.attend(q, keys, values, causal(tokens, at)), keys, values


@pytest.fixture(params=["no_grad", "inference_mode"])
def grad_mode(request: pytest.FixtureRequest):
    with getattr(torch, request.param)():
        yield request.param


def compiled(
    model: nn.Module, policy: dict[str, Any] = POLICY, run: str = "eager", **more: Any
) -> Any:
    """A graph for each number of tokens: a number that varies is not rewritten."""
    torch._dynamo.reset()
    options = {"run": run, "policy": policy, "strict": True, **more}
    return torch.compile(model, backend="hsa", options=options)


def tokens(batch: int, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(batch, number, SIZE, dtype=dtype)
    torch._dynamo.mark_static(x, 1)
    return x


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Pair:
    """A static cache stepped by the compiled layer, and its twin stepped by the expected one."""

    def __init__(self, step: Any, expected: Any, length: int, batch: int = 2) -> None:
        self.step, self.expected, self.position, self.batch = step, expected, length, batch
        self.cache, self.twin = new_cache(batch), new_cache(batch)
        x = torch.randn(batch, length, SIZE)
        for cache in (self.cache, self.twin):
            prefill(expected, *cache, x)

    def check(self, number: int, keep: int | None = None) -> None:
        """A step of ``number`` tokens, of which ``keep`` are accepted."""
        x = tokens(self.batch, number)
        at = torch.arange(number) + self.position
        torch._dynamo.mark_static(at, 0)
        got = self.step(x, *self.cache, at)
        close(got, self.expected(x, *self.twin, at))
        torch.testing.assert_close(self.cache, self.twin, rtol=0, atol=0)
        self.position += number if keep is None else keep


@pytest.mark.parametrize("number", [2, 5, 16])
@pytest.mark.parametrize("policy", [LOSSLESS, POLICY], ids=["lossless", "sparse"])
def test_a_static_cache(grad_mode: str, number: int, policy: dict[str, Any]) -> None:
    step = compiled(Static(), policy)
    pair = Pair(step, Static(sdpa if policy is LOSSLESS else rule(policy)), 60)
    for _ in range(3):
        pair.check(number)
    (layer,) = hsa_compile.stats(step).layers
    seen = sum(60 + number * (i + 1) for i in range(3))
    assert layer.tokens_attendable == seen
    assert (layer.tokens_read < seen) == (policy is POLICY)


@pytest.mark.parametrize("number", [2, 5, 16])
@pytest.mark.parametrize("policy", [LOSSLESS, POLICY], ids=["lossless", "sparse"])
def test_a_growing_cache(grad_mode: str, number: int, policy: dict[str, Any]) -> None:
    step = compiled(Growing(), policy)
    grow(step, Growing(sdpa if policy is LOSSLESS else rule(policy)), [(number, number)] * 3)


def grow(step: Any, expected: Any, steps: list[tuple[int, int]], length: int = 60) -> None:
    x = torch.randn(2, length, SIZE)
    cache = tuple(t.contiguous() for t in expected.qkv(x)[1:])
    twin = tuple(t.clone() for t in cache)
    addresses = set()
    for number, keep in steps:
        x = tokens(2, number)
        got, *cache = step(x, *cache)
        addresses.add(cache[0].data_ptr())
        want, *twin = expected(x, *twin)
        close(got, want)
        torch.testing.assert_close(cache, twin)
        rejected = number - keep
        if rejected:
            cache, twin = ([t[:, :, :-rejected] for t in held] for held in (cache, twin))
    assert len(addresses) == 1, "the cache was copied"


def rounds(seed: int, number: int = 16) -> list[tuple[int, int]]:
    """Drafts verified, some rejected, single tokens in between."""
    random = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(number):
        size = (1, 5, 5, 1, 3)[int(torch.randint(5, (), generator=random))]
        steps.append((size, int(torch.randint(1, size + 1, (), generator=random))))
    return steps


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("policy", [LOSSLESS, POLICY], ids=["lossless", "sparse"])
def test_drafts_in_a_static_cache(grad_mode: str, seed: int, policy: dict[str, Any]) -> None:
    """Graphs of one, three and five tokens share the state of one cache."""
    torch._dynamo.reset()
    pair = Pair(
        compiled(Static(), policy), Static(sdpa if policy is LOSSLESS else rule(policy)), 58
    )
    pair.check(1)
    with full_rebuilds() as rebuilt:
        for number, keep in rounds(seed):
            pair.check(number, keep)
        assert not rebuilt
    if grad_mode == "no_grad":
        from hsa_compile.runtime.state import OWNERS, root_of

        assert len(OWNERS.of(root_of(pair.cache[0]))) == 1


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("policy", [LOSSLESS, POLICY], ids=["lossless", "sparse"])
def test_drafts_in_a_growing_cache(grad_mode: str, seed: int, policy: dict[str, Any]) -> None:
    step = compiled(Growing(), policy)
    grow(step, Growing(sdpa if policy is LOSSLESS else rule(policy)), rounds(seed), 58)


# The cache, in other ways


class Written(Static):
    """Writes with ``write`` and attends under ``mask``, both given the position of the first token."""

    def __init__(self, write: Callable[..., Any], attend: Attend = sdpa) -> None:
        super().__init__(attend)
        self.write = write

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Any) -> Tensor:  # type: ignore[override]
        q, k, v = self.qkv(x)
        keys, values = self.write(keys, k, at), self.write(values, v, at)
        first = at if isinstance(at, int) else at.reshape(-1)[:1]
        row = torch.arange(x.shape[1])[:, None] + first
        mask = (torch.arange(keys.shape[2]) <= row)[None, None]
        out = self.attend(q, keys, values, mask)
        return (out, keys, values) if self.write in FUNCTIONAL else out  # type: ignore[return-value]


def sliced(cache: Tensor, new: Tensor, at: int) -> Tensor:
    cache[:, :, at : at + new.shape[2]] = new
    return cache


def narrowed(cache: Tensor, new: Tensor, at: int) -> Tensor:
    cache.narrow(2, at, new.shape[2]).copy_(new)
    return cache


def copied_into_a_slice(cache: Tensor, new: Tensor, at: int) -> Tensor:
    cache[..., at : at + new.shape[2], :].copy_(new)
    return cache


def scattered(cache: Tensor, new: Tensor, at: int) -> Tensor:
    return torch.slice_scatter(cache, new, 2, at, at + new.shape[2])


def copied(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return cache.index_copy(2, at, new)


FUNCTIONAL = (scattered, copied)


@pytest.mark.parametrize("write", [sliced, narrowed, copied_into_a_slice, scattered, copied])
@torch.no_grad()
def test_writes(write: Callable[..., Any]) -> None:
    model = Written(write)
    step, expected = compiled(model), Written(write, rule(POLICY))
    cache, twin = new_cache(2), new_cache(2)
    for held in (cache, twin):
        prefill(model, *held, torch.randn(2, 60, SIZE))
    twin = tuple(t.clone() for t in cache)
    at = 60
    for number, keep in [(5, 5), (5, 2), (1, 1), (5, 3), (5, 5), (5, 4)]:
        x = tokens(2, number)
        position = at if write in (sliced, narrowed, copied_into_a_slice, scattered) else None
        if position is None:
            position = torch.arange(number) + at
            torch._dynamo.mark_static(position, 0)
        got, want = step(x, *cache, position), expected(x, *twin, position)
        if write in FUNCTIONAL:
            got, *cache = got
            want, *twin = want
        close(got, want)
        torch.testing.assert_close(tuple(cache), tuple(twin), rtol=0, atol=0)
        at += keep


class Shifted(Static):
    """Positions that the graph computes from those that it is given; each token sees what was written by then."""

    def __init__(self, shift: Callable[[Tensor], Tensor], attend: Attend = sdpa) -> None:
        super().__init__(attend)
        self.shift = shift

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        at = self.shift(position)
        keys[:, :, at] = k
        values[:, :, at] = v
        return self.attend(q, keys, values, causal(keys.shape[2], position))


@pytest.mark.parametrize(
    "shift",
    [
        lambda at: at.flip(0),
        lambda at: (at * 7) % 96,
        lambda at: at % 80,
        lambda at: at - 60,
        lambda at: torch.where(at == at[0] + 2, at - 40, at),
        lambda at: at - CAPACITY,
    ],
    ids=["backwards", "scattered", "a ring", "at the start", "one elsewhere", "from the end"],
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_positions_that_do_not_follow(
    grad_mode: str, shift: Callable[[Tensor], Tensor], page_size: int
) -> None:
    """The graph does not tell: every page that one of them is in is summarised anew, and the next step finds it so."""
    policy = {**POLICY, "page_size": page_size, "budget": page_size, "recent": 5}
    pair = Pair(compiled(Shifted(shift), policy), Shifted(shift, rule(policy)), 61)
    for held, twin in zip(
        pair.cache, pair.twin, strict=True
    ):  # no poison: not all that is attended was written
        twin.copy_(held.normal_())
    for number in (5, 5, 1, 5, 3, 5):
        pair.check(number)


@pytest.mark.parametrize("read", [96, 90])
def test_a_part_of_a_longer_buffer_is_read(grad_mode: str, read: int) -> None:
    class Part(Static):
        def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            keys[:, :, position] = k
            values[:, :, position] = v
            return self.attend(q, keys[:, :, :read], values[:, :, :read], causal(read, position))

    pair = Pair(compiled(Part()), Part(rule(POLICY)), 78)
    for number, keep in [(5, 5), (5, 4), (5, 5), (5, 2), (5, 5), (5, -20), (5, 5)]:
        pair.check(number, keep)


@pytest.mark.parametrize("position", [124, 127, 200])
def test_the_last_token_does_not_fit(position: int) -> None:
    with torch.no_grad():
        step = compiled(Static())
        pair = Pair(step, Static(rule(POLICY)), 60)
        pair.check(5)
        before = [t.clone() for t in pair.cache]
        at = torch.arange(5) + position
        torch._dynamo.mark_static(at, 0)
        with pytest.raises(hsa_compile.CacheError, match=r"token \d+ .* 128 tokens"):
            step(tokens(2, 5), *pair.cache, at)
        torch.testing.assert_close(list(pair.cache), before, rtol=0, atol=0)
        pair.check(5)


def test_overruns_are_counted_along() -> None:
    """On a GPU a position is read only where counting does not rule an overrun out; the last token must fit."""
    from hsa_compile.runtime.overrun import OverrunCheck
    from hsa_compile.runtime.state import PageState, SummaryLayout

    state = PageState(
        SummaryLayout("mean", 16, 1, 16, torch.float32), 1, torch.device("cpu"), False
    )
    looked = []

    def position(at: Tensor) -> Tensor:
        looked.append(int(at[0]))
        return at

    five = OverrunCheck(position, (0,), lambda arguments: 32, False, 5)
    one = OverrunCheck(position, (0,), lambda arguments: 32, False)
    five(state, (torch.arange(5) + 10,))
    assert (looked, state.position) == ([10], 14)
    five(state, (torch.arange(5) + 15,))
    one(state, (torch.tensor([20]),))
    five(state, (torch.arange(5) + 21,))
    assert (looked, state.position) == ([10], 25)
    five(state, (torch.arange(5) + 26,))  # the last one is at 30
    assert looked == [10]
    # Two were taken back: counting on arrives at the end before the step does.
    five(state, (torch.arange(5) + 27,))
    assert (looked, state.position) == ([10, 27], 31)
    with pytest.raises(hsa_compile.CacheError, match="token 32 "):
        five(state, (torch.arange(5) + 28,))
    assert state.position is None


def test_room_for_several() -> None:
    old = torch.randn(2, 3, 5, 4)
    with torch.no_grad():
        first = with_room_for(old, 5)
        assert first.shape == (2, 3, 10, 4)
        torch.testing.assert_close(first[:, :, :5], old)
        second = with_room_for(first, 251)
        assert second.data_ptr() == first.data_ptr() and second.shape[2] == 261
        # Its spare capacity is used up.
        assert with_room_for(second, 1).data_ptr() != first.data_ptr()
        # Two that were taken back are somebody's still; then nobody's.
        kept = first[:, :, :-2]
        assert with_room_for(kept, 5).data_ptr() != kept.data_ptr()
        del first, second
        assert with_room_for(kept, 5).data_ptr() == kept.data_ptr()


# Attention, in other ways


@pytest.mark.parametrize("growing", [False, True])
def test_causal_is_aligned_at_the_top_left(growing: bool) -> None:
    """``is_causal`` over a longer cache shows token i the first i + 1 keys, and so it stays."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)

    with torch.no_grad():
        if growing:
            grow(compiled(Growing(attend)), Growing(attend), [(5, 5)] * 3)
        else:
            pair = Pair(compiled(Static(attend)), Static(attend), 60)
            for _ in range(3):
                pair.check(5)


def test_heads_of_a_group_folded_into_queries() -> None:
    """One token: the heads that share a KV head are put in the place of tokens."""

    class Folded(Static):
        def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            keys[:, :, position] = k
            values[:, :, position] = v
            folded = q.reshape(x.shape[0], KV_HEADS, HEADS // KV_HEADS, SIZE)
            mask = causal(keys.shape[2], position)
            return self.attend(folded, keys, values, mask).reshape(q.shape)

    with torch.no_grad():
        pair = Pair(compiled(Folded()), Folded(rule(POLICY)), 90)
        for _ in range(4):
            pair.check(1)


def test_more_queries_than_new_tokens() -> None:
    """A step that attends again with the tokens before: three queries, of which one is new."""

    class Again(Static):
        def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            at = position[-1:]
            keys[:, :, at] = k[:, :, -1:]
            values[:, :, at] = v[:, :, -1:]
            return self.attend(q, keys, values, causal(keys.shape[2], position))

    with torch.no_grad():
        pair = Pair(compiled(Again()), Again(rule(POLICY)), 90)
        pair.position = 88
        for _ in range(3):
            pair.check(3, 1)


@pytest.mark.parametrize("recent", [0, 1, 16])
def test_each_token_reads_its_own_page(recent: int) -> None:
    """Whatever the policy: the tokens of a step may lie on two pages."""
    policy = {**POLICY, "budget": 16, "sink": 0, "recent": recent}
    with torch.no_grad():
        pair = Pair(compiled(Static(), policy), Static(rule(policy)), 62)
        for _ in range(3):
            pair.check(5)


@pytest.mark.slow
def test_layouts_of_the_output() -> None:
    """A view of the output is in the graph, as eager attention lays it out in memory."""

    class Viewed(Static):
        def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
            out = super().forward(x, keys, values, position)
            return out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)

    for run in ("eager", "inductor"):
        with torch.no_grad():
            pair = Pair(compiled(Viewed(), run=run), Viewed(rule(POLICY)), 90)
            for number, keep in [(5, 3), (1, 1), (5, 5)]:
                pair.check(number, keep)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Static, Growing])
def test_with_inductor(kind: type) -> None:
    with torch.no_grad():
        step = compiled(kind(), run="inductor")
        rounds = [(5, 3), (1, 1), (5, 5), (2, 1), (5, 4)]
        if kind is Growing:
            grow(step, Growing(rule(POLICY)), rounds)
        else:
            pair = Pair(step, Static(rule(POLICY)), 58)
            for number, keep in rounds:
                pair.check(number, keep)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    with torch.no_grad():
        model, wide = Static().to(dtype), Static(rule(POLICY))
        step = compiled(model)
        cache = tuple(t.to(dtype) for t in new_cache(2))
        prefill(model, *cache, torch.randn(2, 90, SIZE, dtype=dtype))
        for at in (90, 95):
            x, position = tokens(2, 5, dtype), torch.arange(5) + at
            got = step(x, *cache, position)
            q = model.qkv(x)[0]
            full = (t.float() for t in (q, *cache))
            want = wide.attend(*full, causal(CAPACITY, position))
            torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)


# What is left


@pytest.mark.parametrize(
    ("placement", "number", "reason"),
    [
        ("host", 5, "placement 'host' takes steps of a single token; this one has 5 query tokens"),
        ("device", 17, "17 query tokens: only steps of up to 16 are rewritten"),
    ],
)
def test_left(placement: str, number: int, reason: str) -> None:
    """Single tokens before and after are right: they see what was written without them."""
    policy = {**POLICY, "placement": placement, "pool": 1}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            step = compiled(Static(), policy, strict=False)
            pair = Pair(step, Static(rule(POLICY)), 60)
            pair.check(1)
            pair.check(1)
            pair.expected = Static()
            pair.check(number, 3)
            pair.expected = Static(rule(POLICY))
            pair.check(1)
            pair.check(1)
            found = {(s.decision, s.reason) for s in hsa_compile.explain(step).sites}
            assert ("sparse", "") in found
            assert any(decision == "left" and why.startswith(reason) for decision, why in found)


def test_a_number_that_varies_is_left() -> None:
    with torch.no_grad():
        step = compiled(Static(), strict=False)
        pair = Pair(step, Static(), 20)
        for number in (3, 4, 5, 2):
            x, at = torch.randn(2, number, SIZE), torch.arange(number) + pair.position
            # The first of them is taken for fixed.
            expected = Static(rule(POLICY)) if number == 3 else Static()
            close(step(x, *pair.cache, at), expected(x, *pair.twin, at))
            pair.position += number
        reasons = [s.reason for s in hsa_compile.explain(step).sites if s.decision == "left"]
        assert len(reasons) == 1 and "query tokens, a number that varies" in reasons[0]


def test_more_rows_than_the_kernels_take() -> None:
    taken = (torch.bfloat16, 128, 128, 8, 32)
    assert kernel_limits(*taken, queries=8) is None
    assert kernel_limits(*taken, queries=9) == (
        "8 query heads a KV head, 9 query tokens each, are more than 64 rows"
    )
