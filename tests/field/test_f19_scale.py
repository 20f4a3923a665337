"""A fused attention silently takes the default scale for one that the model wrote differently.

pytorch PR#174361 (#174049, #151098). Right: the product of every factor on the way from the query to the softmax,
wherever it stands.
"""

import math

import pytest
import torch
from torch import Tensor

import hsa_compile

from .helpers import (
    SPARSE,
    SPARSELY,
    Shape,
    Static,
    beside,
    check_left,
    check_rewritten,
    check_sparse,
    compile_hsa,
    decisions,
    repeat_kv,
    run_static,
    sdpa,
)

ROOT = math.sqrt(0.3)


def hand(on_q=None, on_k=None, on_t=None, on_scores=None, masked_first: bool = False):
    """Attention by hand, with factors at four places; ``masked_first`` masks before the scores' own."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        keys, values = (repeat_kv(t, 2) for t in (keys, values))
        q = on_q(q) if on_q else q
        keys = on_k(keys) if on_k else keys
        turned = keys.transpose(-1, -2)
        scores = torch.matmul(q, on_t(turned) if on_t else turned)
        hidden = torch.where(mask, 0.0, float("-inf"))
        if masked_first:
            scores = scores + hidden + torch.arange(keys.shape[2]).float() % 3
        scores = on_scores(scores) if on_scores else scores
        scores = scores if masked_first else scores + hidden
        return torch.matmul(torch.softmax(scores, -1), values)

    return attend


SPELLINGS = {
    "none, which is 1": hand(),
    "on q": hand(on_q=lambda q: q * 0.3),
    "on k": hand(on_k=lambda k: k * 0.3),
    "on the transposed k": hand(on_t=lambda k: k / (1 / 0.3)),
    "on scores": hand(on_scores=lambda s: s * 0.3),
    "on scores, from the left": hand(on_scores=lambda s: 0.3 * s),
    "on scores, divided": hand(on_scores=lambda s: s / 4.0),
    "on scores, in place": hand(on_scores=lambda s: s.mul_(0.3)),
    "on scores, by method": hand(on_scores=lambda s: s.div(4)),
    "split over q and k": hand(on_q=lambda q: q * ROOT, on_k=lambda k: k * ROOT),
    "split over k and scores": hand(on_k=lambda k: k * 0.6, on_scores=lambda s: s * 0.5),
    "twice on scores": hand(on_scores=lambda s: s * 0.6 / 2.0),
    "after the mask": hand(on_scores=lambda s: s * 0.3, masked_first=True),
    "sdpa, 0.3": lambda q, k, v, m: sdpa(q, k, v, m, scale=0.3),
    "sdpa, 1.0": lambda q, k, v, m: sdpa(q, k, v, m, scale=1.0),
    "sdpa, 1": lambda q, k, v, m: sdpa(q, k, v, m, scale=1),
    "sdpa, default": sdpa,
    "sdpa, and on k": lambda q, k, v, m: sdpa(q, k * 0.3, v, m, scale=1.0),
    "sdpa, and on q": lambda q, k, v, m: sdpa(q * 0.3, k, v, m),
    "sdpa, and on q, scale 1": lambda q, k, v, m: sdpa(q * 0.3, k, v, m, scale=1.0),
}


def test_exact() -> None:
    """Each spelling over the same cache; of those that differ, one shows under its name."""
    layer, shape = Static(beside(list(SPELLINGS.values()))), Shape(steps=2)
    compiled = compile_hsa(layer)
    got, want = run_static(compiled, shape), run_static(layer, shape)
    for spelling, ours, theirs in zip(SPELLINGS, got.split(16, -1), want.split(16, -1)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=spelling)
    assert decisions(compiled) == SPARSELY
    assert len(hsa_compile.stats(compiled).layers) == len(SPELLINGS)


@pytest.mark.parametrize(
    ("attend", "scale"),
    [
        (lambda q, k, v, m: sdpa(q, k, v, m, scale=1.5), 1.5),
        (hand(on_scores=lambda s: s * 1.5), 1.5),
        (hand(on_k=lambda k: k * 3.0, on_scores=lambda s: s / 2), 1.5),
    ],
)
def test_selection_takes_the_scale_too(attend, scale: float) -> None:
    """The mean of the group's softmax depends on it."""
    check_sparse(attend, Shape(steps=8), scale)


@pytest.mark.parametrize(
    "attend",
    [hand(on_scores=lambda s: s * -0.3), lambda q, k, v, m: sdpa(q, k, v, m, scale=-0.3)],
)
def test_negative(attend) -> None:
    """Pages are scored by how large a product they can hold, which a negative scale turns around."""
    check_left(attend, "the scale is -0.3")


def test_factor_on_values() -> None:
    """What is scaled after the weights is no business of the softmax."""
    check_left(lambda q, k, v, m: sdpa(q, k, v * 2.0, m), "computed in this graph by `mul`")
    check_rewritten(lambda q, k, v, m: sdpa(q, k, v, m) * 2.0)


def test_budget_is_what_is_read() -> None:
    assert SPARSE["budget"] < Shape().length
