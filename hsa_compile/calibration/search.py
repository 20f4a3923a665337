"""The search: candidates for all layers, groups of layers apart, then the path of mixed policies, bisected."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hsa_compile.errors import CalibrationError
from hsa_compile.policy import LayerPolicy, Policy

from .measure import Measure, Run
from .path import Option, path
from .result import Calibration, Point

DENSE = LayerPolicy(algorithm="dense")
GROUPS = 8
"""Of neighbouring layers, at most, of which each is run alone to see how much its errors matter."""
TINY = 1e-12
"""A loss that stands for none: where errors do not matter, the larger one still counts as worse."""


def search(
    measure: Measure, candidates: Sequence[LayerPolicy], bound: float, trials: int, show: bool
) -> Calibration:
    """Run the candidates, and up to ``trials`` mixed policies, and choose.

    Raises:
        CalibrationError: no layer can be calibrated.
    """
    with _progress(show, len(candidates) + GROUPS + trials + 4) as advance:
        advance("dense, as it is")
        measure.run_dense()
        advance("dense, compiled")
        dense = measure(Policy(DENSE))
        if dense.explanation.note:
            raise CalibrationError(
                f"{dense.explanation.note}: layers cannot be told apart; valid: a model without graph breaks"
            )
        runs: dict[LayerPolicy, Run] = {}
        for candidate in candidates:
            advance(_label(candidate))
            runs[candidate] = measure(Policy(candidate), watch=True)
        costs = _Costs.of(runs)
        curve = [costs.point("dense", "dense", dense)]
        watched = [costs.point(_label(one), "uniform", run) for one, run in runs.items()]
        curve += watched
        known: dict[Policy, Point] = {}

        def mixed(label: str, given: Mapping[int, LayerPolicy]) -> Point:
            policy = costs.policy(given, candidates[0])
            if policy not in known:
                advance(label)
                known[policy] = costs.point(label, "mixed", measure(policy))
                curve.append(known[policy])
            return known[policy]

        by_cost = sorted(zip(watched, candidates), key=lambda one: one[0].tokens)
        probe = by_cost[len(by_cost) // 2][1]
        weights = dict.fromkeys(costs.whole, 1.0)
        # Neighbouring layers matter alike. What a middling candidate loses in them alone tells how much.
        for group in _groups(list(costs.whole), GROUPS if trials else 1):
            alone = {index: probe if index in group else DENSE for index in costs.whole}
            loss = mixed(f"{_label(probe)} in {_span(group)}", alone).loss
            errors = sum(runs[probe].layers[i].error or 0 for i in group if i in runs[probe].layers)
            if errors > 0:
                weights |= dict.fromkeys(group, max(loss, TINY) / errors)

        steps = path(costs.options(runs, weights))
        last = len(steps) - 1

        def step(at: int) -> Point:
            return mixed(f"mixed {at}/{last}", steps[at])

        # Whatever the losses are, a larger bound never ends at a dearer policy: up to the first one that only it
        # accepts, the same are tried, and then it goes on below that one.
        within, beyond = 0, len(steps)
        if trials and by_cost[0][0].loss <= bound and step(last).loss <= bound:
            within = last
        for _ in range(trials):
            if beyond - within <= 1:
                break
            at = (within + beyond) // 2
            if step(at).loss <= bound:
                within = at
            else:
                beyond = at

        for point in sorted(curve, key=lambda one: (one.tokens, one.kind == "uniform", one.loss)):
            if not point.loss <= bound:
                continue
            found = point
            if point.kind == "uniform":  # run once more, as it would be returned: without a monitor
                advance(point.label)
                found = costs.point(point.label, "uniform", measure(point.policy))
            if found.loss <= bound:
                return Calibration(found.policy, found, tuple(curve), bound)
    return Calibration(curve[0].policy, curve[0], tuple(curve), bound)


def _groups(indices: list[int], most: int) -> list[list[int]]:
    """Neighbours, in up to ``most`` groups of about one size; none where there would be a single one."""
    count = min(most, len(indices))
    bounds = [round(i * len(indices) / count) for i in range(count + 1)]
    return [indices[a:b] for a, b in itertools.pairwise(bounds)] if count > 1 else []


def _span(group: list[int]) -> str:
    return str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}"


def _label(layer: LayerPolicy) -> str:
    return f"{layer.algorithm} {layer.budget}"


class _Costs:
    """What layers read, dense and under each candidate.

    Attributes:
        whole: KV tokens that dense attention reads in a step, by the index of each layer that can be calibrated.
        dense: other layers with attention, which stay dense in mixed policies.
        chosen: layers whose model chooses its own tokens, which no page score replaces.
    """

    def __init__(self, whole: Mapping[int, float], dense: set[int], chosen: set[int]) -> None:
        self.whole, self.dense, self.chosen = whole, dense, chosen

    @classmethod
    def of(cls, runs: Mapping[LayerPolicy, Run]) -> _Costs:
        layers = [item for run in runs.values() for item in run.layers.items()]
        watched = sorted({index for index, layer in layers if layer.error is not None})
        if not watched:
            explanation = next(iter(runs.values())).explanation
            raise CalibrationError(
                "no candidate made a layer sparse, so there is nothing to calibrate:\n"
                f"{explanation.rejections() or explanation}"
            )
        whole = {at: max(one.attendable for index, one in layers if index == at) for at in watched}
        others = {site.index for run in runs.values() for site in run.explanation.sites}
        chosen = {index for index, _ in layers} - set(watched)
        return cls(whole, others - chosen - set(watched), chosen)

    def _read(self, run: Run, index: int) -> float:
        layer = run.layers.get(index)
        # What was not rewritten of a layer reads all of its cache.
        return self.whole[index] - (0.0 if layer is None else layer.attendable - layer.read)

    def options(
        self, runs: Mapping[LayerPolicy, Run], weights: Mapping[int, float]
    ) -> dict[int, list[Option[LayerPolicy]]]:
        found = {index: [Option(DENSE, whole, 0.0)] for index, whole in self.whole.items()}
        for candidate, run in runs.items():
            for index, options in found.items():
                layer = run.layers.get(index)
                if layer is not None and layer.error is not None:
                    loss = weights[index] * layer.error
                    options.append(Option(candidate, self._read(run, index), loss))
        return found

    def point(self, label: str, kind: str, run: Run) -> Point:
        tokens = sum(self._read(run, index) for index in self.whole) / len(self.whole)
        whole = sum(self.whole.values()) / len(self.whole)
        watched = {index: run.layers[index] for index in self.whole if index in run.layers}
        return Point(
            label, kind, run.policy, run.loss, run.perplexity, tokens, tokens / whole, watched
        )

    def policy(self, given: Mapping[int, LayerPolicy], usual: LayerPolicy) -> Policy:
        """The policy that gives each layer what it is given; what most layers have is the default."""
        every = {**given, **dict.fromkeys(self.dense, DENSE), **dict.fromkeys(self.chosen, usual)}
        default = Counter(every.values()).most_common(1)[0][0]
        entries: list[tuple[int, int, LayerPolicy]] = []
        indices = sorted(every)
        for before, index in zip([None, *indices], indices):
            layer = every[index]
            if layer == default:
                continue
            if entries and entries[-1][1] == before and entries[-1][2] == layer:
                entries[-1] = (entries[-1][0], index, layer)
            else:
                entries.append((index, index, layer))
        keys = [(a if a == b else f"{a}-{b}", layer) for a, b, layer in entries]
        return Policy(default, tuple(keys))


@contextmanager
def _progress(show: bool, total: int) -> Iterator[Callable[[str], None]]:
    """What is called with a word about each run before it begins."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not show,
    ) as progress:
        bar = progress.add_task("", total=total, completed=-1)
        yield lambda what: progress.update(bar, description=f"calibrating: {what}", advance=1)
