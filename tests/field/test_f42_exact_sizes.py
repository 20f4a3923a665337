"""Pinned memory is rounded up to a power of two, which nearly doubles what the host needs.

pytorch#150517, #95823, vllm#56410. Right: what is pinned is what was asked for, to the page, and it is reported.
"""

import gc

import torch

from hsa_compile.runtime.host_block import HostBytes
from hsa_compile.runtime.host_memory import HostPool
from hsa_compile.runtime.host_os import PAGE

from ..runtime.fake_driver import FakeDriver

MIB = 1 << 20


def test_a_little_more_than_a_power_of_two() -> None:
    driver = FakeDriver()
    pool = HostPool(torch.device("cpu"), driver=driver)
    asked = 129 * MIB + MIB // 2
    block = pool.allocate(asked)
    assert asked <= driver.pinned < asked + PAGE
    assert pool.bytes() == HostBytes(in_use=driver.pinned, pinned=driver.pinned)
    del block
    gc.collect()
    pool.trim()
    assert driver.pinned == 0 and pool.bytes() == HostBytes()


def test_many_layers() -> None:
    """Keys and values of 24 layers, each just above a size that is rounded."""
    driver = FakeDriver()
    pool = HostPool(torch.device("cpu"), driver=driver)
    blocks = [pool.allocate(4 * MIB + PAGE) for _ in range(48)]
    assert pool.bytes().pinned == driver.pinned == 48 * (4 * MIB + PAGE)
    del blocks
    pool.trim()
    assert driver.pinned == 0
