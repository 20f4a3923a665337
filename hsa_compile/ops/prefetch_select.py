"""``hsa::prefetch_select``: guess what a later layer will select, and copy it into that layer's pool.

    q                                        [B, Hq, 1, D]; the guess at the later layer's query
    summary, bits                            as of ``hsa::select``, the later layer's, as its last step left them
    position, table, owner, used, clock      as of ``hsa::diff``; all pages are others, none is selected
    keys, values, pool_keys, pool_values     as of ``hsa::prefetch``
    the rest                                 as of ``hsa::select``
    ->
    held   [N] uint8          garbage; memory of what runs beside
    counts [B, Hkv, 5] int32  as of ``hsa::diff``: evictions, and others to load

The state changes as by ``diff(select(...))`` and ``prefetch``: pages become resident that the later layer may select,
and nothing that it computes changes. On a GPU all of it runs beside what comes next; nothing may touch the later
layer's state until ``hsa::join_prefetch``.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsa_compile.runtime import streams

from . import aten, diff
from ._library import define
from .fetch import fetch
from .prefetch import MOST_PROGRAMS

define(
    "prefetch_select(Tensor q, Tensor summary, Tensor bits, Tensor position, Tensor keys, Tensor values, "
    "Tensor(a!) table, Tensor(b!) owner, Tensor(c!) used, Tensor(d!) clock, Tensor(e!) pool_keys, "
    "Tensor(f!) pool_values, float scale, str algorithm, int page_size, int slots, int budget_pages, int fraction, "
    "int sink, int recent, str group_reduce, float top_p=1.0, int floor=0, "
    "int[] head_pages=[]) -> (Tensor held, Tensor counts)"
)

_ALIGNED = 256


def prefetch_select(
    q: Tensor,
    summary: Tensor,
    bits: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    owner: Tensor,
    used: Tensor,
    clock: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    scale: float,
    algorithm: str,
    page_size: int,
    slots: int,
    budget_pages: int,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    top_p: float = 1.0,
    floor: int = 0,
    head_pages: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    rule = (scale, algorithm, page_size, slots, budget_pages, fraction, sink, recent, group_reduce)
    state, pools = (table, owner, used, clock), (pool_keys, pool_values)
    stops: dict[str, Any] = {"top_p": top_p, "floor": floor, "head_pages": head_pages}
    held, counts = _results(q, summary, slots)
    if q.device.type != "cuda":
        ids, _ = aten.select(q, summary, bits, *rule, **stops)
        _, loads, counts = diff.diff(ids, position, page_size, *state, more=slots)
        fetch(keys, values, loads, counts, *pools, page_size, ahead=True)
        return held, counts
    from hsa_compile.lowering import standalone

    make = _Carver(held)
    with streams.beside(q.device):
        ids, _ = standalone.select(q, summary, bits, *rule, **stops, make=make)
        _, loads, _ = standalone.diff(
            ids, position, page_size, *state, more=slots, make=make, counts=counts
        )
        standalone.fetch(keys, values, loads, counts, *pools, page_size, ahead=True, make=make)
    return held, counts


class _Carver:
    """Makes tensors out of memory that was allocated before."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.used = memory, 0

    def __call__(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = math.prod(size) * dtype.itemsize
        begin, self.used = self.used, self.used + -(-nbytes // _ALIGNED) * _ALIGNED
        return self.memory[begin : begin + nbytes].view(dtype).view(*size)


def _results(q: Tensor, summary: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Scores, their order, ids, tokens selected; slots, loads; what ``fetch`` returns. Then the counts.

    Elsewhere than on a GPU nothing runs beside, and nothing is held.
    """
    batch, query_heads = q.shape[:2]
    _, kv_heads, pages, _ = summary.shape
    rows = batch * kv_heads
    numbers = batch * query_heads * pages + rows * (pages + slots + 4 + 3 * slots) + MOST_PROGRAMS
    nbytes = 4 * numbers + 8 * _ALIGNED if q.device.type == "cuda" else 0
    return (
        q.new_empty((nbytes,), dtype=torch.uint8),
        q.new_empty((batch, kv_heads, 5), dtype=torch.int32),
    )


def fake(
    q: Tensor,
    summary: Tensor,
    bits: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    owner: Tensor,
    used: Tensor,
    clock: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    scale: float,
    algorithm: str,
    page_size: int,
    slots: int,
    budget_pages: int,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    top_p: float = 1.0,
    floor: int = 0,
    head_pages: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    return _results(q, summary, slots)
