"""A compiled step copies the whole cache, which is written in place in eager mode.

pytorch#131192, executorch#12003. Right: the cache stays at its address, and nothing that a step allocates comes
near its size.
"""

import pytest
import torch

from .helpers import (
    SPARSE,
    SPARSELY,
    Growing,
    Shape,
    Static,
    compile_hsa,
    decisions,
    new_cache,
    token,
)

SHAPE = Shape(length=8000, capacity=8192, batch=1)


def largest_allocation(step, *inputs: object) -> int:
    """Bytes of the largest single allocation on the CPU during one call."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step(*inputs)
    taken = [
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    assert taken, "nothing was recorded"
    return max(taken)


@pytest.mark.parametrize("run", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@torch.no_grad()
def test_static(run: str) -> None:
    keys, values = new_cache(SHAPE)
    addresses = keys.data_ptr(), values.data_ptr()
    compiled = compile_hsa(Static(), SPARSE, run)
    compiled(
        *token(SHAPE, 8000), keys, values, torch.tensor([8000])
    )  # compiles, and summarises all
    compiled(*token(SHAPE, 8001), keys, values, torch.tensor([8001]))
    at = torch.tensor([8002])
    taken = largest_allocation(compiled, *token(SHAPE, 8002), keys, values, at)
    assert (keys.data_ptr(), values.data_ptr()) == addresses
    assert taken <= keys.nbytes // 4
    assert decisions(compiled) == SPARSELY


@torch.no_grad()
def test_growing() -> None:
    """Concatenation is the copy: a growing cache does without it from the second step on."""
    compiled = compile_hsa(Growing(), SPARSE)
    cache = [t[:, :, : SHAPE.length].contiguous() for t in new_cache(SHAPE)]
    for at in range(8000, 8003):
        _, *cache = compiled(*token(SHAPE, at), *cache)
    addresses = [t.data_ptr() for t in cache]
    taken = largest_allocation(compiled, *token(SHAPE, 8003), *cache)
    _, *cache = compiled(*token(SHAPE, 8003), *cache)
    assert taken <= cache[0].nbytes // 4
    # The profiled step had appended to the same prefix, so this one was given a copy: see the step after it.
    addresses = [t.data_ptr() for t in cache]
    _, *cache = compiled(*token(SHAPE, 8004), *cache)
    assert [t.data_ptr() for t in cache] == addresses
    assert decisions(compiled) == SPARSELY
