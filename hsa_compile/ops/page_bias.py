"""``hsa::page_bias``: what an additive mask adds to the attention of a page, as one number.

    mask [Bm, Hm, 1, S] floating  ->  bias [Bm, Hm, P], P = ceil(S / page_size); fp32, fp64 for a double mask

It is the logarithm of the mean of ``e^mask`` over the tokens of the page that can be attended (``hsa::page_mask``):
what a page with equal scores would gain in the softmax (linear biases, Press et al. 2022; relative positions, Raffel et
al. 2020). Of a mask that only hides tokens it is 0 exactly. A page without an attendable token has 0.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ._library import define
from .page_mask import attendable

define("page_bias(Tensor mask, int page_size) -> Tensor")


def _work_dtype(mask: Tensor) -> torch.dtype:
    return torch.float64 if mask.dtype == torch.float64 else torch.float32


def page_bias(mask: Tensor, page_size: int) -> Tensor:
    tokens = mask.shape[-1]
    pages = (tokens + page_size - 1) // page_size
    present = attendable(mask)
    seen = torch.where(present, mask.to(_work_dtype(mask)), -math.inf).squeeze(-2)
    seen = F.pad(seen, (0, pages * page_size - tokens), value=-math.inf)
    seen = seen.unflatten(-1, (pages, page_size))
    count = (seen != -math.inf).sum(-1)
    largest = torch.where(count > 0, seen.amax(-1), 0)
    total = torch.exp(seen - largest.unsqueeze(-1)).sum(-1)
    return torch.where(count > 0, largest + torch.log(total / count), 0)


def fake(mask: Tensor, page_size: int) -> Tensor:
    pages = (mask.shape[-1] + page_size - 1) // page_size
    return mask.new_empty((mask.shape[0], mask.shape[1], pages), dtype=_work_dtype(mask))
