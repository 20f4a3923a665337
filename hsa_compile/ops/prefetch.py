"""``hsa::prefetch``: pages for later, copied while the step goes on.

    keys, values, loads, counts, pool_keys, pool_values    as of ``hsa::fetch``; copied are the ``counts[..., AHEAD]``
                                                           entries behind the first ``counts[..., LOADS]``
    ->
    held [N] int32    garbage; memory of the copy

On a GPU the copy runs beside what comes next, and nothing waits for it until ``hsa::join_prefetch``: its slots must be
those of no page that is read before.
"""

import torch
from torch import Tensor

from hsa_compile.runtime import streams

from ._library import define
from .diff import AHEAD, LOADS
from .fetch import copy_pages

define(
    "prefetch(Tensor keys, Tensor values, Tensor loads, Tensor counts, Tensor(a!) pool_keys, Tensor(b!) pool_values, "
    "int page_size) -> Tensor"
)

MOST_PROGRAMS = 1024


def prefetch_reference(
    keys: Tensor,
    values: Tensor,
    loads: Tensor,
    counts: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
) -> None:
    """The specification, page by page."""
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            first = int(counts[b, h, LOADS])
            behind = first + int(counts[b, h, AHEAD])
            for page, slot in loads[b, h, first:behind].tolist():
                for cache, pool in ((keys, pool_keys), (values, pool_values)):
                    tokens = cache[b, h, page * page_size : (page + 1) * page_size]
                    pool[b, h, slot, : len(tokens)] = tokens


def prefetch(
    keys: Tensor,
    values: Tensor,
    loads: Tensor,
    counts: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
) -> Tensor:
    """PyTorch implementation; on a GPU, the kernel of ``hsa::fetch``."""
    held = fake(keys, values, loads, counts, pool_keys, pool_values, page_size)
    if pool_keys.device.type == "cuda":
        from hsa_compile.lowering import standalone

        arguments = (keys, values, loads, counts, pool_keys, pool_values, page_size)
        with streams.beside(pool_keys.device):
            standalone.fetch(*arguments, ahead=True, make=lambda size, **_: held[: size[0]])
        return held
    begin = counts[..., LOADS].unsqueeze(-1)
    entry = torch.arange(loads.shape[2], device=loads.device)
    listed = (entry >= begin) & (entry < begin + counts[..., AHEAD].unsqueeze(-1))
    copy_pages(keys, values, loads, listed, pool_keys, pool_values, page_size)
    return held


def fake(
    keys: Tensor,
    values: Tensor,
    loads: Tensor,
    counts: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
) -> Tensor:
    return loads.new_empty((MOST_PROGRAMS,))
