"""Output collapses just past the budget, because the first tokens are the first to go.

mlx-lm#1443. Right: the pages of the first and of the recent tokens are always kept.
"""

import pytest
import torch

from .helpers import PAGE, SPARSE, Shape, Static, check, compile_hsa, rule, sdpa, weights

BUDGET = 48
POLICY = {**SPARSE, "budget": BUDGET}


@pytest.mark.parametrize("algorithm", ["quest", "cuboid", "mean"])
def test_always_kept(algorithm: str) -> None:
    """At every length from one below the budget to a page above it."""
    shape = Shape(length=BUDGET - 2, steps=PAGE + 2)
    compiled = compile_hsa(Static(sdpa), {**POLICY, "algorithm": algorithm})
    shares = weights(compiled, shape)
    for i, row in enumerate(shares):
        length = shape.length + i + 1
        read = row > 0
        assert read[..., :4].all(), f"sinks, at {length}"
        assert read[..., length - 16 : length].all(), f"recent tokens, at {length}"
        assert not read[..., length:].any()
        pages = read[..., : 5 * PAGE].unflatten(-1, (5, PAGE)).any(-1).sum(-1)
        assert (pages == min(3, -(-length // PAGE))).all(), f"pages, at {length}"


def test_however_low_their_score() -> None:
    """The first page points away from every query, and stays."""
    shape = Shape(length=100, steps=4)
    kept = {}

    def lowered(step):
        def call(q, k, v, keys, values, position):
            direction = torch.ones(16)
            keys[:, :, :PAGE] = -0.5 * direction
            return step(q + direction, k, v, keys, values, position)

        return call

    for sink in (0, 4):
        compiled = compile_hsa(Static(sdpa), {**POLICY, "sink": sink})
        kept[sink] = weights(lowered(compiled), shape)[..., :PAGE] > 0
    assert kept[4].all() and not kept[0].any()


@pytest.mark.parametrize("growing", [False, True])
def test_numbers_follow_the_rule(growing: bool) -> None:
    shape = Shape(length=BUDGET - 2, steps=PAGE + 2)
    check(sdpa, shape, POLICY, rule(POLICY), growing)


def test_kept_pages_exceed_the_budget() -> None:
    """A budget of one token beside sinks and recent tokens on five pages: these five, and no more."""
    policy = {**SPARSE, "budget": 1, "sink": 20, "recent": 40}
    shape = Shape(length=100, steps=12)
    check(sdpa, shape, policy, rule(policy))
    shares = weights(compile_hsa(Static(sdpa), policy), shape)
    assert (shares[..., :20] > 0).all() and (shares[..., 32:48] == 0).all()
