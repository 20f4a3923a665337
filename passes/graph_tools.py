"""Small readings of Dynamo graphs that several passes share: names of operations, arguments, shapes, places."""

from __future__ import annotations

import inspect
import math
import re
from types import FunctionType

import torch
from torch import fx

from hsa_compile import compat
from hsa_compile.site import Where

CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type_as", "type"})
"""Methods that change a dtype (``to`` also a device)."""

_ALIASES = {
    "iadd": "add",
    "__add__": "add",
    "__radd__": "add",
    "add_": "add",
    "imul": "mul",
    "__mul__": "mul",
    "__rmul__": "mul",
    "mul_": "mul",
    "multiply": "mul",
    "truediv": "div",
    "itruediv": "div",
    "true_divide": "div",
    "div_": "div",
    "divide": "div",
    "__matmul__": "matmul",
    "bmm": "matmul",
    "masked_fill_": "masked_fill",
    "softmax_": "softmax",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "concat": "cat",
    "concatenate": "cat",
    "_softmax": "softmax",
}


_NAMESPACES = frozenset({"aten", "prims", "hsa"})
"""Of operators that are what their names say; anybody may define a ``softmax`` in another one."""


class Mismatch(Exception):
    """Raised while matching, with the reason and the node that did not fit."""

    def __init__(self, reason: str, node: fx.Node) -> None:
        super().__init__(reason)
        self.node = node


def raw_name(node: fx.Node) -> str:
    """The name of a call's target as the model spelled it (``add_`` and ``iadd`` stay apart from ``add``)."""
    if node.op == "call_method" or isinstance(node.target, str):
        return str(node.target)
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, _, name = compat.qualified_name(node.target).rpartition("::")
        return name if namespace in _NAMESPACES else f"{namespace}::{name}"
    name = getattr(node.target, "__name__", "")
    module = node.target.__module__ if isinstance(node.target, FunctionType) else ""
    return name if module.partition(".")[0] in ("", "torch") else f"{module}.{name}"


def op(node: object) -> str:
    """Canonical name of what a node computes (``add`` for every spelling of addition); ``""`` for what is no call."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op not in ("call_method", "call_function"):
        return node.op
    name = raw_name(node)
    return _ALIASES.get(name, name)


def argument(node: fx.Node, index: int, name: str, default: object = None) -> object:
    """Positional argument ``index`` of a call, or keyword ``name``, or ``default``."""
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, default)


def value(node: object) -> object:
    """What the node held while it was traced: a fake tensor, a SymInt, ...; other objects are returned as they are."""
    if isinstance(node, fx.Node):
        return node.meta.get("example_value", node.meta.get("val"))
    return node


def tensor(node: object) -> torch.Tensor | None:
    """The node's fake tensor, or None where it holds no tensor."""
    held = value(node)
    return held if isinstance(held, torch.Tensor) else None


def number(node: object) -> float | None:
    """A Python number known at compile time (not a SymInt), or None.

    ``torch.full((), c)`` and ``torch.tensor(c)`` made in the graph count, as what their dtype makes of c: masks use
    them as fill values.
    """
    if isinstance(node, bool):
        return None
    if isinstance(node, (int, float)):
        return float(node)
    if not isinstance(node, fx.Node):
        return None
    if op(node) == "full":
        return _rounded(number(argument(node, 1, "fill_value")), node)
    if op(node) in ("tensor", "to") and op(node.args[0]) in ("", "full"):
        return _rounded(number(node.args[0]), node)
    return None


def _rounded(held: float | None, node: fx.Node) -> float | None:
    """A number as the tensor ``node`` holds it."""
    made = tensor(node)
    if held is None or made is None or made.dtype == torch.bool:
        return None
    if not made.dtype.is_floating_point and not math.isfinite(held):
        return None
    return float(torch.tensor(held, dtype=torch.float64).to(made.dtype))


def casts_to_whole_numbers(node: fx.Node) -> bool:
    """Whether a call is a cast that a fraction does not survive."""
    held = tensor(node)
    return op(node) in CASTS and held is not None and not held.dtype.is_floating_point


FILLS = {"ones": 1, "new_ones": 1, "ones_like": 1, "zeros": 0, "new_zeros": 0, "zeros_like": 0}
"""Calls that make a tensor of one number, which their name tells."""
_FILLED_WITH = {
    "tensor": (0, "data"),
    "full": (1, "fill_value"),
    "full_like": (1, "fill_value"),
    "new_full": (2, "fill_value"),
}
"""Where the others have it."""


