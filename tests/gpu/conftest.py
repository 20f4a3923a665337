"""Fixtures of the tests that need a GPU."""

import gc
from collections.abc import Iterator

import pytest
import torch

import hsa_compile
from hsa_compile.runtime.host_memory import host_bytes, trim


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test, no pool and no host memory is held that was not before it."""
    torch._dynamo.reset()
    gc.collect()
    before = (hsa_compile.pool_bytes(), host_bytes().in_use)
    yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    assert (hsa_compile.pool_bytes(), host_bytes().in_use) == before
    trim()
