"""``hsa::diff``: which selected pages a pool already holds, and which must be loaded into which slots.

    ids      [B, Hkv, K] int32     selected pages, ascending, padded with -1 (``hsa::select``)
    position [1] or [B] int64      where this step's token was written
    table    [B, Hkv, P] int32     written; the slot of each page, or -1
    owner    [B, Hkv, N] int32     written; the page in each slot, or -1; N > K
    used     [B, Hkv, N] int32     written; the clock when a slot's page was last selected
    clock    [B, Hkv] int32        written; steps so far, one more after each
    ->
    slots    [B, Hkv, K] int32     the slot of each selected page, padded with -1
    loads    [B, Hkv, K, 2] int32  page and slot of each page to load, ascending, padded with -1 (``hsa::fetch``)
    counts   [B, Hkv, 3] int32     hits, loads, evictions: hits + loads pages are selected

A page is *resident* where its table entry and the owner of that slot name each other. Taking a page out of the pool,
because the cache changed behind it, is therefore one write: its table entry becomes -1 and its slot is dead. A new
state has -1 throughout the table and the owners, and a clock of 0. Nothing else may write ``used`` or ``clock``: a
resident page was last used before this step's clock.

The rule. The page of the position, the *tail*, has the last slot for itself: steps write their tokens there
(``hsa::append``). Any other page in it is not resident, and the tail is loaded into it, if it is selected and not
resident. Apart from that, a resident page is a hit and stays where it is. The others take as many of the slots before
the last as they are: dead and empty slots first, then those of the least recently used pages, ties to the lower slot;
never the slot of a page selected in this step. In ascending order, pages get these slots in ascending order. A page
that is resident and loses its slot is evicted.

Work goes by K and N; nothing but single entries of the table is looked at.
"""

import torch
from torch import Tensor

from ._library import define

HITS, LOADS, EVICTIONS = range(3)
"""Columns of ``counts``."""

define(
    "diff(Tensor ids, Tensor position, int page_size, Tensor(a!) table, Tensor(b!) owner, Tensor(c!) used, "
    "Tensor(d!) clock) -> (Tensor slots, Tensor loads, Tensor counts)"
)


