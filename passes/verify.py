"""Check the rewritten graph before it is compiled.

    before: the rewritten graph
    after:  the same graph, or a ``RewriteError``

The graph must be well formed, every rewritten attention must give the shape, dtype and device of the one it replaces,
and nothing may be left that reads a growing cache by its old name.
"""

from __future__ import annotations

import torch
from torch import fx

from hsa_compile.errors import RewriteError

from .graph_tools import same, tensor
from .rewrite import Rewritten


def verify(gm: fx.GraphModule, rewritten: Rewritten) -> None:
    """Raises ``RewriteError`` naming the site, or torch's own error for a malformed graph."""
    gm.graph.lint()
    for site in rewritten.sites:
        attention = site.plan.site.attention
        where = f"attention at {attention.where.path or attention.out.name}"
        _must_be_alike(tensor(attention.out), tensor(site.result), where)
        if attention.lse is not None:
            _must_be_alike(tensor(attention.lse), tensor(site.lse), f"{where}, log-sum-exp")
    for attention, result in rewritten.chosen:
        where = f"attention at {attention.where.path or attention.out.name}"
        _must_be_alike(tensor(attention.out), tensor(result), where)
    kept = rewritten.outputs - sum(len(grown.places) for grown in rewritten.growing)
    output = next(iter(reversed(gm.graph.nodes)))
    returned = {
        at
        for site in rewritten.watched
        for at in (site.q, site.out, site.lse, site.bits, site.bias, site.keys, site.values)
        if at is not None
    }
    if len(output.args[0]) != kept + len(returned):
        raise RewriteError(
            f"the rewritten graph returns {len(output.args[0])} values, {kept + len(returned)} were expected"
        )


def _must_be_alike(was: torch.Tensor | None, now: torch.Tensor | None, where: str) -> None:
    if was is None or now is None:
        raise RewriteError(f"{where}: the rewritten graph holds no tensor there")
    shapes = was.ndim == now.ndim and all(map(same, was.shape, now.shape))
    if not shapes or was.dtype != now.dtype or was.device != now.device:
        raise RewriteError(
            f"{where}: {now.dtype} {tuple(now.shape)} on {now.device} after the rewrite, "
            f"{was.dtype} {tuple(was.shape)} on {was.device} before it"
        )
