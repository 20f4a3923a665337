"""``hsa::summarize``: keep a cache's page summaries true to its keys.

    keys     [B, Hkv, S, D]        the cache, this step's tokens already written
    bits     [Bm, Hm, P]           packed mask of this step (``hsa::page_mask``); Bm in {1, B}, Hm in {1, Hq}
    position [1] or [B] int64      where the first of this step's tokens was written
    summary  [B, Hkv, P, R]        written; R = algorithm's parts x D, in the dtype of the keys
    covered  [B, Hkv, P, 2] int64  written; which tokens a summary describes, and what the next step should find;
                                   or [B, Hkv, P, 3], with what ``hsa::select_accumulated`` keeps
    tail     [B, Hkv, T, D]        the slot of the position's page in a pool (``hsa::append``), or None; T = page_size
    written                        how many tokens this step wrote, one behind the other; one where there is a tail
    signs    [B, Hkv, P, T * W]    int64, written with each summary: the signs of the page's tokens
                                   (``hsa::select_tokens``), or None; only of cuboids, and without a tail

A page is stale, and is summarised anew over the tokens that any query head of the KV head can attend, when

- the tokens that can be attended are not those it covers (growth, a crop, a window that moved, another padding), or
- this step wrote into it, or
- the next step does not find what this one left: a position one further, and before it the key that was written here
  (the cache was written elsewhere, or this state is new: expected is -1). A position up to ``LATELY`` further will do,
  with that key where it was; then the pages of all tokens from there on are stale.

A step of several tokens leaves what it found: its first position and the key before that. Tokens of it may be taken
back, and the next step write over them, without another page being summarised anew.

What is expected is one word, ``expected``: the position, and 31 bits of the key before it. That key depends on all
tokens before it, in every layer but the first, so a request that took the place of another is seen by it where nothing
else tells: a tensor of ``torch.inference_mode`` has no version counter.

A step whose tokens may lie apart says ``APART`` for their position. No step leaves that, and such a step leaves
``NEVER``: then, and in the step after it, all pages are summarised anew.

Where keys are memory of the host, a step should not read them. With ``tail`` it does not, while nothing but this step's
write makes a page stale: the key written here and the one before it are in the slot (where the position opens a page,
what its last token has left there), and so is all of the page that can be attended, if the page's own expectation is
met. ``hsa::append`` has seen to that; where it is not met, the page is read from the keys, as all others are.

Nothing outside the mask is ever read into a summary, so padding and memory that was never written shape nothing.
A page without attendable tokens gets a summary of zeros; selection never asks for it.

Where ``covered`` has a third number a page, it is set to zero for every page that is summarised anew.

``hsa::store_summary`` is what remains an op on a CPU, where Inductor compiles the rest (``hsa_compile.ops.aten``): the
writes into summary and coverage, which functionalisation would copy in full (and torch 2.11 would order before their
last reader), and pages whose staleness depends on data.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import algorithms
from ._library import define, implement
from .page_mask import unpack
from .signs import signs_of

NEVER = -1
APART = -64
"""The position of tokens that do not lie one behind the other."""
LATELY = 16
# Channels of the last key that are looked at, and what they are multiplied with.
MARKED_CHANNELS = 4
MARK_FACTOR = 31
# Numbers of keys gathered at once in a rebuild: small enough to stay in a core's cache, large enough to hide the calls.
_NUMBERS_AT_ONCE = 1 << 19

define(
    "summarize(Tensor keys, Tensor bits, Tensor position, Tensor(a!) summary, Tensor(b!) covered, "
    "str algorithm, int page_size, Tensor? tail=None, int written=1, Tensor(c!)? signs=None) -> ()"
)
define(
    "store_summary(Tensor keys, Tensor bits, Tensor position, Tensor fresh, Tensor others, Tensor left, "
    "Tensor(a!) summary, Tensor(b!) covered, str algorithm, int page_size) -> ()"
)


def expected(keys: Tensor, position: Tensor, tail: Tensor | None = None) -> Tensor:
    """What a step at ``position [1] or [B]`` should find: ``[B, Hkv]`` int64.

    The low half is the position; the high half a mark of the key before it, of the bits of its first channels in fp32.
    That key is read from ``tail``, if it is given.
    """
    before = (position - 1).clamp(min=0)
    if tail is not None:
        keys, before = tail, before % tail.shape[2]
    if position.shape[0] == 1:
        key = keys.index_select(2, before).squeeze(2)
    else:
        key = keys[torch.arange(keys.shape[0], device=keys.device), :, before]
    return _word(key, position.unsqueeze(-1))


def _word(key: Tensor, position: Tensor) -> Tensor:
    """``key [B, Hkv, D]`` is the one before ``position [1 or B, 1 or Hkv]``."""
    mark = torch.zeros((), dtype=torch.int64, device=key.device)
    for channel in range(min(MARKED_CHANNELS, key.shape[2])):
        bits = key[..., channel].float().view(torch.int32).to(torch.int64)
        mark = mark + bits * MARK_FACTOR**channel
    mark = (mark ^ torch.bitwise_right_shift(mark, 16)) & 0x7FFFFFFF  # half types have no low bits
    mark = torch.where(position > 0, mark, 0)
    return (mark << 32) | position


def _found(
    keys: Tensor, position: Tensor, covered: Tensor, tail: Tensor | None, written: int
) -> tuple[Tensor, Tensor]:
    """What this step finds as it should, ``[B, Hkv, P]``; and from where on it is not to be trusted for all that."""
    held, at = covered.select(-1, 1), position.reshape(-1, 1, 1)
    found = expected(keys, position, tail).unsqueeze(-1)
    left = held[:, :, :1]
    if tail is None and written and not torch.equal(left, found):
        since = left & 0xFFFFFFFF
        lately = (since <= at) & (at - since <= LATELY)
        since = torch.where(lately, since, at)
        before = (since - 1).clamp(min=0).unsqueeze(-1).expand(-1, -1, 1, keys.shape[3])
        again = _word(keys.gather(2, before).squeeze(2), since.squeeze(-1)).unsqueeze(-1)
        known = lately & (again == left)
        found, at = torch.where(known, left, found), torch.where(known, since, at)
    return held == found, at


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


def _page_summaries(
    score: algorithms.PageScore, page: Tensor, word: Tensor, page_size: int
) -> Tensor:
    """Summaries of ``page [..., T, D]``, of which the tokens in ``word [...]`` count: ``[..., R]``.

    Each channel is handed over as a page of head size one. Its tokens are then adjacent in memory, and the order in
    which they are added up depends on nothing but T: a page that grew token by token, alone, gets exactly the summary
    that it gets when all pages are rebuilt together.
    """
    present = unpack(word, page_size).unsqueeze(-2)
    page = page.to(torch.promote_types(page.dtype, torch.float32))
    channels = torch.where(present, page.mT, 0).unsqueeze(-1)
    fresh = score.summarize(channels, present.unsqueeze(-1))
    return fresh.masked_fill_((word == 0).unsqueeze(-1).unsqueeze(-1), 0).mT.flatten(-2)


def _refresh_page(
    tokens: Tensor,
    words: Tensor,
    page: int,
    summary: Tensor,
    score: algorithms.PageScore,
    page_size: int,
    signs: Tensor | None = None,
) -> None:
    """Summarise one page of every row, ``tokens [B, Hkv, up to T, D]``; ``words [Bm, 1 or Hkv, P]``."""
    if tokens.shape[2] < page_size:
        tokens = F.pad(tokens, (0, 0, 0, page_size - tokens.shape[2]))
    word = words.select(2, page)
    summary.select(2, page).copy_(_page_summaries(score, tokens, word, page_size))
    if signs is not None:
        fresh = signs_of(tokens, unpack(word, page_size), summary.select(2, page))
        signs.select(2, page).copy_(fresh)


def _refresh_pages(
    keys: Tensor,
    words: Tensor,
    stale: Tensor,
    summary: Tensor,
    score: algorithms.PageScore,
    page_size: int,
    tail: Tensor | None = None,
    signs: Tensor | None = None,
) -> None:
    """Summarise the pages marked in ``stale [B, Hkv, P]``, read from ``tail`` if it is given; ``words [B, Hkv, P]``."""
    last = keys.shape[2] - 1
    offsets = torch.arange(page_size, device=keys.device)
    at_once = max(1, _NUMBERS_AT_ONCE // (page_size * keys.shape[3]))
    rows = (index.split(at_once) for index in stale.nonzero(as_tuple=True))
    for b, h, p in zip(*rows, strict=True):
        if tail is None:
            at = (p.unsqueeze(-1) * page_size + offsets).clamp(max=last)
            page = keys[b.unsqueeze(-1), h.unsqueeze(-1), at]
        else:
            page = tail[b, h]
        word = words[b, h, p]
        summary[b, h, p] = _page_summaries(score, page, word, page_size).to(summary.dtype)
        if signs is not None:
            signs[b, h, p] = signs_of(page, unpack(word, page_size), summary[b, h, p])


def _refresh(
    keys: Tensor,
    bits: Tensor,
    position: Tensor,
    summary: Tensor,
    covered: Tensor,
    algorithm: str,
    page_size: int,
    tail: Tensor | None = None,
    count: int = 1,
    signs: Tensor | None = None,
) -> None:
    """Bring the summary up to date, but not yet what it covers; ``count`` tokens were written.

    While a request decodes, the pages written into are the only stale ones. A single one is told apart first and costs
    no index tensors.
    """
    score = algorithms.get(algorithm)
    words = kv_head_words(bits, keys.shape[1])
    met, since = _found(keys, position, covered, tail, count)
    stale = (covered.select(-1, 0) != words) | ~met
    first = since // page_size
    last = (position.reshape(-1, 1, 1) + count - 1) // page_size if count else first - 1
    if covered.shape[-1] > 2:
        pages = torch.arange(words.shape[2], device=words.device)
        covered.select(-1, 2).masked_fill_(stale | ((first <= pages) & (pages <= last)), 0)
    written = {*first.flatten().tolist(), *last.flatten().tolist()}
    page = written.pop()
    if written or not 0 <= page < words.shape[2]:
        pages = torch.arange(words.shape[2], device=words.device)
        here = (first <= pages) & (pages <= last)
        stale |= here
        if tail is not None:
            rows = here & met
            _refresh_pages(keys, words.expand_as(met), rows, summary, score, page_size, tail)
            stale &= ~rows
    else:
        # Where a row does not meet what it expects, all rows read the keys; the others find the same there.
        from_keys = tail is None or not met.select(2, page).all()
        tokens = keys[:, :, page * page_size : (page + 1) * page_size] if from_keys else tail
        _refresh_page(tokens, words, page, summary, score, page_size, signs)
        stale.select(2, page).fill_(False)
    if stale.any():
        _refresh_pages(keys, words.expand_as(stale), stale, summary, score, page_size, None, signs)


def store_summary(
    keys: Tensor,
    bits: Tensor,
    position: Tensor,
    fresh: Tensor,
    others: Tensor,
    left: Tensor,
    summary: Tensor,
    covered: Tensor,
    algorithm: str,
    page_size: int,
) -> None:
    """Write ``fresh [B, Hkv, R]``, the summary of the page of ``position [1]``; if ``others []``, see to all.

    ``left [B, Hkv]`` is what the next step should find.
    """
    if others.item():
        _refresh(keys, bits, position, summary, covered, algorithm, page_size)
    else:
        page = int(position) // page_size
        summary.select(2, page).copy_(fresh)
        covered.select(2, page)[..., 2:].zero_()
    _cover(covered, bits, keys.shape[1], left)


def _cover(covered: Tensor, bits: Tensor, kv_heads: int, left: Tensor) -> None:
    covered.select(-1, 0).copy_(kv_head_words(bits, kv_heads))
    covered.select(-1, 1).copy_(left.unsqueeze(-1))


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
) -> None:
    """PyTorch implementation: work in proportion to the stale pages, beside one look at the words."""
    _refresh(keys, bits, position, summary, covered, algorithm, page_size, tail, written, signs)
    left = expected(keys, position if written > 1 else position + written, tail)
    if written > 1:
        left = torch.where(position.unsqueeze(-1) < 0, NEVER, left)
    _cover(covered, bits, keys.shape[1], left)


def fake(
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
) -> None:
    return None


implement("store_summary", store_summary, lambda *arguments: None)
