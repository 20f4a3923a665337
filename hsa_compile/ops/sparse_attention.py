"""``hsa::sparse_attention``: softmax attention of one query token over selected pages.

    q      [B, Hq, 1, D]
    keys   [B, Hkv, S, D]       the full cache, any strides; query head h reads KV head h // (Hq // Hkv)
    values [B, Hkv, S, Dv]
    ids    [B, Hkv, K] int32    pages to attend, -1 is padding
    slots  [B, Hkv, K] int32    where they are in a pool (``hsa::diff``; marks are ignored), or None; with slots, keys
                                and values are pools, [B, Hkv, N, page_size, D] and [B, Hkv, N, page_size, Dv]
    bits   [Bm, Hm, P] int64    packed mask (``hsa::page_mask``), Bm in {1, B}, Hm in {1, Hq}
    bias   [Bm, Hm, 1, S]       additive mask, or None; read at the original position of each selected token
    ->
    out    [B, Hq, 1, Dv]       in the dtype of q
    lse    [B, Hq, 1]           fp32 log-sum-exp of the scaled, biased scores that took part; -inf for an empty row

``out = softmax(scale * q k^T + bias) v`` over the tokens of the selected pages whose bit is set, accumulated in fp32.
``ragged`` tells that rows may fill far fewer slots than there are: that changes how the work is shared, and no result.
With a ``softcap`` (0: none; Gemma 2) the scaled products s are capped before the bias: softcap * tanh(s / softcap).
A row without any such token gives zeros. Keys and values whose bit is not set never take part, whatever they hold.
Masks and biases are read at the pages themselves, wherever their tokens are kept: with a pool that holds the pages, the
op and the kernels give what they give without, bit by bit.
"""

import math

import torch
from torch import Tensor

from ._library import define
from .diff import MISSING
from .page_mask import unpack

define(
    "sparse_attention(Tensor q, Tensor keys, Tensor values, Tensor ids, Tensor? slots, Tensor bits, Tensor? bias, "
    "float scale, int page_size, float softcap=0.0, "
    "bool ragged=False) -> (Tensor out, Tensor lse)"
)


def _from_pool(pool: Tensor, ids: Tensor, slots: Tensor, pages: int) -> Tensor:
    """The cache ``[B, Hkv, pages * page_size, D]`` with the selected pages in place, and zeros elsewhere."""
    cache = pool.new_zeros((*ids.shape[:2], pages, *pool.shape[3:]))
    for b, h, k in (ids >= 0).nonzero().tolist():
        cache[b, h, ids[b, h, k]] = pool[b, h, slots[b, h, k] % MISSING]
    return cache.flatten(2, 3)


def sparse_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    slots: Tensor | None,
    bits: Tensor,
    bias: Tensor | None,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
    ragged: bool = False,
) -> tuple[Tensor, Tensor]:
    """The specification: dense attention under the mask "selected and attendable", in fp32 (fp64 for a double q)."""
    batch, query_heads = q.shape[:2]
    pages = bits.shape[-1]
    if slots is not None:
        tokens = pages * page_size if bias is None else bias.shape[-1]
        keys, values = (
            _from_pool(pool, ids, slots, pages)[:, :, :tokens] for pool in (keys, values)
        )
    kv_heads, tokens = keys.shape[1:3]
    group = query_heads // kv_heads
    work = q.dtype if q.dtype == torch.float64 else torch.float32
    chosen = torch.zeros((batch, kv_heads, pages + 1), dtype=torch.bool, device=q.device)
    chosen.scatter_(-1, torch.where(ids < 0, pages, ids).long(), True)
    chosen = chosen[..., :pages].repeat_interleave(group, 1).unsqueeze(-1)
    present = unpack(bits.expand(batch, query_heads, pages), page_size)
    takes_part = (chosen & present).flatten(-2)[..., :tokens].unsqueeze(-2)
    k = keys.to(work).repeat_interleave(group, 1)
    v = values.to(work).repeat_interleave(group, 1)
    logits = scale * (q.to(work) @ k.mT)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(work)
    logits = torch.where(takes_part, logits, -math.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.where(takes_part, torch.exp(logits - lse.unsqueeze(-1)), 0)
    seen = takes_part.unflatten(1, (kv_heads, group)).any(2).repeat_interleave(group, 1)
    out = weights @ torch.where(seen.mT, v, 0)
    return out.to(q.dtype), lse.float()


def fake(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    slots: Tensor | None,
    bits: Tensor,
    bias: Tensor | None,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
    ragged: bool = False,
) -> tuple[Tensor, Tensor]:
    batch, query_heads, length = q.shape[:3]
    out = q.new_empty((batch, query_heads, length, values.shape[-1]))
    return out, q.new_empty((batch, query_heads, length), dtype=torch.float32)
