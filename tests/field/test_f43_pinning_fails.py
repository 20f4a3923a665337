"""Pinning fails under a limit on locked memory, in a container, or under WSL, and the run dies.

LMCache-Ascend#5, LMCache#1063, WSL#14078. Right: one warning, then smaller chunks or pageable memory; the same content.
(That a GPU computes the same from it is tested in ``tests/gpu/test_host_memory.py``.)
"""

import warnings

import pytest
import torch

from hsa_compile.runtime.host_memory import HostPool

from ..runtime.fake_driver import FakeDriver

MIB = 1 << 20


@pytest.mark.parametrize(
    "driver",
    [
        FakeDriver(largest=3 * MIB),
        FakeDriver(limit=8 * MIB),
        FakeDriver(limit=0),
        FakeDriver(limit=0, crosses=False),
    ],
    ids=["no large chunks", "a low limit", "nothing", "nothing, in one piece"],
)
def test_one_warning_and_the_same_content(driver: FakeDriver) -> None:
    pool = HostPool(torch.device("cpu"), driver=driver)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        blocks = [pool.allocate(12 * MIB) for _ in range(4)]
        values = [torch.randn(3, MIB) for _ in blocks]
        for block, value in zip(blocks, values, strict=True):
            block.tensor((3, MIB), torch.float32).copy_(value)
    assert len(caught) == 1 and caught[0].category is RuntimeWarning
    for block, value in zip(blocks, values, strict=True):
        assert torch.equal(block.tensor((3, MIB), torch.float32), value)
    assert pool.bytes().in_use == 48 * MIB
    assert pool.bytes().pinned == driver.pinned == sum(b.nbytes for b in blocks if b.pinned)
    del blocks, block
    pool.trim()
    assert not driver.registered and not driver.managed
