"""What lies between cached tensors and attention, where it treats every token alone.

    before: kv = linear(latents, w).view(B, T, H, D).transpose(1, 2); keys = cat([kv, rotary.expand(...)], -1)
    after:  the graph unchanged; a ``Region``: cached ``latents`` and ``rotary``, and the nodes that make keys of them

    chosen: the same nodes over [B * S, k] tokens, gathered from ``latents`` and ``rotary``

Latent attention (DeepSeek-AI 2024, "DeepSeek-V2") caches a few hundred numbers a token and makes the keys and values of
all heads from them in every step. From the keys and values the graph is walked back, and every node must be one that
keeps the dimension of the tokens, and that of the rows, apart from all others: products with weights over the last
dimension, views that leave both dimensions whole, what is computed number by number, and tensors that are allocated and
filled part by part. So the same nodes compute the same keys of some tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import fx
from torch.fx.node import map_arg

from hsa_compile import compat
from hsa_compile.site import Place, Region

from .emit import Emitter
from .graph_tools import (
    CASTS,
    argument,
    fixed,
    memory,
    modifies,
    number,
    op,
    raw_name,
    same,
    tensor,
    writes,
)

Source = tuple[fx.Node, Place]

_ALLOCATED = frozenset({"empty", "new_empty", "zeros", "new_zeros"})
_RESHAPED = frozenset({"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"})
_EXPANDED = frozenset({"expand", "expand_as"})
_ALIKE = CASTS | frozenset(
    "contiguous clone detach neg abs relu silu gelu sigmoid tanh exp sqrt rsqrt square pow".split()
)
"""One operand, number by number."""
_COMBINED = frozenset({"add", "sub", "mul", "div"})
_FUNCTIONAL = frozenset({"index_copy", "index_put", "slice_scatter", "select_scatter", "scatter"})


class TogetherError(Exception):
    """Raised where tokens are not treated one by one, with the reason."""


def region_of(roots: Iterable[tuple[fx.Node, fx.Node]], until: fx.Node) -> Region:
    """The region that makes ``roots``, ``[B, H, T, D]``, each given with the node that reads it.

    Nothing that it reads is written between its first reader and ``until``, where it may be computed again.

    Raises:
        TogetherError: a node may mix tokens, or nothing that is cached is behind it.
    """
    tracer = _Tracer(until.graph)
    for root, _ in roots:
        tracer.visit(root, Place(0, 2))
    for root, reader in roots:
        tracer.read_by(root, reader)
    return tracer.region(until)


def replay(
    emit: Emitter,
    region: Region,
    taken: dict[fx.Node, fx.Node],
    rows: object,
    tokens: object,
) -> dict[fx.Node, fx.Node]:
    """The nodes of ``region`` once more, over what was taken of each cached tensor: ``rows`` of ``tokens``."""
    made = dict(taken)
    for node, place in region.nodes.items():
        made[node] = _again(emit, node, place, made, rows, tokens)
    return made


def _again(
    emit: Emitter,
    node: fx.Node,
    place: Place,
    made: dict[fx.Node, fx.Node],
    rows: object,
    tokens: object,
) -> fx.Node:
    name, held = op(node), tensor(node)
    sizes: list[object] = list(held.shape) if held is not None else []
    if sizes:
        sizes[place.batch], sizes[place.token] = rows, tokens
    if name in _ALLOCATED:
        assert held is not None
        kind = torch.zeros if "zeros" in name else torch.empty
        return emit.call(kind, sizes, dtype=held.dtype, device=held.device)
    if name in _RESHAPED:
        return emit.method("reshape", made[node.args[0]], sizes)  # type: ignore[index]
    if name in _EXPANDED:
        return emit.method("expand", made[node.args[0]], sizes)  # type: ignore[index]
    args, kwargs = map_arg((node.args, node.kwargs), lambda read: made.get(read, read))  # type: ignore[misc]
    if node.op == "call_method":
        return emit.method(str(node.target), *args, **kwargs)  # type: ignore[misc]
    return emit.call(node.target, *args, **kwargs)  # type: ignore[arg-type, misc]


class _Tracer:
    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.nodes: dict[fx.Node, Place] = {}
        self.cached: dict[fx.Node, Place] = {}
        self.first: dict[fx.Node, int] = {}
        self.rows: object = None
        self.tokens: object = None

    def visit(self, node: fx.Node, place: Place) -> None:
        """Follow ``node`` back; its dimensions ``place`` are rows and tokens."""
        known = self.nodes.get(node, self.cached.get(node))
        if known is not None:
            if known != place:
                raise TogetherError(f"`{raw_name(node)}` is read with its dimensions in two orders")
            return
        held = tensor(node)
        if held is not None and self.tokens is None:
            self.rows, self.tokens = held.shape[place.batch], held.shape[place.token]
        if held is not None and not self._fits(held, place):
            raise TogetherError(f"`{raw_name(node)}` holds another number of tokens")
        sources = self._sources(node, place)
        if sources is None:
            self._take(node, place)
            return
        self.nodes[node] = place
        for source, where in sources:
            self.visit(source, where)
            self.read_by(source, node)

    def read_by(self, source: fx.Node, reader: fx.Node) -> None:
        self.first[source] = min(self.first.get(source, self.order[reader]), self.order[reader])

    def region(self, until: fx.Node) -> Region:
        end = self.order[until]
        for node in self.nodes:
            for outside in node.all_input_nodes:
                if outside not in self.nodes and tensor(outside) is not None:
                    self.read_by(outside, node)
        for read, first in self.first.items():
            if read in self.nodes:
                continue
            if any(first < self.order[write] < end for write in writes(memory(read))):
                raise TogetherError(f"`{read.name}` is written between its reader and attention")
        ordered = sorted(self.nodes, key=self.order.__getitem__)
        grows = any(op(memory(node)) == "cat" for node in self.cached)
        nodes = {node: self.nodes[node] for node in ordered}
        return Region(nodes, self.cached, "dynamic" if grows else "static")

    def _fits(self, held: torch.Tensor, place: Place) -> bool:
        return (
            0 <= place.batch < place.token < held.ndim
            and same(held.shape[place.batch], self.rows)
            and same(held.shape[place.token], self.tokens)
        )

    def _take(self, node: fx.Node, place: Place) -> None:
        """``node`` is where tokens are gathered, if it is what a cache holds."""
        if tensor(node) is None or not is_cached(node):
            name = raw_name(node) or node.op
            raise TogetherError(f"`{name}` is not known to treat tokens one by one")
        if place.batch != 0:
            raise TogetherError("the rows of what is cached are not its first dimension")
        self.cached[node] = place

    def _sources(self, node: fx.Node, place: Place) -> list[Source] | None:
        """What ``node`` reads token by token, and where rows and tokens are there; None where it may mix them."""
        name = op(node)
        if node.op not in ("call_function", "call_method"):
            return None
        if name in _ALLOCATED:
            return self._filled(node, place) if _known(node, place) else None
        if modifies(node) or writes(node) or "out" in node.kwargs:
            return None
        if name in _COMBINED:
            return self._combined(node, node.args[:2], place)
        if name == "cat":
            return self._joined(node, place)
        source = argument(node, 0, "input")
        if not isinstance(source, fx.Node):
            return None
        back = _back(node, name, source)
        if back is None or (name in _RESHAPED | _EXPANDED and not _known(node, place)):
            return None
        batch, token = back(place.batch), back(place.token)
        return None if batch is None or token is None else [(source, Place(batch, token))]

    def _combined(
        self, node: fx.Node, operands: Iterable[object], place: Place
    ) -> list[Source] | None:
        """Operands of an operation number by number, or parts that are copied: with all tokens, or without any."""
        held, found = tensor(node), list[Source]()
        assert held is not None
        for each in operands:
            read = tensor(each)
            if read is None or not isinstance(each, fx.Node):
                if number(each) is None:
                    return None
                continue
            less = held.ndim - read.ndim
            where = Place(place.batch - less, place.token - less)
            if self._fits(read, where):
                found.append((each, where))
            elif any(d >= 0 and not same(read.shape[d], 1) for d in (where.batch, where.token)):
                return None
        return found

    def _joined(self, node: fx.Node, place: Place) -> list[Source] | None:
        parts, dim, held = argument(node, 0, "tensors"), argument(node, 1, "dim", 0), tensor(node)
        if not isinstance(parts, (tuple, list)) or not isinstance(dim, int) or held is None:
            return None
        if dim % held.ndim in (place.batch, place.token):
            return None
        return [(part, place) for part in parts if isinstance(part, fx.Node)]

    def _filled(self, node: fx.Node, place: Place) -> list[Source] | None:
        """A tensor that is allocated, and whose parts are copied into it before anything else reads it."""
        held, made = tensor(node), writes(node)
        assert held is not None
        parts: dict[fx.Node, Place] = {}
        found: list[Source] = []
        for write in made:
            part, copied = write.args[0], write.args[1]
            if op(write) != "copy_" or not isinstance(part, fx.Node):
                return None
            kept: list[int | None] | None = list(range(held.ndim))
            if part is not node:
                inside = op(part) == "getitem" and part.args[0] is node
                kept = _kept(part.args[1], held) if inside else None
            if kept is None or place.batch not in kept or place.token not in kept:
                return None
            where = Place(kept.index(place.batch), kept.index(place.token))
            sources = self._combined(part, [copied], where)
            if sources is None:
                return None
            if part is not node:
                parts[part] = where
            parts[write] = where
            for source, _ in sources:
                self.read_by(source, write)
            found += sources
        last = max((self.order[write] for write in made), default=-1)
        if any(self.order[user] < last for user in node.users if user not in parts):
            return None
        self.nodes.update(parts)
        return found


def _known(node: fx.Node, place: Place) -> bool:
    """Whether all sizes but those of rows and tokens are numbers."""
    held = tensor(node)
    return held is not None and all(
        fixed(size) is not None
        for dim, size in enumerate(held.shape)
        if dim not in (place.batch, place.token)
    )


def is_cached(node: fx.Node) -> bool:
    """Whether a tensor is a graph input, or what a step makes of one by writing tokens into it or appending them."""
    base = memory(node)
    if op(base) == "cat":
        parts = argument(base, 0, "tensors")
        return isinstance(parts, (tuple, list)) and any(
            isinstance(part, fx.Node) and memory(part).op == "placeholder" for part in parts
        )
    if op(base) in _FUNCTIONAL:
        source = base.args[0]
        return isinstance(source, fx.Node) and memory(source).op == "placeholder"
    return base.op == "placeholder"


def is_held(node: fx.Node) -> bool:
    """Whether a tensor is a view of what is cached."""
    held, base = tensor(node), tensor(memory(node))
    if held is None or base is None or held.dtype != base.dtype:
        return False
    return is_cached(node) and compat.storage_key(held) == compat.storage_key(base)


Back = Callable[[int], "int | None"]
"""From a dimension of a result to that of its operand which it is, whole; None where it is none."""


def _back(node: fx.Node, name: str, source: fx.Node) -> Back | None:
    """How the dimensions of a node are those of the one operand that it takes tokens from; None where they mix."""
    held, read = tensor(node), tensor(source)
    if name == "getitem" and read is None:
        return lambda d: d  # one of the parts of a split
    if name in ("split", "chunk", "split_with_sizes") and read is not None:
        cut = argument(node, 2, "dim", 0)
        return _all_but(cut, read.ndim)
    if held is None or read is None:
        return None
    if name in _ALIKE:
        plain = name != "pow" or number(argument(node, 1, "exponent")) is not None
        return (lambda d: d) if plain and held.device == read.device else None
    if name in _RESHAPED:
        return (lambda d: _whole(read, held, d)) if held.dtype == read.dtype else None
    if name in _EXPANDED:
        less = held.ndim - read.ndim
        return lambda d: d - less if d >= less else None
    if name == "linear":
        weights = tensor(argument(node, 1, "weight"))
        return _all_but(-1, read.ndim) if weights is not None else None
    if name == "matmul":
        return _of_product(node, held, read)
    if name in ("layer_norm", "rms_norm"):
        shape = argument(node, 1, "normalized_shape")
        last = read.ndim - (len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1)
        return lambda d: d if d < last else None
    if name in ("mean", "sum") and argument(node, 2, "keepdim", False) is True:
        return _all_but(argument(node, 1, "dim"), read.ndim)
    if name == "repeat_interleave":
        times = argument(node, 1, "repeats")
        return _all_but(argument(node, 2, "dim"), read.ndim) if isinstance(times, int) else None
    kept = _order(node, name, read)
    return None if kept is None else (lambda d: kept[d])


def _all_but(dim: object, ndim: int) -> Back | None:
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    if not all(isinstance(d, int) for d in dims):
        return None
    mixed = {d % ndim for d in dims}
    return lambda d: None if d in mixed else d


def _whole(before: torch.Tensor, after: torch.Tensor, dim: int) -> int | None:
    """The dimension of ``before`` that a reshape leaves whole as dimension ``dim`` of ``after``."""
    earlier = math.prod(after.shape[:dim])
    for at, size in enumerate(before.shape):
        if same(size, after.shape[dim]) and same(math.prod(before.shape[:at]), earlier):
            return at
    return None


def _of_product(node: fx.Node, held: torch.Tensor, read: torch.Tensor) -> Back | None:
    """``x @ w``: rows and tokens are dimensions of x, and w is the same for all of them."""
    weights = tensor(argument(node, 1, "other", node.kwargs.get("mat2")))
    if weights is None or read.ndim < 2 or weights.ndim < 2:
        return None

    def back(dim: int) -> int | None:
        of_weights = dim - (held.ndim - weights.ndim)
        shared = dim == held.ndim - 2 or of_weights < 0 or same(weights.shape[of_weights], 1)
        of_read = dim - (held.ndim - read.ndim)
        return of_read if shared and of_read >= 0 and dim != held.ndim - 1 else None

    return back


def _order(node: fx.Node, name: str, read: torch.Tensor) -> list[int | None] | None:
    """For views: the operand's dimension that each one of the result is, whole."""
    every: list[int | None] = list(range(read.ndim))
    if name == "transpose":
        a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
        if not isinstance(a, int) or not isinstance(b, int):
            return None
        every[a], every[b] = every[b], every[a]
        return every
    if name == "permute":
        first = argument(node, 1, "dims")
        dims = first if isinstance(first, (tuple, list)) else node.args[1:]
        return [d % read.ndim for d in dims if isinstance(d, int)]
    if name == "getattr" and node.args[1] == "mT":
        return [*every[:-2], every[-1], every[-2]]
    if name in ("unsqueeze", "squeeze"):
        dim = argument(node, 1, "dim")
        if not isinstance(dim, int):
            return None
        if name == "unsqueeze":
            every.insert(dim % (read.ndim + 1), None)
        elif same(read.shape[dim], 1):
            every.pop(dim)
        return every
    if name == "getitem":
        return _kept(node.args[1], read)
    return None


