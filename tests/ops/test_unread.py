"""The mask without what was read, against the specification and by hand."""

from __future__ import annotations

import pytest
import torch

from hsa_compile.ops.unread import unread_reference
from tests.ops.checks import HSA, inductor


def test_by_hand() -> None:
    """Tokens 0, 5 and 63, and of the other KV head 64; a token that nobody could attend stays masked."""
    bits = torch.tensor([[[-1, 0b110]]])
    tokens = torch.tensor([[[0, 5, 63, -1], [64, 65, -1, -1]]], dtype=torch.int32)
    left = HSA.unread(bits, tokens, 4, 64)
    first = [(1 << 63) - 1 - 0b100001, 0b110]
    assert left.tolist() == [[first, first, [-1, 0b100], [-1, 0b100]]]


@pytest.mark.parametrize("page_size", [1, 8, 64])
@pytest.mark.parametrize("size", [(1, 1), (3, 1), (3, 6), (1, 6)])
def test_masks(size: tuple[int, int], page_size: int) -> None:
    torch.manual_seed(page_size)
    pages = 5
    words = torch.randint(-(2**63), 2**63 - 1, (*size, pages))
    bits = words if page_size == 64 else words & ((1 << page_size) - 1)
    tokens = torch.stack([torch.randperm(pages * page_size)[:4] for _ in range(6)])
    tokens = tokens.view(3, 2, 4).int()
    tokens[1, 0, 2:] = -1
    expected = unread_reference(bits, tokens, 6, page_size)
    assert torch.equal(HSA.unread(bits, tokens, 6, page_size), expected)
    compiled = torch.compile(HSA.unread.default, backend="eager", fullgraph=True)
    assert torch.equal(compiled(bits, tokens, 6, page_size), expected)


def test_inductor() -> None:
    bits = torch.full((1, 1, 4), -1)
    tokens = torch.arange(0, 64, 3, dtype=torch.int32).view(1, 1, -1)
    step = torch.compile(lambda *given: HSA.unread(*given, 2, 16), backend=inductor)
    got = step(bits & 0xFFFF, tokens)
    assert torch.equal(got, unread_reference(bits & 0xFFFF, tokens, 2, 16))
