"""The operators that attention is rewritten into: ``torch.ops.hsa.*``.

One file an op holds its schema, shapes, fake and specification; ``aten`` holds the implementation that runs in eager
mode on every device and that Inductor compiles on a CPU. On CUDA, Inductor lowers the ops to the kernels of
``hsa_compile.templates`` (see ``hsa_compile.lowering``).
"""

from collections.abc import Callable

import torch

from . import aten, checked_position, page_mask, select, sparse_attention, summarize
from ._library import implement

implement("checked_position", checked_position.checked_position, checked_position.fake)
implement("page_mask", page_mask.page_mask, page_mask.fake)
implement("summarize", summarize.summarize, summarize.fake)
implement("select", aten.select, select.fake)
implement("sparse_attention", aten.sparse_attention, sparse_attention.fake)


def decompositions(device_type: str) -> dict[torch._ops.OpOverload, Callable[..., object]]:
    """Ops that Inductor is to see as ATen on this kind of device (``"cpu"``, ``"cuda"``)."""
    table: dict[torch._ops.OpOverload, Callable[..., object]] = {
        torch.ops.hsa.page_mask.default: page_mask.page_mask
    }
    if device_type == "cpu":
        table[torch.ops.hsa.select.default] = aten.select
        table[torch.ops.hsa.sparse_attention.default] = aten.sparse_attention
    return table
