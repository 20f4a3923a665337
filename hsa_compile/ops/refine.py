"""``hsa::refine``: of the tokens of selected pages, those that each KV head attends in this step.

    q     [B, Hq, 1, D]
    keys  [B, Hkv, S, D]          the full cache, any strides
    ids   [B, Hkv, K] int32       selected pages (``hsa::select``), ascending, padded with -1
    seen  [B, Hkv, 2] int64       what ``select`` counted: its second number is the tokens that the row can attend
    bits  [Bm, Hm, P] int64       packed mask (``hsa::page_mask``), Bm in {1, B}, Hm in {1, Hq}
    bias  [Bm, Hm, 1, S]          additive mask, or None
    ->
    tokens [B, Hkv, N] int32      selected tokens, in no order, padded with -1 behind; N = slots
    counts [B, Hkv, 2] int64      tokens selected, tokens attendable (over all query heads of the KV head)

A page is as good as its best token, and the others take room that tokens of other pages deserve. So a selection of
more pages than the budget buys is followed by one of tokens, by their own keys (Quest's pages, and then the choice of
Twilight, Lin et al., 2025, arXiv:2502.02770).

The rule. ``s_h(t)`` is the score of attention itself, ``scale * q_h . k_t``, capped where there is a ``softcap`` and
biased, over the tokens of the selected pages that query head h can attend. Per KV head the group is reduced as it is
for pages:

- ``softmax_mean``: the mean over the group of the softmax over these tokens, as a logarithm,
  ``logsumexp_h(s_h(t) - logsumexp_t(s_h))``;
- ``max``: the largest score in the group.

The first ``sink`` attendable tokens, the last ``recent`` and the newest one are always in. They count towards the
budget, and are all of it where they are more. The rest go by score, ties to the lower index. A budget given as a
fraction is taken of the attendable tokens of the row, in units of 1 / 65536 (0: ``budget`` counts). ``select`` names
every page that holds one of the first or last tokens, and all pages of a row within its budget: of that row nothing is
left out.
"""

import math

import torch
from torch import Tensor
from torch.types import IntLikeType

from ._library import define
from .page_mask import unpack
from .select import FRACTION_UNIT

define(
    "refine(Tensor q, Tensor keys, Tensor ids, Tensor seen, Tensor bits, Tensor? bias, float scale, int page_size, "
    "SymInt slots, int budget, int fraction, int sink, int recent, str group_reduce, float softcap=0.0) "
    "-> (Tensor tokens, Tensor counts)"
)


def forced_tokens(sink: int, recent: int) -> int:
    """The most tokens that are always in: a lower bound for ``slots``."""
    return sink + max(recent, 1)


def best_tokens(
    rank: Tensor,
    present: Tensor,
    attendable: Tensor,
    slots: int,
    budget: int,
    fraction: int,
    sink: int,
    recent: int,
) -> tuple[Tensor, Tensor]:
    """The specification of the choice, row by row: tokens and counts.

    ``rank [B, Hkv, S]`` is how tokens compete, ``present [B, Hkv, S]`` which do, ``attendable [B, Hkv]`` how many the
    row has.
    """
    batch, kv_heads = rank.shape[:2]
    tokens = torch.full((batch, kv_heads, slots), -1, dtype=torch.int32, device=rank.device)
    counts = torch.zeros((batch, kv_heads, 2), dtype=torch.int64, device=rank.device)
    counts[..., 1] = attendable
    for b in range(batch):
        for h in range(kv_heads):
            held = present[b, h].nonzero().flatten().tolist()
            if not held:
                continue
            first, last = held[0], held[-1]
            always = [t for t in held if t < first + sink or t > last - recent or t == last]
            rest = sorted(set(held) - set(always), key=lambda t: (-float(rank[b, h, t]), t))
            bought = -(-fraction * int(attendable[b, h]) // FRACTION_UNIT) if fraction else budget
            chosen = [*always, *rest][: min(slots, max(len(always), bought))]
            tokens[b, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            counts[b, h, 0] = len(chosen)
    return tokens, counts


def group_rank(scores: Tensor, group_reduce: str) -> Tensor:
    """Scores ``[B, Hkv, G, S]``, -inf where a head does not attend, as one a KV head: ``[B, Hkv, S]``."""
    if group_reduce == "max":
        return scores.amax(-2)
    normaliser = torch.logsumexp(scores, -1, keepdim=True)
    return torch.logsumexp(scores - normaliser.clamp(min=torch.finfo(scores.dtype).min), -2)


def refine_reference(
    q: Tensor,
    keys: Tensor,
    ids: Tensor,
    seen: Tensor,
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
    """The specification, over the whole cache; in float64 where ``q`` is, else in float32."""
    batch, query_heads = q.shape[:2]
    kv_heads, tokens = keys.shape[1:3]
    heads = (kv_heads, query_heads // kv_heads)
    pages = bits.shape[-1]
    work = q.dtype if q.dtype == torch.float64 else torch.float32
    scores = scale * (q.to(work).unflatten(1, heads).squeeze(3) @ keys.to(work).mT)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = (
            scores
            + bias.to(work).expand(batch, query_heads, 1, tokens).unflatten(1, heads)[..., 0, :]
        )
    named = torch.zeros((batch, kv_heads, pages + 1), dtype=torch.bool, device=q.device)
    named.scatter_(-1, torch.where(ids < 0, pages, ids).long(), True)
    named = named[:, :, :pages, None].expand(-1, -1, -1, page_size).flatten(2)[..., :tokens]
    attends = unpack(bits.expand(batch, query_heads, pages), page_size).flatten(2)[..., :tokens]
    attends = attends.unflatten(1, heads) & named.unsqueeze(2)
    rank = group_rank(torch.where(attends, scores, -math.inf), group_reduce)
    rule = (slots, budget, fraction, sink, recent)
    return best_tokens(rank, attends.any(2), seen[..., 1], *rule)


def fake(
    q: Tensor,
    keys: Tensor,
    ids: Tensor,
    seen: Tensor,
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
    batch, kv_heads = keys.shape[:2]
    tokens = q.new_empty((batch, kv_heads, slots), dtype=torch.int32)
    return tokens, q.new_empty((batch, kv_heads, 2), dtype=torch.int64)
