"""A batch of one traces differently, so that its attention is not found.

pytorch PR#163252. Right: the same sites are rewritten for batches of 1, 2 and 3.
"""

import pytest

from .helpers import (
    SPARSE,
    SPARSELY,
    Growing,
    Shape,
    Static,
    by_hand,
    close,
    compile_hsa,
    decisions,
    rule,
    run_growing,
    run_static,
    sdpa,
    sites,
)


@pytest.mark.parametrize(
    ("kind", "attend", "heads"),
    [
        (Static, sdpa, (4, 2)),
        (Static, by_hand, (2, 2)),
        (Static, sdpa, (1, 1)),
        (Growing, by_hand, (4, 2)),
        (Growing, sdpa, (1, 1)),
    ],
)
def test_same_matches(kind: type, attend, heads: tuple[int, int]) -> None:
    run = run_static if kind is Static else run_growing
    found = []
    for batch in (1, 2, 3):
        shape = Shape(batch=batch, heads=heads[0], kv_heads=heads[1], steps=2)
        compiled = compile_hsa(kind(attend), SPARSE)
        close(run(compiled, shape), run(kind(rule(SPARSE)), shape))
        assert decisions(compiled) == SPARSELY
        found.append(len({(site.path, site.index) for site in sites(compiled)}))
    assert found == [1, 1, 1]


def test_one_model_all_batches() -> None:
    """The same compiled layer meets a batch of one first, then larger ones, then one again."""
    compiled = compile_hsa(Static(), SPARSE)
    for batch in (1, 2, 3, 1):
        shape = Shape(batch=batch, steps=2, seed=batch)
        close(run_static(compiled, shape), run_static(Static(rule(SPARSE)), shape))
    assert decisions(compiled) == SPARSELY
