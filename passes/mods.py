"""The functions that flex_attention is given, evaluated at all positions at once.

    before: mask_mod(b, h, q_idx, kv_idx) = padding[b, kv_idx] & (kv_idx <= q_idx + offset)      (scalars)
    after:  padding[b, kv] & (kv <= q + offset), b [B, 1, 1, 1], h [1, H, 1, 1], q [1, 1, L, 1], kv [1, 1, 1, S]

Every scalar becomes a tensor of four dimensions, each of size 1 where it does not depend on that index. So does a
captured tensor without dimensions: among themselves they promote dtypes as scalars do. Only what is the same on tensors
that broadcast is taken over: elementwise operations, a captured tensor read at one index for each of its dimensions (in
one step or in several), and constants. What depends on no index may also be viewed. All else is a ``Mismatch``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import map_aggregate

from hsa_compile import compat

from .graph_tools import (
    CASTS,
    FILLS,
    VIEWS,
    Mismatch,
    fill,
    modifies,
    op,
    raw_name,
    tensor,
    value,
)
from .splice import Splicer

_COMPARISONS = frozenset(
    "lt le gt ge eq ne less less_equal greater greater_equal not_equal __lt__ __le__ __gt__ __ge__ __eq__ __ne__ "
    "isinf isnan isneginf".split()
)
_LOGIC = frozenset(
    "and_ or_ xor invert __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __invert__ bitwise_and bitwise_or "
    "bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not".split()
)
_ARITHMETIC = frozenset(
    "add sub mul div neg pos abs pow square sqrt rsqrt reciprocal exp exp2 log log2 log1p expm1 sin cos tanh sigmoid "
    "floor ceil round trunc sign minimum maximum clamp clamp_min clamp_max clip floordiv floor_divide mod remainder "
    "fmod lshift rshift where masked_fill subtract negative absolute __sub__ __rsub__ rsub __truediv__ __rtruediv__ "
    "__floordiv__ __rfloordiv__ __mod__ __pow__ __rpow__ __neg__ __abs__".split()
)
_DTYPES = CASTS | {"int", "long", "bool"}
_ELEMENTWISE = _COMPARISONS | _LOGIC | _ARITHMETIC | _DTYPES | {"contiguous", "clone", "detach"}


@dataclass(frozen=True)
class Scalar:
    """What is a scalar to a mod: ``[B or 1, H or 1, L or 1, S or 1]``; ``scored`` if it depends on the score."""

    node: fx.Node
    scored: bool = False


@dataclass(frozen=True)
class Captured:
    """A tensor of the model, or a part of it: the first dimensions are read ``at`` one index each."""

    node: fx.Node
    at: tuple[object, ...] = ()

    @property
    def dims(self) -> int:
        """Dimensions that are left."""
        return tensor(self.node).ndim - len(self.at)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Positions:
    """What the indices of a mod are: ``[B, 1, 1, 1]``, ``[1, H, 1, 1]``, ``[1, 1, L, 1]``, ``[1, 1, 1, S]``, int64."""

    indices: tuple[fx.Node, ...]


def positions(splicer: Splicer, q: fx.Node, keys: fx.Node) -> Positions:
    """Those of q ``[B, Hq, L, D]`` and keys ``[B, Hkv, S, D]``."""
    sizes = [*(splicer.size(q, dim) for dim in range(3)), splicer.size(keys, 2)]
    device = tensor(q).device  # type: ignore[union-attr]
    indices = []
    for dim, size in enumerate(sizes):
        flat = splicer.call(torch.arange, size, device=device)
        indices.append(splicer.method("view", flat, *(-1 if d == dim else 1 for d in range(4))))
    return Positions(tuple(indices))


def evaluate(
    splicer: Splicer,
    mod: fx.Graph,
    score: fx.Node | None,
    at: Positions,
    captured: tuple[object, ...],
) -> Evaluated:
    """What ``mod(score, b, h, q_idx, kv_idx, *captured)`` gives, or ``mod(b, h, ...)`` where ``score`` is None.

    Raises:
        Mismatch: with the operation that is not known to be the same on tensors that broadcast.
    """
    given: list[object] = [] if score is None else [Scalar(score, True)]
    given.extend(map(Scalar, at.indices))
    given.extend(Captured(x) if tensor(x) is not None else x for x in captured)  # type: ignore[arg-type]
    return _Evaluation(splicer, mod, given, "mask_mod" if score is None else "score_mod").result()


@dataclass(frozen=True)
class Evaluated:
    """The result, and every node that was made for it and depends on the score."""

    node: fx.Node
    scored: frozenset[fx.Node]


class _Evaluation:
    def __init__(self, splicer: Splicer, mod: fx.Graph, given: list[object], kind: str) -> None:
        self.splicer, self.mod, self.kind = splicer, mod, kind
        self.device = splicer.site.meta["example_value"][0].device
        inputs = [node for node in mod.nodes if node.op == "placeholder"]
        if len(inputs) != len(given):
            raise Mismatch(f"the {kind} of flex_attention takes other arguments", splicer.site)
        self.held: dict[fx.Node, object] = dict(zip(inputs, given, strict=True))

    def result(self) -> Evaluated:
        output = next(iter(reversed(self.mod.nodes)))
        (returned,) = output.args
        if isinstance(returned, (tuple, list)) and len(returned) == 1:
            (returned,) = returned
        needed = _needed(returned)
        for node in self.mod.nodes:
            if node in needed and node not in self.held:
                self.held[node] = self._value(node)
        given = self.held[returned] if isinstance(returned, fx.Node) else returned
        scored = {x.node for x in self.held.values() if isinstance(x, Scalar) and x.scored}
        return Evaluated(self._scalar(given, output).node, frozenset(scored))

    def _value(self, node: fx.Node) -> object:
        name = op(node)
        if not _is_torchs(node) or "out" in node.kwargs:
            raise self._unknown(node)
        if modifies(node):
            raise self._unknown(node, "writes in place", raw_name(node))
        args = map_aggregate(node.args, self._given)
        kwargs = map_aggregate(node.kwargs, self._given)
        leaves = _leaves((args, kwargs))
        if fill(node) is not None:
            return self._constant(node, name, args)
        if name == "getitem" and self._picks_elements(args[1]):  # type: ignore[index]
            return self._read(node, *args)  # type: ignore[misc]
        if not any(map(_depends_on_indices, leaves)):
            return self._captured(node, name, args, kwargs)
        if name not in _ELEMENTWISE or (name == "where" and len(node.args) != 3):
            raise self._unknown(node)
        return self._elementwise(node, name, args, kwargs, leaves)

    def _given(self, item: object) -> object:
        return self.held[item] if isinstance(item, fx.Node) else item

    def _elementwise(
        self, node: fx.Node, name: str, args: object, kwargs: object, leaves: list[object]
    ) -> Scalar:
        """A call on scalars, which are all tensors of four dimensions."""
        scores = [leaf for leaf in leaves if isinstance(leaf, Scalar) and leaf.scored]

        def given(leaf: object) -> object:
            if not isinstance(leaf, (Scalar, Captured)):
                return leaf
            held = self._scalar(leaf, node)
            if scores and not held.scored and name in ("add", "sub"):
                return self._as_precise(held.node, scores[0].node)
            return held.node

        made = self._spliced(node, map_aggregate(args, given), map_aggregate(kwargs, given))
        dtype = tensor(made).dtype  # type: ignore[union-attr]
        if scores and name in _DTYPES and not dtype.is_floating_point:
            raise self._unknown(node, f"makes the score {dtype}")
        return Scalar(made, bool(scores))

    def _as_precise(self, added: fx.Node, score: fx.Node) -> fx.Node:
        """What is added to a score, in the dtype of scores."""
        dtype = tensor(score).dtype  # type: ignore[union-attr]
        if tensor(added).dtype == dtype:  # type: ignore[union-attr]
            return added
        return self.splicer.method("to", added, dtype)

    def _captured(self, node: fx.Node, name: str, args: object, kwargs: object) -> object:
        """A call that depends on no index, as the mod has it."""
        if name not in _ELEMENTWISE | VIEWS:
            raise self._unknown(node)

        def given(leaf: object) -> object:
            return leaf.node if isinstance(leaf, (Scalar, Captured)) else leaf

        made = self._spliced(node, map_aggregate(args, given), map_aggregate(kwargs, given))
        return made if tensor(made) is None else Captured(made)

    def _picks_elements(self, index: object) -> bool:
        """Whether ``x[index]`` has one integer for each dimension that it indexes."""
        return all(map(self._is_integer, _items(index)))

    @staticmethod
    def _is_integer(item: object) -> bool:
        if isinstance(item, (Scalar, Captured)):
            held = tensor(item.node)
            scalar = isinstance(item, Scalar) or item.dims == 0
            return scalar and held is not None and held.dtype in (torch.int64, torch.int32)
        return isinstance(value(item), (int, torch.SymInt)) and not isinstance(item, bool)

    def _read(self, node: fx.Node, source: object, index: object) -> object:
        """``source[index]`` where ``index`` picks elements: once for all positions when no dimension is left."""
        if not isinstance(source, Captured):
            raise self._unknown(node, "indexes what is no captured tensor")
        at = (*source.at, *_items(index))
        read = Captured(source.node, at)
        if read.dims < 0 or any(isinstance(i, Scalar) and i.scored for i in at):
            raise self._unknown(node)
        if read.dims:
            return read
        picked = tuple(
            self._scalar(i, node).node if isinstance(i, (Scalar, Captured)) else i for i in at
        )
        return Scalar(self._four(self.splicer.call(operator.getitem, source.node, picked)))

    def _constant(self, node: fx.Node, name: str, args: object) -> object:
        """``x.new_ones(())``, ``torch.tensor(c)`` and their like, on the device of the query."""
        shown = tensor(node)
        filled = fill(node)
        if shown is None or shown.ndim or not isinstance(filled, (bool, int, float)):
            raise self._unknown(node)
        dtype = node.kwargs.get("dtype")
        if name.startswith("new_") or name.endswith("_like"):
            like = args[0]  # type: ignore[index]
            dtype = dtype or tensor(like.node).dtype  # type: ignore[union-attr]
        elif name in FILLS:
            dtype = dtype or torch.get_default_dtype()
        filled = bool(filled) if dtype == torch.bool else filled
        return Scalar(self._full(filled, dtype))  # type: ignore[arg-type]

    def _full(self, filled: object, dtype: torch.dtype | None = None) -> fx.Node:
        shape = (1, 1, 1, 1)
        return self.splicer.call(torch.full, shape, filled, dtype=dtype, device=self.device)

    def _scalar(self, held: object, reader: fx.Node) -> Scalar:
        """A value as a tensor of four dimensions."""
        if isinstance(held, Captured) and held.dims == 0:
            if tensor(held.node).device != self.device:  # type: ignore[union-attr]
                raise self._unknown(reader, "takes a captured tensor of another device")
            return Scalar(self._four(held.node))
        if isinstance(held, (bool, int, float)):
            return Scalar(self._full(held))
        if not isinstance(held, Scalar):
            raise self._unknown(reader, "takes a captured tensor that is no scalar")
        return held

    def _four(self, node: fx.Node) -> fx.Node:
        if tensor(node).ndim:  # type: ignore[union-attr]
            return node
        return self.splicer.method("reshape", node, 1, 1, 1, 1)

    def _spliced(self, node: fx.Node, args: object, kwargs: object) -> fx.Node:
        splice = self.splicer.method if node.op == "call_method" else self.splicer.call
        return splice(node.target, *args, **kwargs)  # type: ignore[arg-type, misc]

    def _unknown(self, node: fx.Node, what: str = "is not recognised", name: str = "") -> Mismatch:
        return Mismatch(
            f"`{name or op(node)}` in the {self.kind} of flex_attention {what}", self.splicer.site
        )


def _items(index: object) -> tuple[object, ...]:
    return tuple(index) if isinstance(index, (tuple, list)) else (index,)


def _leaves(arguments: object) -> list[object]:
    found: list[object] = []
    map_aggregate(arguments, found.append)  # type: ignore[arg-type]
    return found


def _depends_on_indices(leaf: object) -> bool:
    return isinstance(leaf, Scalar) or (isinstance(leaf, Captured) and bool(leaf.at))


def _needed(returned: object) -> set[fx.Node]:
    frontier, needed = [returned], set[fx.Node]()
    while frontier:
        node = frontier.pop()
        if isinstance(node, fx.Node) and node not in needed:
            needed.add(node)
            frontier.extend(node.all_input_nodes)
    return needed


def _is_torchs(node: fx.Node) -> bool:
    """Whether a call is a method, an operator or a function of torch itself, not another's of the same name."""
    if node.op == "call_method":
        return True
    overloads = compat.overloads(node.target)
    if overloads:
        return all(overload.namespace == "aten" for overload in overloads)
    name = getattr(node.target, "__name__", "")
    homes = (torch, operator, torch.Tensor)
    return node.op == "call_function" and any(getattr(h, name, None) is node.target for h in homes)
