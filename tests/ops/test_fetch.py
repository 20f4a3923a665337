"""``hsa::fetch`` against its specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hsa_compile.ops  # noqa: F401

from .pools import LAYOUTS, CacheShape, check_fetch, make_caches, make_pools

HSA = torch.ops.hsa


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(dtype: torch.dtype, layout: str) -> None:
    shape = CacheShape(dtype=dtype, layout=layout)
    for sizes in ((64, 64), (72, 72), (80, 80), (128, 128), (256, 256), (96, 64), (64, 128)):
        check_fetch(HSA.fetch, replace(shape, dim=sizes[0], value_dim=sizes[1]))


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 640, 643])
@pytest.mark.parametrize("loads", [0, 1, None])
def test_lengths(page: int, tokens: int, loads: int | None) -> None:
    check_fetch(HSA.fetch, CacheShape(page=page, tokens=tokens, loads=loads, dim=16))


def test_many_rows() -> None:
    check_fetch(HSA.fetch, CacheShape(batch=70, kv_heads=8, dim=16, value_dim=16))


def test_opcheck() -> None:
    shape = CacheShape()
    loads = torch.tensor([[0, 3], [6, 1], [-1, -1]], dtype=torch.int32).expand(2, 2, 3, 2)
    counts = torch.tensor([1, 2, 0], dtype=torch.int32).expand(2, 2, 3)
    torch.library.opcheck(
        HSA.fetch.default,
        (
            *make_caches(shape),
            loads.contiguous(),
            counts.contiguous(),
            *make_pools(shape),
            shape.page,
        ),
    )
