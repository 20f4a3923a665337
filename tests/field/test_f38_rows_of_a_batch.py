"""Batches are not supported, or rows of a batch disturb each other.

x-attention#12, hip-attention PR#42. Right: each row of a sparse batch equals its own single run.
"""

import pytest
import torch
from torch import Tensor

from .helpers import (
    SPARSE,
    Growing,
    Shape,
    Static,
    close,
    compile_hsa,
    new_cache,
    rule,
    sdpa,
    token,
)

SHAPE = Shape(batch=3, steps=6)


def row(tensors, index: int):
    return tuple(t[index : index + 1].clone() for t in tensors)


def run(step, inputs_of, cache, growing: bool) -> Tensor:
    outs = []
    for at in range(SHAPE.length, SHAPE.length + SHAPE.steps):
        if growing:
            out, *cache = step(*inputs_of(at), *cache)
        else:
            out = step(*inputs_of(at), *cache, torch.tensor([at]))
        outs.append(out)
    return torch.stack(outs)


@pytest.mark.parametrize("growing", [False, True])
@torch.no_grad()
def test_each_row_equals_its_single_run(growing: bool) -> None:
    kind = Growing if growing else Static

    def cache():
        made = new_cache(SHAPE)
        return tuple(t[:, :, :90].contiguous() for t in made) if growing else made

    compiled = compile_hsa(kind(sdpa), SPARSE)
    together = run(compiled, lambda at: token(SHAPE, at), cache(), growing)
    close(together, run(kind(rule(SPARSE)), lambda at: token(SHAPE, at), cache(), growing))
    for i in range(3):
        alone = run(compiled, lambda at, i=i: row(token(SHAPE, at), i), row(cache(), i), growing)
        close(together[:, i : i + 1], alone)
    dense = run(kind(sdpa), lambda at: token(SHAPE, at), cache(), growing)
    assert (together - dense).abs().amax((0, 2, 3, 4)).min() > 1e-4, "a row left nothing out"


@torch.no_grad()
def test_rows_of_different_length() -> None:
    """Left padding: pages of a row begin where they begin, and padding shapes no summary."""
    padding = torch.tensor([0, 13, 37])

    def padded(begin: Tensor, attend=sdpa):
        def layer(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
            seen = torch.arange(keys.shape[2]) >= begin[:, None, None, None]
            return attend(q, keys, values, mask & seen)

        return Static(layer)

    cache = new_cache(SHAPE)
    for i, begin in enumerate(padding.tolist()):
        for held in cache:
            held[i, :, :begin] = 1e4
    copies = [t.clone() for t in cache]
    compiled = compile_hsa(padded(padding), SPARSE)
    together = run(compiled, lambda at: token(SHAPE, at), cache, False)
    for i in range(3):
        single = padded(padding[i : i + 1], rule(SPARSE))
        alone = run(single, lambda at, i=i: row(token(SHAPE, at), i), row(copies, i), False)
        close(together[:, i : i + 1], alone)
