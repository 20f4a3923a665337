"""``hsa::select_tokens``: which tokens each KV head attends in this step, by an index of one bit a channel.

    q       [B, Hq, 1, D]
    summary [B, Hkv, P, 2 * D]       cuboids (``hsa::summarize``): the centre of a page's keys and their mean deviation
    signs   [B, Hkv, P, T * W] int64 on which side of the centre each key is, channel by channel; T = page_size tokens
                                     of W = ceil(D / 64) words, kept with the summary of the page
    bits    [Bm, Hm, P] int64        packed mask (``hsa::page_mask``), Bm in {1, B}, Hm in {1, Hq}
    bias    [Bm, Hm, 1, S]           additive mask, or None
    ->
    tokens  [B, Hkv, N] int32        selected tokens, in no order, padded with -1 behind; N = slots
    counts  [B, Hkv, 2] int64        tokens selected, tokens attendable (over all query heads of the KV head)

Channel d of a key is taken for ``centre_d + deviation_d`` where its bit is set, and for ``centre_d - deviation_d``
where it is not: where keys lie evenly about their centre, no two values are nearer to them in the mean square. In bf16
the bits are 1/32 of keys and values. The rule is that of ``hsa::refine`` over all pages, with these keys in the place
of the real ones.
"""

import torch
from torch import Tensor
from torch.types import IntLikeType

from ._library import define
from .page_mask import unpack
from .refine import refine_reference
from .signs import keys_by_signs

define(
    "select_tokens(Tensor q, Tensor summary, Tensor signs, Tensor bits, Tensor? bias, float scale, int page_size, "
    "SymInt slots, int budget, int fraction, int sink, int recent, str group_reduce, float softcap=0.0) "
    "-> (Tensor tokens, Tensor counts)"
)


def select_tokens_reference(
    q: Tensor,
    summary: Tensor,
    signs: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    scale: float,
    page_size: int,
    slots: int,
    budget: int,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The specification; in float64 where ``q`` is, else in float32."""
    batch, kv_heads, pages = summary.shape[:3]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    tokens = pages * page_size if bias is None else bias.shape[-1]
    keys = keys_by_signs(summary.to(work), signs, page_size)[:, :, :tokens]
    heads = bits.expand(batch, q.shape[1], pages).unflatten(1, (kv_heads, -1))
    seen = unpack(heads, page_size).any(2).sum((-2, -1)).unsqueeze(-1)
    ids = torch.arange(pages, dtype=torch.int32, device=q.device).expand(batch, kv_heads, pages)
    rule = (scale, page_size, slots, budget, fraction, sink, recent, group_reduce, softcap)
    return refine_reference(q, keys, ids, seen.expand(-1, -1, 2), bits, bias, *rule)


def fake(
    q: Tensor,
    summary: Tensor,
    signs: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    scale: float,
    page_size: int,
    slots: IntLikeType,
    budget: int,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    batch, kv_heads = summary.shape[:2]
    tokens = q.new_empty((batch, kv_heads, slots), dtype=torch.int32)
    return tokens, q.new_empty((batch, kv_heads, 2), dtype=torch.int64)
