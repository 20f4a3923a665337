"""The search: candidates for all layers, then the path of mixed policies, bisected."""

from __future__ import annotations

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


def search(
    measure: Measure, candidates: Sequence[LayerPolicy], bound: float, trials: int, show: bool
) -> Calibration:
    """Run the candidates, and up to ``trials`` mixed policies, and choose.

    Raises:
        CalibrationError: no layer can be calibrated.
    """
    with _progress(show, len(candidates) + trials + 4) as advance:
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
        steps = path(costs.options(runs))

        def mixed(at: int) -> Point:
            advance(f"mixed {at} of {len(steps) - 1}")
            policy = costs.policy(steps[at], candidates[0])
            point = costs.point(f"mixed {at}/{len(steps) - 1}", "mixed", measure(policy))
            curve.append(point)
            return point

        # Whatever the losses are, a larger bound never ends at a dearer policy: up to the first one that only it
        # accepts, the same are tried, and then it goes on below that one.
        last = len(steps) - 1
        within, beyond = 0, len(steps)
        if min(watched, key=lambda point: point.tokens).loss <= bound and mixed(last).loss <= bound:
            within = last
        for _ in range(trials):
            if beyond - within <= 1:
                break
            at = (within + beyond) // 2
            if mixed(at).loss <= bound:
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

    def options(self, runs: Mapping[LayerPolicy, Run]) -> dict[int, list[Option[LayerPolicy]]]:
        found = {index: [Option(DENSE, whole, 0.0)] for index, whole in self.whole.items()}
        for candidate, run in runs.items():
            for index, options in found.items():
                layer = run.layers.get(index)
                if layer is not None and layer.error is not None:
                    options.append(Option(candidate, self._read(run, index), layer.error))
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
