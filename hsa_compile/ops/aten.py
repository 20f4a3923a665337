"""The ops in ATen: what runs without Inductor, and what Inductor compiles to C++ on a CPU.

These are decompositions: pure tensor expressions with static output shapes, in which nothing but the summary and the
packed mask is read in full. The specifications beside the schemas are what they are tested against.

How an expression is spelled decides what Inductor makes of it on a CPU:

- A handful of query rows against many rows of memory is a product and a sum, not a matrix product: the loop reads
  each row once for the whole group and takes a gather into the same pass, so selected keys are never copied. BLAS is
  slow at such thin products and needs its operands in memory.
- Values are the other way round, reduced over tokens: there one copy of the selected ones and BLAS is the faster way.
- What several loops read and is not worth computing in each of them goes through ``materialise``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.types import IntLikeType

from .. import algorithms, compat
from .diff import MISSING
from .page_mask import unpack
from .refine import group_rank
from .select import FRACTION_UNIT
from .summarize import expected, kv_head_words

# Group sizes up to which Inductor's loop beats BLAS on ``dot``.
_LOOP_GROUP = 8
_NEVER = torch.iinfo(torch.int64).min
_INDEX_BITS = 32


def materialise(x: Tensor) -> Tensor:
    """``x`` itself; Inductor computes it once into a buffer instead of anew in every loop that reads it."""
    return x.as_strided(x.shape, x.stride())


def popcount(words: Tensor) -> Tensor:
    """Set bits of each int64 word, by halving (an arithmetic shift leaves the sign; the masks clear it)."""
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    # Each step names its operand twice, and Inductor would write all of it twice.
    words = materialise(((words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F).contiguous())
    words = words + (words >> 8)
    words = words + (words >> 16)
    return (words + (words >> 32)) & 0x7F


def _exponent(words: Tensor) -> Tensor:
    """``floor(log2)`` of int64 words in which no two neighbouring bits are set: none of them rounds up to a power."""
    return ((words.double().view(torch.int64) >> 52) & 0x7FF) - 1023


def lowest_bit(words: Tensor) -> Tensor:
    """Place of the lowest set bit of each int64 word; of no meaning where none is."""
    return _exponent(words & -words)


def highest_bit(words: Tensor) -> Tensor:
    """Place of the highest set bit of each int64 word; of no meaning where none is."""
    return torch.where(words < 0, 63, _exponent(words & ~(words >> 1)))


def _is_traced(x: Tensor) -> bool:
    """Whether this is Inductor looking at the expression, not a computation."""
    return compat.is_fake(x)


def work_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def dot(query: Tensor, rows: Tensor, loop: bool = False) -> Tensor:
    """``query [B, H, G, R]`` times ``rows [B, H, *N, R]`` -> ``[B, H, G, *N]``, in the precision of the query.

    With ``loop`` Inductor is not to have the rows in memory, however many queries there are.
    """
    rows = rows.to(query.dtype)
    # Only under Inductor is the product never in memory. A GPU makes small ones anew faster than it copies rows.
    loop = loop or query.shape[2] <= _LOOP_GROUP or rows.device.type != "cpu"
    if not (_is_traced(rows) and loop):
        return torch.matmul(query, rows.flatten(2, -2).mT).unflatten(-1, rows.shape[2:-1])
    for _ in range(rows.dim() - 3):
        query = query.unsqueeze(2)
    return (rows.unsqueeze(-2) * query).sum(-1).movedim(-1, 2)


def by_group(x: Tensor, kv_heads: int) -> Tensor:
    """Heads of ``x [Bm, Hm, ...]`` by KV head: ``[Bm, Hkv, G, ...]``, or ``[Bm, 1, 1, ...]`` where Hm is 1."""
    if x.shape[1] == 1:
        return x.unsqueeze(2)
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def top_ranked(rank: Tensor, present: Tensor, count: IntLikeType) -> tuple[Tensor, Tensor]:
    """The first ``count`` present ones by rank, ties to the lower index, and which are valid: ``[B, H, count]``."""
    index = torch.arange(rank.shape[-1], device=rank.device)
    if rank.dtype == torch.float64:
        order = torch.sort(
            rank.masked_fill(~present, -math.inf), dim=-1, descending=True, stable=True
        )
        pages = order.indices[..., :count]
        return pages, present.expand_as(rank).gather(-1, pages)
    # One integer orders by rank, then by index: topk is many times faster than a stable sort, and has no tie rule.
    word = torch.where(rank == 0, 0.0, rank).view(torch.int32)
    word = (word ^ ((word >> 31) & 0x7FFFFFFF)).long()
    # Minus the index, not a constant minus it: Inductor has indices in 32 bits.
    key = torch.where(present, (word << _INDEX_BITS) - index, _NEVER)
    best = torch.topk(key, count, dim=-1).values  # type: ignore[arg-type]
    pages = -best & (2**_INDEX_BITS - 1)
    return torch.where(best != _NEVER, pages, 0), best != _NEVER


def _ascending(order: Tensor, kept: Tensor, slots: IntLikeType, pages: IntLikeType) -> Tensor:
    """The kept pages of ``order``, at most ``slots``, ascending and padded with -1 to that many, int32."""
    ids = torch.sort(torch.where(kept, order, pages), -1).values
    ids = torch.where(ids < pages, ids, -1).to(torch.int32)
    if compat.statically_known_true(slots <= pages):
        return ids[..., :slots]
    return F.pad(ids, (0, slots - ids.shape[-1]), value=-1)  # type: ignore[list-item]


def page_ranks(
    q: Tensor,
    summary: Tensor,
    bits: Tensor,
    scale: float,
    algorithm: str,
    group_reduce: str,
    bias: Tensor | None,
) -> Tensor:
    """Each KV head's score of each page (see ``hsa_compile.ops.select``): ``[B, Hkv, P]``, fp32 or fp64."""
    batch, kv_heads, pages = summary.shape[:3]
    work = work_dtype(q)
    if algorithms.get(algorithm).parts == 0:
        return torch.arange(pages, device=q.device).to(work).expand(batch, kv_heads, pages)
    query = algorithms.get(algorithm).expand_query(q[:, :, 0].to(work)).unflatten(1, (kv_heads, -1))
    if group_reduce == "softmax_mean" or bias is not None:
        query = query * scale
    scores = dot(materialise(query), summary)
    if bias is not None:
        scores = scores + by_group(bias, kv_heads).to(work)
    scores = materialise(torch.where(by_group(bits, kv_heads) != 0, scores, -math.inf).contiguous())
    return group_rank(scores, group_reduce)


