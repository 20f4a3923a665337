"""Copy the Dynamo graph, so that Dynamo's own (which it walks again afterwards) stays as it was.

before: Dynamo's graph
after:  an equal graph of ours; placeholders keep the sources that guards and CUDA graphs need
"""

from torch import fx

_ATTRIBUTES = ("_dynamo_source",)


def capture(gm: fx.GraphModule) -> fx.GraphModule:
    """An equal graph module, sharing parameters, whose graph may be rewritten freely."""
    graph = fx.Graph(gm)
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, mapping)
    graph.output(output)
    copied_output = next(iter(reversed(graph.nodes)))
    original_output = next(iter(reversed(gm.graph.nodes)))
    copied_output.meta = dict(original_output.meta)
    for original, copy in mapping.items():
        for name in _ATTRIBUTES:
            if hasattr(original, name):
                setattr(copy, name, getattr(original, name))
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    for name in ("_param_name_to_source",):
        if hasattr(gm, name):
            setattr(copy, name, getattr(gm, name))
    return copy
