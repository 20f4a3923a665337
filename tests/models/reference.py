"""The rule in plain PyTorch, as an attention function of transformers: no state, no history, nothing compiled.

Every decode step recomputes all page summaries from the keys and the mask that attention is given, selects with
``select_reference``, attends with ``sparse_attention_reference`` and estimates the rest with
``estimate_rest_reference``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hsa_compile import LayerPolicy, algorithms
from hsa_compile.lowering.limits import MAX_STEP
from hsa_compile.ops.estimate_rest import estimate_rest_reference
from hsa_compile.ops.page_mask import attendable, page_mask, unpack
from hsa_compile.ops.refine import refine_reference
from hsa_compile.ops.select import FRACTION_UNIT, select_reference
from hsa_compile.ops.select_tokens import select_tokens_reference
from hsa_compile.ops.signs import signs_of
from hsa_compile.ops.sparse_attention import sparse_attention_reference
from hsa_compile.ops.strided_pages import strided_pages_reference
from hsa_compile.ops.summarize import per_kv_head
from hsa_compile.ops.unread import unread_reference

from .helpers import transformers

_NAME = "plain_page_sparse"


def page_summaries(
    keys: Tensor, mask: Tensor, policy: LayerPolicy, algorithm: str | None = None
) -> Tensor:
    """Summaries ``[B, Hkv, P, R]`` of ``keys [B, Hkv, S, D]``, by the policy's algorithm or another.

    They are over the tokens that any query head of the group attends: mask ``[B, 1 or Hq, 1, S]``, boolean.
    """
    spare = -keys.shape[2] % policy.page_size
    paged = F.pad(keys.float(), (0, 0, 0, spare)).unflatten(2, (-1, policy.page_size))
    heads = mask[:, :, 0]
    if heads.shape[1] > 1:
        heads = heads.unflatten(1, (keys.shape[1], -1)).any(2)
    present = F.pad(heads, (0, spare)).unflatten(2, (-1, policy.page_size)).unsqueeze(-1)
    score = algorithms.get(policy.score if algorithm is None else algorithm)
    summary = score.summarize(paged, present.expand_as(paged[..., :1]))
    return summary.masked_fill(~present.any(-2), 0)


def sparse_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    policy: LayerPolicy,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """One step by the rule: q ``[B, Hq, L, D]``, mask ``[1 or B, 1 or Hq, 1 or L, S]`` boolean, additive or None.

    ``sink`` is one more score in the denominator, ``[1 or B, 1 or Hq, 1, 1]``. Several queries are as many heads of a
    group, and the last tokens that are always read are at least as many.
    """
    if mask is None:
        mask = torch.ones((1, 1, 1, keys.shape[2]), dtype=torch.bool)
    batch, heads, queries, _ = q.shape
    if queries > 1:
        mask = mask.expand(-1, heads, queries, -1).flatten(1, 2).unsqueeze(2)
        if sink is not None:
            sink = sink.expand(-1, heads, queries, -1).flatten(1, 2).unsqueeze(2)
        q, policy = (
            q.flatten(1, 2).unsqueeze(2),
            replace(policy, recent=max(policy.recent, queries)),
        )
        out = sparse_attention(q, keys, values, mask, scale, policy, softcap, sink)
        return out.view(batch, heads, queries, -1)
    mask = mask.expand(q.shape[0], -1, -1, -1)
    bits = page_mask(mask, policy.page_size)
    summary = page_summaries(keys, attendable(mask), policy)
    of_pages = policy.of_pages
    whole, each = not isinstance(policy.budget, float), policy.budget
    each = each if isinstance(each, tuple) else ()
    rule = (
        policy.page_size,
        bits.shape[-1],
        ceil(of_pages.budget / policy.page_size) if whole and not each else 0,
        0 if whole else round(of_pages.budget * FRACTION_UNIT),
        policy.sink,
        policy.recent,
    )
    if policy.algorithm == "three_level" and policy.granularity == "token":
        bought = (policy.budget, 0) if whole else (0, round(policy.budget * FRACTION_UNIT))
        tokens = (1, keys.shape[2], *bought, policy.sink, policy.recent)
        ids, counts = strided_pages_reference(page_mask(mask, 1), *keys.shape[:2], *tokens)
    elif policy.algorithm == "three_level":
        ids, counts = strided_pages_reference(bits, *keys.shape[:2], *rule)
    else:
        ids, counts = select_reference(
            q,
            summary,
            bits,
            scale,
            policy.algorithm,
            *rule,
            policy.group_reduce,
            bias=None if mask.dtype == torch.bool else mean_bias(mask, policy.page_size),
            top_p=policy.top_p,
            floor=ceil(policy.min_budget / policy.page_size),
            head_pages=[ceil(tokens / policy.page_size) for tokens in each],
            dense_below=policy.dense_below,
        )
    bias, page_size = None if mask.dtype == torch.bool else mask, policy.page_size
    if policy.indexes_tokens:
        paged = F.pad(keys, (0, 0, 0, -keys.shape[2] % page_size)).unflatten(2, (-1, page_size))
        present = unpack(per_kv_head(bits, len(q), keys.shape[1]), page_size)
        ids, _ = select_tokens_reference(
            *(
                q,
                summary,
                signs_of(paged, present, summary),
                bits,
                bias,
                scale,
                page_size,
                keys.shape[2],
            ),
            *(policy.budget, 0) if whole else (0, round(policy.budget * FRACTION_UNIT)),
            *(policy.sink, policy.recent, policy.group_reduce, softcap),
        )
    if policy.granularity == "two_stage":
        ids, _ = refine_reference(
            *(q, keys, ids, counts, bits, bias, scale, page_size, keys.shape[2]),
            *(policy.budget, 0) if whole else (0, round(policy.budget * FRACTION_UNIT)),
            *(policy.sink, policy.recent, policy.group_reduce, softcap),
        )
    words = bits
    if policy.granularity != "page":
        words, page_size = page_mask(mask, 1), 1
    out, lse = sparse_attention_reference(
        q, keys, values, ids, None, words, bias, scale, page_size, softcap
    )
    if policy.estimates:
        means = (page_summaries(x, attendable(mask), policy, "mean") for x in (keys, values))
        added = None if bias is None else mean_bias(mask, policy.page_size)
        prototypes = policy.prototypes if policy.algorithm == "three_level" else 0
        rest = (scale, softcap, prototypes)
        if policy.granularity == "token":
            bits = unread_reference(bits, ids, q.shape[1], policy.page_size)
            ids = torch.full_like(ids, -1)
        out, lse = estimate_rest_reference(q, *means, ids, bits, added, out, lse, *rest)
    if sink is None:
        return out
    # exp(lse) is the sum of the exponentials; the sink is one more.
    total = lse.unsqueeze(-1).double().exp()
    return (out * (total / (total + sink.double().exp()))).to(out.dtype)


def mean_bias(mask: Tensor, page_size: int) -> Tensor:
    """Logarithm of the mean of ``e^mask`` over the attendable tokens of each page of ``mask [Bm, Hm, 1, S]``, or 0."""
    seen = torch.where(attendable(mask), mask.double(), -torch.inf).squeeze(-2)
    pages = seen.split(page_size, -1)
    mean = [page.logsumexp(-1) - page.isfinite().sum(-1).log() for page in pages]
    return torch.stack(mean, -1).nan_to_num(0.0, 0.0, 0.0)


@contextmanager
def by_the_rule(model: Any, policy: LayerPolicy) -> Iterator[Any]:
    """``model``, decoding with the rule in the place of attention; a prefill of more than a few tokens stays dense."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if position_bias is not None:
            lowest = torch.finfo(query.dtype).min
            keep = True if attention_mask is None else attention_mask
            attention_mask = torch.where(torch.as_tensor(keep), position_bias, lowest)
        if query.shape[2] > MAX_STEP:
            return dense(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = sparse_attention(query, key, value, attention_mask, scale, policy)
        return out.transpose(1, 2).contiguous(), None

    dense = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    transformers.AttentionInterface.register(_NAME, forward)
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    transformers.AttentionMaskInterface.register(_NAME, masks["sdpa"])
    # Encoder and decoder may have configurations of their own.
    configs = {id(m.config): m.config for m in (model, *model.modules()) if hasattr(m, "config")}
    before = [config._attn_implementation for config in configs.values()]
    for config in configs.values():
        config._attn_implementation = _NAME
    try:
        yield model
    finally:
        for config, name in zip(configs.values(), before, strict=True):
            config._attn_implementation = name
