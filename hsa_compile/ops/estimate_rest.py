"""``hsa::estimate_rest``: the pages that were not selected join attention as one key and one value each.

    q           [B, Hq, 1, D]
    key_means   [B, Hkv, P, R]       of each page; the first D numbers are the mean of its keys (``hsa::summarize``)
    value_means [B, Hkv, P, Dv]      the mean of its values
    ids         [B, Hkv, K] int32    the pages that were attended, -1 is padding; None where the mask is without them
    bits        [Bm, Hm, P] int64    packed mask (``hsa::page_mask``), Bm in {1, B}, Hm in {1, Hq}
    bias        [Bm, Hm, P]          what an additive mask adds (``hsa::page_bias``), or None
    out         [B, Hq, 1, Dv]       attention to the selected pages, and its log-sum-exp (``hsa::sparse_attention``)
    lse         [B, Hq, 1] fp32
    ->
    out         [B, Hq, 1, Dv]       attention to everything: that, and an estimate of the rest
    lse         [B, Hq, 1] fp32

A page that is not selected takes part with weight ``n * exp(cap(scale * q . mean key) + bias)`` and its mean value,
where n is how many of its tokens the query head can attend (the estimation zone of RetroInfer, Chen et al., 2025,
arXiv:2505.02922, with pages for clusters). That is exact where the keys of a page are equal, and its tokens have equal
biases. Means are those of the tokens that any query head of the KV head can attend. A page of which a head can attend
nothing adds nothing to it, and where every page is selected, out and lse are what they were.

With ``prototypes`` C, the rest of a KV head takes part as at most C keys and values. Its R pages with an attendable
token are cut into C runs (page number j of them is in run ``j * C // R``), each page then moves to the nearest mean key
of a run (one step of Lloyd's, ties to the lower), and a prototype is the mean key and the mean value of its pages,
weighed by the tokens that any query head can attend. Its weight is ``exp(cap(scale * q . key))`` times the sum of
``n * e^bias`` over its pages.
"""

import math

import torch
from torch import Tensor

from ._library import define
from .aten import by_group, dot, materialise, popcount, work_dtype
from .page_mask import unpack
from .summarize import kv_head_words

define(
    "estimate_rest(Tensor q, Tensor key_means, Tensor value_means, Tensor? ids, Tensor bits, Tensor? bias, Tensor out, "
    "Tensor lse, float scale, float softcap=0.0, int prototypes=0) -> (Tensor out, Tensor lse)"
)


