"""``hsa::diff``: which selected pages a pool already holds, and which must be loaded into which slots.

    ids      [B, Hkv, K + M] int32    selected pages, ascending, padded with -1; then M = more others, which the next
                                      step may want, likewise (``hsa::select``)
    position [1] or [B] int64         where this step's token was written
    table    [B, Hkv, P] int32        written; the slot of each page, or -1
    owner    [B, Hkv, N] int32        written; the page in each slot, or -1; N > K + M
    used     [B, Hkv, N] int32        written; when a slot's page was last asked for
    clock    [B, Hkv] int32           written; steps so far, one more after each
    ->
    slots    [B, Hkv, K + M] int32    the slot of each page of ``ids``, and ``MISSING`` more where the page is to be
                                      loaded into it; padded with -1
    loads    [B, Hkv, K + M, 2] int32 page and slot of each page to load, padded with -1: selected ones, then others
    counts   [B, Hkv, 5] int32        hits, loads, evictions; others to load (``hsa::prefetch``), and how many hits
                                      are the first ones of pages that were loaded so

A page is *resident* where its table entry and the owner of that slot name each other. Taking a page out of the pool,
because the cache changed behind it, is therefore one write: its table entry becomes -1 and its slot is dead. A new
state has -1 throughout the table and the owners, and a clock of 0. Nothing else may write ``used`` or ``clock``: a
resident page was last asked for before this step's clock.

The rule. The page of the position, the *tail*, has the last slot for itself: steps write their tokens there
(``hsa::append``). Any other page in it is not resident, and the tail is loaded into it, if it is selected and not
resident. Apart from that, a resident page stays where it is, and is a hit if it is selected. The others, first those
that are selected, take as many of the slots before the last as they are: dead and empty slots first, then those of the
least recently used pages, ties to the lower slot; never the slot of a page of this step's ``ids``. In order, pages get
these slots in ascending order. A page that is resident and loses its slot is evicted. A tail among the others is not
loaded, and has no slot.

``used`` is twice the clock of the step that last asked for the page, and one more where the page was ever selected:
of those that one step asked for, pages never selected go first. The tail's is of no meaning.

Work goes by K, M and N; nothing but single entries of the table is looked at.
"""

import torch
from torch import Tensor

from ._library import define

HITS, LOADS, EVICTIONS, AHEAD, FIRST_HITS = range(5)
"""Columns of ``counts``."""
MISSING = 1 << 24
"""Marks a slot whose page is to be loaded."""

define(
    "diff(Tensor ids, Tensor position, int page_size, Tensor(a!) table, Tensor(b!) owner, Tensor(c!) used, "
    "Tensor(d!) clock, int more=0) -> (Tensor slots, Tensor loads, Tensor counts)"
)


