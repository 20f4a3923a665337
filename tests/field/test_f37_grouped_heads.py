"""Scores of query heads do not fit a cache that has fewer heads.

H2O#32. Right: selection is per KV head, over the group of query heads that reads it, and matches the rule.
"""

import pytest
import torch

from .helpers import (
    SPARSE,
    SPARSELY,
    Growing,
    Shape,
    Static,
    check,
    check_sparse,
    close,
    compile_hsa,
    decisions,
    new_cache,
    rule,
    run_growing,
    sdpa,
    weights,
)

HEADS = [(4, 2), (4, 1), (4, 4), (8, 2)]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_matches_the_rule(heads: int, kv_heads: int) -> None:
    check_sparse(sdpa, Shape(heads=heads, kv_heads=kv_heads, steps=8))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "algorithm", "reduce"),
    [
        (4, 2, "quest", "max"),
        (4, 1, "cuboid", "softmax_mean"),
        (4, 1, "cuboid", "max"),
        (4, 2, "mean", "softmax_mean"),
    ],
)
def test_every_reduction(heads: int, kv_heads: int, algorithm: str, reduce: str) -> None:
    policy = {**SPARSE, "algorithm": algorithm, "group_reduce": reduce}
    shape = Shape(heads=heads, kv_heads=kv_heads)
    growing = reduce == "max"
    compiled = check(sdpa, shape, policy, rule(policy), growing)
    assert decisions(compiled) == SPARSELY


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS[:2])
def test_the_heads_of_a_group_read_the_same_pages(heads: int, kv_heads: int) -> None:
    shape = Shape(heads=heads, kv_heads=kv_heads, length=120, steps=4)
    shares = weights(compile_hsa(Static(sdpa), {**SPARSE, "sink": 0, "recent": 1}), shape)
    read = (shares > 0).unflatten(2, (kv_heads, heads // kv_heads))
    assert (read == read[:, :, :, :1]).all()
    assert (read.sum(-1) <= SPARSE["budget"]).all()
    if kv_heads > 1:
        assert (read[:, :, 0] != read[:, :, 1]).any(), "all KV heads chose alike"


def test_repeated_before_the_cache() -> None:
    """A cache that holds one head a query head, though the projections have fewer."""

    class Wide(Growing):
        def forward(self, q, k, v, keys, values):  # type: ignore[override]
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            return super().forward(q, k, v, keys, values)

    shape = Shape()
    cache = [t[:, :, :90].repeat_interleave(2, 1) for t in new_cache(shape)]
    compiled = compile_hsa(Wide(sdpa), SPARSE)
    with torch.no_grad():
        close(run_growing(compiled, shape, cache), run_growing(Wide(rule(SPARSE)), shape, cache))
    assert decisions(compiled) == SPARSELY