def _clusters(rest: list[int], keys: Tensor, count: Tensor, prototypes: int) -> list[list[int]]:
    """The pages of each prototype, ``keys [P, D]`` and ``count [P]``."""
    runs: dict[int, list[int]] = {}
    for j, page in enumerate(rest):
        runs.setdefault(j * prototypes // len(rest), []).append(page)
    centres = torch.stack([count[run] @ keys[run] / count[run].sum() for run in runs.values()])
    moved: dict[int, list[int]] = {}
    for page in rest:
        nearest = int((keys[page] - centres).square().sum(-1).argmin())
        moved.setdefault(nearest, []).append(page)
    return list(moved.values())


def estimate_rest_reference(
    q: Tensor,
    key_means: Tensor,
    value_means: Tensor,
    ids: Tensor | None,
    bits: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float = 0.0,
    prototypes: int = 0,
) -> tuple[Tensor, Tensor]:
    """The specification, KV head by KV head, in float64."""
    batch, heads = q.shape[:2]
    kv_heads, pages = key_means.shape[1:3]
    group = heads // kv_heads
    seen = unpack(bits.expand(batch, heads, pages), 64).unflatten(1, (kv_heads, group))
    added = torch.zeros(batch, heads, pages) if bias is None else bias.expand(batch, heads, pages)
    out, lse = out.double().clone(), lse.double().clone()
    for b in range(batch):
        for h in range(kv_heads):
            keys = key_means[b, h, :, : q.shape[-1]].double()
            values, tokens = value_means[b, h].double(), seen[b, h].any(0).sum(-1).double()
            selected = set() if ids is None else set(ids[b, h].tolist())
            rest = [p for p in range(pages) if p not in selected and tokens[p] > 0]
            clusters = [[page] for page in rest]
            if rest and prototypes:
                clusters = _clusters(rest, keys, tokens, prototypes)
            if not rest:
                continue
            member = torch.zeros(len(clusters), pages, dtype=torch.float64)
            for c, cluster in enumerate(clusters):
                member[c, cluster] = 1
            share = member * tokens / (member @ tokens).unsqueeze(-1)
            group_of = slice(h * group, (h + 1) * group)
            score = scale * (q[b, group_of, 0].double() @ (share @ keys).mT)
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            count = seen[b, h].sum(-1) * added[b, group_of].double().exp()
            logit = torch.cat((lse[b, group_of], score + (count @ member.mT).log()), -1)
            weight = torch.softmax(logit, -1).nan_to_num(0.0)  # a head that can attend nothing
            met = weight[:, 1:] @ (share @ values)
            out[b, group_of, 0] = weight[:, :1] * out[b, group_of, 0] + met
            lse[b, group_of, 0] = torch.logsumexp(logit, -1)
    return out.to(q.dtype), lse.float()


def estimate_rest(
    q: Tensor,
    key_means: Tensor,
    value_means: Tensor,
    ids: Tensor | None,
    bits: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float = 0.0,
    prototypes: int = 0,
) -> tuple[Tensor, Tensor]:
    """Tensor expressions over pages, for every device: nothing in it is as long as the cache."""
    batch, kv_heads, pages = key_means.shape[:3]
    work = work_dtype(q)
    lowest, least = torch.finfo(work).min, torch.finfo(work).tiny
    keys, values = key_means[..., : q.shape[-1]], value_means
    mass = popcount(by_group(bits, kv_heads)).to(work).log()
    if bias is not None:
        mass = mass + by_group(bias, kv_heads).to(work)
    if ids is not None:
        # What is padding of ids marks a page behind the last.
        selected = torch.zeros((batch, kv_heads, pages + 1), dtype=torch.bool, device=q.device)
        selected = selected.scatter(-1, torch.where(ids < 0, pages, ids).long(), True)[..., :pages]
        mass = torch.where(selected.unsqueeze(2), -math.inf, mass)
    if prototypes:
        tokens = popcount(kv_head_words(bits, kv_heads)).to(work)
        keys, values, mass = _prototypes(keys, values, materialise(mass), tokens, prototypes)
    query = q[:, :, 0].unflatten(1, (kv_heads, -1)).to(work) * scale
    scores = dot(materialise(query), keys)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = materialise((scores + mass).contiguous())
    # Where nothing is left there is no largest; the clamp makes weights zero instead of nan.
    largest = scores.amax(-1, keepdim=True).clamp(min=lowest)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    rest = largest + torch.log(total)
    weights = (weights / total.clamp(min=least)).to(values.dtype)
    estimate = torch.matmul(weights, values).to(work)

    exact, before = (x.squeeze(2).unflatten(1, (kv_heads, -1)) for x in (out, lse.unsqueeze(-1)))
    larger = torch.maximum(before.to(work), rest).clamp(min=lowest)
    kept, added = torch.exp(before - larger), torch.exp(rest - larger)
    total = kept + added
    merged = (kept * exact.to(work) + added * estimate) / total.clamp(min=least)
    lse = (larger + torch.log(total)).float().squeeze(-1)
    return merged.to(q.dtype).flatten(1, 2).unsqueeze(2), lse.flatten(1, 2).unsqueeze(2)


def _prototypes(
    keys: Tensor, values: Tensor, mass: Tensor, tokens: Tensor, prototypes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys ``[B, Hkv, C, D]``, values ``[B, Hkv, C, Dv]`` and mass ``[B, Hkv, 1 or G, C]`` of pages that have any.

    keys ``[B, Hkv, P, D]``, values ``[B, Hkv, P, Dv]``, mass ``[B, Hkv, 1 or G, P]`` as a logarithm, tokens
    ``[Bm, 1 or Hkv, P]``.
    """
    work = mass.dtype
    left = (mass != -math.inf).any(2)
    number = torch.arange(prototypes, device=keys.device)
    cluster = (left.cumsum(-1) - 1) * prototypes // left.sum(-1, keepdim=True).clamp(min=1)

    def of_clusters(cluster: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which pages are in each, ``[B, Hkv, C, P]``, with what share, and whether any are, ``[B, Hkv, C, 1]``."""
        member = (cluster.unsqueeze(-2) == number.unsqueeze(-1)) & left.unsqueeze(-2)
        weight = torch.where(member, tokens.unsqueeze(-2), 0)
        total = weight.sum(-1, keepdim=True)
        return member, (weight / total.clamp(min=1)).to(keys.dtype), total > 0

    _, share, some = of_clusters(cluster)
    centres = torch.matmul(share, keys)
    # Nearest in the square of the distance, without what does not depend on the cluster.
    near = torch.matmul(keys, centres.mT).to(work)
    near = near - 0.5 * centres.to(work).square().sum(-1).unsqueeze(-2)
    cluster = torch.where(some.mT, near, -math.inf).argmax(-1)
    member, share, _ = of_clusters(cluster)
    largest = mass.amax(-1, keepdim=True).clamp(min=torch.finfo(work).min)
    summed = torch.matmul(torch.exp(mass - largest), member.to(work).mT)
    return torch.matmul(share, keys), torch.matmul(share, values), largest + torch.log(summed)


def fake(
    q: Tensor,
    key_means: Tensor,
    value_means: Tensor,
    ids: Tensor | None,
    bits: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float = 0.0,
    prototypes: int = 0,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(out.shape), lse.new_empty(lse.shape)
