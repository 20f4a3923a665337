"""Pages are left out although the length is below the token budget.

Quest#22. Right: a budget of 64 tokens loses nothing of 50, nor of 64.
"""

import pytest
import torch

import hsa_compile

from .helpers import (
    SPARSELY,
    Growing,
    Shape,
    Static,
    check,
    compile_hsa,
    decisions,
    run_growing,
    run_static,
    sdpa,
    weights,
)


@pytest.mark.parametrize(("algorithm", "page"), [("quest", 16), ("cuboid", 32), ("mean", 64)])
def test_every_page_is_kept(algorithm: str, page: int) -> None:
    policy = {"algorithm": algorithm, "budget": 64, "page_size": page, "sink": 4, "recent": 16}
    shape = Shape(length=50, steps=14)
    compiled = check(sdpa, shape, policy)
    assert decisions(compiled) == SPARSELY
    (layer,) = hsa_compile.stats(compiled).layers
    assert layer.steps == 14
    assert layer.tokens_read == layer.tokens_attendable == sum(range(51, 65))


@pytest.mark.parametrize("growing", [False, True])
def test_the_first_token_beyond(growing: bool) -> None:
    """65 tokens in five pages: now, and not before, a page is left out."""
    policy = {"budget": 64, "page_size": 16, "recent": 16}
    kind, run = (Growing, run_growing) if growing else (Static, run_static)
    shape = Shape(length=62, steps=4)
    compiled = compile_hsa(kind(sdpa), policy)
    difference = (run(compiled, shape) - run(kind(sdpa), shape)).abs().amax((1, 2, 3))
    assert (difference[:2] < 1e-5).all() and (difference[2:] > 1e-4).all()


@pytest.mark.parametrize("padding", [5, 16, 30])
def test_padded_rows_within_the_budget(padding: int) -> None:
    """What counts is what a row can attend: 60 tokens, wherever they begin, and however many pages they touch."""

    def attend(q, keys, values, mask):
        begin = torch.tensor([padding, 62])[:, None, None, None]
        return sdpa(q, keys, values, mask & (torch.arange(keys.shape[2]) >= begin))

    shape = Shape(length=padding + 59, steps=4)
    compiled = check(attend, shape, {"budget": 64, "page_size": 16, "recent": 16})
    assert decisions(compiled) == SPARSELY


@pytest.mark.parametrize("budget", [1.0, 0.999])
def test_a_budget_of_everything(budget: float) -> None:
    """As a fraction; a growing cache is always rewritten."""
    policy = {"budget": budget, "page_size": 16}
    compiled = check(sdpa, Shape(length=50, steps=5), policy, growing=True)
    (layer,) = hsa_compile.stats(compiled).layers
    assert layer.tokens_read == layer.tokens_attendable


def test_weights_reach_every_token() -> None:
    compiled = compile_hsa(Static(sdpa), {"budget": 64, "page_size": 16})
    shares = weights(compiled, Shape(length=50, steps=1))
    assert (shares[..., :51] > 0).all() and (shares[..., 51:] == 0).all()
