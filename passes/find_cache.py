"""Find the KV cache behind each attention: which graph input holds it, and how this graph writes the new token.

    before: attention over k, v
    after:  the graph unchanged; k and v traced to a ``CacheUpdate`` each, or a ``Reject``

Four shapes of cache are understood. *static*: a graph input written in place (``index_copy_``,
``x[:, :, pos] = k``, ``index_put_``, ``copy_`` into a slice). *functional*: the same write as a new
tensor (``slice_scatter``, ``index_copy``), returned in the place of its input. *dynamic*:
``torch.cat([input, new])`` along the tokens, returned as the next call's input. *fixed*: a graph input that nothing in
the graph writes, such as keys and values that were computed once from the output of an encoder.

A write must land along the token dimension of what attention reads; strides of the traced tensors decide that, so no
layout is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx

from hsa_compile import compat
from hsa_compile.lowering.limits import MAX_STEP
from hsa_compile.site import Attention, AttentionSite, CacheUpdate, ChosenSite, Reject

from .graph_tools import (
    VIEWS,
    argument,
    fixed,
    may_write,
    memory,
    modifies,
    op,
    raw_name,
    readers,
    same,
    tensor,
    value,
    writes,
)
from .operands import MADE
from .token_wise import TogetherError, region_of

_VIEWS = frozenset(
    "getitem transpose permute view reshape unsqueeze squeeze narrow select contiguous detach to "
    "float flatten unflatten chunk unbind split".split()
)
_IN_PLACE = frozenset(
    {"index_copy_", "index_put_", "copy_", "setitem", "scatter_", "slice_scatter_"}
)
_FUNCTIONAL = frozenset({"index_copy", "index_put", "slice_scatter", "select_scatter", "scatter"})


class NoCache(Exception):
    """Raised while tracing, with the reason that keeps a site from being rewritten."""


class Elsewhere(NoCache):
    """A write to the same graph input that lands in another part of it, such as another layer of one big tensor."""


def find_cache(
    graph: fx.Graph, found: Iterable[Attention | ChosenSite | Reject]
) -> list[AttentionSite | ChosenSite | Reject]:
    """Pair every attention with its cache; what was found about others passes through."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    sites: list[AttentionSite | ChosenSite | Reject] = []
    for item in found:
        if not isinstance(item, Attention):
            sites.append(item)
            continue
        try:
            keys = _trace(item.k, item, order, "keys")
            values = _trace(item.v, item, order, "values")
            _must_agree(keys, values, order)
            _must_last(item, order)
            sites.append(AttentionSite(item, keys, values))
        except NoCache as reason:
            sites.append(Reject(item.where, str(reason), item.anchor.name))
    return sites


def _must_agree(keys: CacheUpdate, values: CacheUpdate, order: dict[fx.Node, int]) -> None:
    if keys.kind != values.kind:
        raise NoCache(f"the keys are in a {keys.kind} cache and the values in a {values.kind} one")
    if not _same_position(keys.position, values.position):
        raise NoCache(
            "keys and values are written at positions that are not computed once for both: they may differ"
        )
    if keys.tokens != values.tokens:
        raise NoCache(f"{keys.tokens} tokens of keys and {values.tokens} of values are written")
    if isinstance(keys.position, fx.Node):
        first, last = sorted((order[keys.write], order[values.write]))
        if any(first < order[write] < last for write in writes(memory(keys.position))):
            raise NoCache("the position changes between the writes of keys and of values")


def _must_last(attention: Attention, order: dict[fx.Node, int]) -> None:
    """What attention reads must not change until ``attention.out``, where the rewritten graph reads it all."""
    operands: dict[fx.Node, str] = {}
    for what, node in (
        ("query", attention.q),
        ("keys", attention.k),
        ("values", attention.v),
        *(("mask", term.node) for term in attention.masks),
        ("attention sink", attention.sink and attention.sink.node),
    ):
        while node is not None and node.meta.get(MADE) and op(node) in VIEWS:
            node = node.args[0]  # type: ignore[assignment]  # of what the model itself reads
        if node is not None:
            operands[node] = what
    first_read: dict[fx.Node, fx.Node] = {}
    frontier, seen = [attention.out], {attention.out}
    while frontier:
        reader = frontier.pop()
        for source in reader.all_input_nodes:
            if source in operands:
                first_read[source] = min(
                    reader, first_read.get(source, reader), key=order.__getitem__
                )
            elif source not in seen and source.op != "placeholder" and tensor(source) is not None:
                seen.add(source)
                frontier.append(source)
    for node, reader in first_read.items():
        for write in writes(memory(node)):
            if order[reader] < order[write] < order[attention.out]:
                raise NoCache(
                    f"`{raw_name(write)}` changes the {operands[node]} in place while attention is computed from it"
                )


