"""``hsa::strided_pages``: pages chosen by their position alone, the first, the last, and evenly spaced ones between.

    bits    [Bm, Hm, P] int64      packed mask (``hsa::page_mask``), Bm in {1, B}, Hm in {1, Hq}
    ->
    ids     [B, Hkv, K] int32      selected pages, ascending, padded with -1; K = slots
    counts  [B, Hkv, 2] int64      tokens selected, tokens attendable (over all query heads of the KV head)

The pages that are always in, how many the budget buys, and rows within it are those of ``hsa::select``. What is left of
the budget, r pages, is spread over the c others that have an attendable token: the middle one of each of r equal parts,
which is number j where ``round(j * r / c)`` grows behind it (halves round up). It depends on nothing but the mask, so
layers that share one share the pages. Strided attention (Child et al., 2019, arXiv:1904.10509), with pages for tokens.
"""

import torch
from torch import Tensor
from torch.types import IntLikeType

from ._library import define
from .aten import rows_of_budget
from .page_mask import unpack
from .select import FRACTION_UNIT
from .summarize import kv_head_words, per_kv_head

define(
    "strided_pages(Tensor bits, SymInt batch, int kv_heads, int page_size, SymInt slots, SymInt budget_pages, "
    "int fraction, int sink, int recent) -> (Tensor ids, Tensor counts)"
)


def strided_pages_reference(
    bits: Tensor,
    batch: int,
    kv_heads: int,
    page_size: int,
    slots: int,
    budget_pages: int,
    fraction: int,
    sink: int,
    recent: int,
) -> tuple[Tensor, Tensor]:
    """The specification, row by row."""
    seen = unpack(per_kv_head(bits, batch, kv_heads), page_size).flatten(-2)
    ids = torch.full((batch, kv_heads, slots), -1, dtype=torch.int32, device=bits.device)
    counts = torch.zeros((batch, kv_heads, 2), dtype=torch.int64, device=bits.device)
    for b in range(batch):
        for h in range(kv_heads):
            tokens = seen[b, h].nonzero().flatten().tolist()
            if not tokens:
                continue
            first, last = tokens[0], tokens[-1]
            always = {
                t // page_size for t in tokens if t < first + sink or t > last - recent or t == last
            }
            bought = -(-(fraction * len(tokens)) // (page_size * FRACTION_UNIT))
            bought = bought if fraction else budget_pages
            bought += len(tokens) <= bought * page_size
            others = sorted({t // page_size for t in tokens} - always)
            rest = min(max(bought - len(always), 0), len(others))
            # The middle of each of as many equal parts.
            spread = {
                others[-(-((2 * i + 1) * len(others)) // (2 * rest)) - 1] for i in range(rest)
            }
            chosen = sorted(always | spread)
            ids[b, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            counts[b, h, 0] = sum(t // page_size in chosen for t in tokens)
            counts[b, h, 1] = len(tokens)
    return ids, counts


def strided_pages(
    bits: Tensor,
    batch: IntLikeType,
    kv_heads: int,
    page_size: int,
    slots: IntLikeType,
    budget_pages: IntLikeType,
    fraction: int,
    sink: int,
    recent: int,
) -> tuple[Tensor, Tensor]:
    """Tensor expressions over pages, for every device."""
    union = kv_head_words(bits, kv_heads)
    row = rows_of_budget(union, page_size, budget_pages, fraction, sink, recent)
    others = row.present & ~row.always
    rest = (row.bought + row.within - row.always.sum(-1, keepdim=True)).clamp(min=0)
    count = others.sum(-1, keepdim=True)
    # `round(j * r / c)` behind a page and before it; of pages that are none of the others it is the same.
    behind = others.cumsum(-1)
    rounded = [(2 * j * rest + count) // (2 * count).clamp(min=1) for j in (behind, behind - 1)]
    kept = row.always | (others & (rounded[0] > rounded[1]))
    place = torch.where(kept, kept.cumsum(-1) - 1, slots)
    index = torch.arange(union.shape[-1], dtype=torch.int32, device=bits.device)
    ids = torch.full((*union.shape[:2], slots + 1), -1, dtype=torch.int32, device=bits.device)
    ids = ids.scatter(-1, place, index.expand_as(place))[..., :slots]
    counts = torch.stack((torch.where(kept, row.in_page, 0).sum(-1), row.length), -1)
    return (
        ids.expand(batch, kv_heads, slots).contiguous(),
        counts.expand(batch, kv_heads, 2).contiguous(),
    )


def fake(
    bits: Tensor,
    batch: IntLikeType,
    kv_heads: int,
    page_size: int,
    slots: IntLikeType,
    budget_pages: IntLikeType,
    fraction: int,
    sink: int,
    recent: int,
) -> tuple[Tensor, Tensor]:
    ids = bits.new_empty((batch, kv_heads, slots), dtype=torch.int32)
    return ids, bits.new_empty((batch, kv_heads, 2), dtype=torch.int64)
