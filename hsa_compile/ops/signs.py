"""Keys by one bit a channel: on which side of the centre of its page each is (``hsa_compile.ops.select_tokens``)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .page_mask import unpack

WORD = 64
"""Channels a word."""


def signs_width(page_size: int, head_dim: int) -> int:
    """Words of signs a page and KV head."""
    return page_size * -(-head_dim // WORD)


def signs_of(page: Tensor, present: Tensor, summary: Tensor) -> Tensor:
    """Signs ``[..., T * W]`` of ``page [..., T, D]`` about the centre that its ``summary [..., 2 * D]`` holds.

    Tokens that are not ``present [..., T]`` have none.
    """
    size = page.shape[-1]
    centre = summary[..., :size].to(torch.promote_types(summary.dtype, torch.float32))
    above = present.unsqueeze(-1) & (page.to(centre.dtype) > centre.unsqueeze(-2))
    above = F.pad(above, (0, -size % WORD)).unflatten(-1, (-1, WORD))
    place = torch.ones((), dtype=torch.int64, device=page.device) << torch.arange(
        WORD, device=page.device
    )
    return torch.where(above, place, 0).sum(-1).flatten(-2)


def keys_by_signs(summary: Tensor, signs: Tensor, page_size: int) -> Tensor:
    """The keys that signs stand for, ``[B, Hkv, P * T, D]``, in the dtype of the summary."""
    centre, deviation = (half.unsqueeze(3) for half in summary.chunk(2, -1))
    above = unpack(signs.unflatten(-1, (page_size, -1)), WORD).flatten(-2)[..., : centre.shape[-1]]
    return torch.where(above, centre + deviation, centre - deviation).flatten(2, 3)
