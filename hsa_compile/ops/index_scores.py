"""``hsa::index_scores``: how well each cached token suits each query token, by a model's own indexer.

    q       [B, S, H, D]     queries of the H heads of the indexer
    k       [B, T, D]        its keys, one a cached token and for all heads
    weights [B, S, H]        what each head counts
    ->
    scores  [B, S, T] fp32   sum_h weights_h * relu(scale * q_h . k_t); fp64 for a double q

It is the lightning indexer of DeepSeek-V3.2 (DeepSeek-AI 2025, "DeepSeek-V3.2", equation 1). Queries and keys are of
one dtype; products of half precision are exact, and summed in fp32. No tensor ``[B, S, H, T]`` is in memory.
"""

import torch
from torch import Tensor

from ._library import define

define("index_scores(Tensor q, Tensor k, Tensor weights, float scale) -> Tensor")

CHUNK_NUMBERS = 1 << 20
"""Products that :func:`index_scores` has in memory at once, at most, and of at least 64 tokens."""


def _work_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def index_scores_reference(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> Tensor:
    """The specification, with all products at once."""
    work = _work_dtype(q)
    products = torch.einsum("bshd,btd->bsht", q.to(work), k.to(work))
    return torch.einsum("bsh,bsht->bst", weights.to(work), torch.relu(scale * products))


def index_scores(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> Tensor:
    """As many tokens at a time as keep the products of all heads small."""
    work = _work_dtype(q)
    batch, queries, heads, _ = q.shape
    tokens = k.shape[1]
    query, count = q.to(work).flatten(1, 2), weights.to(work).unsqueeze(-2)
    scores = torch.empty((batch, queries, tokens), dtype=work, device=q.device)
    step = max(64, CHUNK_NUMBERS // max(1, batch * queries * heads))
    for first in range(0, tokens, step):
        some = slice(first, first + step)
        products = torch.matmul(query, k[:, some].to(work).mT).mul_(scale).relu_()
        products = products.unflatten(1, (queries, heads))
        scores[..., some] = torch.matmul(count, products).squeeze(-2)
    return scores


def fake(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> Tensor:
    batch, queries = q.shape[:2]
    return q.new_empty((batch, queries, k.shape[1]), dtype=_work_dtype(q))
