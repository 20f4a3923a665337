"""``hsa::unread``: the packed mask without tokens that were read, for what takes part in their place.

bits   [Bm, Hm, P] int64      packed mask (``hsa::page_mask``), Bm in {1, B}, Hm in {1, Hq}
tokens [B, Hkv, N] int32      tokens that were read, different from one another; -1 is padding
->
words  [B, Hq, P] int64       what is left of the mask of each query head; Hq = heads
"""

import torch
from torch import Tensor

from ._library import define
from .aten import by_group
from .page_mask import unpack

define("unread(Tensor bits, Tensor tokens, int heads, int page_size) -> Tensor")


def unread_reference(bits: Tensor, tokens: Tensor, heads: int, page_size: int) -> Tensor:
    """The specification, token by token."""
    batch, kv_heads = tokens.shape[:2]
    words = bits.expand(batch, heads, -1).clone()
    for b in range(batch):
        for h in range(heads):
            for token in tokens[b, h * kv_heads // heads].tolist():
                page, at = divmod(token, page_size)
                if token >= 0 and unpack(words[b, h, page], page_size)[at]:
                    words[b, h, page] ^= (1 << at) - (1 << 64 if at == 63 else 0)
    return words


def unread(bits: Tensor, tokens: Tensor, heads: int, page_size: int) -> Tensor:
    """Tensor expressions, for every device."""
    batch, kv_heads = tokens.shape[:2]
    pages = bits.shape[-1]
    # What is padding marks a page behind the last.
    page = torch.where(tokens < 0, pages, tokens // page_size).long()
    one = torch.ones((), dtype=torch.int64, device=bits.device) << (tokens.long() % page_size)
    read = torch.zeros((batch, kv_heads, pages + 1), dtype=torch.int64, device=bits.device)
    read = read.scatter_add(-1, page, one)[..., :pages].unsqueeze(2)
    left = by_group(bits, kv_heads) & ~read
    return left.expand(batch, kv_heads, heads // kv_heads, pages).flatten(1, 2)


def fake(bits: Tensor, tokens: Tensor, heads: int, page_size: int) -> Tensor:
    return bits.new_empty((tokens.shape[0], heads, bits.shape[-1]))
