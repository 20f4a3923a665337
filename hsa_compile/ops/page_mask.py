"""``hsa::page_mask``: an attention mask packed to one 64-bit word a page.

The word is all that selection and attention need of a boolean mask, at an eighth of its bytes or less, and comparing
it with the word that a summary was built from shows whether the summary still describes its page.

    mask [Bm, Hm, 1, S] bool or floating  ->  bits [Bm, Hm, P] int64, P = ceil(S / page_size)

Bit ``t`` of page ``p`` is set when token ``p * page_size + t`` can be attended: where a boolean mask is true, or where
an additive mask is within ``MASKED_BELOW`` of its row's largest value. Softmax does not see a constant added to a
row, so this reads -inf, a dtype's minimum and -10,000 all as "masked", and leaves a row of equal values attendable,
as eager attention does.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ._library import define

MASKED_BELOW = 9000.0

define("page_mask(Tensor mask, int page_size) -> Tensor")


def attendable(mask: Tensor) -> Tensor:
    """The mask as booleans (see the module's rule), same shape."""
    if mask.dtype == torch.bool:
        return mask
    # A difference, for a dtype's minimum less the margin would be the minimum again.
    return mask - mask.amax(-1, keepdim=True) > -MASKED_BELOW


def page_mask(mask: Tensor, page_size: int) -> Tensor:
    """Pack ``mask [Bm, Hm, 1, S]`` to ``[Bm, Hm, ceil(S / page_size)]`` int64; ``page_size`` at most 64."""
    tokens = mask.shape[-1]
    pages = (tokens + page_size - 1) // page_size
    present = F.pad(attendable(mask).squeeze(-2), (0, pages * page_size - tokens))
    present = present.unflatten(-1, (pages, page_size))
    weights = torch.ones((), dtype=torch.int64, device=mask.device) << torch.arange(
        page_size, device=mask.device
    )
    return torch.where(present, weights, 0).sum(-1)


def unpack(bits: Tensor, page_size: int) -> Tensor:
    """Inverse of the packing: ``[..., P]`` int64 -> ``[..., P, page_size]`` bool."""
    # Not `>>`: its meta function cannot take a symbolic batch.
    shifted = torch.bitwise_right_shift(
        bits.unsqueeze(-1), torch.arange(page_size, device=bits.device)
    )
    return (shifted & 1).bool()


def fake(mask: Tensor, page_size: int) -> Tensor:
    pages = (mask.shape[-1] + page_size - 1) // page_size
    return mask.new_empty((mask.shape[0], mask.shape[1], pages), dtype=torch.int64)
