"""``hsa::fetch``: copy pages of the full cache into the slots of a pool.

    keys        [B, Hkv, S, D]          the full cache, any strides with a last one of 1; on a GPU, memory of the host
    values      [B, Hkv, S, Dv]
    loads       [B, Hkv, K, 2] int32    page and slot of each page to copy (``hsa::diff``)
    counts      [B, Hkv, 5] int32       their number, ``counts[..., LOADS]``; entries after it are not read
    pool_keys   [B, Hkv, N, T, D]       written; T = page_size
    pool_values [B, Hkv, N, T, Dv]      written

Of a last page that the cache does not fill, only its tokens are copied; the rest of the slot stays as it is.
"""

import torch
from torch import Tensor

from ._library import define
from .diff import AHEAD, LOADS

define(
    "fetch(Tensor keys, Tensor values, Tensor loads, Tensor counts, Tensor(a!) pool_keys, Tensor(b!) pool_values, "
    "int page_size) -> ()"
)


def fetch_reference(
    keys: Tensor,
    values: Tensor,
    loads: Tensor,
    counts: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
    ahead: bool = False,
) -> None:
    """The specification, page by page; of ``hsa::prefetch`` with ``ahead``."""
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            begin = int(counts[b, h, LOADS]) if ahead else 0
            end = begin + int(counts[b, h, AHEAD if ahead else LOADS])
            for page, slot in loads[b, h, begin:end].tolist():
                for cache, pool in ((keys, pool_keys), (values, pool_values)):
                    tokens = cache[b, h, page * page_size : (page + 1) * page_size]
                    pool[b, h, slot, : len(tokens)] = tokens


def fetch(
    keys: Tensor,
    values: Tensor,
    loads: Tensor,
    counts: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
    ahead: bool = False,
) -> None:
    """PyTorch implementation: work in proportion to the pages to copy, once their number is known on the host."""
    entry = torch.arange(loads.shape[2], device=loads.device)
    listed = entry < counts[..., LOADS].unsqueeze(-1)
    if ahead:
        listed = ~listed & (entry < (counts[..., LOADS] + counts[..., AHEAD]).unsqueeze(-1))
    full, rest = divmod(keys.shape[2], page_size)
    b, h, k = listed.nonzero(as_tuple=True)
    page, slot = loads[b, h, k].long().unbind(-1)
    whole = page < full
    part = ~whole
    for cache, pool in ((keys, pool_keys), (values, pool_values)):
        pages = cache[:, :, : full * page_size].unflatten(2, (full, page_size))
        pool[b[whole], h[whole], slot[whole]] = pages[b[whole], h[whole], page[whole]]
        if rest:
            last = cache[:, :, full * page_size :]
            pool[:, :, :, :rest][b[part], h[part], slot[part]] = last[b[part], h[part]]


def fake(
    keys: Tensor,
    values: Tensor,
    loads: Tensor,
    counts: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
) -> None:
    return None
