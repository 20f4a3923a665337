"""``diff`` and ``fetch`` in a graph through Inductor on a CPU: what they write is written in place."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from .checks import HSA, inductor
from .pools import CacheShape, PoolShape, PoolState, make_caches, make_pools, new_state, selections

SELECTED, SLOTS, PAGE = 4, 9, 16
CACHE = CacheShape(tokens=40 * PAGE, dim=16, value_dim=24, selected=SELECTED, slots=SLOTS)
POOL = PoolShape(selected=SELECTED, slots=SLOTS, pages=40)


def step(
    keys: Tensor,
    values: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    ids: Tensor,
    position: Tensor,
    *state: Tensor,
) -> tuple[Tensor, ...]:
    """Bring the selected pages into the pool, as one layer does; then read it."""
    slots, loads, counts = HSA.diff(ids, position, PAGE, *state)
    HSA.fetch(keys, values, loads, counts, pool_keys, pool_values, PAGE)
    return slots + 1, counts * 2, pool_keys[:, :, 0, 0] + 1


@pytest.mark.parametrize("layers", [1, 3])
def test_pools_are_written_in_place(layers: int) -> None:
    def model(ids: Tensor, position: Tensor, args: list[list[Tensor]]) -> list[Tensor]:
        return [x for arg in args for x in step(*arg[:4], ids, position, *arg[4:])]

    def layer() -> list[Tensor]:
        return [*make_caches(CACHE), *make_pools(CACHE), *new_state(POOL).tensors()]

    args = [layer() for _ in range(layers)]
    want = [[x.clone() for x in arg] for arg in args]
    compiled = torch.compile(model, backend=inductor, dynamic=False, fullgraph=True)
    before = [x.data_ptr() for arg in args for x in arg]
    for number, (ids, position) in enumerate(selections(POOL, 12)):
        if number:
            got = compiled(ids, position, args)
        else:
            got, (code,) = run_and_get_code(compiled, ids, position, args)
        torch.testing.assert_close(got, model(ids, position, want), rtol=0, atol=0)
        torch.testing.assert_close(args, want, rtol=0, atol=0)
    assert [x.data_ptr() for arg in args for x in arg] == before
    # Nothing is allocated but what the last line computes, and nothing is copied.
    sizes = set(re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", code))
    assert sizes <= {"2, 2, 4", "2, 2, 3", "2, 2, 16"}, sizes
    assert "copy_" not in re.sub(r"#.*", "", code)
    assert PoolState(*args[0][4:]).clock.eq(12).all()
