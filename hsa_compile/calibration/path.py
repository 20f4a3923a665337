"""The policies worth trying between dense and the cheapest, in an order in which each reads less than the one before.

Small errors of the layers add up to a loss that is about quadratic in them, so a weighted sum of squared errors stands
for it. The allocations that are best for some price of a token are then those on the lower convex hulls of the layers'
(cost, loss); from one to the next, one layer goes one candidate down.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Option(Generic[Choice]):
    """What one layer may be given: what it reads, and the loss that its error is expected to make."""

    choice: Choice
    cost: float
    error: float


def hull(options: Sequence[Option[Choice]]) -> list[Option[Choice]]:
    """The lower convex hull of (cost, error), dearest first; of equal ones the first given stays."""
    cheapest_first = sorted(options, key=lambda one: (one.cost, one.error))
    kept: list[Option[Choice]] = []
    for one in cheapest_first:
        if kept and one.error >= kept[-1].error:
            continue
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) <= _slope(kept[-1], one):
            kept.pop()
        kept.append(one)
    return kept[::-1]


def _slope(cheap: Option[Choice], dear: Option[Choice]) -> float:
    """Error that a token saves."""
    return (cheap.error - dear.error) / (dear.cost - cheap.cost)


def path(layers: Mapping[int, Sequence[Option[Choice]]]) -> list[dict[int, Choice]]:
    """What each layer is given, from the options of least error (first) to the cheapest (last)."""
    hulls = {index: hull(options) for index, options in layers.items()}
    edges = sorted(
        (_slope(cheap, dear), index, at)
        for index, kept in hulls.items()
        for at, (dear, cheap) in enumerate(itertools.pairwise(kept))
    )
    chosen = {index: kept[0].choice for index, kept in hulls.items()}
    found = [dict(chosen)]
    for _, index, at in edges:
        chosen[index] = hulls[index][at + 1].choice
        found.append(dict(chosen))
    return found
