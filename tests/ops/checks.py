"""What the tests of the ops compare, and the ways of running them."""

from __future__ import annotations

from dataclasses import replace

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import hsa_compile.ops
from hsa_compile import compat
from hsa_compile.ops.select import select_reference
from hsa_compile.ops.sparse_attention import sparse_attention_reference
from hsa_compile.passes.merge import merge_equal
from tests.ops.cases import State, assert_same_pages, page_ranks

HSA = torch.ops.hsa
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
    """Inductor with the ops as it sees them on a CPU."""
    table = hsa_compile.ops.DECOMPOSITIONS
    return compat.compile_with_inductor(graph, inputs, {}, table, "tests", merge_equal)


traced = aot_autograd(
    fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
    decompositions=hsa_compile.ops.DECOMPOSITIONS,
)
"""The same graph as Inductor's, run op by op: without C++ to compile."""


def check_select(state: State, result: tuple[Tensor, Tensor]) -> None:
    ids, counts = result
    expected = select_reference(*state.selection())  # type: ignore[arg-type]
    assert ids.dtype == torch.int32 and counts.dtype == torch.int64
    assert_same_pages(ids, expected[0], page_ranks(state))
    assert torch.equal(counts[..., 1], expected[1][..., 1])
    if torch.equal(ids, expected[0]):
        assert torch.equal(counts, expected[1])


def attend(state: State, ids: Tensor) -> tuple[object, ...]:
    """Arguments of ``sparse_attention``."""
    case = state.case
    return (
        state.q,
        state.keys,
        state.values,
        ids,
        None,
        state.bits,
        state.bias,
        case.scale,
        case.page_size,
        case.softcap,
    )


def check_attention(state: State, ids: Tensor, result: tuple[Tensor, Tensor]) -> None:
    # The reference multiplies what does not take part by zero, so it cannot be shown the poison.
    clean = replace(state, keys=state.keys.nan_to_num(), values=state.values.nan_to_num())
    out, lse = sparse_attention_reference(*attend(clean, ids))  # type: ignore[arg-type]
    tolerance = dict(TOLERANCE)
    if state.bias is not None:
        # A row that is -10,000 throughout is attended, and its logits are rounded at that size.
        tolerance["atol"] += 2e4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(result[0], out, **tolerance)
    torch.testing.assert_close(result[1], lse, **tolerance)
