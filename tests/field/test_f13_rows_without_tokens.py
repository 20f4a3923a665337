"""A row whose mask hides everything gives nan, which spreads into summaries and gradients.

pytorch#103749, #103963. Right: such rows give zeros, as ``scaled_dot_product_attention`` does, rows with tokens give
what eager gives, and nothing that is kept holds a nan.
"""

import pytest
import torch
from torch import Tensor, nn

import hsa_compile
from hsa_compile.runtime.state import OWNERS, PageState

from .helpers import (
    LOSSLESS,
    SPARSE,
    SPARSELY,
    Shape,
    Static,
    beside,
    close,
    compile_hsa,
    decisions,
    new_cache,
    repeat_kv,
    rule,
    run_static,
    sdpa,
    token,
)

SHAPE = Shape(batch=3)
EMPTY = 1
"""The row that attends nothing."""


def with_an_empty_row(mask: Tensor) -> Tensor:
    rows = torch.arange(SHAPE.batch)[:, None, None, None] != EMPTY
    return mask & rows


def masked(attend):
    return lambda q, keys, values, mask: attend(q, keys, values, with_an_empty_row(mask))


def additive(fill: float):
    """Attention under the additive form of the same mask."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.where(with_an_empty_row(mask), 0.0, fill)
        return sdpa(q, keys, values, hidden)

    return attend


def filled(fill: float):
    """Scores spelled out, and filled where they are masked."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        keys, values = (repeat_kv(t, 2) for t in (keys, values))
        scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25
        scores = scores.masked_fill(~with_an_empty_row(mask), fill)
        return torch.matmul(torch.softmax(scores, -1), values)

    return attend


def summaries() -> list[Tensor]:
    return [state.summary for state in OWNERS.states() if isinstance(state, PageState)]


@pytest.mark.parametrize("policy", [SPARSE, {**SPARSE, "algorithm": "cuboid"}])
@torch.no_grad()
def test_boolean(policy: dict) -> None:
    kept = new_cache(SHAPE)
    compiled = compile_hsa(Static(masked(sdpa)), policy)
    got = run_static(compiled, SHAPE, kept)
    close(got, run_static(Static(masked(rule(policy))), SHAPE))
    assert (got[:, EMPTY] == 0).all() and (got[:, 0] != 0).any()
    assert decisions(compiled) == SPARSELY
    assert summaries() and all(held.isfinite().all() for held in summaries())


FILLS = [float("-inf"), torch.finfo(torch.float32).min, -1e4]


def test_additive() -> None:
    """-inf throughout gives zeros; finite fills give no more than eager's numbers to rows with tokens."""
    shape = Shape(batch=3, length=100, capacity=160, poison=None)
    layer = Static(beside([additive(fill) for fill in FILLS]))
    compiled = compile_hsa(layer, {"budget": 144, "page_size": 16, "sink": 0})
    got, want = run_static(compiled, shape), run_static(layer, shape)
    close(got[:, [0, 2]], want[:, [0, 2]])
    assert got.isfinite().all()
    assert (got[:, EMPTY, :, :16] == 0).all()
    assert decisions(compiled) == SPARSELY


def test_filled() -> None:
    """A row filled with -inf is nan in eager mode; here it is zeros. The others are eager's."""
    layer = Static(beside([filled(fill) for fill in (*FILLS[:2], -1e9)]))
    compiled = compile_hsa(layer, LOSSLESS)
    got, want = run_static(compiled, SHAPE), run_static(layer, SHAPE)
    close(got[:, [0, 2]], want[:, [0, 2]])
    assert got.isfinite().all()
    assert (got[:, EMPTY, :, :16] == 0).all()
    assert decisions(compiled) == SPARSELY


@torch.no_grad()
def test_a_row_that_wakes_up() -> None:
    """A row without tokens for some steps, then with all of them: nothing of the empty steps is left."""

    class Woken(nn.Module):
        def __init__(self, attend) -> None:
            super().__init__()
            self.attend, self.one = attend, nn.Parameter(torch.ones(()))

        def forward(self, q, k, v, keys, values, position, awake):
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            mask = torch.arange(keys.shape[2]) <= position
            return self.attend(q, keys, values, mask[None, None, None] & awake) * self.one

    compiled, expected = compile_hsa(Woken(sdpa), SPARSE), Woken(rule(SPARSE))
    cache, twin = new_cache(SHAPE), new_cache(SHAPE)
    for at in range(90, 100):
        awake = torch.tensor([True, at > 94, at % 2 == 0])[:, None, None, None]
        inputs, position = token(SHAPE, at), torch.tensor([at])
        close(compiled(*inputs, *cache, position, awake), expected(*inputs, *twin, position, awake))


def test_gradients() -> None:
    """While gradients are recorded attention is left alone: they are eager's, and finite."""
    layer = Static(masked(sdpa))
    compiled = compile_hsa(layer, LOSSLESS)
    grads = []
    for step in (layer, compiled):
        q, k, v = (t.requires_grad_() for t in token(SHAPE, 90))
        keys, values = (t.clone() for t in new_cache(SHAPE))
        step(q, k, v, keys, values, torch.tensor([90])).sum().backward()
        grads.append([q.grad, v.grad])
    for got, want in zip(*grads):
        assert got.isfinite().all()
        close(got, want)
    ((decision, reason),) = decisions(compiled)
    assert decision == "left" and "autograd" in reason
    assert hsa_compile.stats(compiled).steps == 0
