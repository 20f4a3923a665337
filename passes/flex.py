"""What a call of flex_attention does to its scores, as scale, soft cap and masks.

    before: out = flex_attention(q, k, v, score_mod, (..., block lists, mask_mod), scale)
    after:  scale, soft cap, terms: ``add`` what score_mod adds, ``keep`` where block lists and mask_mod say so

``score_mod`` is evaluated on a node that only stands for the product of q and k, and the way back from its result to
that node is walked as in attention that is written out (``scores``).

A block mask is honoured as compiled kernels honour it: a key is attended if its block is listed as full, or is listed
and mask_mod says so. Eager flex_attention asks mask_mod alone; where the lists were made of it, as
``create_block_mask`` makes them, that is the same.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from hsa_compile import compat
from hsa_compile.site import MaskTerm

from .graph_tools import Mismatch, argument, fixed, op, same, tensor
from .mods import Positions, evaluate, positions
from .scores import Scores, trace_modified
from .splice import Splicer


@dataclass(frozen=True)
class FlexCall:
    """A call as the graph has it: ``out`` and ``lse`` are what is read of its results, lse perhaps not at all."""

    node: fx.Node
    out: fx.Node
    lse: fx.Node | None
    score_mod: fx.Graph
    mask_mod: fx.Graph
    blocks: compat.BlockLists
    score_captures: tuple[object, ...]
    mask_captures: tuple[object, ...]


def flex_call(node: fx.Node) -> FlexCall:
    """Raises ``Mismatch`` where something other than the result and the log-sum-exp is used."""
    results: dict[object, fx.Node] = {}
    for user in list(node.users):
        index = user.args[1] if op(user) == "getitem" else None
        if index in results or index not in (0, 1, 2):
            raise Mismatch(
                "the results of flex_attention are used otherwise than each by itself", node
            )
        if user.users:
            node.append(user)  # what stands between them is after both
            results[index] = user
    if 0 not in results:
        raise Mismatch("the result of flex_attention is not used", node)
    if 2 in results:
        raise Mismatch("the largest scores are used, which sparse attention does not give", node)
    mask = argument(node, 4, "block_mask")
    blocks = compat.block_lists(mask) if isinstance(mask, (tuple, list)) else None
    if blocks is None:
        raise Mismatch("the block mask of flex_attention has a form that is not known", node)
    return FlexCall(
        node,
        results[0],
        results.get(1),
        _graph_of(argument(node, 3, "score_mod"), node),
        _graph_of(blocks.mask_mod, node),
        blocks,
        tuple(argument(node, 7, "score_mod_other_buffers", ())),  # type: ignore[arg-type]
        tuple(argument(node, 8, "mask_mod_other_buffers", ())),  # type: ignore[arg-type]
    )


def _must_give_sums(call: FlexCall, dtype: torch.dtype) -> None:
    """The log-sum-exp is fp32 here, and to base 2 as in all implementations but one."""
    options = argument(call.node, 6, "kernel_options")
    if isinstance(options, dict) and options.get("BACKEND") == "FLASH":
        raise Mismatch("the log-sum-exp of the FLASH backend is used", call.node)
    if dtype == torch.float64:
        raise Mismatch("the log-sum-exp of attention in float64 is used", call.node)


def _graph_of(mod: object, node: fx.Node) -> fx.Graph:
    found: object = None
    if isinstance(mod, fx.Node) and mod.op == "get_attr":
        found = operator.attrgetter(str(mod.target))(node.graph.owning_module)
    if not isinstance(found, fx.GraphModule):
        raise Mismatch("a function that flex_attention is given is not in the graph", node)
    return found.graph


def modified_scores(call: FlexCall, splicer: Splicer, q: fx.Node, keys: fx.Node) -> Scores:
    """What becomes of the scores of q ``[B, Hq, L, D]`` and keys ``[B, Hkv, S, D]``, the scale of the call apart.

    Raises:
        Mismatch: an operation is not understood, or the order of operations is not.
    """
    query, held = tensor(q), tensor(keys)
    assert query is not None and held is not None
    shape = (*query.shape[:3], held.shape[2])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if call.lse is not None:
        _must_give_sums(call, dtype)
    with splicer.before(call.node):
        at = positions(splicer, q, keys)
        with splicer.standing_for(shape, dtype, q, keys) as product:
            made = evaluate(splicer, call.score_mod, product, at, call.score_captures)
            found = trace_modified(made.node, call.node, made.scored, call.lse is not None)
        kept = _attended(call, splicer, shape, at)
    if kept is not None:
        found.masks.append(MaskTerm("keep", kept))
    return found


def _attended(
    call: FlexCall, splicer: Splicer, shape: tuple[object, ...], at: Positions
) -> fx.Node | None:
    """Where keys are attended, ``[B or 1, H or 1, L or 1, S or 1]`` boolean; None where that is everywhere."""
    made = evaluate(splicer, call.mask_mod, None, at, call.mask_captures)
    kept: fx.Node | None = made.node
    if tensor(kept).dtype != torch.bool:  # type: ignore[union-attr]
        raise Mismatch(f"mask_mod gives {tensor(kept).dtype}, not booleans", call.node)  # type: ignore[union-attr]
    if op(kept) == "full" and kept.args[1] is True:  # type: ignore[union-attr]
        kept = None
    blocks = call.blocks
    if blocks.whole and op(blocks.count) == "ones" and op(blocks.indices) == "zeros":
        return kept
    listed = _listed(call, splicer, shape, at, blocks.count, blocks.indices)
    kept = listed if kept is None else splicer.call(torch.logical_and, listed, kept)
    if blocks.full_count is None:
        return kept
    full = _listed(call, splicer, shape, at, blocks.full_count, blocks.full_indices)
    return splicer.call(torch.logical_or, full, kept)


def _listed(
    call: FlexCall,
    splicer: Splicer,
    shape: tuple[object, ...],
    at: Positions,
    count: object,
    indices: object,
) -> fx.Node:
    """Whether the block of each key is among the first ``count`` of ``indices``, ``[B or 1, H or 1, L or 1, S]``."""
    method, function = splicer.method, splicer.call
    size = call.blocks.kv_block
    if not isinstance(count, fx.Node) or not isinstance(indices, fx.Node):
        raise Mismatch(
            "the block mask of flex_attention holds something else than tensors", call.node
        )
    rows = _must_fit(call, shape, count, indices)
    blocks = _blocks_of(splicer, splicer.size(at.indices[3], 3), size)
    places = function(torch.arange, splicer.size(indices, 3), device=tensor(count).device)  # type: ignore[union-attr]
    valid = function(
        torch.logical_and,
        function(operator.lt, places, method("unsqueeze", count, -1)),
        function(operator.lt, indices, blocks),
    )
    # One column more takes what is not listed.
    column = method("to", function(torch.where, valid, indices, blocks), torch.int64)
    sizes = tuple(splicer.size(count, dim) for dim in range(3))
    columns = function(operator.add, blocks, 1) if isinstance(blocks, fx.Node) else blocks + 1
    empty = method("new_zeros", count, (*sizes, columns), dtype=torch.bool)
    dense = function(torch.scatter, empty, -1, column, True)
    listed = function(torch.index_select, dense, 3, _block_of(splicer, at.indices[3], size))
    if rows == 1:
        return method("narrow", listed, 2, 0, 1)
    row = _block_of(splicer, at.indices[2], call.blocks.q_block)
    return function(torch.index_select, listed, 2, row)


def _blocks_of(splicer: Splicer, tokens: int | fx.Node, size: int) -> int | fx.Node:
    """How many blocks of ``size`` hold all tokens."""
    if isinstance(tokens, int):
        return -(-tokens // size)
    rounded = splicer.call(operator.add, tokens, size - 1)
    return splicer.call(operator.floordiv, rounded, size)


def _block_of(splicer: Splicer, indices: fx.Node, size: int) -> fx.Node:
    """The block of each index, in one dimension."""
    return splicer.call(operator.floordiv, splicer.method("reshape", indices, -1), size)


def _must_fit(call: FlexCall, shape: tuple[object, ...], count: fx.Node, indices: fx.Node) -> int:
    """Rows of blocks that the queries are in."""
    counted, listed = tensor(count), tensor(indices)
    queries = fixed(shape[2])
    rows = -(-(queries or 1) // call.blocks.q_block)
    fits = (
        counted is not None
        and listed is not None
        and (counted.ndim, listed.ndim) == (3, 4)
        and all(map(same, counted.shape, listed.shape))
        and all(same(counted.shape[d], 1) or same(counted.shape[d], shape[d]) for d in (0, 1))
        and isinstance(counted.shape[2], int)
        and counted.shape[2] >= rows
    )
    if not fits:
        raise Mismatch("the block lists of flex_attention do not fit query and keys", call.node)
    return rows