def _same_position(a: fx.Node | int | None, b: fx.Node | int | None) -> bool:
    """Whether two positions are one: the same node, equal numbers, or views of one tensor of one element."""
    if a is b or a == b:
        return True
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or memory(a) is not memory(b):
        return False
    held = tensor(memory(a))
    return held is not None and same(held.numel(), 1)


def base_of(node: object) -> fx.Node | None:
    """The node whose memory (or, over a copying cast, whose content) a chain of views reads."""
    while isinstance(node, fx.Node):
        gathers = op(node) == "getitem" and any(tensor(i) is not None for i in _flat(node.args[1]))
        if (op(node) in _VIEWS and not gathers) or op(node) in _IN_PLACE:
            node = node.args[0]
        else:
            return node
    return None


def _flat(index: object) -> tuple[object, ...]:
    return tuple(index) if isinstance(index, (tuple, list)) else (index,)


def _trace(
    node: fx.Node, attention: Attention, order: dict[fx.Node, int], what: str
) -> CacheUpdate:
    read = tensor(node)
    assert read is not None
    chain_dtype = read.dtype
    base = base_of(node)
    if base is None:
        raise NoCache(f"the {what} are not a tensor of this graph")
    held = tensor(base)
    if held is None or held.dtype != chain_dtype or held.device != read.device:
        raise NoCache(f"the {what} are converted between the cache and attention")
    if base.op == "placeholder":
        return _static(base, node, read, attention, order, what)
    if op(base) == "cat":
        return _dynamic(base, node, read, what)
    if op(base) in _FUNCTIONAL:
        return _functional(base, node, read, what)
    raise NoCache(_computed(base, node, attention, what))


def _computed(base: fx.Node, node: fx.Node, attention: Attention, what: str) -> str:
    """Why there is no cache of what is computed in every step."""
    plain = (
        f"the {what} are computed in this graph by `{op(base)}`: there is no KV cache behind them"
    )
    try:
        region = region_of([(node, attention.scores)], attention.out)
    except TogetherError:
        return plain
    kept = any(
        latent.op != "placeholder" or any(map(modifies, latent.users)) for latent in region.cached
    )
    if not kept or not {"linear", "matmul"} & set(map(op, region.nodes)):
        return plain
    numbers = sum(
        math.prod(
            size for dim, size in enumerate(held.shape) if dim not in (place.batch, place.token)
        )
        for latent, place in region.cached.items()
        if (held := tensor(latent)) is not None
    )
    return (
        f"the {what} are computed in every step from cached latents, {numbers} numbers a token: "
        "there is no KV cache behind them"
    )


def _static(
    base: fx.Node,
    node: fx.Node,
    read: torch.Tensor,
    attention: Attention,
    order: dict[fx.Node, int],
    what: str,
) -> CacheUpdate:
    written = sorted(writes(base), key=order.__getitem__)
    if not written:
        _must_be_only_read(base, what)
        return CacheUpdate("fixed", base, base, base, None, (node, 2), "only read", 0)
    mine: list[CacheUpdate] = []
    for write in written:
        if op(write) not in _IN_PLACE:
            raise NoCache(f"the cache of the {what} is changed in place by `{raw_name(write)}` too")
        try:
            mine.append(_in_place(base, write, read, what))
        except Elsewhere:
            continue
    if not mine:
        raise NoCache(f"no write to the cache of the {what} lands where attention reads")
    if len(mine) > 1:
        raise NoCache(f"the {what} are written {len(mine)} times in one step")
    reader = attention.scores if what == "keys" else attention.out
    if order[mine[0].write] > order[reader]:
        raise NoCache(f"the {what} are written after attention has read them")
    return mine[0]


