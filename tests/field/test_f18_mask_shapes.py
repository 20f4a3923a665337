"""Grouped heads together with a mask of one row a head, or a row, fail to broadcast.

torch-xpu-ops#5090, mlx-lm PR#1322. Right: every shape that broadcasts gives what eager gives, with
``enable_gqa=True`` and with repeated heads.
"""

import pytest
import torch
from torch import Tensor

from .helpers import Shape, check_rewritten, check_sparse, repeat_kv, sdpa

B, H, KV = 3, 4, 2
SHAPE = Shape(batch=B)
MASKS = [(1, 1, 1), (B, 1, 1), (1, H, 1), (B, H, 1), (H, 1), (1, 1), (1,)]
"""All but the last dimension, which is the keys."""


def hidden(lead: tuple[int, ...], keys: Tensor) -> Tensor:
    """A mask of this shape that hides other tokens in every row; the first tokens are always seen."""
    tokens = torch.arange(keys.shape[2])
    rows = torch.arange(torch.Size(lead).numel()).view(*lead, 1)
    return (tokens % (rows + 3) != 1) | (tokens < 4)


def repeated(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, *(repeat_kv(t, q.shape[1] // t.shape[1]) for t in (keys, values)), mask)


def interleaved(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, *(t.repeat_interleave(q.shape[1] // KV, dim=1) for t in (keys, values)), mask)


def product(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    keys, values = (repeat_kv(t, q.shape[1] // t.shape[1]) for t in (keys, values))
    scores = torch.matmul(q, keys.transpose(2, 3)) / 4
    if mask.dtype == torch.bool:
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, -1), values)


CASES = [(lead, sdpa) for lead in MASKS]
CASES += [((B, 1, 1), product), ((B, H, 1), product), ((H, 1), product)]
CASES += [((B, H, 1), repeated), ((1, H, 1), interleaved)]


@pytest.mark.parametrize(("lead", "attend"), CASES)
def test_equals_eager(lead: tuple[int, ...], attend) -> None:
    """Boolean and additive, over one cache."""

    def layer(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        both = mask & hidden(lead, keys)
        if len(lead) < 3:
            both = both.view(*lead, -1) if len(lead) == 1 else both[0, : lead[0]]
        # The bias differs from token to token, so that a row that moved would show.
        bias = torch.arange(keys.shape[2]) % 5 * 0.3
        added = torch.where(both, bias, float("-inf"))
        return attend(q, keys, values, both) + attend(q, keys, values, added)

    check_rewritten(layer, SHAPE)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
def test_grouping(heads: tuple[int, int]) -> None:
    """Masks of one row a query head, over every kind of grouping."""
    shape = Shape(batch=2, heads=heads[0], kv_heads=heads[1])

    def layer(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return sdpa(q, keys, values, mask & hidden((1, heads[0], 1), keys))

    check_rewritten(layer, shape)


def test_sparse() -> None:
    check_sparse(repeated, SHAPE)