def summarize(
    keys: Tensor,
    bits: Tensor,
    position: Tensor,
    summary: Tensor,
    covered: Tensor,
    algorithm: str,
    page_size: int,
    tail: Tensor | None = None,
    written: int = 1,
    signs: Tensor | None = None,
) -> object:
    """``hsa::summarize`` for Inductor on a CPU: the page that is written into, in every step, and the bookkeeping.

    Which other pages are stale depends on data; ``hsa::store_summary`` sees to them and mostly finds none.
    With a tail the op stays whole: it is for caches that a GPU reads from the host. So it does with signs, and where
    the step writes another number of tokens than one: how many pages these are in depends on data, too.
    """
    if (
        tail is not None
        or signs is not None
        or written != 1
        or keys.device.type != "cpu"
        or position.dim() != 1
        or position.shape[0] != 1
    ):
        return NotImplemented
    tokens = keys.shape[2]
    words = kv_head_words(bits, keys.shape[1])
    page = position // page_size
    # Compared without a dimension: one of size 1 would guard on whether there is one page only.
    elsewhere = torch.arange(bits.shape[-1], device=keys.device) != page.squeeze(0)
    # One number a row, not computed anew for each page.
    found, left = (materialise(expected(keys, at).contiguous()) for at in (position, position + 1))
    stale = covered[..., 1] != found.unsqueeze(-1)
    stale = stale | (covered[..., 0] != words)
    others = (stale & elsewhere).any()
    at = (page * page_size + torch.arange(page_size, device=keys.device)).clamp(max=tokens - 1)
    word = words.index_select(-1, page)
    present = unpack(word, page_size).squeeze(-2).unsqueeze(-1)
    page_keys = torch.where(present, keys.index_select(2, at), 0)
    page_keys = page_keys.to(torch.promote_types(keys.dtype, torch.float32))
    fresh = torch.where(word == 0, 0, algorithms.get(algorithm).summarize(page_keys, present))
    fresh = fresh.to(summary.dtype)
    torch.ops.hsa.store_summary(
        keys, bits, position, fresh, others, left, summary, covered, algorithm, page_size
    )
    return None


@dataclass(frozen=True)
class Rows:
    """What the budget says of each row and KV head, before any score: see ``hsa_compile.ops.select``.

    present, always and in_page (tokens) are ``[Bm, 1 or Hkv, P]``, length ``[Bm, 1 or Hkv]``, within and bought (pages)
    ``[Bm, 1 or Hkv, 1]``.
    """

    present: Tensor
    always: Tensor
    in_page: Tensor
    length: Tensor
    within: Tensor
    bought: Tensor | IntLikeType


