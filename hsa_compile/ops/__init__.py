"""The operators that attention is rewritten into: ``torch.ops.hsa.*``.

One file an op holds its schema, shapes, fake and specification; ``aten`` holds the implementation that runs in eager
mode on every device and that Inductor compiles on a CPU. On CUDA, Inductor lowers the ops to the kernels of
``hsa_compile.templates`` (see ``hsa_compile.lowering``).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import (
    append,
    aten,
    aten_tokens,
    checked_position,
    diff,
    estimate_rest,
    fetch,
    fetch_attention,
    index_scores,
    join_prefetch,
    page_bias,
    page_mask,
    prefetch,
    prefetch_select,
    refine,
    select,
    select_accumulated,
    select_tokens,
    sparse_attention,
    strided_pages,
    summarize,
    unread,
)
from ._library import implement

implement("checked_position", checked_position.checked_position, checked_position.fake)
implement("page_mask", page_mask.page_mask, page_mask.fake)
implement("page_bias", page_bias.page_bias, page_bias.fake)
implement("summarize", summarize.summarize, summarize.fake)
implement("select", aten.select, select.fake)
implement("select_accumulated", select_accumulated.select_accumulated, select_accumulated.fake)
implement("accumulate", select_accumulated.accumulate, select_accumulated.fake_accumulate)
implement("strided_pages", strided_pages.strided_pages, strided_pages.fake)
implement("select_tokens", aten_tokens.select_tokens, select_tokens.fake)
implement("refine", aten_tokens.refine, refine.fake)
implement("append", append.append, append.fake)
implement("diff", diff.diff, diff.fake)
implement("fetch", fetch.fetch, fetch.fake)
implement("fetch_attention", fetch_attention.fetch_attention, fetch_attention.fake)
implement("prefetch", prefetch.prefetch, prefetch.fake)
implement("prefetch_select", prefetch_select.prefetch_select, prefetch_select.fake)
implement("join_prefetch", join_prefetch.join_prefetch, join_prefetch.fake)
implement("index_scores", index_scores.index_scores, index_scores.fake)
implement("sparse_attention", aten.sparse_attention, sparse_attention.fake)
implement("unread", unread.unread, unread.fake)
implement("estimate_rest", estimate_rest.estimate_rest, estimate_rest.fake)


def _on_cpu(function: Callable[..., object]) -> Callable[..., object]:
    """A decomposition for CPU tensors; on other devices the op stays whole, for a lowering."""

    @functools.wraps(function)
    def decomposed(q: Tensor, *args: object) -> object:
        return function(q, *args) if q.device.type == "cpu" else NotImplemented

    return decomposed


DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., object]] = {
    torch.ops.hsa.page_mask.default: page_mask.page_mask,
    torch.ops.hsa.page_bias.default: page_bias.page_bias,
    torch.ops.hsa.strided_pages.default: strided_pages.strided_pages,
    torch.ops.hsa.unread.default: unread.unread,
    torch.ops.hsa.estimate_rest.default: estimate_rest.estimate_rest,
    torch.ops.hsa.refine.default: _on_cpu(aten_tokens.refine),
    torch.ops.hsa.select_tokens.default: _on_cpu(aten_tokens.select_tokens),
    torch.ops.hsa.select.default: _on_cpu(aten.select),
    torch.ops.hsa.sparse_attention.default: _on_cpu(aten.sparse_attention),
}
"""Ops that Inductor is to see as ATen: masks and sums over pages everywhere, the others on a CPU."""
