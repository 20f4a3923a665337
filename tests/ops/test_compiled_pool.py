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


def early(q: Tensor, bits: Tensor, position: Tensor, *layer: Tensor) -> tuple[Tensor, ...]:
    """A layer whose pages are loaded ahead twice: by a guess before the step, and beside it for the next one."""
    keys, values, pool_keys, pool_values, summary, *state = layer
    rule = (0.25, "mean", PAGE, SELECTED, SELECTED, 0, 0, 1, "max")
    caches, pools = (keys, values), (pool_keys, pool_values)
    held, moved = HSA.prefetch_select(
        q.flip(-1), summary, bits, position, *caches, *state, *pools, *rule
    )
    keys.index_copy_(2, position, q[:, :2])
    HSA.join_prefetch([held], state[0], moved)
    ids, counts = HSA.select(q, summary, bits, *rule, 2)
    slots, loads, found = HSA.diff(ids, position, PAGE, *state, 2)
    HSA.fetch(*caches, loads, found, *pools, PAGE)
    held = HSA.prefetch(*caches, loads, found, *pools, PAGE)
    result = slots + 1, moved + found, counts * 2, pool_keys[:, :, 0, 0] + 1
    HSA.join_prefetch([held, loads, found], state[3])
    return result


@pytest.mark.slow
def test_pages_loaded_ahead_are_written_in_place() -> None:
    """Neither caches nor pools nor their records are copied, and one compile serves all steps."""
    torch._dynamo.utils.counters.clear()

    def model(q: Tensor, bits: Tensor, at: Tensor, args: list[list[Tensor]]) -> list[Tensor]:
        return [x for arg in args for x in early(q, bits, at, *arg)]

    def layer() -> list[Tensor]:
        summary = torch.randn(2, 2, POOL.pages, CACHE.dim)
        return [*caches(), *make_pools(CACHE), summary, *new_state(POOL).tensors()]

    def caches() -> list[Tensor]:
        return [x.float() for x in make_caches(CACHE)]

    args = [layer() for _ in range(2)]
    for arg in args:
        arg[2:4] = (x.float() for x in arg[2:4])
    want = [[x.clone() for x in arg] for arg in args]
    compiled = torch.compile(model, backend=inductor, dynamic=False, fullgraph=True)
    before = [x.data_ptr() for arg in args for x in arg]
    for number in range(8):
        at = torch.tensor([33 * PAGE + 10 + number])
        bits = torch.full((1, 1, POOL.pages), -1).masked_fill(torch.arange(POOL.pages) > 33, 0)
        given = torch.randn(2, 4, 1, CACHE.dim), bits, at
        if number:
            got = compiled(*given, args)
        else:
            got, (code,) = run_and_get_code(compiled, *given, args)
        torch.testing.assert_close(got, model(*given, want))
        torch.testing.assert_close(args, want, rtol=0, atol=0)
    assert [x.data_ptr() for arg in args for x in arg] == before
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    sizes = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", code)
    largest = max(
        torch.Size(int(n) for n in size.split(",") if n.strip()).numel() for size in sizes
    )
    # Scores of pages are the most; a pool is fifteen times that, a cache more.
    assert largest <= 2 * 4 * POOL.pages < args[0][2].numel() / 14
    body = re.sub(r"#.*", "", code[code.index("def call") :])
    assert not re.search(r"aten\.(clone|copy_?|cat|index_put|scatter)|copy_\(", body)
    calls = re.findall(r"^ +(?:\w+ = )?torch\.ops\.hsa\.(\w+)\.default\(", body, re.MULTILINE)
    order = ["prefetch_select", "join_prefetch", "diff", "fetch", "prefetch", "join_prefetch"]
    assert sorted(calls) == sorted(order * 2) and calls[0] == order[0] and calls[-1] == order[-1]
