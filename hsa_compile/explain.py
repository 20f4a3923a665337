"""What was found in a model, what was decided, and what it saves."""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hsa_compile import compat
from hsa_compile.cost import cost_of, cost_of_chosen
from hsa_compile.policy import describe
from hsa_compile.site import CacheUpdate, ChosenPlan, LayerPlan, Reject, SiteReport

_NOTHING_COMPILED = 'nothing has been compiled for this model with backend="hsa" yet'
_NO_ATTENTION = "no attention was found in the compiled graphs"


@dataclass(frozen=True)
class Explanation:
    """The attention sites of one or more graphs. ``str()`` gives tables; ``sites`` the rows as data."""

    sites: tuple[SiteReport, ...]
    note: str = ""

    def rejections(self) -> str:
        """One line for each site that could not be rewritten."""
        return "\n".join(
            f"  {site.path or 'attention'} ({site.source}): {site.reason}"
            for site in self.sites
            if site.decision == "left"
        )

    def publish(self, log: logging.Logger) -> None:
        """Log the decisions, and put them into the structured trace of ``tlparse``."""
        compat.trace_artifact(
            "hsa_compile_explain", json.dumps([asdict(site) for site in self.sites], indent=1)
        )
        if not self.sites:
            log.debug("no attention in this graph")
            return
        for site in self.sites:
            log.info(
                "%s %s: %s%s",
                site.path,
                site.decision,
                site.policy,
                site.reason and f" ({site.reason})",
            )
        log.debug("%s", self)

    def __str__(self) -> str:
        if not self.sites:
            return self.note or _NO_ATTENTION
        table = Table(title="attention sites", title_justify="left")
        for name in ("layer", "module", "decision", "policy or reason", "cache", "shapes", "where"):
            table.add_column(name, overflow="fold")
        for site in self.sites:
            why = site.policy if site.decision == "sparse" else site.reason
            why += f"; {site.prefetch}" if site.prefetch else ""
            where = "/".join(site.source.rsplit("/", 2)[-2:])
            table.add_row(
                str(site.index), site.path, site.decision, why, site.cache, site.shapes, where
            )
        console = Console(width=160, no_color=True, force_terminal=False)
        with console.capture() as captured:
            console.print(table)
            for line in _savings(self.sites):
                console.print(line, highlight=False)
            if self.note:
                console.print(self.note, highlight=False)
        return captured.get()


def _savings(sites: Iterable[SiteReport]) -> list[str]:
    """Bytes read dense and sparse, once for all layers that agree."""
    groups: dict[tuple[str, str, int | None], list[int]] = {}
    for site in sites:
        if site.decision == "sparse":
            groups.setdefault((site.bytes_dense, site.bytes_sparse, site.break_even), []).append(
                site.index
            )
    lines = []
    for (dense, sparse, even), layers in groups.items():
        at = f"sparse reads less from S = {even}" if even is not None else "sparse never reads less"
        lines.append(
            f"bytes read a step, layers {_ranges(layers)}: dense {dense}, sparse {sparse}; {at}"
        )
    return lines


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def report(plans: Iterable[LayerPlan | ChosenPlan | Reject], part: str = "") -> Explanation:
    """The explanation of one planned graph; ``part`` says why it is not the whole model, where it is not."""
    note = f"the model has graph breaks: {part}" if part else ""
    return Explanation(tuple(_row(item) for item in plans), note)


def _row(item: LayerPlan | ChosenPlan | Reject) -> SiteReport:
    where = item.where if isinstance(item, Reject) else item.site.where
    place = (where.index, where.path, where.module_class, where.source)
    if isinstance(item, Reject):
        return SiteReport(*place, "left", item.reason)
    attention = item.site.attention
    shapes = ", ".join(
        f"{name} {_shape(node.meta['example_value'])}"
        for name, node in (("q", attention.q), ("k", attention.k), ("v", attention.v))
    )
    if isinstance(item, ChosenPlan):
        return _chosen_row(item, place, shapes)
    cost = cost_of(item)
    return SiteReport(
        *place,
        item.decision,
        item.note,
        _cache(item.site.keys),
        describe(item.policy),
        shapes,
        str(cost.dense),
        str(cost.sparse) if item.decision == "sparse" else "",
        cost.break_even,
        _prefetch(item),
        cost.summaries,
        cost.candidates,
    )