def diff_reference(
    ids: Tensor,
    position: Tensor,
    page_size: int,
    table: Tensor,
    owner: Tensor,
    used: Tensor,
    clock: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification, row by row."""
    batch, kv_heads, pages = table.shape
    last = owner.shape[2] - 1
    slots, loads, counts = fake(ids, position, page_size, table, owner, used, clock)
    for result in (slots, loads, counts):
        result.fill_(-1)
    for b in range(batch):
        tail = int(position[b if len(position) > 1 else 0]) // page_size
        for h in range(kv_heads):
            now = int(clock[b, h])
            slot_of, page_in = table[b, h].tolist(), owner[b, h].tolist()
            selected = [page for page in ids[b, h].tolist() if page >= 0]
            live = {
                slot: page
                for slot, page in enumerate(page_in)
                if 0 <= page < pages and slot_of[page] == slot and (slot != last or page == tail)
            }
            placed = {page: slot for slot, page in live.items()}
            to_load = [page for page in selected if page not in placed]
            others = [page for page in to_load if page != tail]
            free = [slot for slot in range(last) if live.get(slot) not in selected]
            age = used[b, h].tolist()
            free.sort(key=lambda slot: (slot in live, age[slot] if slot in live else 0, slot))
            victims = sorted(free[: len(others)])
            placed |= {tail: last} if tail in to_load else {}
            placed |= dict(zip(others, victims, strict=True))
            evicted = [live[slot] for slot in victims if slot in live]
            for page in evicted:
                table[b, h, page] = -1
            for at, page in enumerate(to_load):
                table[b, h, page], owner[b, h, placed[page]] = placed[page], page
                loads[b, h, at, 0], loads[b, h, at, 1] = page, placed[page]
            for at, page in enumerate(selected):
                slots[b, h, at] = placed[page]
                used[b, h, placed[page]] = now
            counts[b, h, HITS] = len(selected) - len(to_load)
            counts[b, h, LOADS] = len(to_load)
            counts[b, h, EVICTIONS] = len(evicted)
            clock[b, h] = now + 1
    return slots, loads, counts


def _marked(at: Tensor, size: int) -> Tensor:
    """Booleans ``[B, Hkv, size]``, true at the places ``at [B, Hkv, K]``; ``size`` itself is no place."""
    marks = torch.zeros((*at.shape[:2], size + 1), dtype=torch.bool, device=at.device)
    return marks.scatter_(-1, at, True)[..., :size]


def diff(
    ids: Tensor,
    position: Tensor,
    page_size: int,
    table: Tensor,
    owner: Tensor,
    used: Tensor,
    clock: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch implementation; never waits for the device. Raises ValueError where a pool could not hold a selection."""
    batch, kv_heads, count = ids.shape
    pages, pool = table.shape[2], owner.shape[2]
    if pool <= count:
        raise ValueError(
            f"a pool of {pool} slots cannot hold a selection of {count} pages beside the last one's slot"
        )
    last = pool - 1
    now = clock.unsqueeze(-1)
    slot = torch.arange(pool, device=ids.device)
    order = torch.arange(count, device=ids.device)

    selected = ids >= 0
    page = ids.clamp(min=0).long()
    is_tail = page == position.view(-1, 1, 1) // page_size
    held = table.gather(-1, page).long()
    resident = selected & (held >= 0) & (owner.gather(-1, held.clamp(min=0)) == ids)
    resident = resident & (is_tail | (held != last))
    missing = selected & ~resident
    other = missing & ~is_tail
    n_others, n_loads = other.sum(-1, keepdim=True), missing.sum(-1)

    # Slots in the order in which they are given up; there are as many as are needed, or more.
    kept = _marked(torch.where(resident, held, pool), pool)
    kept = kept | (slot == last)
    in_range = (owner >= 0) & (owner < pages)
    live = in_range & (table.gather(-1, torch.where(in_range, owner, 0).long()) == slot)
    age = torch.where(live, used.long(), -(2**32)).masked_fill(kept, 2**32)
    victims = torch.sort(age, dim=-1, stable=True).indices[..., :count]
    taken = order < n_others
    victims = torch.where(taken, victims, pool).sort(-1).values

    given = victims.gather(-1, (other.cumsum(-1) - 1).clamp(min=0))
    slots = torch.where(resident, held, torch.where(is_tail, last, given)).masked_fill(
        ~selected, -1
    )
    loads = ids.new_full((batch, kv_heads, count + 1, 2), -1)
    entry = torch.where(missing, missing.cumsum(-1) - 1, count)
    entry = entry.unsqueeze(-1).expand(-1, -1, -1, 2)
    loads.scatter_(2, entry, torch.stack((ids, slots.to(ids.dtype)), -1))

    # The table is long and its entries are few: what need not be written repeats what the first page's entry becomes.
    victim = victims.clamp(max=pool - 1)
    evicts = taken & live.gather(-1, victim)
    first = page[..., :1]
    entry_of_first = torch.where(selected[..., :1], slots[..., :1], held[..., :1])
    at = torch.where(evicts, owner.gather(-1, victim).long(), first)
    at = torch.cat((at, torch.where(selected, page, first)), -1)
    entry = torch.where(evicts, -1, entry_of_first)
    entry = torch.cat((entry, torch.where(selected, slots, entry_of_first)), -1)
    table.scatter_(-1, at, entry.to(table.dtype))

    place = torch.where(missing, slots, pool)
    owners = torch.cat((owner, owner.new_empty((batch, kv_heads, 1))), -1)
    owner.copy_(owners.scatter_(-1, place, ids)[..., :pool])
    used.copy_(torch.where(_marked(torch.where(selected, slots, pool), pool), now, used))
    clock.add_(1)
    counts = torch.stack((selected.sum(-1) - n_loads, n_loads, evicts.sum(-1)), -1)
    return slots.to(ids.dtype), loads[:, :, :count].contiguous(), counts.to(ids.dtype)


def fake(
    ids: Tensor,
    position: Tensor,
    page_size: int,
    table: Tensor,
    owner: Tensor,
    used: Tensor,
    clock: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, kv_heads, count = ids.shape
    return (
        ids.new_empty((batch, kv_heads, count)),
        ids.new_empty((batch, kv_heads, count, 2)),
        ids.new_empty((batch, kv_heads, 3)),
    )
