"""``hsa::append``: this step's token into the pool, and which pages of the pool the step can still trust.

    keys        [B, Hkv, S, D]       the full cache, this step's token already written; on a GPU, memory of the host
    values      [B, Hkv, S, Dv]
    k           [B, Hkv, 1, D]       this step's token
    v           [B, Hkv, 1, Dv]
    bits        [Bm, Hm, P]          packed mask of this step (``hsa::page_mask``); Bm in {1, B}, Hm in {1, Hq}
    position    [1] or [B] int64     where the token was written
    covered     [B, Hkv, P, 2] int64 written; as ``hsa::summarize`` left it
    table       [B, Hkv, P] int32    written; the slot of each page, or -1 (``hsa::diff``)
    owner       [B, Hkv, N] int32    written; the page in each slot, or -1
    pool_keys   [B, Hkv, N, T, D]    written; T = page_size
    pool_values [B, Hkv, N, T, Dv]   written

The page of the position, the *tail*, lives in the last slot, N - 1, so that no step reads it from the host: the token
is written there, always, and the slot is the tail's, whatever it held. Of the host, a few channels of one key are read,
the one before the position: where a row does not find what it should (``hsa_compile.ops.summarize``), nothing is known
of the cache behind the pool, all pages leave the pool, and ``covered`` expects nothing any more.

The tail is in the pool where its slot holds all that this step can attend of it. Earlier tokens are there if the tail
was in the pool before; later ones are not written by steps, and are there if the last step could attend them too. Where
the token is the first of its page and nothing else of the page can be attended, the slot holds enough in any case.
Otherwise the tail is not in the pool, even if another slot holds it, for that was filled before this step, and
``hsa::diff`` has it loaded. ``covered`` expects what is found of a tail that is in the pool, and else nothing: then
``hsa::summarize`` reads it from the cache, too.
"""

import torch
from torch import Tensor

from ._library import define
from .summarize import NEVER, expected, per_kv_head

define(
    "append(Tensor keys, Tensor values, Tensor k, Tensor v, Tensor bits, Tensor position, Tensor(a!) covered, "
    "Tensor(b!) table, Tensor(c!) owner, Tensor(d!) pool_keys, Tensor(e!) pool_values, int page_size) -> ()"
)


def append_reference(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    position: Tensor,
    covered: Tensor,
    table: Tensor,
    owner: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
) -> None:
    """The specification, row by row."""
    batch, kv_heads = table.shape[:2]
    last = owner.shape[2] - 1
    found = expected(keys, position)
    words = per_kv_head(bits, batch, kv_heads)
    for b in range(batch):
        page, token = divmod(int(position[b if len(position) > 1 else 0]), page_size)
        later = set(range(token + 1, page_size))
        for h in range(kv_heads):
            stale = bool(covered[b, h, 0, 1] != found[b, h])
            if stale:
                covered[b, h, :, 1] = NEVER
                table[b, h] = -1
            now, before = (
                {token for token in range(page_size) if int(word) >> token & 1}
                for word in (words[b, h, page], covered[b, h, page, 0])
            )
            was_tail = int(table[b, h, page]) == last and int(owner[b, h, last]) == page
            opens = token == 0 and now == {0}
            held = opens or (was_tail and (now & later) <= before)
            pool_keys[b, h, last, token] = k[b, h, 0]
            pool_values[b, h, last, token] = v[b, h, 0]
            owner[b, h, last] = page
            table[b, h, page] = last if held else -1
            covered[b, h, page, 1] = found[b, h] if held and not stale else NEVER


def append(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    position: Tensor,
    covered: Tensor,
    table: Tensor,
    owner: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
) -> None:
    """PyTorch implementation; never waits for the device."""
    batch, kv_heads = table.shape[:2]
    last = owner.shape[2] - 1
    found = expected(keys, position).unsqueeze(-1)
    stale = covered[:, :, :1, 1] != found
    covered.select(-1, 1).masked_fill_(stale, NEVER)
    table.masked_fill_(stale, -1)

    page = (position // page_size).view(-1, 1, 1).expand(batch, kv_heads, 1)
    token = (position % page_size).view(-1, 1, 1)
    now = per_kv_head(bits, batch, kv_heads).gather(-1, page)
    before = covered.select(-1, 0).gather(-1, page)
    # All bits above the token's.
    later = torch.bitwise_left_shift(torch.full_like(token, -2), token)
    was_tail = (table.gather(-1, page) == last) & (owner[..., -1:] == page)
    held = (token == 0) & (now == 1) | was_tail & ((now & later & ~before) == 0)

    at = token.unsqueeze(-1).expand(batch, kv_heads, 1, 1)
    for pool, one in ((pool_keys, k), (pool_values, v)):
        pool.select(2, last).scatter_(2, at.expand(-1, -1, 1, one.shape[3]), one)
    owner[..., -1:].copy_(page)
    table.scatter_(-1, page, torch.where(held, last, -1).to(table.dtype))
    covered.select(-1, 1).scatter_(-1, page, torch.where(held & ~stale, found, NEVER))


def fake(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    position: Tensor,
    covered: Tensor,
    table: Tensor,
    owner: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
) -> None:
    return None
