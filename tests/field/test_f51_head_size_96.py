"""A head size that is no power of two is read past its end.

pytorch#133321, PR#164931. Right: 72, 80 and 96 (and what is odd) equal eager mode.
"""

import pytest
import torch

from .helpers import (
    LOSSLESS,
    SPARSELY,
    Shape,
    Static,
    check_rewritten,
    check_sparse,
    compile_hsa,
    decisions,
    new_cache,
    sdpa,
    token,
)

SIZES = [72, 80, 96]


@pytest.mark.parametrize(("size", "growing"), [(72, False), (80, True), (96, False), (7, False)])
def test_lossless(size: int, growing: bool) -> None:
    check_rewritten(sdpa, Shape(size=size, value_size=size), growing)


def test_sparse() -> None:
    check_sparse(sdpa, Shape(size=96, value_size=96))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_on_a_gpu(size: int) -> None:
    """What lies beside a key in memory is nan: it must not be read into the tile."""
    shape = Shape(size=size, value_size=size)
    wide = [torch.full((2, 2, 128, size + 8), float("nan"), device="cuda") for _ in range(2)]
    cache = [held[..., :size] for held in wide]
    for held, made in zip(cache, new_cache(shape)):
        held.copy_(made)
    twin = [t.clone() for t in cache]
    compiled, layer = compile_hsa(Static().cuda(), LOSSLESS, "inductor"), Static().cuda()
    for at in range(90, 93):
        inputs, position = [t.cuda() for t in token(shape, at)], torch.tensor([at], device="cuda")
        got, want = compiled(*inputs, *cache, position), layer(*inputs, *twin, position)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert decisions(compiled) == SPARSELY
