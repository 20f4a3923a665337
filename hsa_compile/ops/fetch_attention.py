"""``hsa::fetch_attention``: attention to pages in a pool, which brings those that are missing there.

    q                        [B, Hq, 1, D]
    keys, values             the full cache, as of ``hsa::fetch``
    ids, slots               [B, Hkv, K] int32; selected pages, and their slots with marks (``hsa::diff``)
    loads, counts            as of ``hsa::diff``: the same marks, as a list
    bits, bias               as of ``hsa::sparse_attention``
    pool_keys, pool_values   written; as of ``hsa::fetch``
    ->
    out, lse                 as of ``hsa::sparse_attention``

It is ``fetch`` and then ``sparse_attention`` to the pool, bit by bit. On a GPU both are one kernel: the program that
attends to a page reads it from the cache where it is missing, and puts it into its slot on the way, while the others go
on with what the pool holds. The bus and the device's memory are then busy at the same time.
"""

import torch
from torch import Tensor

from .. import compat
from . import aten
from ._library import define
from .fetch import fetch, fetch_reference
from .sparse_attention import fake as attention_fake
from .sparse_attention import sparse_attention_reference

define(
    "fetch_attention(Tensor q, Tensor keys, Tensor values, Tensor ids, Tensor slots, Tensor loads, Tensor counts, "
    "Tensor bits, Tensor? bias, Tensor(a!) pool_keys, Tensor(b!) pool_values, float scale, int page_size, "
    "float softcap=0.0) -> (Tensor out, Tensor lse)"
)


def fetch_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    slots: Tensor,
    loads: Tensor,
    counts: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    pool_keys: Tensor,
    pool_values: Tensor,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The specification."""
    pools = (pool_keys, pool_values)
    fetch_reference(keys, values, loads, counts, *pools, page_size)
    return sparse_attention_reference(q, *pools, ids, slots, bits, bias, scale, page_size, softcap)


def fetch_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    slots: Tensor,
    loads: Tensor,
    counts: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    pool_keys: Tensor,
    pool_values: Tensor,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """PyTorch implementation."""
    pools = (pool_keys, pool_values)
    fetch(keys, values, loads, counts, *pools, page_size)
    return aten.sparse_attention(q, *pools, ids, slots, bits, bias, scale, page_size, softcap)


def decomposed(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    slots: Tensor,
    loads: Tensor,
    counts: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    pool_keys: Tensor,
    pool_values: Tensor,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
) -> object:
    """The same for Inductor on a CPU, where the two are apart: attention then becomes part of its loops."""
    if q.device.type != "cpu":
        return NotImplemented
    pools, rest = (pool_keys, pool_values), (bits, bias, scale, page_size, softcap)
    torch.ops.hsa.fetch(keys, values, loads, counts, *pools, page_size)
    return torch.ops.hsa.sparse_attention(q, *pools, ids, slots, *rest)


def fake(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    slots: Tensor,
    loads: Tensor,
    counts: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    pool_keys: Tensor,
    pool_values: Tensor,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    return attention_fake(q, keys, values, ids, slots, bits, bias, scale, page_size, softcap)


compat.decompose_when_functionalised(torch.ops.hsa.fetch_attention.default, decomposed)