def _chosen_row(item: ChosenPlan, place: tuple[int, str, str, str], shapes: str) -> SiteReport:
    choice, region = item.site.choice, item.site.region
    told = f"the model's own top-{choice.most} of its indexer"
    if not item.site.as_cached:
        told += ", keys and values made of those alone"
    if choice.scores is None:
        told += ", its scores as the model makes them"
    held = region.kind if item.site.as_cached else f"{region.kind} (latents)"
    cost = cost_of_chosen(item)
    sparse = str(cost.sparse) if item.decision == "sparse" else ""
    return SiteReport(
        *place,
        item.decision,
        item.note,
        held,
        told,
        shapes,
        str(cost.dense),
        sparse,
        cost.break_even,
    )


def _prefetch(plan: LayerPlan) -> str:
    if plan.lookahead is not None:
        behind = plan.lookahead.behind
        return f"its pages are fetched behind {len(behind)} modules, {behind[0]} to {behind[-1]}"
    if plan.no_lookahead:
        return f"nothing is fetched ahead: {plan.no_lookahead}"
    return ""


def _shape(tensor: torch.Tensor) -> str:
    sizes = ", ".join(str(compat.expression(size)) for size in tensor.shape)
    return f"[{sizes}] {str(tensor.dtype).removeprefix('torch.')}"


def _cache(update: CacheUpdate) -> str:
    return f"{update.kind} ({update.form})"


def merge(explanations: Sequence[Explanation], note: str = "") -> Explanation:
    """Several graphs of one model as one: equal rows once, the most recent graph last.

    Without a ``note``, the first that one of them has is that of all.
    """
    rows: dict[tuple[object, ...], SiteReport] = {}
    for explanation in explanations:
        times: Counter[tuple[object, ...]] = Counter()
        for site in explanation.sites:
            key = (site.path, site.index, site.decision, site.reason, site.policy)
            times[key] += 1  # a module may hold several attentions
            nth = (*key, times[key])
            rows.pop(nth, None)
            rows[nth] = site
    note = next(filter(None, (note, *(explanation.note for explanation in explanations))), "")
    if note and not rows:
        note = f"{_NO_ATTENTION}; {note}"
    return Explanation(tuple(rows.values()), note)


class _Captured(Exception):
    """Carries the explanation out of a compilation that is not to run."""


def explain(
    model: Any, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """List every attention site of a model: where, what was decided, and why.

    With inputs, the model is traced on them and nothing is run or compiled: no cache is written. Where the model has
    graph breaks, tracing has to run it; it then runs eagerly, on deep copies of the inputs. Without inputs, the
    graphs compiled so far with ``backend="hsa"`` are explained.

    Args:
        model: a module, a compiled module or a bound ``forward``.
        args, kwargs: what the model would be called with for one step.
        options: as for ``torch.compile``; by default those that ``model`` was compiled with, if it was.

    Returns:
        The sites as data (``.sites``) and as text (``str()``).

    Raises:
        OptionError, PolicyError: as at compile time.
    """
    from hsa_compile import registry

    if not args and not kwargs:
        found = registry.explanations(model)
        return merge(found) if found else Explanation((), _NOTHING_COMPILED)
    function, known = _uncompiled(model)
    return _trace(function, args, kwargs, options if options is not None else known)


def _uncompiled(model: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The eager function behind a model, and the options that it was compiled with."""
    return compat.original_callable(model), compat.compile_options(model)


def _trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Explanation:
    from hsa_compile.backend import lower_graph
    from hsa_compile.options import parse_options

    parsed = parse_options(options, None)
    found: list[Explanation] = []

    def stop(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
        found.append(lower_graph(gm, inputs, parsed).explanation)
        raise _Captured

    def go_on(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
        found.append(lower_graph(gm, inputs, parsed).explanation)
        return gm.forward

    outcome = compat.trace_once(function, args, kwargs, stop, _Captured)
    if outcome is None:
        return merge(found)
    found.clear()
    copies = copy.deepcopy((args, kwargs))
    compat.trace_through(function, copies[0], copies[1], go_on)
    return merge(found, f"the model has graph breaks: {outcome}")
