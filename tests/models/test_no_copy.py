"""Compiled for a CPU, a step neither copies a cache nor walks over all of its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering

from hsa_compile import LayerPolicy

from . import plain, reference
from .helpers import compile_hsa
from .plain import KV_HEADS, SIZE, Decoder, Write

CAPACITY, LENGTH = 8192, 8000
PAGE = 16
POLICY = LayerPolicy(algorithm="quest", budget=256, page_size=PAGE)
COPIES = re.compile(r"aten\.(clone|copy_?|cat|index_put_?|index_copy_?|slice_scatter|scatter_?)\b")


@pytest.fixture(autouse=True)
def _capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "CAPACITY", CAPACITY)


@pytest.fixture
def written() -> Iterator[list[str]]:
    """The code that Inductor writes while the test runs, graph by graph."""
    codes: list[str] = []
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        mock.patch.object(GraphLowering, "save_output_code", codes.append),
    ):
        yield codes


def largest_buffer(code: str) -> int:
    """Elements of the largest tensor that the code makes; sizes must be numbers."""
    shapes = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", code)
    assert len(shapes) == code.count("empty_strided_cpu((")
    counts = [torch.Size(int(n) for n in shape.split(",") if n.strip()).numel() for shape in shapes]
    return max(counts)


def loop_bounds(code: str) -> list[str]:
    return re.findall(r"for\(int64_t \w+=[^;]*; *\w+<static_cast<int64_t>\((.*?)\); ", code)


def by_the_rule(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return reference.sparse_attention(q, keys, values, keep, SIZE**-0.5, POLICY)


def filled(model: Decoder) -> tuple[Decoder, Decoder]:
    """The model with random tokens in its caches, and a copy that follows the rule."""
    generator = torch.Generator().manual_seed(3)
    for block in model.blocks:
        for cache in (block.k_cache, block.v_cache):
            cache.normal_(generator=generator)
    model.at = LENGTH
    twin = plain.copy.deepcopy(model)
    twin.attend = by_the_rule
    return model, twin


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(
            write,
            id=write.name,
            marks=()
            if write.function is plain.index_copy_ and write.position != "buffer"
            else pytest.mark.slow,
        )
        for write in plain.WRITES
        if not write.replaces
    ],
)
def test_static_cache(write: Write, written: list[str]) -> None:
    torch.manual_seed(0)
    model, twin = filled(Decoder([plain.Block(write, 2)], "int").eval())
    cache = model.blocks[0].k_cache
    address = cache.data_ptr()
    compiled = compile_hsa(model, POLICY, run="inductor")
    with torch.no_grad():
        for at in range(LENGTH, LENGTH + 3):
            x = torch.randn(2, 1, plain.WIDTH)
            where = torch.tensor([at]) if write.position in ("tensor", "buffer") else at
            torch.testing.assert_close(compiled(x, where), twin(x, where), rtol=0, atol=1e-5)
    assert cache.data_ptr() == address
    assert torch.equal(cache, twin.blocks[0].k_cache)
    assert written
    for code in written:
        assert largest_buffer(code) < cache.numel() // 4
        assert not COPIES.search(code[code.index("def call") :])
        whole = [bound for bound in loop_bounds(code) if int(bound.rstrip("L")) >= CAPACITY]
        assert loop_bounds(code) and not whole


def test_growing_cache(written: list[str]) -> None:
    """Within its capacity the buffer stays where it is; loops run over pages, never over tokens."""
    torch.manual_seed(0)
    model = Decoder([plain.GrowingBlock(2)]).eval()
    block = model.blocks[0]
    block.keys, block.values = torch.randn(2, 2, KV_HEADS, LENGTH, SIZE).unbind()
    twin = plain.copy.deepcopy(model)
    twin.attend = by_the_rule
    compiled = compile_hsa(model, POLICY, run="inductor")
    addresses = set()
    with torch.no_grad():
        for at in range(LENGTH, LENGTH + 4):
            x, where = torch.randn(2, 1, plain.WIDTH), torch.tensor([at])
            torch.testing.assert_close(compiled(x, where), twin(x, where), rtol=0, atol=1e-5)
            addresses.add(block.keys.data_ptr())
    assert len(addresses) == 1
    assert torch.equal(block.keys, twin.blocks[0].keys)
    assert len(written) == 2
    symbolic = written[-1]
    assert not COPIES.search(symbolic[symbolic.index("def call") :])
    pages = re.compile(
        rf"c10::div_floor_integer\(static_cast<int64_t>\(ks\d\), static_cast<int64_t>\({PAGE}L\)\)"
    )
    assert any("ks" in bound for bound in loop_bounds(symbolic))
    assert not [bound for bound in loop_bounds(symbolic) if "ks" in pages.sub("", bound)]
    shapes = re.findall(r"empty_strided_cpu\(\(([^)]*(?:\([^)]*\)[^)]*)*)\), \(", symbolic)
    assert not [
        shape for shape in shapes if re.search(r"s\d+", re.sub(r"\(s\d+ // 16\)", "", shape))
    ]
