"""``hsa::summarize``: keep a cache's page summaries true to its keys.

    keys     [B, Hkv, S, D]        the cache, this step's token already written
    bits     [Bm, Hm, P]           packed mask of this step (``hsa::page_mask``); Bm in {1, B}, Hm in {1, Hq}
    position [1] or [B] int64      where this step's token was written
    summary  [B, Hkv, P, R]        written; R = algorithm's parts x D, in the dtype of the keys
    covered  [B, Hkv, P, 2] int64  written; which tokens a summary describes, and the position expected next

A page is stale, and is summarised anew over the tokens that any query head of the KV head can attend, when

- the tokens that can be attended are not those it covers (growth, a crop, a window that moved, another padding), or
- this step wrote into it, or
- the position is not the one expected (the cache was written elsewhere, or this state is new: expected is -1).

Nothing outside the mask is ever read into a summary, so padding and memory that was never written shape nothing.
A page without attendable tokens gets a summary of zeros; selection never asks for it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import algorithms
from ._library import define
from .page_mask import unpack

NEVER = -1
_PAGES_AT_ONCE = 4096

define(
    "summarize(Tensor keys, Tensor bits, Tensor position, Tensor(a!) summary, Tensor(b!) covered, "
    "str algorithm, int page_size) -> ()"
)


def kv_head_words(bits: Tensor, kv_heads: int) -> Tensor:
    """Tokens that any query head of a KV head can attend: ``[Bm, Hm, P]`` -> ``[Bm, 1 or Hkv, P]`` int64."""
    heads = bits.shape[1]
    if heads <= kv_heads:
        return bits
    group = bits.unflatten(1, (kv_heads, heads // kv_heads))
    words = group[:, :, 0]
    for member in range(1, heads // kv_heads):
        words = words | group[:, :, member]
    return words


def per_kv_head(bits: Tensor, batch: int, kv_heads: int) -> Tensor:
    """The same for every row, ``[B, Hkv, P]``."""
    return kv_head_words(bits, kv_heads).expand(batch, kv_heads, bits.shape[-1])


def _page_summaries(score: algorithms.PageScore, page: Tensor, present: Tensor) -> Tensor:
    """Summaries of ``page [..., T, D]``, of which ``present [..., T]`` counts: ``[..., R]``.

    Each channel is handed over as a page of head size one. Its tokens are then adjacent in memory, and the order in
    which they are added up depends on nothing but T: a page that grew token by token, alone, gets exactly the summary
    that it gets when all pages are rebuilt together.
    """
    page = page.to(torch.promote_types(page.dtype, torch.float32))
    channels = torch.where(present.unsqueeze(-2), page.mT, 0).unsqueeze(-1)
    fresh = score.summarize(channels, present.unsqueeze(-2).unsqueeze(-1)).mT.flatten(-2)
    return fresh.masked_fill_(~present.any(-1, keepdim=True), 0)


def _refresh_page(
    keys: Tensor, words: Tensor, page: int, summary: Tensor, score: algorithms.PageScore, page_size: int
) -> None:
    """Summarise one page of every row, through views; ``words [Bm, 1 or Hkv, P]``."""
    begin = page * page_size
    tokens = keys[:, :, begin : begin + page_size]
    missing = page_size - tokens.shape[2]
    if missing:
        tokens = F.pad(tokens, (0, 0, 0, missing))
    summary[:, :, page].copy_(_page_summaries(score, tokens, unpack(words[:, :, page], page_size)))


def _refresh_pages(
    keys: Tensor, words: Tensor, stale: Tensor, summary: Tensor, score: algorithms.PageScore, page_size: int
) -> None:
    """Summarise the pages marked in ``stale [B, Hkv, P]``; ``words [B, Hkv, P]``."""
    last = keys.shape[2] - 1
    offsets = torch.arange(page_size, device=keys.device)
    rows = (index.split(_PAGES_AT_ONCE) for index in stale.nonzero(as_tuple=True))
    for b, h, p in zip(*rows, strict=True):
        at = (p.unsqueeze(-1) * page_size + offsets).clamp(max=last)
        page = keys[b.unsqueeze(-1), h.unsqueeze(-1), at]
        fresh = _page_summaries(score, page, unpack(words[b, h, p], page_size))
        summary[b, h, p] = fresh.to(summary.dtype)


def summarize(
    keys: Tensor,
    bits: Tensor,
    position: Tensor,
    summary: Tensor,
    covered: Tensor,
    algorithm: str,
    page_size: int,
) -> None:
    """PyTorch implementation: work in proportion to the stale pages, beside one look at the words.

    While a request decodes, the page written into is the only stale one. That case is told apart first and costs no
    index tensors.
    """
    score = algorithms.get(algorithm)
    words = kv_head_words(bits, keys.shape[1])
    at = position.reshape(-1, 1, 1)
    expected = torch.stack(torch.broadcast_tensors(words, at), -1)
    wrong = covered != expected
    written = [p // page_size for p in position.tolist()]
    if written[0] < words.shape[2] and written.count(written[0]) == len(written):
        wrong[:, :, written[0]] = False
        _refresh_page(keys, words, written[0], summary, score, page_size)
        stale = wrong.any(-1) if wrong.any() else None
    else:
        pages = torch.arange(words.shape[2], device=words.device)
        stale = wrong.any(-1) | (pages == at // page_size)
    if stale is not None:
        _refresh_pages(keys, words.expand_as(stale), stale, summary, score, page_size)
    expected[..., 1] += 1
    covered.copy_(expected)


def fake(
    keys: Tensor,
    bits: Tensor,
    position: Tensor,
    summary: Tensor,
    covered: Tensor,
    algorithm: str,
    page_size: int,
) -> None:
    return None
