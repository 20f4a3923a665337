"""Selection of single tokens in ATen: on every device, what runs without Inductor and what Inductor compiles.

The largest tensor is the score of every candidate, a number a query head; keys are gathered in the loop that multiplies
them. The best are found by ``torch.topk``.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.types import IntLikeType

from .. import compat
from .aten import Chosen, by_group, dot, materialise, selected_logits, top_ranked, work_dtype
from .page_mask import unpack
from .refine import group_rank
from .select import FRACTION_UNIT
from .signs import WORD
from .summarize import kv_head_words, per_kv_head


def _best(
    scores: Tensor,
    at: Tensor,
    present: Tensor,
    attendable: Tensor,
    group_reduce: str,
    slots: IntLikeType,
    budget: int,
    fraction: int,
    sink: int,
    recent: int,
) -> tuple[Tensor, Tensor]:
    """The choice of ``hsa_compile.ops.refine``: tokens and counts.

    Of ``N`` candidates: scores ``[B, Hkv, G, N]`` (-inf where a head does not attend), at ``[B, Hkv, N]`` ascending,
    present ``[B, Hkv, N]``; attendable ``[B, Hkv]``.
    """
    rank = group_rank(scores, group_reduce)
    first = torch.where(present, at, torch.iinfo(torch.int64).max // 2).amin(-1, keepdim=True)
    last = torch.where(present, at, -1).amax(-1, keepdim=True)
    always = present & ((at < first + sink) | (at > last - max(recent, 1)))
    bought: Tensor | int = budget
    if fraction:
        bought = (-(-(fraction * attendable) // FRACTION_UNIT)).unsqueeze(-1)
    wanted = torch.clamp(always.sum(-1, keepdim=True), min=bought)
    count = torch.sym_min(slots, rank.shape[-1])
    order, valid = top_ranked(torch.where(always, math.inf, rank), present, count)
    kept = valid & (torch.arange(count, device=rank.device) < wanted)
    tokens = torch.where(kept, at.gather(-1, order), -1).to(torch.int32)
    if not compat.statically_known_true(slots <= rank.shape[-1]):
        tokens = F.pad(tokens, (0, slots - count), value=-1)  # type: ignore[list-item]
    return tokens, torch.stack((kept.sum(-1), attendable), -1)


def refine(
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
    """See ``hsa_compile.ops.refine``."""
    chosen = Chosen(ids, page_size, bits.shape[-1], keys.shape[2])
    where = (*chosen.rows, chosen.at)
    scores = selected_logits(q, keys[where], chosen, bits, bias, scale, softcap)
    present = chosen.attended(kv_head_words(bits, keys.shape[1]).unsqueeze(2)).squeeze(2)
    rule = (group_reduce, slots, budget, fraction, sink, recent)
    return _best(
        scores.flatten(-2), chosen.at.flatten(-2), present.flatten(-2), seen[..., 1], *rule
    )


def select_tokens(
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
    """See ``hsa_compile.ops.select_tokens``. Keys are made of their signs in the loop that multiplies them."""
    batch, kv_heads, pages = summary.shape[:3]
    work = work_dtype(q)
    query = q[:, :, 0].unflatten(1, (kv_heads, -1)).to(work) * scale
    centre, deviation = (half.unsqueeze(3) for half in summary.to(work).chunk(2, -1))
    channel = torch.arange(centre.shape[-1], device=q.device)
    word = signs.unflatten(-1, (page_size, -1)).index_select(-1, channel // WORD)
    above = (torch.bitwise_right_shift(word, channel % WORD) & 1) != 0
    keys = torch.where(above, centre + deviation, centre - deviation)
    scores = dot(materialise(query), keys, loop=True)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        added = F.pad(bias[:, :, 0], (0, pages * page_size - bias.shape[-1]))
        scores = scores + by_group(added, kv_heads).unflatten(-1, (pages, page_size)).to(work)
    attends = unpack(by_group(bits, kv_heads), page_size)
    scores = materialise(torch.where(attends, scores, -math.inf).contiguous())
    present = unpack(per_kv_head(bits, batch, kv_heads), page_size).flatten(-2)
    at = torch.arange(present.shape[-1], device=q.device).expand_as(present)
    rule = (group_reduce, slots, budget, fraction, sink, recent)
    return _best(scores.flatten(-2), at, present, present.sum(-1), *rule)
