"""``hsa::select``: which pages each KV head attends in this step.

    q       [B, Hq, 1, D]
    summary [B, Hkv, P, R]         from ``hsa::summarize``
    bits    [Bm, Hm, P] int64      packed mask (``hsa::page_mask``), Bm in {1, B}, Hm in {1, Hq}
    bias    [Bm, Hm, P]            what an additive mask adds (``hsa::page_bias``), or None; fp32, fp64 for a double q
    ->
    ids     [B, Hkv, K + M] int32  selected pages, ascending, padded with -1; K = slots, M = more
    counts  [B, Hkv, 2] int64      tokens selected, tokens attendable (over all query heads of the KV head)

The rule. ``s_h(p)`` is query head h's page score (``hsa_compile.algorithms``) over the pages it can attend. Per KV
head the group is reduced to one number a page:

- ``softmax_mean``: the mean over the group of the softmax over pages of ``scale * s_h``, kept as a logarithm,
  ``logsumexp_h(scale * s_h(p) - logsumexp_p(scale * s_h))``: an fp32 softmax underflows where one page dominates and
  would leave the others tied;
- ``max``: the largest raw score in the group.

With a bias, ``scale * s_h(p) + bias_h(p)`` takes the place of ``scale * s_h``, and for ``max`` that of the raw score.
An algorithm that keeps nothing of a page (``streaming``) ranks later pages first.

Pages that hold one of the first ``sink`` attendable tokens, one of the last ``recent``, or the newest one are always
in. They count towards the number of pages, ``ceil(budget / page_size)``, and are all of them where they are more. The
rest go by score, ties to the lower index. A page without an attendable token is never selected. A budget given as a
fraction is taken of the attendable tokens of the row; it is passed in units of 1 / 65536 (0: ``budget_pages`` counts).
Where ``head_pages`` are given, one number for each KV head, these take the place of ``budget_pages``.

A row whose attendable tokens are no more than the pages of its budget hold may take one page more: tokens that begin
inside a page touch one page more than they fill. Nothing is then left out of it.

With ``top_p`` below 1 (Twilight, Lin et al., 2025, arXiv:2502.02770, with pages for tokens) a row that exceeds its
budget takes the smallest number of pages whose estimated share of the softmax reaches it: ``exp`` of the rank of
``softmax_mean``, summed over the pages that are always in and then by rank, relative to the sum over all pages. It
takes at least ``floor`` pages, and at most what its budget buys.

With ``dense_below`` above 0 a row whose pages, chosen by all of that, hold less than this share of the softmax, by the
same estimate, takes every page that it can attend; as long as there are slots for all of these.

The last ``more`` columns name the pages that just missed the selection, those that would be next by score: ascending
too, and padded with -1. They are not counted.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.types import IntLikeType

from .. import algorithms
from ._library import define
from .page_mask import unpack
from .summarize import per_kv_head

FRACTION_UNIT = 65536

define(
    "select(Tensor q, Tensor summary, Tensor bits, float scale, str algorithm, int page_size, SymInt slots, "
    "SymInt budget_pages, int fraction, int sink, int recent, str group_reduce, int more=0, Tensor? bias=None, "
    "float top_p=1.0, int floor=0, int[] head_pages=[], "
    "float dense_below=0.0) "
    "-> (Tensor ids, Tensor counts)"
)


def forced_pages(sink: int, recent: int, page_size: int) -> int:
    """The most pages that sinks, recent tokens and the newest token can touch: a lower bound for ``slots``."""
    first = 0 if sink == 0 else (sink - 1 + page_size - 1) // page_size + 1
    last = (max(recent, 1) - 1 + page_size - 1) // page_size + 1
    return first + last


def select_reference(
    q: Tensor,
    summary: Tensor,
    bits: Tensor,
    scale: float,
    algorithm: str,
    page_size: int,
    slots: int,
    budget_pages: int,
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
    """The specification, row by row; in float64 where ``q`` is, else in float32."""
    batch, query_heads = q.shape[:2]
    kv_heads, pages = summary.shape[1:3]
    group = query_heads // kv_heads
    work = q.dtype if q.dtype == torch.float64 else torch.float32
    query = (
        algorithms.get(algorithm).expand_query(q[:, :, 0].to(work)).unflatten(1, (kv_heads, group))
    )
    scores = torch.einsum("bhgr,bhpr->bhgp", query, summary.to(work))
    if bias is not None:
        added = bias.to(work).expand(batch, query_heads, pages).unflatten(1, (kv_heads, group))
        scores, scale = scale * scores + added, 1.0
    seen = (bits.expand(batch, query_heads, pages) != 0).unflatten(1, (kv_heads, group))
    if algorithms.get(algorithm).parts == 0:
        rank = torch.arange(pages, device=q.device).expand(batch, kv_heads, pages)
    elif group_reduce == "softmax_mean":
        logits = (scale * scores).masked_fill(~seen, -math.inf)
        normaliser = torch.logsumexp(logits, -1, keepdim=True)
        rank = torch.logsumexp(logits - normaliser.clamp(min=torch.finfo(work).min), -2)
    else:
        rank = scores.masked_fill(~seen, -math.inf).amax(-2)
    present = unpack(per_kv_head(bits, batch, kv_heads), page_size)
    ids = torch.full((batch, kv_heads, slots + more), -1, dtype=torch.int32, device=q.device)
    counts = torch.zeros((batch, kv_heads, 2), dtype=torch.int64, device=q.device)
    for b in range(batch):
        for h in range(kv_heads):
            tokens = present[b, h].flatten().nonzero().flatten().tolist()
            if not tokens:
                continue
            in_page: dict[int, int] = {}
            for token in tokens:
                in_page[token // page_size] = in_page.get(token // page_size, 0) + 1
            first, last = tokens[0], tokens[-1]
            always = {
                t // page_size for t in tokens if t < first + sink or t > last - recent or t == last
            }
            share = -(-(fraction * len(tokens)) // (page_size * FRACTION_UNIT))
            bought = share if fraction else head_pages[h] if head_pages else budget_pages
            by_score = sorted(in_page.keys() - always, key=lambda p: (-float(rank[b, h, p]), p))
            if len(tokens) <= bought * page_size:
                bought += 1
            elif top_p < 1:
                mass = rank[b, h].exp()[[*always, *by_score]].cumsum(0)
                reached = int((mass < top_p * mass[-1]).sum()) + 1
                bought = min(bought, max(reached, floor))
            wanted = min(slots, max(len(always), bought))
            cut = wanted - len(always)
            if dense_below and len(in_page) <= slots:
                mass = rank[b, h].exp()
                held = mass[[*always, *by_score[:cut]]].sum()
                if held < dense_below * mass[[*in_page]].sum():
                    cut = len(by_score)
            chosen, missed = sorted([*always, *by_score[:cut]]), sorted(by_score[cut : cut + more])
            ids[b, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            ids[b, h, slots : slots + len(missed)] = torch.tensor(missed, dtype=torch.int32)
            counts[b, h, 0] = sum(in_page[p] for p in chosen)
            counts[b, h, 1] = len(tokens)
    return ids, counts


def fake(
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
    batch, kv_heads = summary.shape[:2]
    ids = q.new_empty((batch, kv_heads, slots + more), dtype=torch.int32)
    return ids, q.new_empty((batch, kv_heads, 2), dtype=torch.int64)