def rows_of_budget(
    union: Tensor,
    page_size: int,
    budget_pages: IntLikeType,
    fraction: int,
    sink: int,
    recent: int,
    head_pages: Sequence[int] = (),
) -> Rows:
    """``union [Bm, 1 or Hkv, P]`` are the words of each KV head."""
    pages = union.shape[-1]
    present = union != 0
    begin = torch.arange(pages, device=union.device) * page_size
    # Inductor unrolls reductions over few pages: their operands are not to be computed in each copy.
    in_page = materialise(popcount(union).contiguous())
    lowest = materialise((begin + lowest_bit(union)).contiguous())
    highest = materialise((begin + highest_bit(union)).contiguous())
    length = in_page.sum(-1)
    first = torch.where(present, lowest, pages * page_size).amin(-1, keepdim=True)
    last = torch.where(present, highest, -1).amax(-1, keepdim=True)
    always = present & ((lowest < first + sink) | (highest > last - max(recent, 1)))
    bought: Tensor | IntLikeType = budget_pages
    if head_pages:
        head = torch.arange(len(head_pages), device=union.device).unsqueeze(-1)
        bought = torch.zeros_like(head)
        for at, count in enumerate(head_pages):
            bought = torch.where(head == at, count, bought)
    if fraction:
        bought = (-(-(fraction * length) // (page_size * FRACTION_UNIT))).unsqueeze(-1)
    within = length.unsqueeze(-1) <= bought * page_size
    return Rows(present, always, in_page, length, within, bought)


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
    more: int = 0,
    bias: Tensor | None = None,
    top_p: float = 1.0,
    floor: int = 0,
    head_pages: Sequence[int] = (),
    dense_below: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """See ``hsa_compile.ops.select``."""
    batch, kv_heads, pages = summary.shape[:3]
    union = kv_head_words(bits, kv_heads)
    row = rows_of_budget(union, page_size, budget_pages, fraction, sink, recent, head_pages)
    present, always, within, bought = row.present, row.always, row.within, row.bought
    in_page, length = row.in_page, row.length
    always_count = always.sum(-1, keepdim=True)
    rank = page_ranks(q, summary, bits, scale, algorithm, group_reduce, bias)
    # Where the cache is shorter than the budget, its length bounds the work, and padding makes up the shape.
    count = torch.sym_min(slots + more, pages)
    order, valid = top_ranked(torch.where(always, math.inf, rank), present, count)
    bought = within + bought
    if top_p < 1 or dense_below:
        mass = torch.where(present, rank, -math.inf).exp()
        everything = mass.sum(-1, keepdim=True)
        mass = torch.where(valid, mass.expand(batch, kv_heads, pages).gather(-1, order), 0)
    if top_p < 1:
        short = mass.cumsum(-1) < top_p * everything
        needed = (short.sum(-1, keepdim=True) + 1).clamp(min=floor)
        bought = torch.where(within, bought, torch.minimum(needed, bought))
    wanted = torch.maximum(always_count, bought)
    place = torch.arange(count, device=q.device)
    if more:
        wanted = wanted.clamp(max=slots)
    kept = valid & (place < wanted)
    if dense_below:
        held = torch.where(kept, mass, 0).sum(-1, keepdim=True)
        fits = present.sum(-1, keepdim=True) <= slots
        wanted = wanted + count * ((held < dense_below * everything) & fits)
        kept = valid & (place < wanted)
    in_page = in_page.expand(batch, kv_heads, pages).gather(-1, order)
    counts = torch.stack(
        (torch.where(kept, in_page, 0).sum(-1), length.expand(batch, kv_heads)), -1
    )
    ids = _ascending(order, kept, slots, pages)
    if more:
        missed = valid & (place >= wanted) & (place < wanted + more)
        ids = torch.cat((ids, _ascending(order, missed, more, pages)), -1)
    return ids, counts


class Chosen:
    """Selected pages ``ids [B, Hkv, K]`` of a cache of ``tokens`` in ``pages``: their tokens, and which are attended.

    ``at [B, Hkv, K, page_size]`` are the tokens' places, within the cache also where there is none; ``rows`` index with
    them. No more pages are kept than the cache has.
    """

    def __init__(
        self, ids: Tensor, page_size: int, pages: IntLikeType, tokens: IntLikeType
    ) -> None:
        self.page_size, self.pages, self.tokens = page_size, pages, tokens
        self.short = not compat.statically_known_true(ids.shape[-1] <= pages)
        self.count = torch.sym_min(ids.shape[-1], pages) if self.short else ids.shape[-1]
        self.ids = self.cut(ids)
        self.page = materialise(self.ids.clamp(min=0).long())
        self.offsets = torch.arange(page_size, device=ids.device)
        self.at = (self.page.unsqueeze(-1) * page_size + self.offsets).clamp(max=tokens - 1)
        batch, kv_heads = ids.shape[:2]
        b = torch.arange(batch, device=ids.device).view(-1, 1, 1, 1)
        self.rows = (b, torch.arange(kv_heads, device=ids.device).view(1, -1, 1, 1))

    def cut(self, named: Tensor) -> Tensor:
        """``named [B, Hkv, K]``, like the ids: padding comes last."""
        if not self.short:
            return named
        # A slice would guard on which number is smaller.
        return named.index_select(-1, torch.arange(self.count, device=named.device))

    def attended(self, words: Tensor) -> Tensor:
        """Words ``[Bm, H, G, P]`` at the pages, as booleans ``[B, Hkv, G, K, page_size]``."""
        (batch, kv_heads), group = self.ids.shape[:2], words.shape[2]
        words = words.expand(batch, kv_heads, group, self.pages)
        words = words.gather(-1, self.page.unsqueeze(2).expand(-1, -1, group, -1))
        words = torch.where(self.ids.unsqueeze(2) < 0, 0, words)
        return unpack(materialise(words), self.page_size)


def selected_logits(
    q: Tensor,
    rows: Tensor,
    chosen: Chosen,
    bits: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """Scores of attention of ``rows [B, Hkv, K, page_size, D]``, -inf where masked: ``[B, Hkv, G, K, page_size]``."""
    batch, kv_heads, selected = chosen.ids.shape
    work = work_dtype(q)
    query = q[:, :, 0].unflatten(1, (kv_heads, -1)).to(work) * scale
    logits = dot(materialise(query), rows)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        spread = by_group(bias[:, :, 0], kv_heads)
        group = spread.shape[2]
        spread = spread.expand(batch, kv_heads, group, chosen.tokens)
        at = chosen.at.flatten(2).unsqueeze(2).expand(-1, -1, group, -1)
        logits = logits + spread.gather(-1, at).unflatten(-1, (selected, chosen.page_size)).to(work)
    takes_part = chosen.attended(by_group(bits, kv_heads))
    return materialise(torch.where(takes_part, logits, -math.inf).contiguous())


def sparse_attention(
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
    """See ``hsa_compile.ops.sparse_attention``.

    Of ragged rows a CPU reads as many slots as the longest fills, which depends on data: the op stays whole.
    """
    if ragged and _is_traced(q):
        return NotImplemented
    if ragged and q.device.type == "cpu":
        filled = max(1, int((ids >= 0).sum(-1).amax()))
        ids = ids[..., :filled]
        slots = None if slots is None else slots[..., :filled]
    pages = bits.shape[-1]
    if slots is None:
        tokens = keys.shape[2]
    else:
        tokens = pages * page_size if bias is None else bias.shape[-1]
    chosen = Chosen(ids, page_size, pages, tokens)
    where: tuple[Tensor, ...] = (*chosen.rows, chosen.at)
    if slots is not None:
        held = chosen.cut(slots).clamp(min=0).long() & (MISSING - 1)
        where = (*chosen.rows, held.unsqueeze(-1), chosen.offsets)
    work = work_dtype(q)
    logits = selected_logits(q, keys[where], chosen, bits, bias, scale, softcap).flatten(-2)
    # An empty row has no maximum; the clamp makes its weights zero instead of nan.
    largest = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(work).min)
    weights = torch.exp(logits - largest)
    total = weights.sum(-1, keepdim=True)
    # Weights of zero do not silence what may be a nan.
    seen = chosen.attended(kv_head_words(bits, keys.shape[1]).unsqueeze(2)).squeeze(2)
    v = materialise(torch.where(seen.unsqueeze(-1), values[where], 0).to(work)).flatten(2, 3)
    out = torch.matmul(weights, v) / total.clamp(min=torch.finfo(work).tiny)
    lse = (largest + torch.log(total)).float().squeeze(-1)
    return out.to(q.dtype).flatten(1, 2).unsqueeze(2), lse.flatten(1, 2).unsqueeze(2)


# An op that writes its arguments is functionalised before decompositions are looked up; this is where it is asked for
# one of its own.
compat.decompose_when_functionalised(torch.ops.hsa.summarize.default, summarize)
