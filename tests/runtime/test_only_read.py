"""Keys and values that no step writes: summarised once, and anew when they are others or were edited."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsa_compile
from hsa_compile.ops import summarize

from ..field.helpers import SPARSE, rule, sdpa
from .helpers import KV_HEADS, SIZE

TOKENS = 120
HEADS = 4


class Cross(nn.Module):
    """Attention over keys and values that are passed in, under a mask."""

    def __init__(self, attend: Any = sdpa) -> None:
        super().__init__()
        self.attend = attend
        self.one = nn.Parameter(torch.ones(()))

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return self.attend(q, keys, values, mask) * self.one


def compiled(model: nn.Module | None = None, run: str = "eager", **policy: Any) -> Any:
    torch._dynamo.reset()
    options = {"run": run, "policy": {**SPARSE, **policy}, "strict": True}
    return torch.compile(Cross() if model is None else model, backend="hsa", options=options)


def encoded(batch: int = 2, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, KV_HEADS, tokens, SIZE), torch.randn(batch, KV_HEADS, tokens, SIZE)


def check(
    step: Any, memory: tuple[Tensor, Tensor], mask: Tensor | None = None, steps: int = 2
) -> int:
    """Steps are as the rule has them; returns how many pages were summarised for them."""
    pages = 0
    expected = rule(SPARSE)
    original = summarize._refresh_pages

    def counted(keys: Tensor, words: Tensor, stale: Tensor, *rest: object) -> None:
        nonlocal pages
        pages += int(stale.sum())
        original(keys, words, stale, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summarize, "_refresh_pages", counted)
        for _ in range(steps):
            q = torch.randn(memory[0].shape[0], HEADS, 1, SIZE)
            want = expected(q, *memory, mask)
            torch.testing.assert_close(step(q, *memory, mask), want, rtol=1e-5, atol=1e-5)
    return pages


ALL = 2 * KV_HEADS * 8


@pytest.fixture(params=["no_grad", "inference_mode"])
def grad_mode(request: pytest.FixtureRequest):
    with getattr(torch, request.param)():
        yield request.param


def test_summarised_once(grad_mode: str) -> None:
    step, memory = compiled(), encoded()
    assert check(step, memory) == ALL
    assert check(step, memory, steps=3) == 0
    (layer,) = hsa_compile.stats(step).layers
    assert layer.tokens_attendable == 5 * TOKENS
    assert 0 < layer.tokens_read <= 5 * 64
    (site,) = hsa_compile.explain(step).sites
    assert (site.decision, site.cache) == ("sparse", "fixed (only read)")


def test_it_is_not_dense() -> None:
    with torch.no_grad():
        step, memory = compiled(), encoded()
        q = torch.randn(2, HEADS, 1, SIZE)
        assert (step(q, *memory, None) - sdpa(q, *memory, None)).abs().max() > 1e-3


def test_other_tensors(grad_mode: str) -> None:
    """The output of another encoder; those of before are known still."""
    step, first, second = compiled(), encoded(), encoded()
    assert check(step, first) == ALL
    assert check(step, second) == ALL
    assert check(step, first) == check(step, second) == 0
    assert check(step, copy.deepcopy(first)) == ALL


def test_replaced_in_place(grad_mode: str) -> None:
    """As a static cache takes the keys of the next request."""
    step, memory = compiled(), encoded()
    check(step, memory)
    for held, other in zip(memory, encoded(), strict=True):
        held.copy_(other)
    assert check(step, memory) == ALL


def test_edited() -> None:
    with torch.no_grad():
        step, memory = compiled(), encoded()
        check(step, memory)
        memory[0][:, :, 10:40].neg_()
        assert check(step, memory) == ALL
        memory[0].data = torch.randn_like(memory[0])
        assert check(step, memory) == ALL


def test_an_edit_that_is_told(grad_mode: str) -> None:
    step, memory = compiled(), encoded()
    check(step, memory)
    memory[0].data[:, :, 10:40].neg_()
    assert hsa_compile.invalidate(memory) == 1
    assert check(step, memory) == ALL


def test_other_padding(grad_mode: str) -> None:
    """A mask for each row; another mask is another description of the pages that it touches."""
    step, memory = compiled(), encoded(3)
    mask = (torch.arange(TOKENS) < torch.tensor([[120], [77], [100]]))[:, None, None]
    assert check(step, memory, mask) > 0
    assert check(step, memory, mask) == 0
    mask = (torch.arange(TOKENS) < torch.tensor([[120], [93], [100]]))[:, None, None]
    assert check(step, memory, mask) == 2 * KV_HEADS


def test_lengths_that_vary(grad_mode: str) -> None:
    """One graph for all: a length that is not known is rewritten, whatever it is."""
    step = compiled()
    for tokens in (120, 100, 7, 333, 16, 17):
        memory = encoded(tokens=tokens)
        assert check(step, memory) > 0
        assert check(step, memory) == 0


def test_freed_with_the_keys(grad_mode: str) -> None:
    gc.collect()
    before = hsa_compile.summary_bytes()
    step, memory = compiled(), encoded()
    check(step, memory)
    assert hsa_compile.summary_bytes() > before
    del memory
    gc.collect()
    assert hsa_compile.summary_bytes() == before


def test_several_query_tokens(grad_mode: str) -> None:
    class Several(Cross):
        def forward(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
            q = torch.cat((q, q * 2, -q), 2)
            return super().forward(q, keys, values, mask)

    from .test_several_queries import rule as rule_of_several

    step, memory = compiled(Several()), encoded()
    for _ in range(3):
        q = torch.randn(2, HEADS, 1, SIZE)
        want = Several(rule_of_several(SPARSE))(q, *memory, None)
        torch.testing.assert_close(step(q, *memory, None), want, rtol=1e-5, atol=1e-5)


def test_learned_memory(grad_mode: str) -> None:
    """Parameters serve as keys, too: a step of an optimiser is an edit."""

    class Learned(Cross):
        def __init__(self) -> None:
            super().__init__()
            keys, values = encoded()
            self.keys, self.values = nn.Parameter(keys), nn.Parameter(values)

        def forward(self, q: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(q, self.keys, self.values)

    with torch.inference_mode(False), torch.no_grad():
        model = Learned()
    step = compiled(model)

    def known(q: Tensor, keys: Tensor, values: Tensor, mask: None) -> Tensor:
        return step(q)

    memory = (model.keys.detach(), model.values.detach())
    assert check(known, memory) == ALL
    assert check(known, memory) == 0
    with torch.inference_mode(False), torch.no_grad():
        model.keys.add_(torch.randn_like(model.keys))
    assert check(known, memory) == ALL


def test_a_part_of_a_larger_tensor(grad_mode: str) -> None:
    """Keys and values of two layers in one tensor, each layer with a state of its own."""

    class Packed(Cross):
        def forward(self, q: Tensor, packed: Tensor) -> Tensor:  # type: ignore[override]
            first = super().forward(q, packed[0, 0], packed[0, 1])
            return first + super().forward(q, packed[1, 0], packed[1, 1])

    packed = torch.randn(2, 2, 2, KV_HEADS, TOKENS, SIZE)
    step, expected = compiled(Packed()), Packed(rule(SPARSE))
    for turn in range(4):
        q = torch.randn(2, HEADS, 1, SIZE)
        torch.testing.assert_close(step(q, packed), expected(q, packed), rtol=1e-5, atol=1e-5)
        if turn == 1:
            packed.copy_(torch.randn_like(packed))


def test_written_under_another_name() -> None:
    """Two inputs of one memory, of which the graph writes the other."""

    class Aliased(Cross):
        def forward(self, q: Tensor, keys: Tensor, values: Tensor, all_keys: Tensor) -> Tensor:  # type: ignore[override]
            all_keys[:, :, 3] = q[:, :KV_HEADS, 0]
            return super().forward(q, keys, values)

    with torch.no_grad():
        torch._dynamo.reset()
        options = {"run": "eager", "policy": SPARSE}
        step = torch.compile(Aliased(), backend="hsa", options=options)
        keys, values = encoded()
        for _ in range(2):
            q, twin = torch.randn(2, HEADS, 1, SIZE), keys.clone()
            want = Aliased()(q, twin[:, :, :], values, twin)
            torch.testing.assert_close(step(q, keys[:, :, :], values, keys), want)
        found = {site.reason for site in hsa_compile.explain(step).sites if site.decision == "left"}
        assert found == {"the keys share their memory with an input that this graph writes"}


def test_on_the_host() -> None:
    with torch.no_grad():
        options = {"run": "eager", "policy": {**SPARSE, "placement": "host"}}
        sites = hsa_compile.explain(
            Cross(), torch.randn(2, HEADS, 1, SIZE), *encoded(), options=options
        ).sites
        assert [(site.decision, site.reason) for site in sites] == [
            ("left", "placement 'host' takes caches that a step writes; this one is only read")
        ]


@pytest.mark.slow
def test_with_inductor(grad_mode: str) -> None:
    step, memory = compiled(run="inductor"), encoded()
    assert check(step, memory) == ALL
    assert check(step, memory) == 0
    memory[0].copy_(torch.randn_like(memory[0]))
    assert check(step, memory) == ALL
