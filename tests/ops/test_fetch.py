"""``hsa::fetch`` and ``hsa::prefetch`` against their specifications."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hsa_compile.ops  # noqa: F401

from .pools import LAYOUTS, CacheShape, check_fetch, make_caches, make_pools

HSA = torch.ops.hsa
BOTH = ((HSA.fetch, False), (HSA.prefetch, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(dtype: torch.dtype, layout: str) -> None:
    shape = CacheShape(dtype=dtype, layout=layout)
    for sizes in ((64, 64), (72, 72), (80, 80), (128, 128), (256, 256), (96, 64), (64, 128)):
        for op, ahead in BOTH:
            check_fetch(op, replace(shape, dim=sizes[0], value_dim=sizes[1]), ahead)


@pytest.mark.parametrize("page", [8, 16, 32, 64])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 640, 643])
@pytest.mark.parametrize("loads", [0, 1, None])
def test_lengths(page: int, tokens: int, loads: int | None) -> None:
    for op, ahead in BOTH:
        check_fetch(op, CacheShape(page=page, tokens=tokens, loads=loads, dim=16), ahead)


def test_many_rows() -> None:
    for op, ahead in BOTH:
        check_fetch(op, CacheShape(batch=70, kv_heads=8, dim=16, value_dim=16), ahead)


def test_opcheck() -> None:
    shape = CacheShape()
    loads = torch.tensor([[0, 3], [6, 1], [-1, -1]], dtype=torch.int32).expand(2, 2, 3, 2)
    counts = torch.tensor([1, 2, 0, 1, 0], dtype=torch.int32).expand(2, 2, 5)
    moved = loads.contiguous(), counts.contiguous()
    given = (*make_caches(shape), *moved, *make_pools(shape), shape.page)
    torch.library.opcheck(HSA.fetch.default, given)
    torch.library.opcheck(
        HSA.prefetch.default, given, test_utils=("test_schema", "test_faketensor")
    )
    token, mark = HSA.prefetch(*given), torch.zeros(2)
    torch.library.opcheck(HSA.join_prefetch.default, ([token, *moved], mark))