def fill(node: fx.Node) -> object:
    """The argument that every element of a new tensor is, such as ``c`` of ``full(size, c)``; None of other calls."""
    name = op(node)
    return argument(node, *_FILLED_WITH[name]) if name in _FILLED_WITH else FILLS.get(name)


_MODIFYING_OPERATORS = frozenset(
    f"{prefix}{name}{suffix}"
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
    for prefix, suffix in (("i", ""), ("__i", "__"))
)
_FUNCTIONAL_OPERATORS = frozenset({"and_", "or_", "not_", "is_"})
"""Of Python, whose names are only kept apart from its keywords."""
VIEWS = frozenset(
    "getitem transpose permute view view_as reshape flatten unflatten unsqueeze squeeze narrow select expand expand_as "
    "chunk split unbind detach contiguous mT getattr to float".split()
)


def modifies(node: fx.Node) -> bool:
    """Whether a call writes into its first argument."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = raw_name(node)
    in_place = name.endswith("_") and not name.endswith("__") and name not in _FUNCTIONAL_OPERATORS
    return name in ("setitem", "__setitem__") or in_place or name in _MODIFYING_OPERATORS


def memory(node: fx.Node) -> fx.Node:
    """The node whose memory a view, or the result of a write in place, stands for."""
    while (modifies(node) or op(node) in VIEWS) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def writes(node: fx.Node) -> list[fx.Node]:
    """The calls that write into the memory of ``node``: through it, through views of it, through results of writes."""
    found: dict[fx.Node, None] = {}
    frontier = [node]
    while frontier:
        held = frontier.pop()
        for user in held.users:
            if not user.args or user.args[0] is not held or user in found:
                continue
            if modifies(user):
                found[user] = None
                frontier.append(user)
            elif op(user) in VIEWS:
                frontier.append(user)
    return list(found)


def readers(node: fx.Node) -> list[fx.Node]:
    """The calls that take ``node``, or a view of it, as any of their operands."""
    found: dict[fx.Node, None] = {}
    frontier = [node]
    while frontier:
        for user in frontier.pop().users:
            if user not in found:
                found[user] = None
                frontier.extend([user] if op(user) in VIEWS else [])
    return list(found)


def may_write(node: fx.Node) -> bool:
    """Whether a call may write any of its operands: by its schema, by ``out=``, or in a graph or kernel of its own."""
    if node.op == "call_module" or compat.is_higher_order(node.target):
        return not compat.is_flex_attention(node.target)  # which refuses functions that write
    return "out" in node.kwargs or any(map(compat.is_mutable, compat.overloads(node.target)))


def same(a: object, b: object) -> bool:
    """Whether two sizes are equal for every input that the graph's guards admit; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return compat.statically_known_true(a == b)


def fixed(size: object) -> int | None:
    """A size that is the same for every input, or None where it is symbolic."""
    expression = compat.expression(size)
    return int(expression) if expression.is_number else None


def where(node: fx.Node, index: int) -> Where:
    """Module path, class and source line of a node; ``index`` is used where the path names no layer number."""
    stack = node.meta.get("nn_module_stack") or {}
    path, module_class, file = "", "", None
    for qualified, kind in stack.values():
        path = module_path(qualified)
        module_class = (kind if isinstance(kind, str) else kind.__name__).rsplit(".", 1)[-1]
        file = None if isinstance(kind, str) else _defining_file(kind)
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path)
    layer = int(numbers[0]) if len(numbers) == 1 else index
    return Where(layer, path, module_class, source_line(node, file))


def module_path(qualified: str) -> str:
    """``L['self']._modules['model'].layers[0].attn`` -> ``model.layers.0.attn``: the path a user would write."""
    path = re.sub(r"^L\['(?:args|kwargs)'\]\[[^\]]+\]|^L\['[^']+'\]", "", qualified)
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path)
    return path.replace("._orig_mod", "").strip(".")


def source_line(node: fx.Node, file: str | None = None) -> str:
    """``file:line`` of the code that made the node: its innermost frame in ``file``, else outside torch."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = (
        [frame for frame in frames if frame[0] == file]
        or [f for f in frames if "/torch/" not in f[0]]
        or frames
    )
    return ":".join(own[-1]) if own else ""


def _defining_file(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except TypeError:
        return None
