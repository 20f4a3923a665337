"""Copies on another stream are not waited for, and memory that one still reads is handed out: rare, silent corruption.

vllm#45704, ROCm/pytorch#3194. Right: after rounds over several streams, one of them slow, everything is what it was.
"""

import random

import pytest
import torch

from hsa_compile.runtime.host_memory import HostPool, host_pool

from ..runtime.fake_driver import FakeDriver

KIB = 1 << 10


def test_memory_that_is_still_read_is_never_handed_out() -> None:
    """200 rounds; streams finish when they like, and until then nobody gets what they read."""
    driver, pick = FakeDriver(), random.Random(0)
    pool = HostPool(torch.device("cpu"), driver=driver)
    pool.used_on("side")
    reading: list[tuple[int, int]] = []
    reused = 0
    seen: set[int] = set()
    for _ in range(200):
        if pick.random() < 0.3:
            driver.busy.clear()
            reading.clear()
        block = pool.allocate(64 * KIB)
        spans = [(start, end) for start, end in reading if start < block.address + 64 * KIB]
        assert not any(block.address < end for _, end in spans)
        reused += block.address in seen
        seen.add(block.address)
        driver.busy.add("side")
        reading.append((block.address, block.address + 64 * KIB))
        del block
    assert reused > 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_rounds_with_a_slow_kernel() -> None:
    """Offload, change, restore: bit by bit what was offloaded, 200 times."""
    device = torch.device("cuda")
    side = torch.cuda.Stream()
    pool = host_pool(device)
    pool.used_on(side)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for i in range(200):
        value = torch.full((64 * KIB,), i, dtype=torch.int32, device=device)
        if i % 10 == 0:
            torch.cuda._sleep(20_000_000)
        value += 1
        held = pool.allocate(value.nbytes).tensor(tuple(value.shape), value.dtype)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            held.copy_(value, non_blocking=True)
        value.record_stream(side)
        del value
        torch.cuda.current_stream().wait_stream(side)
        wrong += (held.to(device, copy=True) != i + 1).sum()
        del held
    assert wrong.item() == 0
