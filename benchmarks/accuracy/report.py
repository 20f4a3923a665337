"""Tables of a file of results: what each policy loses, and where it loses most."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from benchmarks.accuracy.mass import quantile
from benchmarks.accuracy.policies import DENSE
from benchmarks.accuracy.store import Record
from benchmarks.accuracy.tasks import NEEDLES

Place = tuple[str, int]
"""A task and a context length."""


@dataclass(frozen=True)
class Mass:
    """Captured mass of a policy over all samples, positions, layers and KV heads.

    Attributes:
        mean, p05: of the softmax mass of the selected pages; the 5th percentile is to a hundredth.
        ratio, ratio_p05: of its share of what the oracle captures.
        worst_layer: the lowest share of the oracle's that a layer has, and its number.
        worst_head: the same for one KV head: layer and head.
    """

    mean: float
    p05: float
    ratio: float
    ratio_p05: float
    worst_layer: tuple[float, int]
    worst_head: tuple[float, int, int]


@dataclass(frozen=True)
class Summary:
    """One policy, compared with dense decoding of the same samples.

    Attributes:
        scores: mean score by task and context.
        relative: the same divided by that of dense; tasks that dense always fails are not in it.
        perplexity: of all continuations.
        perplexity_ratio: perplexity, divided by that of dense.
        read: share of the attendable KV cache that was read.
        mass: None where none was recorded.
    """

    scores: Mapping[Place, float]
    relative: Mapping[Place, float]
    perplexity: float | None
    perplexity_ratio: float | None
    read: float
    mass: Mass | None

    @property
    def worst(self) -> tuple[float, Place] | None:
        """The task and length at which least of the dense score is left."""
        return min(((value, place) for place, value in self.relative.items()), default=None)

    def task(self, name: str, relative: bool) -> float | None:
        """Mean over contexts of a task."""
        found = self.relative if relative else self.scores
        values = [value for (task, _), value in found.items() if task == name]
        return _mean(values) if values else None


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def summarise(records: Sequence[Record]) -> dict[str, Summary]:
    """The records of one model, by policy, dense first. Samples without a dense result are left out."""
    dense = {_sample(record): record for record in records if record["policy"] == DENSE}
    by_policy: dict[str, list[Record]] = defaultdict(list, {DENSE: list(dense.values())})
    for record in records:
        if record["policy"] != DENSE and _sample(record) in dense:
            by_policy[record["policy"]].append(record)
    return {label: _summary(found, dense) for label, found in by_policy.items() if found}


def _sample(record: Record) -> tuple[Any, ...]:
    return record["task"], record["context"], record["sample"]


def _summary(records: Sequence[Record], dense: Mapping[tuple[Any, ...], Record]) -> Summary:
    ours: dict[Place, list[float]] = defaultdict(list)
    theirs: dict[Place, list[float]] = defaultdict(list)
    nll: list[tuple[float, float]] = []
    for record in records:
        reference = dense[_sample(record)]
        if "score" in record:
            place = record["task"], record["context"]
            ours[place].append(record["score"])
            theirs[place].append(reference["score"])
        else:
            nll.append((record["nll"], reference["nll"]))
    scores = {place: _mean(values) for place, values in ours.items()}
    masses = [record["mass"] for record in records if "mass" in record]
    return Summary(
        scores,
        {place: scores[place] / _mean(theirs[place]) for place in scores if any(theirs[place])},
        math.exp(_mean(one for one, _ in nll)) if nll else None,
        math.exp(_mean(one - two for one, two in nll)) if nll else None,
        _mean(record["read"] for record in records),
        _mass(masses) if masses else None,
    )


def _mass(masses: Sequence[Mapping[str, Any]]) -> Mass:
    weights = torch.tensor([float(mass["positions"]) for mass in masses], dtype=torch.float64)

    def mean(name: str) -> torch.Tensor:
        """By layer and KV head."""
        stacked = torch.tensor([mass[name] for mass in masses], dtype=torch.float64) / 1000
        return torch.einsum("n,nlh->lh", weights / weights.sum(), stacked)

    def counts(name: str) -> list[int]:
        return [sum(column) for column in zip(*(mass[name] for mass in masses))]

    captured, oracle = mean("captured"), mean("oracle")
    layers, heads = captured.mean(1) / oracle.mean(1), captured / oracle
    layer, head = int(layers.argmin()), divmod(int(heads.argmin()), heads.shape[1])
    return Mass(
        float(captured.mean()),
        quantile(counts("captured_bins"), 0.05),
        float(captured.mean() / oracle.mean()),
        quantile(counts("ratio_bins"), 0.05),
        (float(layers[layer]), layer),
        (float(heads[head]), *head),
    )


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """For each model: one pair of tables a context length, and one over all of them."""
    for model in sorted({record["model"] for record in records}):
        of_model = [record for record in records if record["model"] == model]
        contexts = sorted({record["context"] for record in of_model})
        for context in contexts:
            found = [record for record in of_model if record["context"] == context]
            yield from _pair(f"{model}, {context} tokens", found)
        if len(contexts) > 1:
            yield from _pair(f"{model}, all lengths", of_model)


def markdown(records: Sequence[Record]) -> str:
    """One table for the documentation: a row for each model, context length and policy.

    Scores are the mean over tasks of the share of dense ones. Dense has perplexity as it is.
    """
    lines = [
        "| model | tokens | policy | read | scores | worst task | perplexity | mass | worst layer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    places = sorted({(record["model"], record["context"]) for record in records})
    for model, context in places:
        here = [one for one in records if (one["model"], one["context"]) == (model, context)]
        for label, one in summarise(here).items():
            dense = label == DENSE
            scores = list(one.relative.values())
            quality = one.perplexity if dense else one.perplexity_ratio
            cells = [
                f"{one.read:.0%}",
                f"{_mean(scores):.0%}" if scores and not dense else "",
                "" if one.worst is None or dense else f"{one.worst[0]:.0%} `{one.worst[1][0]}`",
                "" if quality is None else f"{quality:.3f}" if dense else f"x {quality:.4f}",
                "" if one.mass is None else f"{one.mass.mean:.3f}",
                "" if one.mass is None else "{:.3f} ({})".format(*one.mass.worst_layer),
            ]
            named = label if dense else f"`{label}`"
            lines.append(f"| {model} | {context:,} | {named} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _pair(title: str, records: Sequence[Record]) -> Iterator[Table]:
    summaries = summarise(records)
    samples = len({_sample(record) for record in records})
    if summaries:
        yield _answers(f"{title}: {samples} samples, scores in % of dense", summaries)
    masses = {label: one.mass for label, one in summaries.items() if one.mass}
    if masses:
        yield _captured(f"{title}: softmax mass of the selected pages", masses)


def _answers(title: str, summaries: Mapping[str, Summary]) -> Table:
    """The row of dense has scores as they are."""
    several = len({context for one in summaries.values() for _, context in one.scores}) > 1
    present = [
        task
        for task in NEEDLES
        if any(task == t for one in summaries.values() for t, _ in one.scores)
    ]
    table = _table(title, "read", *present, "worst task", "perplexity")
    for label, one in summaries.items():
        dense = label == DENSE
        cells = [one.task(task, not dense) for task in present]
        worst = "-"
        if one.worst and not dense:
            value, (task, context) = one.worst
            worst = f"{value:.0%} {task}" + (f" {context}" if several else "")
        quality = one.perplexity if dense else one.perplexity_ratio
        shown = "-" if quality is None else f"{quality:.3f}" if dense else f"x {quality:.4f}"
        table.add_row(
            label,
            f"{one.read:.0%}",
            *("-" if x is None else f"{x:.2f}" if dense else f"{x:.0%}" for x in cells),
            worst,
            shown,
        )
    return table


def _captured(title: str, masses: Mapping[str, Mass]) -> Table:
    table = _table(title, "mean", "p5", "of oracle's", "p5 of it", "worst layer", "worst head")
    for label, mass in masses.items():
        layer, head = mass.worst_layer, mass.worst_head
        table.add_row(
            label,
            *(f"{x:.3f}" for x in (mass.mean, mass.p05, mass.ratio, mass.ratio_p05)),
            f"{layer[0]:.3f} (layer {layer[1]})",
            f"{head[0]:.3f} (layer {head[1]}, head {head[2]})",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for column in columns:
        table.add_column(column, justify="right")
    return table
