"""A cache made for a large batch is used with a smaller one, and rows of the large batch show through.

transformers PR#37394, PR#42467. Right: rows of the smaller batch are correct, whichever batch ran before; a cache that
cannot be used so says so, and is not written.
"""

import pytest
import torch
from torch import Tensor, nn

from .helpers import (
    SPARSE,
    SPARSELY,
    Shape,
    Static,
    close,
    compile_hsa,
    decisions,
    new_cache,
    rule,
    sdpa,
    token,
)


class Rows(nn.Module):
    """Uses the first rows of a cache, as many as there are queries."""

    def __init__(self, attend=sdpa) -> None:
        super().__init__()
        self.attend = attend
        self.one = nn.Parameter(torch.ones(()))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor
    ) -> Tensor:
        rows = q.shape[0]
        keys[:rows, :, position] = k
        values[:rows, :, position] = v
        mask = (torch.arange(keys.shape[2]) <= position)[None, None, None]
        return self.attend(q, keys[:rows], values[:rows], mask) * self.one


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_rows_of_each_batch(mode: str) -> None:
    """Batches 4, 2, 4, 1, 3 by turns, each step over the same cache at the next position."""
    with getattr(torch, mode)():
        shape = Shape(batch=4, poison=None)
        compiled, expected = compile_hsa(Rows(), SPARSE), Rows(rule(SPARSE))
        cache, twin = new_cache(shape), new_cache(shape)
        for turn, rows in enumerate((4, 4, 2, 2, 4, 1, 3, 4)):
            at = shape.length + turn
            inputs = [t[:rows].clone() for t in token(shape, at)]
            position = torch.tensor([at])
            got = compiled(*inputs, *cache, position)
            close(got, expected(*inputs, *twin, position))
            close(cache[0], twin[0])
        assert decisions(compiled) == SPARSELY


@torch.no_grad()
def test_second_request_of_a_smaller_batch() -> None:
    """The cache is reset and filled again, at the same positions, by fewer rows."""
    shape, fewer = Shape(batch=4), Shape(batch=2, seed=5)
    compiled, expected = compile_hsa(Rows(), SPARSE), Rows(rule(SPARSE))
    cache, twin = new_cache(shape), new_cache(shape)
    for used, count in ((shape, 2), (fewer, 3), (shape, 2)):
        for held, other, fresh in zip(cache, twin, new_cache(used)):
            held[: used.batch] = fresh
            other[: used.batch] = fresh
        for at in range(used.length, used.length + count):
            inputs = token(used, at)
            got = compiled(*inputs, *cache, torch.tensor([at]))
            close(got, expected(*inputs, *twin, torch.tensor([at])))


@torch.no_grad()
def test_a_cache_that_takes_whole_batches_only() -> None:
    """``index_copy_`` of two rows into four is an error in eager mode; it stays one, and nothing is written."""
    shape = Shape(batch=4)
    cache = new_cache(shape)
    compiled = compile_hsa(Static(), SPARSE)
    compiled(*token(shape, 90), *cache, torch.tensor([90]))
    before = [t.clone() for t in cache]
    inputs = [t[:2] for t in token(shape, 91)]
    with pytest.raises(RuntimeError, match="index_copy"):
        Static()(*inputs, *cache, torch.tensor([91]))
    with pytest.raises(Exception, match=r"index_copy|Attempting to broadcast"):
        compiled(*inputs, *cache, torch.tensor([91]))
    for held, was in zip(cache, before):
        close(held, was)
    want = Static(rule(SPARSE))(*token(shape, 91), *before, torch.tensor([91]))
    close(compiled(*token(shape, 91), *cache, torch.tensor([91])), want)