def _must_be_only_read(base: fx.Node, what: str) -> None:
    """Writes that are no calls on the tensor itself: by a call that takes it as an operand, or to the same memory."""
    for reader in readers(base):
        if may_write(reader):
            raise NoCache(f"the {what} are given to `{raw_name(reader)}`, which may write them")
    held = tensor(base)
    assert held is not None
    for other in base.graph.nodes:
        if (
            other.op != "placeholder"
            or other is base
            or not isinstance(tensor(other), torch.Tensor)
        ):
            continue
        if compat.storage_key(tensor(other)) == compat.storage_key(held) and writes(other):
            raise NoCache(f"the {what} share their memory with an input that this graph writes")


def _in_place(base: fx.Node, write: fx.Node, read: torch.Tensor, what: str) -> CacheUpdate:
    copied = argument(write, 1, "src")
    if op(write) == "copy_" and isinstance(copied, fx.Node) and op(copied) in _FUNCTIONAL:
        source, target = tensor(copied.args[0]), tensor(write.args[0])
        if memory(copied.args[0]) is not base or not _same_place(source, target):  # type: ignore[arg-type]
            raise NoCache(f"the whole cache of the {what} is overwritten with another")
        at, tokens = _position(copied, read, what)
        return CacheUpdate("static", base, write, *at, op(copied) + " + copy_", tokens)
    at, tokens = _position(write, read, what)
    return CacheUpdate("static", base, write, *at, op(write), tokens)


