"""Find the scores of a model's own indexer.

    before: s = matmul(weights.unsqueeze(-2), relu(matmul(q.float(), k.mT.float().unsqueeze(1)) * scale)).squeeze(-2)
    after:  the graph unchanged; q, k, weights and scale as ``hsa::index_scores`` takes them

Casts to fp32 are looked through, for the op multiplies as exactly. Scores that are spelled otherwise, or made in lower
precision, stay as the model computes them.
"""

from __future__ import annotations

import torch
from torch import fx

from hsa_compile.site import IndexScores

from .graph_tools import CASTS, argument, memory, modifies, number, op, same, tensor, writes

_MASKING = frozenset({"add", "masked_fill", "where", "contiguous", "clone"}) | CASTS
_MOST_MASKS = 6
"""Operations between the scores and the top-k."""


def find_scores(node: object) -> IndexScores | None:
    """The scores behind what a top-k reads, under masks of any kind; None where they are not an indexer's."""
    frontier = [node]
    for _ in range(_MOST_MASKS):
        each = frontier.pop(0) if frontier else None
        if not isinstance(each, fx.Node):
            continue
        found = _scores(each)
        if found is not None:
            return found
        if op(each) in _MASKING and not modifies(each):
            frontier += each.all_input_nodes
    return None


def _scores(out: fx.Node) -> IndexScores | None:
    """``out`` as scores ``[B, S, T]``."""
    summed = _of(out, "squeeze", -2, 2)
    if summed is None or op(summed) != "matmul":
        return None
    spread, cut = argument(summed, 0, "input"), argument(summed, 1, "other")
    weights, scaled = _of(spread, "unsqueeze", -2, 2), _of(cut, "relu")
    scale, product = _scale(scaled)
    if weights is None or scale is None or product is None or op(product) != "matmul":
        return None
    q, of_q = _exact(argument(product, 0, "input"))
    k, of_k = _keys(argument(product, 1, "other"))
    if q is None or k is None:
        return None
    between = dict.fromkeys((out, summed, spread, cut, scaled, product, *of_q, *of_k))
    nodes = tuple(node for node in between if isinstance(node, fx.Node))
    found = IndexScores(out, q, k, weights, scale, nodes)
    return found if _fits(found) else None


def _fits(found: IndexScores) -> bool:
    """Whether shapes and dtypes are the op's, and nothing else reads, or writes, what is between."""
    out, q, k, weights = (tensor(node) for node in (found.out, found.q, found.k, found.weights))
    if out is None or q is None or k is None or weights is None:
        return False
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    shapes = (out.ndim, q.ndim, k.ndim, weights.ndim) == (3, 4, 3, 3) and all(
        same(a, b)
        for a, b in (
            *zip(weights.shape, q.shape[:3], strict=True),
            *zip(out.shape, (*q.shape[:2], k.shape[1]), strict=True),
            *((k.shape[0], q.shape[0]), (k.shape[2], q.shape[3])),
        )
    )
    kinds = q.dtype == k.dtype and out.dtype == weights.dtype == work
    inner = set(found.nodes)
    alone = all(set(node.users) <= inner for node in inner - {found.out})
    order = {node: i for i, node in enumerate(found.out.graph.nodes)}
    first = min(order[node] for node in inner)
    unwritten = not any(
        first < order[write] < order[found.out]
        for node in (found.q, found.k, found.weights)
        for write in writes(memory(node))
    )
    still = not any(modifies(node) or writes(node) for node in inner if op(node) != "squeeze")
    return shapes and kinds and alone and unwritten and still


def _of(node: object, name: str, *dims: int) -> fx.Node | None:
    """The operand of a call of ``name``, along one of ``dims`` where there are any."""
    if not isinstance(node, fx.Node) or op(node) != name:
        return None
    if dims and argument(node, 1, "dim") not in dims:
        return None
    source = argument(node, 0, "input")
    return source if isinstance(source, fx.Node) else None


def _scale(node: fx.Node | None) -> tuple[float | None, fx.Node | None]:
    """A positive number that a product is multiplied by, 1 where there is none, and the product."""
    if node is None or op(node) not in ("mul", "div"):
        return 1.0, node
    by, source = number(argument(node, 1, "other")), argument(node, 0, "input")
    if by is None or by <= 0 or not isinstance(source, fx.Node):
        return None, node
    return by if op(node) == "mul" else 1 / by, source


def _exact(node: object) -> tuple[fx.Node | None, list[fx.Node]]:
    """A node without the cast to a wider dtype that made it, and the cast."""
    passed: list[fx.Node] = []
    while isinstance(node, fx.Node) and op(node) in CASTS:
        source = node.args[0]
        before, after = tensor(source), tensor(node)
        if before is None or after is None or before.device != after.device:
            break
        if (
            torch.promote_types(before.dtype, after.dtype) != after.dtype
            or not before.is_floating_point()
        ):
            break
        passed.append(node)
        node = source
    return (node if isinstance(node, fx.Node) else None), passed


def _keys(node: object) -> tuple[fx.Node | None, list[fx.Node]]:
    """``k [B, T, D]`` of its transpose ``[B, 1, D, T]``, over exact casts in any place, and what is between."""
    passed: list[fx.Node] = []
    turned = spread = False
    while True:
        node, casts = _exact(node)
        passed += casts
        held = tensor(node)
        if node is None or held is None:
            return None, passed
        if op(node) == "unsqueeze" and not spread and argument(node, 1, "dim") in (1, -3):
            spread = held.ndim == 4
        elif op(node) == "transpose" and not turned:
            dims = {d % held.ndim for d in node.args[1:] if isinstance(d, int)}
            turned = dims == {held.ndim - 2, held.ndim - 1}
            if not turned:
                return None, passed
        elif op(node) == "getattr" and node.args[1] == "mT" and not turned:
            turned = True
        else:
            return (node if turned and spread else None), passed
        passed.append(node)
        node = node.args[0]
