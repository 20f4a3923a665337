"""The ops in ATen: what runs without Inductor, and what Inductor compiles to C++ on a CPU.

These are decompositions: pure tensor expressions with static output shapes, in which nothing but the summary and the
packed mask is read in full. The specifications beside the schemas are what they are tested against.

How an expression is spelled decides what Inductor makes of it on a CPU:

- A handful of query rows against many rows of memory is a product and a sum, not a matrix product: the loop reads
  each row once for the whole group and takes a gather into the same pass, so selected keys are never copied. BLAS is
  slow at such thin products and needs its operands in memory.
- Values are the other way round, reduced over tokens: there one copy of the selected ones and BLAS is the faster way.
- What several loops read and is not worth computing in each of them goes through ``_materialise``.
"""

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.types import IntLikeType

from .. import algorithms
from .page_mask import unpack
from .select import FRACTION_UNIT
from .summarize import kv_head_words

# Group sizes up to which Inductor's loop beats BLAS on ``_dot``.
_LOOP_GROUP = 8
_NEVER = torch.iinfo(torch.int64).min
_INDEX_BITS = 32


def popcount(words: Tensor) -> Tensor:
    """Set bits of each int64 word, by halving (an arithmetic shift leaves the sign; the masks clear it)."""
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    words = words + (words >> 8)
    words = words + (words >> 16)
    return (words + (words >> 32)) & 0x7F


def _materialise(x: Tensor) -> Tensor:
    """``x`` itself; Inductor computes it once into a buffer instead of anew in every loop that reads it."""
    return x.as_strided(x.shape, x.stride())


def _work_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _dot(query: Tensor, rows: Tensor) -> Tensor:
    """``query [B, H, G, R]`` times ``rows [B, H, *N, R]`` -> ``[B, H, G, *N]``, in the precision of the query."""
    rows = rows.to(query.dtype)
    # Only under Inductor is the product never in memory.
    if isinstance(query, FakeTensor) and query.shape[2] <= _LOOP_GROUP:
        for _ in range(rows.dim() - 3):
            query = query.unsqueeze(2)
        return (rows.unsqueeze(-2) * query).sum(-1).movedim(-1, 2)
    return torch.matmul(query, rows.flatten(2, -2).mT).unflatten(-1, rows.shape[2:-1])


def _by_group(x: Tensor, kv_heads: int) -> Tensor:
    """Heads of ``x [Bm, Hm, ...]`` by KV head: ``[Bm, Hkv, G, ...]``, or ``[Bm, 1, 1, ...]`` where Hm is 1."""
    if x.shape[1] == 1:
        return x.unsqueeze(2)
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def _largest(rank: Tensor, present: Tensor, count: IntLikeType) -> tuple[Tensor, Tensor]:
    """The first ``count`` present pages by rank, ties to the lower index: pages and which are valid, ``[B, H, count]``."""
    pages = rank.shape[-1]
    index = torch.arange(pages, device=rank.device)
    if rank.dtype == torch.float64:
        order = torch.sort(rank.masked_fill(~present, -math.inf), dim=-1, descending=True, stable=True).indices
        order = order[..., :count]
        return order, present.expand_as(rank).gather(-1, order)
    # One integer orders by rank, then by index: topk is many times faster than a stable sort, and has no tie rule.
    word = torch.where(rank == 0, 0.0, rank).view(torch.int32)
    word = (word ^ ((word >> 31) & 0x7FFFFFFF)).long()
    key = torch.where(present, (word << _INDEX_BITS) + (2**_INDEX_BITS - 1 - index), _NEVER)
    if not statically_known_true(count <= pages):
        key = torch.nn.functional.pad(key, (0, torch.sym_max(count - pages, 0)), value=_NEVER)
    best = torch.topk(key, count, dim=-1).values
    return 2**_INDEX_BITS - 1 - (best & (2**_INDEX_BITS - 1)), best != _NEVER


def _rank(q: Tensor, summary: Tensor, bits: Tensor, scale: float, algorithm: str, group_reduce: str) -> Tensor:
    """A KV head's score of each page (see ``hsa_compile.ops.select``): ``[B, Hkv, P]`` in fp32, or fp64 for a double q."""
    kv_heads = summary.shape[1]
    work = _work_dtype(q)
    query = algorithms.get(algorithm).expand_query(q[:, :, 0].to(work)).unflatten(1, (kv_heads, -1))
    if group_reduce == "softmax_mean":
        query = query * scale
    scores = _dot(_materialise(query), summary)
    scores = _materialise(torch.where(_by_group(bits, kv_heads) != 0, scores, -math.inf).contiguous())
    if group_reduce == "max":
        return scores.amax(-2)
    # A head that attends nothing has no normaliser; the clamp keeps its -inf from becoming nan.
    normaliser = torch.logsumexp(scores, -1, keepdim=True).clamp(min=torch.finfo(work).min)
    return torch.logsumexp(scores - normaliser, -2)


