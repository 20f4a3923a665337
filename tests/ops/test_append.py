"""``hsa::append`` by hand, and a layer's step with a pool whose last slot holds the tail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import hsa_compile.ops
from hsa_compile.lowering import standalone
from hsa_compile.ops.append import append_reference
from hsa_compile.ops.diff import diff_reference
from hsa_compile.ops.fetch import fetch_reference

from .checks import HSA
from .interpreted import Check, child_process
from .tails import Ops, Request, check_decoding, check_nothing_is_read

assert hsa_compile.ops

EAGER = Ops(HSA.append, HSA.summarize, HSA.select, HSA.diff, HSA.fetch, HSA.sparse_attention)
REFERENCES = replace(EAGER, append=append_reference, diff=diff_reference, fetch=fetch_reference)
KERNELS = Ops(
    standalone.append,
    standalone.summarize,
    standalone.select,
    standalone.diff,
    standalone.fetch,
    standalone.sparse_attention,
)
REQUESTS = [
    Request(),
    Request(apart=True, batch=3),
    Request(growing=True, slots=9, algorithm="mean"),
    Request(growing=True, page=32, pages=7, slots=16, dtype=torch.bfloat16),
    Request(selected=1, slots=2, kv_heads=1, group=1, page=64, pages=4, algorithm="cuboid"),
    Request(selected=6, slots=24, masks=("causal", "ahead", "within", "full"), events=0.05),
    Request(masks=("causal",), events=0.02, slots=8, apart=True),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_decoding(request_: Request) -> None:
    check_decoding(EAGER, request_, steps=25)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_references(request_: Request) -> None:
    check_decoding(REFERENCES, request_, steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_long_decoding(request_: Request) -> None:
    check_decoding(EAGER, request_, steps=500)
    check_decoding(REFERENCES, request_, steps=100)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_the_tail_is_not_read_from_the_cache(request_: Request) -> None:
    check_nothing_is_read(EAGER, request_, steps=request_.page + 3)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Check]:
    pytest.importorskip("triton")
    with child_process() as run:
        yield run


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_kernels(interpreted: Check, request_: Request) -> None:
    interpreted(check_decoding, KERNELS, replace(request_, dim=16, value_dim=16), steps=8)