def diff_reference(
    ids: Tensor,
    position: Tensor,
    page_size: int,
    table: Tensor,
    owner: Tensor,
    used: Tensor,
    clock: Tensor,
    more: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification, row by row."""
    batch, kv_heads, pages = table.shape
    last = owner.shape[2] - 1
    slots, loads, counts = fake(ids, position, page_size, table, owner, used, clock, more)
    for result in (slots, loads, counts):
        result.fill_(-1)
    first_other = ids.shape[2] - more
    for b in range(batch):
        tail = int(position[b if len(position) > 1 else 0]) // page_size
        for h in range(kv_heads):
            now = 2 * int(clock[b, h])
            slot_of, page_in, age = (x[b, h].tolist() for x in (table, owner, used))
            named = [*enumerate(ids[b, h].tolist())]
            selected = [page for at, page in named if at < first_other and page >= 0]
            others = [p for at, p in named if at >= first_other and p not in (-1, tail)]
            live = {
                slot: page
                for slot, page in enumerate(page_in)
                if 0 <= page < pages and slot_of[page] == slot and (slot != last or page == tail)
            }
            placed = {page: slot for slot, page in live.items()}
            hits = [page for page in selected if page in placed]
            first_hits = [p for p in hits if placed[p] != last and age[placed[p]] % 2 == 0]
            to_load = [page for page in selected if page not in placed]
            ahead = [page for page in others if page not in placed]
            need_slots = [page for page in (*to_load, *ahead) if page != tail]
            free = [slot for slot in range(last) if live.get(slot) not in (*selected, *others)]
            free.sort(key=lambda slot: (slot in live, age[slot] if slot in live else 0, slot))
            victims = sorted(free[: len(need_slots)])
            placed |= {tail: last} if tail in to_load else {}
            placed |= dict(zip(need_slots, victims, strict=True))
            evicted = [live[slot] for slot in victims if slot in live]
            for page in evicted:
                table[b, h, page] = -1
            for at, page in enumerate((*to_load, *ahead)):
                table[b, h, page], owner[b, h, placed[page]] = placed[page], page
                loads[b, h, at, 0], loads[b, h, at, 1] = page, placed[page]
            for at, page in named:
                if page in selected or page in others:
                    missing = page in to_load or page in ahead
                    slots[b, h, at] = placed[page] + MISSING * missing
            for page in selected:
                used[b, h, placed[page]] = now + 1
            for page in others:
                known = page not in ahead and age[placed[page]] % 2
                used[b, h, placed[page]] = now + known
            found = (len(hits), len(to_load), len(evicted), len(ahead), len(first_hits))
            counts[b, h] = torch.tensor(found)
            clock[b, h] += 1
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
    more: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch implementation; never waits for the device. Raises ValueError where a pool could not hold all pages."""
    batch, kv_heads, count = ids.shape
    pages, pool = table.shape[2], owner.shape[2]
    if pool <= count:
        raise ValueError(
            f"a pool of {pool} slots cannot hold a selection of {count} pages beside the last one's slot"
        )
    last = pool - 1
    now = 2 * clock.unsqueeze(-1)
    slot = torch.arange(pool, device=ids.device)
    order = torch.arange(count, device=ids.device)

    page = ids.clamp(min=0).long()
    is_tail = page == position.view(-1, 1, 1) // page_size
    named = (ids >= 0) & ((order < count - more) | ~is_tail)
    selected = named & (order < count - more)
    held = table.gather(-1, page).long()
    resident = named & (held >= 0) & (owner.gather(-1, held.clamp(min=0)) == ids)
    resident = resident & (is_tail | (held != last))
    missing = named & ~resident
    other = missing & ~is_tail
    n_others, n_missing = other.sum(-1, keepdim=True), missing.sum(-1)
    n_loads = (missing & selected).sum(-1)
    # Whether the page was selected before, in the lowest bit.
    known = used.gather(-1, held.clamp(min=0)) & 1
    n_first = (resident & selected & (held != last) & (known == 0)).sum(-1)

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
    slots = torch.where(resident, held, torch.where(is_tail, last, given)).masked_fill(~named, -1)
    loads = ids.new_full((batch, kv_heads, count + 1, 2), -1)
    entry = torch.where(missing, missing.cumsum(-1) - 1, count)
    entry = entry.unsqueeze(-1).expand(-1, -1, -1, 2)
    loads.scatter_(2, entry, torch.stack((ids, slots.to(ids.dtype)), -1))

    # The table is long and its entries are few: what need not be written repeats what the first named page's becomes.
    victim = victims.clamp(max=pool - 1)
    evicts = taken & live.gather(-1, victim)
    at_first = named.int().argmax(-1, keepdim=True)
    first = page.gather(-1, at_first)
    entry_of_first = torch.where(named, slots, held).gather(-1, at_first)
    at = torch.where(evicts, owner.gather(-1, victim).long(), first)
    at = torch.cat((at, torch.where(named, page, first)), -1)
    entry = torch.where(evicts, -1, entry_of_first)
    entry = torch.cat((entry, torch.where(named, slots, entry_of_first)), -1)
    table.scatter_(-1, at, entry.to(table.dtype))

    place = torch.where(missing, slots, pool)
    owners = torch.cat((owner, owner.new_empty((batch, kv_heads, 1))), -1)
    owner.copy_(owners.scatter_(-1, place, ids)[..., :pool])
    asked = now + torch.where(selected, 1, torch.where(resident, known, 0))
    ages = torch.cat((used, used.new_empty((batch, kv_heads, 1))), -1)
    place = torch.where(named, slots, pool)
    used.copy_(ages.scatter_(-1, place, asked.to(used.dtype))[..., :pool])
    clock.add_(1)
    marked = slots + MISSING * missing
    n_hits = selected.sum(-1) - n_loads
    counts = torch.stack((n_hits, n_loads, evicts.sum(-1), n_missing - n_loads, n_first), -1)
    return marked.to(ids.dtype), loads[:, :, :count].contiguous(), counts.to(ids.dtype)


def fake(
    ids: Tensor,
    position: Tensor,
    page_size: int,
    table: Tensor,
    owner: Tensor,
    used: Tensor,
    clock: Tensor,
    more: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, kv_heads, count = ids.shape
    return (
        ids.new_empty((batch, kv_heads, count)),
        ids.new_empty((batch, kv_heads, count, 2)),
        ids.new_empty((batch, kv_heads, 5)),
    )
