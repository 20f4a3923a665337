"""The attention neighbourhood of a rewritten graph as text, with names that do not depend on the release of torch.

Printed are the inputs that hold KV caches, the inputs that the rewrite added, every write to a cache, every ``hsa`` op,
and the outputs. Other operands stand as their shape and dtype; a view of a cache stands as an expression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hsa_compile import compat
from hsa_compile.backend import Lowered, lower_graph
from hsa_compile.options import parse_options
from hsa_compile.passes.find_cache import base_of
from hsa_compile.passes.graph_tools import op, raw_name, tensor, value, where

_SHORT = {"float32": "f32", "float64": "f64", "int64": "i64", "int32": "i32", "bool": "b8"}
_SHOWN = frozenset({"full", "clone"})
"""Calls of the rewrite that stand as expressions where they are operands: positions."""
_WRITES = ("index_copy_", "setitem", "index_put_", "copy_", "add_")
# Spelled differently by releases of torch or transformers for the same thing.
_SAME = {"_index_copy_": "index_copy_"}


def lowered(function: Callable[..., Any], *calls: dict[str, Any], policy: Any) -> Lowered:
    """The graph of the last of the calls, rewritten; the calls themselves run on Dynamo's own graphs.

    Args:
        calls: keyword arguments, call by call.
    """
    found: list[Lowered] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(lower_graph(gm, inputs, parse_options({"policy": policy}, None)))
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    with torch.no_grad():
        for call in calls:
            compiled(**call)
    return found[-1]


class Printer:
    def __init__(self, result: Lowered) -> None:
        self.graph = result.gm.graph
        self.gathers = bool(result.rewritten.chosen)
        self.names: dict[fx.Node, str] = {}
        self.symbols: dict[str, str] = {}
        self.lines: list[str] = []
        sites = [site.plan.site for site in result.rewritten.sites]
        grown = [held.view for held in result.rewritten.growing]
        for i, site in enumerate(sites):
            for what, cache in (("keys", site.keys), ("values", site.values)):
                node = cache.base if cache.kind != "dynamic" else grown[2 * i + (what == "values")]
                self.names.setdefault(node, f"{what}_{i}")
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.name.startswith("hsa_"):
                self.names[node] = node.name

    def text(self) -> str:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                if node in self.names:
                    self.lines.append(f"{self.names[node]} = input {self.kind(node)}")
            elif self._is_op(node):
                self._op(node)
            elif self.gathers and op(node) == "topk":
                self.lines.append(f"ids = {self._call('topk', node.args, node.kwargs)}")
            elif self.gathers and op(node) == "getitem" and self._is_gather(node):
                number = sum(name.startswith("chosen") for name in self.names.values())
                self.names[node] = f"chosen_{number}"
                self.lines.append(f"chosen_{number} = {self.show(node.args[0])}[rows, ids]")
            elif op(node) in _WRITES and base_of(node.args[0]) in self.names:
                self.lines.append(self._call(raw_name(node), node.args, node.kwargs))
            elif (
                node.op == "call_function"
                and op(node) == "add"
                and base_of(node.args[0]) in self.names
            ):
                self.lines.append(self._call("add_", node.args, node.kwargs))
            elif op(node) in ("slice_scatter", "cat") and base_of(node.args[0]) in self.names:
                self.names[node] = f"{self.names[base_of(node.args[0])]}_new"
                self.lines.append(
                    f"{self.names[node]} = " + self._call(op(node), node.args, node.kwargs)
                )
        output = next(iter(reversed(self.graph.nodes)))
        self.lines.append("return " + ", ".join(self.show(node) for node in output.args[0]))
        self.lines += self._full_length()
        return "\n".join(self.lines) + "\n"

    @staticmethod
    def _is_gather(node: fx.Node) -> bool:
        index = node.args[1]
        return isinstance(index, tuple) and all(tensor(each) is not None for each in index)

    @staticmethod
    def _is_op(node: fx.Node) -> bool:
        return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "hsa"

    def _op(self, node: fx.Node) -> None:
        name = node.target._opname
        results = {
            "page_mask": "bits",
            "page_bias": "added",
            "index_scores": "scores",
            "checked_position": "position",
            "select": "ids, counts",
            "strided_pages": "ids, counts",
            "refine": "tokens, read",
            "select_tokens": "tokens, read",
            "sparse_attention": "out, lse",
            "fetch_attention": "out, lse",
            "estimate_rest": "all, total",
            "diff": "slots, loads, moved",
            "prefetch": "held",
            "prefetch_select": "early, moved_early",
        }
        number = sum(f"hsa.{name}(" in line for line in self.lines)
        if name == "prefetch_select":
            self.names[node.args[0]] = f"guess_{number}"
            self.lines.append(f"guess_{number} = {self._made_of(node.args[0])}")
        call = self._call(f"hsa.{name}", node.args, node.kwargs)
        if name not in results:
            self.lines.append(call)
            return
        parts = [f"{part}_{number}" for part in results[name].split(", ")]
        self.lines.append(f"{', '.join(parts)} = {call}")
        if len(parts) == 1:
            self.names[node] = parts[0]
        for user in node.users:
            if op(user) == "getitem" and len(parts) > 1:
                self.names[user] = parts[user.args[1]]

    def _made_of(self, node: fx.Node) -> str:
        """The modules whose parameters and buffers a query is made with, in order."""
        behind, frontier = {node}, [node]
        while frontier:
            new = [source for source in frontier.pop().all_input_nodes if source not in behind]
            behind.update(new)
            frontier += new
        read = "_parameters_", "_buffers_"
        paths = dict.fromkeys(
            where(call, 0).path
            for call in self.graph.nodes
            if call in behind and any(x in s.name for s in call.all_input_nodes for x in read)
        )
        return ", ".join(paths)

    def _call(self, name: str, args: Any, kwargs: Any) -> str:
        shown = [self.show(arg) for arg in args]
        shown += [f"{key}={self.show(arg)}" for key, arg in sorted(kwargs.items())]
        return f"{_SAME.get(name, name)}({', '.join(shown)})"

    def show(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            if arg in self.names:
                return self.names[arg]
            if base_of(arg) in self.names and op(arg) != "setitem":
                return self._view(arg)
            if op(arg) in _SHOWN:
                return self._call(op(arg), arg.args, {})
            return self.kind(arg)
        if isinstance(arg, slice):
            start, stop = ("" if x is None else self.show(x) for x in (arg.start, arg.stop))
            return f"{start}:{stop}"
        if isinstance(arg, (tuple, list)):
            return "(" + ", ".join(self.show(x) for x in arg) + ")"
        if isinstance(arg, float):
            return f"{arg:.6g}"
        if isinstance(arg, torch.SymInt):
            return self._size(arg)
        return str(arg)

    def _view(self, node: fx.Node) -> str:
        if op(node) == "getitem":
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            return f"{self.show(node.args[0])}[{', '.join(self.show(i) for i in index)}]"
        return self._call(op(node), node.args, node.kwargs)

    def kind(self, node: fx.Node) -> str:
        held = value(node)
        if not isinstance(held, torch.Tensor):
            return self._size(held) if isinstance(held, torch.SymInt) else str(held)
        dtype = str(held.dtype).removeprefix("torch.")
        return f"[{', '.join(self._size(s) for s in held.shape)}] {_SHORT.get(dtype, dtype)}"

    def _size(self, size: Any) -> str:
        """Symbols are numbered in the order of their appearance."""
        text = str(size)
        if isinstance(size, torch.SymInt):
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                name = self.symbols.setdefault(str(symbol), f"n{len(self.symbols)}")
                text = text.replace(str(symbol), name)
        return text

    def _full_length(self) -> list[str]:
        """What is computed and as large as a cache: nothing should be."""
        caches = [node for node, name in self.names.items() if name.startswith(("keys", "values"))]
        limit = min((self._elements(node) for node in caches), default=0)
        return [
            f"FULL LENGTH: {op(node)} {self.kind(node)}"
            for node in self.graph.nodes
            if node.op in ("call_function", "call_method")
            and base_of(node) not in self.names
            and self._elements(node) >= limit > 0
        ]

    @staticmethod
    def _elements(node: fx.Node) -> int:
        held = tensor(node)
        return 0 if held is None else compat.hint(held.numel())


def format_graph(result: Lowered) -> str:
    return Printer(result).text()
