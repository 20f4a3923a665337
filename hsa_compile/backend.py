"""The backend: ``torch.compile(model, backend="hsa", options={"policy": ...})``.

    capture -> find attention -> find chosen -> find KV cache -> plan -> schedule -> rewrite -> verify -> Inductor

Every pass is a file of ``hsa_compile.passes``. What comes back to Dynamo is a :class:`Program`, which binds page
summaries to the caches of each call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hsa_compile import algorithms, compat, ops, registry
from hsa_compile.errors import RewriteError
from hsa_compile.explain import Explanation, report
from hsa_compile.identity import code_identity
from hsa_compile.options import Options, parse_options
from hsa_compile.passes.capture import capture
from hsa_compile.passes.find_attention import find_attention
from hsa_compile.passes.find_cache import find_cache
from hsa_compile.passes.find_chosen import find_chosen
from hsa_compile.passes.merge import merge_equal
from hsa_compile.passes.operands import drop_unused_views
from hsa_compile.passes.plan import plan
from hsa_compile.passes.rewrite import Rewritten, rewrite
from hsa_compile.passes.rewrite_chosen import rewrite_chosen
from hsa_compile.passes.schedule import schedule
from hsa_compile.passes.verify import verify
from hsa_compile.runtime.bind import bind
from hsa_compile.site import Attention, AttentionSite, ChosenPlan, LayerPlan, Reject

log = logging.getLogger(__name__)


def hsa_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., object]:
    """Compile a Dynamo graph; found by name through the ``torch_dynamo_backends`` entry point.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, as Dynamo passes them.
        options: ``policy``, ``strict``, ``run``, ``mode``, and any of Inductor's own (see ``docs/policy.md``).
        mode: a mode of ``torch.compile``.

    Raises:
        OptionError, PolicyError: a bad option or policy; nothing has been changed.
        RewriteError: ``strict`` is set and an attention site cannot be rewritten.
    """
    return compile_graph(gm, example_inputs, parse_options(options, mode))


@dataclass(frozen=True)
class Lowered:
    """A rewritten graph before it is compiled: what golden tests look at."""

    gm: fx.GraphModule
    rewritten: Rewritten
    explanation: Explanation


def lower_graph(gm: fx.GraphModule, example_inputs: Sequence[object], options: Options) -> Lowered:
    """The pipeline up to and including *verify*."""
    graph_module = capture(gm)
    found = decline_autograd(find_attention(graph_module.graph), example_inputs)
    part = compat.compiled_root(gm).part
    if found:
        options.policy.needs_whole(part)
    sites = find_cache(graph_module.graph, find_chosen(found))
    plans = plan(sites, options.policy)
    plans = schedule(graph_module.graph, plans)
    explanation = report(plans, part)
    rejected = [item for item in plans if isinstance(item, Reject)]
    if options.strict and rejected:
        raise RewriteError(
            "strict: attention sites were left as they were\n" + explanation.rejections()
        )
    sparse = [item for item in plans if isinstance(item, LayerPlan) and item.decision == "sparse"]
    chosen = [item for item in plans if isinstance(item, ChosenPlan) and item.decision == "sparse"]
    rewritten = Rewritten()
    if sparse or chosen:
        fake_mode = compat.trace_mode(gm.graph)
        results = rewrite_chosen(graph_module, chosen, fake_mode)
        rewritten = rewrite(graph_module, sparse, fake_mode, not options.skip_io)
        rewritten.chosen = results
    drop_unused_views(graph_module.graph)
    graph_module.recompile()
    if sparse or chosen:
        verify(graph_module, rewritten)
    return Lowered(graph_module, rewritten, explanation)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[object], options: Options
) -> Callable[..., object]:
    """The whole pipeline."""
    lowered = lower_graph(gm, example_inputs, options)
    lowered.explanation.publish(log)
    sites = lowered.rewritten.sites
    bindings, inputs = bind(gm.graph, lowered.gm.graph, lowered.rewritten, example_inputs)
    inner = _run(lowered.gm, inputs, options, lowered.rewritten.overlaps)
    program = bindings.program(inner) if sites else None
    registry.add(compat.compiled_root(gm), example_inputs, lowered.explanation, program)
    return inner if program is None else program


def _run(
    gm: fx.GraphModule, inputs: Sequence[object], options: Options, overlaps: bool
) -> Callable[..., Sequence[object]]:
    if options.run == "eager":
        return gm.forward
    devices = {held.device.type for held in inputs if isinstance(held, torch.Tensor)}
    # Attention to ragged rows stays whole on a CPU, too, and Inductor takes no op whole that it could decompose.
    if "cuda" in devices or any(layer.dense_below for layer in options.policy.all()):
        from hsa_compile import lowering

        lowering.register()
    used = algorithms.identity(layer.algorithm for layer in options.policy.all())
    identity = code_identity(options.policy.canonical() + used)
    # On a GPU the ops stay whole, and there is nothing to merge.
    merge = None if "cuda" in devices else merge_equal
    patches = options.inductor
    if overlaps:
        # What runs beside is to run as long as it can: a join is not to be moved up to free memory.
        patches = {"reorder_for_peak_memory": False, **patches}
    return compat.compile_with_inductor(gm, inputs, patches, ops.DECOMPOSITIONS, identity, merge)


def decline_autograd(
    found: list[Attention | Reject], example_inputs: Sequence[object]
) -> list[Attention | Reject]:
    """While gradients are recorded nothing is rewritten: the ops have no derivative."""
    records = torch.is_grad_enabled() and any(
        isinstance(held, torch.Tensor) and held.requires_grad for held in example_inputs
    )
    if not records:
        return found
    reason = (
        "autograd is recording (call the model under torch.no_grad() or torch.inference_mode())"
    )
    return [
        item if isinstance(item, Reject) else Reject(item.where, reason, item.anchor.name)
        for item in found
    ]


__all__ = ["AttentionSite", "Lowered", "compile_graph", "hsa_backend", "lower_graph"]