def _same_place(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two views of the same memory are the same view."""
    return (
        a is not None
        and b is not None
        and a.ndim == b.ndim
        and same(a.storage_offset(), b.storage_offset())
        and all(map(same, a.shape, b.shape))
        and all(map(same, a.stride(), b.stride()))
    )


def _functional(base: fx.Node, node: fx.Node, read: torch.Tensor, what: str) -> CacheUpdate:
    source = base_of(base.args[0])
    if source is None or source.op != "placeholder" or base.args[0] is not source:
        raise NoCache(f"the {what} are a functional update of something that is no graph input")
    if writes(base):
        raise NoCache(f"the updated {what} are changed in place")
    written, tokens = _position(base, read, what)
    if any(op(user) == "copy_" and user.args[0] is source for user in base.users):
        return CacheUpdate("static", source, base, *written, op(base) + " + copy_", tokens)
    output = next(iter(reversed(base.graph.nodes)))
    if base not in output.all_input_nodes:
        raise NoCache(
            f"the updated {what} are neither copied back nor returned: no cache lives on after this step"
        )
    return CacheUpdate("functional", source, base, *written, op(base), tokens)


def _dynamic(cat: fx.Node, node: fx.Node, read: torch.Tensor, what: str) -> CacheUpdate:
    parts = argument(cat, 0, "tensors")
    dim = argument(cat, 1, "dim", 0)
    joined = tensor(cat)
    if (
        not isinstance(parts, (tuple, list))
        or len(parts) != 2
        or joined is None
        or not isinstance(dim, int)
    ):
        raise NoCache(f"the {what} are concatenated from other than two tensors")
    old, new = parts
    if not isinstance(old, fx.Node) or old.op != "placeholder" or not isinstance(new, fx.Node):
        raise NoCache(f"the {what} are concatenated to something that is no graph input")
    held = tensor(old)
    if held is None or held.ndim != joined.ndim:
        raise NoCache(f"the {what} are concatenated to a tensor of another number of dimensions")
    if node is not cat and not _same_place(read, joined):  # such as a cast to the dtype that it has
        raise NoCache(f"the concatenated {what} are viewed before attention reads them")
    if dim % joined.ndim != 2:
        raise NoCache(f"the {what} are concatenated along dimension {dim}, not along the tokens")
    added = tensor(new)
    tokens = None if added is None else fixed(added.shape[2])
    if tokens is None or not 1 <= tokens <= MAX_STEP:
        raise NoCache(
            f"more than {MAX_STEP} tokens are appended to the {what}, or their number varies"
        )
    output = next(iter(reversed(cat.graph.nodes)))
    if cat not in output.all_input_nodes:
        if any(memory(node) is cat for node in output.all_input_nodes):
            raise NoCache(f"only a part of the concatenated {what} is kept (a sliding window)")
        raise NoCache(
            f"the concatenated {what} are not returned: no cache lives on after this step"
        )
    if writes(old) or writes(cat):
        raise NoCache(f"the {what} are written in place and concatenated")
    others = (user for user in old.users if op(user) == "cat" and user is not cat)
    if any(argument(user, 0, "tensors")[0] is old for user in others):  # type: ignore[index]
        raise NoCache(f"the {what} are concatenated twice to one cache")
    if any(op(user) in ("view", "view_as", "as_strided") for user in readers(cat)):
        raise NoCache(
            f"the concatenated {what} are viewed as a tensor of another shape, which takes them to be contiguous"
        )
    return CacheUpdate("dynamic", old, cat, new, None, (cat, 2), "cat", tokens)


def _position(
    write: fx.Node, read: torch.Tensor, what: str
) -> tuple[tuple[fx.Node, fx.Node | int, tuple[fx.Node, int]], int]:
    """What a write puts where along the tokens of ``read``; the tensor and dimension that it counts in; how many."""
    name = op(write)
    into = write.args[0]
    if name == "copy_" and isinstance(into, fx.Node) and into.op != "placeholder":
        into = into.args[0]
    target = tensor(into)
    if target is None or not isinstance(into, fx.Node):
        raise NoCache(f"the cache of the {what} is not a tensor")
    if name in ("index_copy_", "index_copy"):
        dim, index, new = (
            argument(write, i, n) for i, n in ((1, "dim"), (2, "index"), (3, "source"))
        )
        items: tuple[object, ...] = _at(target, dim, index)
    elif name in ("setitem", "index_put_", "index_put"):
        if argument(write, 3, "accumulate", False):
            raise NoCache(f"the {what} are added into the cache")
        index, new = argument(write, 1, "indices"), argument(write, 2, "values")
        items = (
            tuple(slice(None) if i is None else i for i in index)
            if isinstance(index, (tuple, list))
            else (index,)
        )
    elif name == "slice_scatter":
        dim, start, end = (
            argument(write, i, n, d)
            for i, n, d in ((2, "dim", 0), (3, "start", 0), (4, "end", None))
        )
        items, new = _at(target, dim, slice(start, end)), argument(write, 1, "src")
    elif name == "select_scatter":
        items, new = (
            _at(target, argument(write, 2, "dim"), argument(write, 3, "index")),
            argument(write, 1, "src"),
        )
    elif name == "copy_":
        items = _copied_slice(write, target, what)
        new = argument(write, 1, "src")
    else:
        raise NoCache(f"the cache of the {what} is written by `{name}`, which is not recognised")
    if not isinstance(new, fx.Node):
        raise NoCache(f"what is written to the {what} is not a tensor")
    item, dim = _token_index(items, target, read, what)
    at, tokens = _slot(item, what)
    return (new, at, (into, dim)), tokens


def _at(target: torch.Tensor, dim: object, item: object) -> tuple[object, ...]:
    """Index tuple that picks ``item`` along ``dim`` and takes all of the rest."""
    if not isinstance(dim, int):
        raise NoCache("the dimension of the cache that is written is not known at compile time")
    return tuple(item if d == dim % target.ndim else slice(None) for d in range(target.ndim))


def _copied_slice(write: fx.Node, source: torch.Tensor, what: str) -> tuple[object, ...]:
    """``cache[:, :, p : p + 1].copy_(k)``, ``cache.narrow(2, p, 1).copy_(k)``, ``cache.select(2, p).copy_(k)``."""
    view = write.args[0]
    if not isinstance(view, fx.Node) or view.op == "placeholder":
        raise NoCache(f"the whole cache of the {what} is overwritten")
    if op(view) == "getitem":
        index = view.args[1]
        return index if isinstance(index, tuple) else (index,)
    if op(view) == "select":
        return _at(source, argument(view, 1, "dim"), argument(view, 2, "index"))
    if op(view) == "narrow":
        start, length = argument(view, 2, "start"), value(argument(view, 3, "length"))
        if length == 1:
            return _at(source, argument(view, 1, "dim"), start)
        known = isinstance(value(start), (int, torch.SymInt))
        end = value(start) + length if known else None  # type: ignore[operator]
        return _at(source, argument(view, 1, "dim"), slice(start, end))
    raise NoCache(
        f"the cache of the {what} is written through `{op(view)}`, which is not recognised"
    )


def _token_index(
    items: tuple[object, ...], target: torch.Tensor, read: torch.Tensor, what: str
) -> tuple[object, int]:
    """What an index tuple picks along the tokens of ``read``, and the dimension of ``target`` that those are.

    Other dimensions must be taken whole, except that integers may pick a layer or a half of a larger tensor and a
    leading slice the rows of a smaller batch.
    """
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items = items[:at] + (slice(None),) * (target.ndim - len(items) + 1) + items[at + 1 :]
    offset = target.storage_offset()
    picked: list[tuple[object, int]] = []
    for dim, item in enumerate(items):
        if item is None or (isinstance(item, slice) and _is_whole(item, target.shape[dim])):
            continue
        if same(target.stride(dim), read.stride(2)) and not same(target.shape[dim], 1):
            picked.append((item, dim))
        elif isinstance(item, int) and not isinstance(item, bool):
            if any(
                same(target.stride(dim), read.stride(d)) and not same(read.shape[d], 1)
                for d in (0, 1, 3)
            ):
                raise NoCache(f"only a part of the {what} is written at the new position")
            offset = offset + item * target.stride(dim)
        elif not (
            (dim == 0 or same(target.stride(dim), read.stride(0)))
            and isinstance(item, slice)
            and item.start in (None, 0)
            and item.step in (None, 1)
        ):
            raise NoCache(
                f"the {what} are written along another dimension than the tokens that attention reads"
            )
    if not same(offset, read.storage_offset()):
        raise Elsewhere(f"the write to the {what} lands elsewhere")
    if len(picked) != 1:
        raise NoCache(
            f"the {what} are indexed in {len(picked)} dimensions that could be the tokens"
        )
    return picked[0]


def _is_whole(item: slice, size: object) -> bool:
    return (
        item.start in (None, 0)
        and (item.stop is None or same(item.stop, size))
        and item.step in (None, 1)
    )


def _slot(at: object, what: str) -> tuple[fx.Node | int, int]:
    """Positions, and how many: a non-negative int, a SymInt, a tensor with one a token, or where a slice begins."""
    tokens = 1
    if isinstance(at, slice):
        first, last = value(0 if at.start is None else at.start), value(at.stop)
        integers = isinstance(first, (int, torch.SymInt)) and isinstance(last, (int, torch.SymInt))
        length = fixed(last - first) if integers and at.step in (None, 1) else None  # type: ignore[operator]
        if length is None or not 1 <= length <= MAX_STEP:
            raise NoCache(
                f"more than {MAX_STEP} tokens of the {what} are written, or their number is not known"
            )
        at, tokens = 0 if at.start is None else at.start, length
    if isinstance(at, int) and not isinstance(at, bool) and at >= 0:
        return at, tokens
    held = value(at)
    if (
        isinstance(at, fx.Node)
        and isinstance(held, (torch.SymInt, int))
        and not isinstance(held, bool)
    ):
        return at, tokens
    if not isinstance(at, fx.Node) or not isinstance(held, torch.Tensor):
        raise NoCache(
            f"the position at which the {what} are written is not a tensor or a non-negative integer"
        )
    count = fixed(held.numel())
    few = count == 1 or (held.ndim == 1 and count is not None and 1 < count <= MAX_STEP)
    if held.dtype not in (torch.int64, torch.int32) or count is None or not few:
        raise NoCache(
            f"{held.numel()} positions of the {what} are written at once, by a {held.dtype} index: "
            f"only a fixed number up to {MAX_STEP} is rewritten"
        )
    return at, count
