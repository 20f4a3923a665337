"""Inductor's lowering of ``hsa::select_tokens``: scores of all tokens by their signs, then the search among them."""

from typing import Any

import torch

from .. import compat
from . import kernels
from .kernels import eager
from .refine import choose, unfit


def lower(
    q: Any, summary: Any, signs: Any, bits: Any, bias: Any, scale: float, page_size: int, *rule: Any
) -> tuple[Any, Any]:
    op = torch.ops.hsa.select_tokens.default
    args = (q, summary, signs, bits, bias, scale, page_size, *rule)
    if not kernels.run_on(q.get_device()):
        return eager(op, None, *args)
    reason = unfit(q, summary, page_size)
    if reason is not None:
        return eager(op, reason, *args)
    index = {"summary": compat.realize(summary), "signs": compat.realize(signs)}
    return choose(q, index, bits, bias, scale, page_size, {}, *rule)
