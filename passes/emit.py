"""New nodes with the values that they hold under the trace: what the rewrite builds its graphs with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.node import map_arg

from hsa_compile import compat

from .graph_tools import value


class Emitter:
    """Adds nodes to ``graph`` at its insertion point; ``fake_mode`` is that of the trace."""

    def __init__(self, graph: fx.Graph, fake_mode: object) -> None:
        self.graph, self.fake_mode = graph, fake_mode

    def call(self, target: Callable[..., object], *args: object, **kwargs: object) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        return self._propagated(node, target, args, kwargs)

    def method(self, name: str, *args: object, **kwargs: object) -> fx.Node:
        node = self.graph.call_method(name, args, kwargs)  # type: ignore[arg-type]

        def run(this: object, *rest: object, **named: object) -> object:
            return getattr(this, name)(*rest, **named)

        return self._propagated(node, run, args, kwargs)

    def _propagated(
        self, node: fx.Node, run: Callable[..., object], args: object, kwargs: object
    ) -> fx.Node:
        """Give a new node the value that it holds under the trace, so that ``verify`` can compare."""
        if isinstance(run, torch._ops.OpOverload) and not run._schema.returns:
            return node
        try:
            with self.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
                held = run(*map_arg(args, value), **map_arg(kwargs, value))  # type: ignore[arg-type]
        except BaseException:
            self.graph.erase_node(node)
            raise
        node.meta["example_value"] = held
        return node

    def input(
        self,
        name: str,
        shape: tuple[object, ...],
        dtype: torch.dtype,
        device: torch.device,
        strides: tuple[object, ...] | None = None,
        replacing: fx.Node | None = None,
    ) -> fx.Node:
        """A new graph input, after the others or in the place of one."""
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(last if replacing is None else replacing):
            node = self.graph.placeholder(name)
        node.meta["example_value"] = compat.fake_tensor(
            self.fake_mode, shape, strides, dtype, device
        )
        static = replacing is None and strides is None
        compat.mark_input(node, static_address=static)
        return node
