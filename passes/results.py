"""The result of an op in the form of the attention that it replaces.

before: out [B, Hq, L, Dv] and its log-sum-exp
after:  less the share of an attention sink; batch and heads merged, dimensions in the order, the memory layout and the
        dtype of the node that is replaced
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from hsa_compile import compat
from hsa_compile.site import Attention, Sink

from .emit import Emitter
from .graph_tools import same, tensor
from .operands import STRAIGHT


def sunk(emit: Emitter, result: fx.Node, lse: fx.Node, sink: Sink) -> fx.Node:
    """The result less the share of the sink: all of it times ``e^lse / (e^lse + e^sink)``, in fp32.

    ``lse`` is ``[B, Hq, L, 1]``.
    """
    call, method = emit.call, emit.method
    score: object = sink.factor
    if sink.node is not None:
        score = call(operator.mul, method("float", sink.node), sink.factor)
    share = call(torch.sigmoid, call(operator.sub, lse, score))
    held = tensor(result)
    assert held is not None
    return method("to", call(operator.mul, method("float", result), share), held.dtype)


def as_before(emit: Emitter, result: fx.Node, attention: Attention) -> fx.Node:
    """``result [B, Hq, L, Dv]`` as the node ``attention.out`` holds it."""
    out, q = tensor(attention.out), tensor(attention.q)
    assert out is not None and q is not None
    if out.ndim == 3:
        result = emit.method("flatten", result, 0, 1)
    if attention.out_dims != STRAIGHT:
        result = emit.method("permute", result, *attention.out_dims)
    if attention.queries > 1:
        result = _laid_out(emit, result, out)
    return result if out.dtype == q.dtype else emit.method("to", result, out.dtype)


def _laid_out(emit: Emitter, result: fx.Node, out: torch.Tensor) -> fx.Node:
    """The result in the memory layout of ``out``, whose views are in the graph."""
    held = tensor(result)
    assert held is not None
    if all(map(same, held.stride(), out.stride())):
        return result
    order = sorted(range(out.ndim), key=lambda dim: -compat.hint(out.stride(dim)))
    packed = emit.method("contiguous", emit.method("permute", result, *order))
    return emit.method("permute", packed, *(order.index(dim) for dim in range(out.ndim)))