def _kept(index: object, held: torch.Tensor) -> list[int | None] | None:
    """The dimensions of ``held`` that each one of ``held[index]`` is, whole; None in their place for a part or none."""
    items = index if isinstance(index, tuple) else (index,)
    taken = sum(item is not None and item is not Ellipsis for item in items)
    kept: list[int | None] = []
    at = 0
    for item in (*items, *((Ellipsis,) if Ellipsis not in items else ())):
        if item is None:
            kept.append(None)
        elif item is Ellipsis:
            rest = held.ndim - taken
            kept += range(at, at + rest)
            at += rest
        elif isinstance(item, slice):
            whole = item.step in (None, 1) and item.start in (None, 0)
            kept.append(
                at if whole and (item.stop is None or same(item.stop, held.shape[at])) else None
            )
            at += 1
        elif isinstance(item, int) and not isinstance(item, bool):
            at += 1
        else:
            return None
    return kept


def drop_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of ``nodes`` that nothing reads any more but for others of them.

    A write goes with the tensor that was allocated for it, and with nothing else.
    """
    live = set(graph.nodes)
    dead = {node for node in nodes if node in live and node.op in ("call_function", "call_method")}
    while True:
        kept = {
            node
            for node in dead
            if not set(node.users) <= dead or (modifies(node) and memory(node) not in dead)
        }
        if not kept:
            break
        dead -= kept
    for node in reversed(list(graph.nodes)):
        if node in dead:
            graph.erase_node(node)