def select(
    q: Tensor,
    summary: Tensor,
    bits: Tensor,
    scale: float,
    algorithm: str,
    page_size: int,
    slots: IntLikeType,
    budget_pages: IntLikeType,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
) -> tuple[Tensor, Tensor]:
    """See ``hsa_compile.ops.select``."""
    batch, kv_heads, pages = summary.shape[:3]
    union = kv_head_words(bits, kv_heads)
    present = union != 0
    index = torch.arange(pages, device=q.device)
    in_page = popcount(union)
    length = in_page.sum(-1)
    first_page = torch.where(present, index, pages).amin(-1, keepdim=True)
    last_page = torch.where(present, index, 0).amax(-1, keepdim=True)
    offsets = torch.arange(page_size, device=q.device)
    head = unpack(union.gather(-1, first_page.clamp(max=pages - 1)), page_size)
    tail = unpack(union.gather(-1, last_page), page_size)
    first = first_page * page_size + torch.where(head, offsets, page_size).amin(-1)
    last = last_page * page_size + torch.where(tail, offsets, 0).amax(-1)
    begin = index * page_size
    sinks = (begin < first + sink) & (begin + page_size > first)
    newest = (begin + page_size > last - recent + 1) | (index == last_page)
    always = present & ((sinks | newest) if sink else newest)
    always_count = always.sum(-1, keepdim=True)
    if fraction:
        share = -(-(fraction * length) // (page_size * FRACTION_UNIT))
        wanted = torch.maximum(always_count, share.unsqueeze(-1))
    else:
        wanted = always_count.clamp(min=budget_pages)

    rank = _rank(q, summary, bits, scale, algorithm, group_reduce)
    order, valid = _largest(torch.where(always, math.inf, rank), present, slots)
    kept = valid & (torch.arange(order.shape[-1], device=q.device) < wanted)
    in_page = in_page.expand(batch, kv_heads, pages).gather(-1, order.clamp(max=pages - 1))
    counts = torch.stack((torch.where(kept, in_page, 0).sum(-1), length.expand(batch, kv_heads)), -1)
    ids = torch.sort(torch.where(kept, order, pages), -1).values
    return torch.where(ids < pages, ids, -1).to(torch.int32), counts


def sparse_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    scale: float,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """See ``hsa_compile.ops.sparse_attention``."""
    batch, kv_heads, tokens = keys.shape[:3]
    slots, pages = ids.shape[-1], bits.shape[-1]
    work = _work_dtype(q)
    page = _materialise(ids.clamp(min=0).long())
    offsets = torch.arange(page_size, device=q.device)
    at = (page.unsqueeze(-1) * page_size + offsets).clamp(max=tokens - 1)
    b = torch.arange(batch, device=q.device).view(-1, 1, 1, 1)
    h = torch.arange(kv_heads, device=q.device).view(1, -1, 1, 1)

    def attended(words: Tensor) -> Tensor:
        """Words ``[Bm, H, G, P]`` at the selected pages, as booleans ``[B, Hkv, G, K, page_size]``."""
        group = words.shape[2]
        words = words.expand(batch, kv_heads, group, pages)
        words = words.gather(-1, page.unsqueeze(2).expand(batch, kv_heads, group, slots))
        return unpack(_materialise(torch.where(ids.unsqueeze(2) < 0, 0, words)), page_size)

    query = q[:, :, 0].unflatten(1, (kv_heads, -1)).to(work) * scale
    logits = _dot(_materialise(query), keys[b, h, at])
    if bias is not None:
        spread = _by_group(bias[:, :, 0], kv_heads)
        group = spread.shape[2]
        spread = spread.expand(batch, kv_heads, group, tokens)
        where = at.flatten(2).unsqueeze(2).expand(batch, kv_heads, group, slots * page_size)
        logits = logits + spread.gather(-1, where).unflatten(-1, (slots, page_size)).to(work)
    takes_part = attended(_by_group(bits, kv_heads))
    logits = _materialise(torch.where(takes_part, logits, -math.inf).contiguous()).flatten(-2)
    # An empty row has no maximum; the clamp makes its weights zero instead of nan.
    largest = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(work).min)
    weights = torch.exp(logits - largest)
    total = weights.sum(-1, keepdim=True)
    # Weights of zero do not silence what may be a nan.
    seen = attended(kv_head_words(bits, kv_heads).unsqueeze(2)).squeeze(2)
    v = torch.where(seen.unsqueeze(-1), values[b, h, at], 0).to(work)
    out = torch.matmul(weights, v.flatten(2, 3)) / total.clamp(min=torch.finfo(work).tiny)
    lse = (largest + torch.log(total)).float().squeeze(-1)
    return out.to(q.dtype).flatten(1, 2).unsqueeze(2), lse.flatten(1, 2).unsqueeze(2)
