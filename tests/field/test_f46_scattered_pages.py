"""Copying into rows of pinned memory that a list names writes nothing; strided copies crawl.

pytorch#137878, #111570. Right: pages are read from where they are, whatever the strides of the cache, and what
arrives is what was there.
"""

import pytest
import torch

from hsa_compile.ops.diff import LOADS

PAGE = 16
BATCH, HEADS, PAGES, SLOTS, SIZE = 2, 3, 40, 9, 24


@pytest.mark.parametrize("layout", ["straight", "tokens first", "a part of a larger tensor"])
@pytest.mark.parametrize("rest", [0, 5])
def test_pages_read_back(layout: str, rest: int) -> None:
    tokens = PAGES * PAGE - rest
    shape = (BATCH, HEADS, tokens, SIZE)
    keys, values = torch.randn(shape), torch.randn(shape)
    if layout == "tokens first":
        keys, values = (
            x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (keys, values)
        )
    if layout == "a part of a larger tensor":
        whole = torch.full((BATCH, 2, HEADS, tokens + 3, SIZE), torch.nan)
        whole[:, 0, :, 1 : tokens + 1], whole[:, 1, :, 1 : tokens + 1] = keys, values
        keys, values = whole[:, 0, :, 1 : tokens + 1], whole[:, 1, :, 1 : tokens + 1]
    loads = torch.full((BATCH, HEADS, SLOTS, 2), -1, dtype=torch.int32)
    counts = torch.zeros(BATCH, HEADS, 3, dtype=torch.int32)
    pools = [torch.full((BATCH, HEADS, SLOTS, PAGE, SIZE), -7.0) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for row in range(BATCH * HEADS):
        b, h = divmod(row, HEADS)
        count = row  # none for the first row
        counts[b, h, LOADS] = count
        loads[b, h, :count, 0] = torch.randperm(PAGES, generator=generator)[:count].int()
        loads[b, h, :count, 1] = torch.randperm(SLOTS, generator=generator)[:count].int()
    loads[-1, -1, 0, 0] = PAGES - 1  # the page that may not be full
    torch.ops.hsa.fetch(keys, values, loads, counts, *pools, PAGE)
    for pool, cache in zip(pools, (keys, values), strict=True):
        expected = torch.full_like(pool, -7.0)
        for b in range(BATCH):
            for h in range(HEADS):
                for page, slot in loads[b, h, : counts[b, h, LOADS]].tolist():
                    held = cache[b, h, page * PAGE : (page + 1) * PAGE]
                    expected[b, h, slot, : len(held)] = held
        assert torch.equal(pool, expected)
