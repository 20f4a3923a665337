"""The templates of residency and copying under Triton's interpreter, against the specifications of the ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from hsa_compile import ops  # noqa: F401
from hsa_compile.lowering import options, standalone
from hsa_compile.lowering.options import Config

from .interpreted import Check, child_process
from .pools import LAYOUTS, CacheShape, PoolShape, check_diff, check_fetch

pytest.importorskip("triton")
pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Check]:
    with child_process() as run:
        yield run


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "shape",
    [
        PoolShape(selected=1, slots=2, pages=4),
        PoolShape(selected=1, slots=4, pages=3, batch=1),
        pytest.param(PoolShape(selected=6, slots=7), marks=SLOW),
        pytest.param(PoolShape(batch=3, kv_heads=1), marks=SLOW),
        pytest.param(
            PoolShape(selected=7, slots=28, pages=300, batch=3, kv_heads=1, page_major=True),
            marks=SLOW,
        ),
        pytest.param(PoolShape(selected=20, slots=33, pages=12, batch=1, kv_heads=3), marks=SLOW),
        pytest.param(
            PoolShape(selected=33, slots=34, pages=100, batch=1, page_major=True), marks=SLOW
        ),
        PoolShape(selected=96, slots=192, pages=2000, batch=1, kv_heads=1, page=64),
        pytest.param(PoolShape(selected=4, more=3, slots=8), marks=SLOW),
        pytest.param(PoolShape(selected=4, more=3, slots=8, early=True), marks=SLOW),
        pytest.param(PoolShape(selected=1, more=9, slots=12, pages=14, batch=1), marks=SLOW),
        PoolShape(selected=20, more=20, slots=60, pages=300, batch=1, kv_heads=2),
    ],
    ids=str,
)
def test_residency(interpreted: Check, shape: PoolShape) -> None:
    interpreted(check_diff, standalone.diff, shape, steps=80)
    unknown = partial(standalone.diff, known_ids=False)
    interpreted(check_diff, unknown, shape, steps=10, stale=0.5)


def check_every_copy(shape: CacheShape) -> None:
    for config in options.fetch_configs(
        options.dim_pad(max(shape.dim, shape.value_dim)) * shape.dtype.itemsize, shape.page
    ):
        check_fetch(partial(standalone.fetch, config=config), shape)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(t, marks=SLOW) for t in (torch.float32, torch.float16))],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_of_layouts(interpreted: Check, dtype: torch.dtype, layout: str) -> None:
    shape = CacheShape(dtype=dtype, layout=layout)
    sizes_of_heads = [(72, 72), (256, 256), (96, 64)]
    if dtype == torch.float32:
        sizes_of_heads += [(64, 64), (80, 80), (128, 128), (64, 128)]
    for sizes in sizes_of_heads:
        interpreted(check_fetch, standalone.fetch, replace(shape, dim=sizes[0], value_dim=sizes[1]))
    interpreted(check_every_copy, shape)


@pytest.mark.parametrize("page", [8, 32, *(pytest.param(n, marks=SLOW) for n in (16, 64))])
@pytest.mark.parametrize(
    "tokens", [1, 17, 64, 643, *(pytest.param(n, marks=SLOW) for n in (15, 16, 640))]
)
def test_copies_of_lengths(interpreted: Check, page: int, tokens: int) -> None:
    for loads in (0, 1, None):
        shape = CacheShape(page=page, tokens=tokens, loads=loads, dim=16)
        interpreted(check_fetch, standalone.fetch, shape)
        interpreted(check_ahead, shape)


def check_ahead(shape: CacheShape) -> None:
    check_fetch(partial(standalone.fetch, ahead=True), shape, ahead=True)


def check_rows(shape: CacheShape, rows_at_once: int) -> None:
    options.LOOP_BLOCK_ROWS = rows_at_once
    for config in (None, Config({"BLOCK_TOKENS": 4}, 1)):
        check_fetch(partial(standalone.fetch, config=config), shape)
    check_fetch(partial(standalone.fetch, known_rows=False), shape)
    check_ahead(shape)


@pytest.mark.parametrize(
    "rows_at_once", [16, *(pytest.param(rows, marks=SLOW) for rows in (32, 1024))]
)
def test_copies_of_many_rows(interpreted: Check, rows_at_once: int) -> None:
    """More parts than programs, and rows numbered in blocks."""
    shape = CacheShape(batch=11, kv_heads=3, dim=16, value_dim=16)
    interpreted(check_rows, shape, rows_at_once)
    interpreted(check_rows, replace(shape, loads=0), rows_at_once)
